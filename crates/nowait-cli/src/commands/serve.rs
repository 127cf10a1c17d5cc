//! `nowait serve`: serves images until told to stop.
//!
//! Invariant: the ready line is printed when clients can connect, and the exit status is 0 only if the last flush succeeded.

use std::collections::HashMap;
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use nowait::{RegisteredMemory, Uring};
use nowait_nbd::Address;
use nowait_server::{
    AnyExport, ClientAuth, Credentials, Exports, Listener, Options, QueueKind, Server, Tls,
    UblkNode,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::{info, warn};

use crate::args::ServeArgs;
use crate::args::tls_args::Encryption;
use crate::commands::info::registrable;
use crate::commands::ublk;
use crate::export_spec::NamedExport;
use crate::lifetime::{Parent, PidFile};
use crate::open_disk::{OpenedDisk, chain_options, open_all};
use crate::running_server::{Additions, RunningServer, ServedDisk, ServedDisks};
use crate::signals::Ending;
use crate::vhost_user_spec::{DevicePlace, VhostUserArg};
use crate::{args, control_socket, default_image, secrets, systemd};
use nowait_cli::error::{CliError, os_message};
use nowait_cli::size::human;

/// The timeout for requests in flight after the signal to stop and, if it expires, for the flush
/// after them.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// The exit status where an image cannot be opened or is in use (`EX_NOINPUT` of sysexits.h), so
/// that a service manager can recognise a failure that a restart does not fix.
const CANNOT_OPEN: u8 = 66;
/// How long clients at inherited sockets are disconnected when no image can be served. It is also
/// the shortest interval at which a service manager restarts the server for them.
const REJECTED: Duration = Duration::from_secs(1);
/// An estimate of the descriptors that are not connections: images, queues, listeners.
const OTHER_DESCRIPTORS: u64 = 1024;

/// Serves the images of `args`, or the default image, until a signal stops the server.
///
/// # Errors
/// An image cannot be opened or is in use, an address is in use, the queues cannot be created or
/// fail, or the last flush failed.
pub(crate) fn run(args: &ServeArgs) -> Result<(), CliError> {
    let parent = Parent::now();
    let exports = args.exports().map_err(CliError::new)?;
    let given = args.addresses.listens();
    let mut connections = connections(args)?;
    let inherited = systemd::sockets()?;
    let ending = Ending::on_signal()
        .map_err(|e| CliError::new(format!("cannot handle signals: {}", os_message(&e))))?;
    if args.lifetime.exit_with_parent {
        parent.end_with_it()?;
    }
    let is_default = exports.is_empty();
    let exports = if is_default { vec![default_export(args)?] } else { exports };
    let (all, tls) = open(args, exports).inspect_err(|_| reject(&inherited))?;
    let Some(first) = all.first() else { return Ok(()) };
    let image = &first.named.image.clone();
    let config = args.config();
    let kind = if args.poll { polled_queue(&all)? } else { queue_kind(args, first)? };
    let ublk = ublk::open(args, first)?;
    let is_device = ublk.is_some() || !args.vhost_user.sockets.is_empty();
    let needs_socket = given.is_empty() && inherited.is_empty() && !is_device;
    let default_socket = needs_socket.then(|| default_image::socket(image)).transpose()?;
    let default_socket = default_socket.map(Arc::new);
    default_socket.iter().for_each(|socket| ending.removes(socket));
    let listens = match &default_socket {
        Some(socket) => std::slice::from_ref(&socket.listen),
        None => &given[..],
    };
    let pid_file = args.lifetime.pid_file.as_deref().map(PidFile::prepare).transpose()?;
    let pid_file = pid_file.map(Arc::new);
    pid_file.iter().for_each(|file| ending.removes(file));
    let is_inherited = !inherited.is_empty();
    let (listeners, listens) = bind(inherited, listens)?;
    let control = control_socket::bind(args.control.control.as_ref())?;
    let devices = exports_of(args, &all, &mut connections)?;
    let max_connections = args.max_connections;
    raise_nofile_limit(max_connections);
    let (queues, device) = (args.queues(), ublk.as_ref().map(UblkNode::device));
    let options =
        Options { queues, kind, config, tls, max_connections, ublk: device, ..Options::default() };
    let server = Server::start(devices, listeners, options).map_err(|e| CliError::at(image, e))?;
    if args.lifetime.exit_with_last_client {
        server.stop_after_last_client();
    }
    limit(args, &server.exports()).map_err(|error| CliError::at(image, error))?;
    ending.serving(server.shutdown_handle(), server.exports());
    if let Some(node) = &ublk {
        node.start().map_err(|error| CliError::at(image, error))?;
    }
    pid_file.iter().filter_map(|file| file.appear().err()).for_each(|error| warn!("{error}"));
    let node = ublk.as_ref().map(|ublk| ublk.device().node());
    let lines = ready_lines(args, &all, kind, &listens, node.as_deref());
    let first = first.named.clone();
    let disks = ServedDisks::new(served(args, &server, all, &listens, node.as_deref()));
    let running =
        RunningServer::new(server.exports(), disks.clone(), additions(args, listens.clone()));
    let control = control.and_then(|socket| socket.serve(running));
    print_ready(args, &lines, is_inherited);
    systemd::notify_ready(&uris(args, &listens, &first));
    if is_default {
        print_hint(args, &listens, &first);
    }
    let flushed = serve_and_flush(server, &ending, &disks, image)?;
    drop((control, default_socket, pid_file, ublk));
    flushed?;
    info!("registered buffers: {} at most", human(registered_at_most()));
    info!("stopped, everything is flushed");
    // A request that never ends would block its worker, and the worker the end of this process.
    std::process::exit(0);
}

/// Sets the limits of `args` for all exports.
fn limit(args: &ServeArgs, exports: &Exports) -> Result<(), nowait::Error> {
    let limits = args.control.limits.limits();
    exports.list().into_iter().try_for_each(|(id, _)| exports.set_limits(id, limits))
}

/// The images of `all` with the ids of their exports and where these can be reached.
fn served(
    args: &ServeArgs,
    server: &Server,
    all: Vec<OpenedDisk>,
    listens: &[Address],
    node: Option<&str>,
) -> Vec<ServedDisk> {
    let places: Vec<Vec<String>> = all
        .iter()
        .map(|disk| {
            let sockets = vhost_user_paths(args, &all, disk);
            let sockets = sockets.into_iter().map(|path| format!("vhost-user:{path}"));
            uris(args, listens, &disk.named).into_iter().chain(sockets).collect()
        })
        .collect();
    let ids = server.exports().list().into_iter().map(|(id, _)| id);
    let mut served: Vec<ServedDisk> = ids
        .zip(all.into_iter().zip(places))
        .map(|(id, (disk, places))| ServedDisk { id, disk, places })
        .collect();
    if let (Some(first), Some(node)) = (served.first_mut(), node) {
        first.places.insert(0, node.to_owned());
    }
    served
}

/// What the exports have in common that are added later, at the addresses `listens`.
fn additions(args: &ServeArgs, listens: Vec<Address>) -> Additions {
    let tls = args.tls.is_required();
    Additions {
        options: chain_options(args),
        allowed: args.control.allow_dir.clone(),
        workers: args.config().workers,
        max_connections: args.max_connections,
        places: Box::new(move |named| listens.iter().map(|at| at.uri(&named.name, tls)).collect()),
    }
}

/// Serves until stopped, and flushes. Returns the result of the flush.
fn serve_and_flush(
    server: Server,
    ending: &Ending,
    disks: &ServedDisks,
    image: &Path,
) -> Result<Result<(), CliError>, CliError> {
    let stopped = server.run(CLOSE_TIMEOUT).map_err(|e| CliError::at(image, e))?;
    warn_of_unfinished(stopped.unfinished);
    ending.flushing();
    systemd::notify_flushing();
    // Without unfinished requests the flush has no timeout: the cache may hold much data.
    let all = disks.take();
    Ok(match stopped.unfinished {
        0 => close(all, true),
        _ => close_with_timeout(all, image),
    })
}

fn warn_of_unfinished(requests: usize) {
    if requests > 0 {
        let time = CLOSE_TIMEOUT.as_secs();
        warn!("{requests} requests did not end within {time} s and were left");
    }
}

/// Opens the images and reads the TLS files.
fn open(args: &ServeArgs, exports: Vec<NamedExport>) -> Result<(Vec<OpenedDisk>, Tls), CliError> {
    let all = open_all(args, exports).map_err(|error| error.with_status(CANNOT_OPEN))?;
    Ok((all, tls(args)?))
}

/// The connections of virtual machines that were handed over, by their descriptors. To be called
/// before this process opens any descriptor.
fn connections(args: &ServeArgs) -> Result<HashMap<i32, UnixStream>, CliError> {
    let numbers = args.vhost_user.sockets.iter().filter_map(|socket| match socket.socket {
        DevicePlace::Descriptor(number) => Some(number),
        DevicePlace::Path(_) => None,
    });
    numbers.map(|number| Ok((number, systemd::connection(number)?))).collect()
}

/// Disconnects the clients that wait at inherited sockets, when no image can be served.
fn reject(inherited: &[(Listener, Address)]) {
    Listener::reject(inherited.iter().map(|(listener, _)| listener), REJECTED);
}

fn default_export(args: &ServeArgs) -> Result<NamedExport, CliError> {
    let image = default_image::image()?;
    print(format_args!("nowait: no image given, serving {}", image.display()));
    Ok(NamedExport { name: args.default_name().to_owned(), image })
}

/// Flushes every image, also when one of them fails.
fn close(all: Vec<OpenedDisk>, ended: bool) -> Result<(), CliError> {
    let mut result = Ok(());
    for opened in all {
        let closed = opened.close(ended);
        match (&result, closed) {
            (Ok(()), closed) => result = closed,
            (Err(_), Ok(())) => {}
            (Err(_), Err(error)) => warn!("{error}"),
        }
    }
    result
}

/// As `close` with requests in flight, but waits at most `CLOSE_TIMEOUT`: storage that leaves
/// requests unanswered may never answer the flush either.
fn close_with_timeout(all: Vec<OpenedDisk>, image: &Path) -> Result<(), CliError> {
    let (sender, closed) = mpsc::channel();
    let closing = std::thread::Builder::new().spawn(move || sender.send(close(all, false)));
    closing.map_err(|e| CliError::at(image, format!("cannot flush: {}", os_message(&e))))?;
    let unanswered = |_| {
        let time = CLOSE_TIMEOUT.as_secs();
        Err(CliError::at(image, format!("not flushed: its storage did not answer for {time} s")))
    };
    closed.recv_timeout(CLOSE_TIMEOUT).unwrap_or_else(unanswered)
}

/// The TLS configuration of the server.
fn tls(args: &ServeArgs) -> Result<Tls, CliError> {
    let load = |directory, clients| {
        secrets::keep_in_memory();
        Credentials::load(directory, clients).map_err(|error| CliError::new(error.to_string()))
    };
    Ok(match args.tls.encryption() {
        Encryption::Off => Tls::Off,
        Encryption::Offered(directory) => Tls::Offered(load(directory, ClientAuth::Any)?),
        Encryption::Required { directory, verify } => {
            let clients = if verify { ClientAuth::Verified } else { ClientAuth::Any };
            Tls::Required(load(directory, clients)?)
        }
    })
}

/// A queue that polls, if the devices of all images can be polled.
fn polled_queue(all: &[OpenedDisk]) -> Result<QueueKind, CliError> {
    for opened in all {
        let refusal = match opened.image.files().and_then(|files| Uring::for_files(&files)) {
            Ok(ring) => ring.polling_refusal().map(String::from),
            Err(error) => Some(Uring::refusal(error)),
        };
        if let Some(refusal) = refusal {
            let what = format!("it cannot be polled: {refusal} (leave out --poll)");
            return Err(CliError::at(&opened.named.image, what));
        }
    }
    info!("every request is polled for");
    Ok(QueueKind::Polled)
}

/// The requested queue, or one that works on this system.
fn queue_kind(args: &ServeArgs, opened: &OpenedDisk) -> Result<QueueKind, CliError> {
    if args.queue == Some(args::QueueKind::Threads) {
        return Ok(QueueKind::Threads);
    }
    let error = match opened.image.files().and_then(|files| Uring::for_files(&files)) {
        Ok(ring) => {
            info!("io_uring: {:?}", ring.offered());
            info!("registered buffers: {}", registrable());
            let must = args.queue.is_some() || args.ublk.ublk.is_some();
            return Ok(if must { QueueKind::Uring } else { QueueKind::Auto });
        }
        Err(error) => Uring::refusal(error),
    };
    if args.ublk.ublk.is_some() {
        return Err(CliError::new(format!("{error}: --ublk needs it")));
    }
    if args.queue.is_some() {
        let what = format!("{error}: try --queue threads");
        return Err(CliError::at(&opened.named.image, what));
    }
    warn!("{error}: serving with threads");
    Ok(QueueKind::Threads)
}

fn registered_at_most() -> u64 {
    RegisteredMemory::of_this_process().most_bytes as u64
}

/// Raises the soft limit of descriptors to the hard limit, if the server needs more. The soft limit
/// is low by default for programs that use select(2).
fn raise_nofile_limit(max_connections: u32) {
    let limit = getrlimit(Resource::Nofile);
    let needed = u64::from(max_connections) + OTHER_DESCRIPTORS;
    if limit.current.is_some_and(|current| current < needed) {
        // A limit that remains too low is reported when a connection cannot be accepted.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    }
}

/// Binds every address. Returns the inherited listeners first, then the new ones in their order.
fn bind(
    inherited: Vec<(Listener, Address)>,
    listens: &[Address],
) -> Result<(Vec<Listener>, Vec<Address>), CliError> {
    let (mut listeners, mut bound_to): (Vec<_>, Vec<_>) = inherited.into_iter().unzip();
    for listen in listens {
        let bound = match listen {
            Address::Unix(path) => Listener::unix(path).map(|listener| vec![listener]),
            Address::Tcp { host, port } => Listener::tcp(host, *port),
        };
        let bound = bound.map_err(|error| bind_failure(listen, &error))?;
        bound_to.push(match (listen, bound.first().and_then(Listener::tcp_address)) {
            (Address::Tcp { host, .. }, Some(address)) => {
                Address::Tcp { host: host.clone(), port: address.port() }
            }
            (listen, _) => listen.clone(),
        });
        listeners.extend(bound);
    }
    Ok((listeners, bound_to))
}

/// The exports of `all`, each with its vhost-user sockets.
fn exports_of(
    args: &ServeArgs,
    all: &[OpenedDisk],
    connections: &mut HashMap<i32, UnixStream>,
) -> Result<Vec<AnyExport>, CliError> {
    // The description belongs to the first export.
    let (workers, mut description) = (args.config().workers, args.description.clone());
    let exports = all.iter().map(|opened| opened.export(workers, description.take()));
    let mut exports: Vec<AnyExport> = exports.collect();
    let named: Vec<NamedExport> = all.iter().map(|opened| opened.named.clone()).collect();
    for socket in &args.vhost_user.sockets {
        let index = socket.export_of(&named).map_err(CliError::new)?;
        let export = exports.remove(index);
        let export = match &socket.socket {
            DevicePlace::Path(path) => {
                let listener = Listener::unix(path);
                let failed = |error| bind_failure(&Address::Unix(path.clone()), &error);
                export.at_vhost_user(listener.map_err(failed)?)
            }
            DevicePlace::Descriptor(number) => match connections.remove(number) {
                Some(connection) => export.at_vhost_user_connection(connection),
                None => export,
            },
        };
        exports.insert(index, export);
    }
    Ok(exports)
}

fn bind_failure(listen: &Address, error: &io::Error) -> CliError {
    let (at, hint) = match listen {
        Address::Unix(path) => (path.display().to_string(), "another path"),
        Address::Tcp { host, port } => (format!("{host}:{port}"), "another port"),
    };
    if let Address::Unix(path) = listen
        && let Ok(there) = std::fs::symlink_metadata(path)
        && !there.file_type().is_socket()
    {
        let what = if there.is_dir() { "a directory" } else { "a file and no socket" };
        return CliError::new(format!("{at}: it is {what} (give {hint})"));
    }
    if error.kind() == io::ErrorKind::AddrInUse {
        return CliError::new(format!("{at}: the address is in use (give {hint})"));
    }
    CliError::new(format!("{at}: cannot listen: {}", os_message(error)))
}

/// Prints that clients can connect, and where. The parent process knows inherited sockets, and
/// standard output may be read by another program then, as in `nbdcopy -- [ nowait serve IMAGE ]
/// -`: the lines are printed there only with `--json`.
fn print_ready(args: &ServeArgs, lines: &str, is_inherited: bool) {
    if is_inherited && !args.json {
        return lines.lines().for_each(|line| info!("{line}"));
    }
    // If standard output is closed, no process waits for the line.
    let _ = io::stdout().write_all(lines.as_bytes()).and_then(|()| io::stdout().flush());
}

/// The lines that say where clients can connect; with `--json` one object.
fn ready_lines(
    args: &ServeArgs,
    all: &[OpenedDisk],
    kind: QueueKind,
    listens: &[Address],
    node: Option<&str>,
) -> String {
    let queue = match kind {
        QueueKind::Auto | QueueKind::Uring | QueueKind::Polled => "uring",
        QueueKind::Threads => "threads",
    };
    let exports = all.iter().map(|opened| {
        serde_json::json!({
            "name": opened.named.name,
            "image": opened.named.image.to_string_lossy(),
            "format": opened.image.format().name(),
            "uris": uris(args, listens, &opened.named),
            "vhost_user": vhost_user_paths(args, all, opened),
            "size_bytes": opened.image.size(),
            "read_only": opened.image.is_read_only(),
            "direct_io": opened.image.is_direct(),
        })
    });
    if args.json {
        let mut ready = serde_json::json!({
            "event": "ready",
            "exports": exports.collect::<Vec<_>>(),
            "tls": match args.tls.encryption() {
                Encryption::Off => "off",
                Encryption::Offered(_) => "on",
                Encryption::Required { .. } => "require",
            },
            "queue": queue,
            "queues": args.queues(),
            "pid": std::process::id(),
        });
        if let Some(node) = node {
            ready["exports"][0]["node"] = node.into();
        }
        // The keys of the first export are at the top level, too.
        for key in ["image", "format", "uris", "size_bytes", "read_only", "direct_io"] {
            ready[key] = ready["exports"][0][key].clone();
        }
        format!("{ready}\n")
    } else {
        let uris = all.iter().flat_map(|opened| uris(args, listens, &opened.named));
        let sockets = args.vhost_user.sockets.iter();
        let sockets = sockets.map(|socket| format!("vhost-user:{}", socket.socket));
        let places = node.map(str::to_owned).into_iter().chain(uris).chain(sockets);
        places.map(|place| format!("serving {place}\n")).collect()
    }
}

/// The URIs of `named`, one for each address.
fn uris(args: &ServeArgs, listens: &[Address], named: &NamedExport) -> Vec<String> {
    let tls = args.tls.is_required();
    listens.iter().map(|listen| listen.uri(&named.name, tls)).collect()
}

/// The vhost-user sockets of `opened`, one of `all`.
fn vhost_user_paths(args: &ServeArgs, all: &[OpenedDisk], opened: &OpenedDisk) -> Vec<String> {
    let named: Vec<NamedExport> = all.iter().map(|opened| opened.named.clone()).collect();
    let is_its = |socket: &&VhostUserArg| {
        let index = socket.export_of(&named).ok();
        index.and_then(|index| named.get(index)) == Some(&opened.named)
    };
    let sockets = args.vhost_user.sockets.iter().filter(is_its);
    sockets.map(|socket| socket.socket.to_string()).collect()
}

fn print_hint(args: &ServeArgs, listens: &[Address], named: &NamedExport) {
    if let Some(uri) = uris(args, listens, named).first() {
        print(format_args!(
            "try:  nbdinfo '{uri}'\n      qemu-img info '{uri}'\n      nbdcopy '{uri}' copy.img"
        ));
    }
}

fn print(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{line}");
}
