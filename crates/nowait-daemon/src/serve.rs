//! `nowait serve`: serves images until told to stop.
//!
//! Invariant: the ready line is printed when clients can connect, and the exit status is 0 only if the last flush succeeded.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use nowait::{RegisteredMemory, Uring};
use nowait_nbd::Address;
use nowait_remote::RbdStorage;
use nowait_server::{Exports, Listener, Options, QueueKind, Server, Tls};
use rustix::process::Rlimit;
use tracing::{info, warn};

use crate::config::ServeConfig;
use crate::config::choices::QueueChoice;
use crate::config::control_address::ControlAddress;
use crate::config::export_spec::NamedExport;
use crate::confinement;
use crate::confinement::{needed_files, owned_paths};
use crate::control::control_interface::{BoundControl, ControlInterface};
use crate::control::control_socket;
use crate::control::running_server::{Additions, RunningServer};
use crate::disks::allowed_places::AllowedPlaces;
use crate::disks::default_image;
use crate::disks::open_disk::{self, Common, OpenedDisk, open_all};
use crate::disks::served_disks::{ServedDisk, ServedDisks};
use crate::disks::ublk_nodes::UblkNodes;
use crate::endpoints;
use crate::endpoints::ready_lines::{
    print, print_hint, print_ready, ready_lines, uris, vhost_user_paths,
};
use crate::endpoints::reload::Reload;
use crate::endpoints::signals::Ending;
use crate::endpoints::tls_files;
use crate::endpoints::{Endpoints, exports_of};
use crate::error::{CliError, os_message};
use crate::process;
use crate::process::background;
use crate::process::background::Background;
use crate::process::io_flusher;
use crate::process::lifetime::{Parent, PidFile};
use crate::process::log_file::LogFile;
use crate::process::owned_paths::OwnedPaths;
use crate::process::systemd;
use crate::process::watchdog;
use crate::sandbox::FileAccess;
use crate::size::human;
use crate::summary;
use crate::upgrade::credential_processes;
use crate::upgrade::launcher::{Launcher, Starts};
use crate::upgrade::messages::ListenerState;
use crate::upgrade::receiver::{Receiver, SavedClients, SavedState};
use crate::upgrade::receiver_policy::{ReceiverPolicy, files_of_images};
use crate::upgrade::sender::Upgrades;

/// The timeout for requests in flight after the signal to stop and, if it expires, for the flush
/// after them.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// The exit status where an image cannot be opened or is in use (`EX_NOINPUT` of sysexits.h), and of a server that was
/// handed sockets and cannot serve them for any reason, so that a service manager can recognise a failure that a
/// restart does not fix.
const CANNOT_OPEN: u8 = 66;

/// Serves the images of `config`, or the default image, until a signal stops the server.
///
/// # Errors
/// An image cannot be opened or is in use, an address is in use, the queues cannot be created or
/// fail, or the last flush failed.
pub fn run(config: &ServeConfig) -> Result<(), CliError> {
    // First of all: what another program hands over, and the images, may be more than the soft limit.
    let descriptors = process::raise_descriptor_limit();
    let mut receiver = Receiver::of_this_process()?;
    let mut waiting = Vec::new();
    let ended = serve(config, receiver.as_mut(), descriptors, &mut waiting);
    if let (Err(error), Some(receiver)) = (&ended, &receiver) {
        receiver.fail(error);
    }
    if waiting.is_empty() {
        return ended;
    }
    // The sockets stay with the service manager, which starts a server for the next client.
    Listener::reject(&waiting, systemd::REJECTED);
    ended.map_err(|error| error.with_status(CANNOT_OPEN))
}

/// Serves, in a process that may `receiver` from another one and was started with the limit `descriptors`. Until
/// clients can connect, `waiting` has the sockets that were handed over.
fn serve(
    config: &ServeConfig,
    mut receiver: Option<&mut Receiver>,
    descriptors: Rlimit,
    waiting: &mut Vec<Listener>,
) -> Result<(), CliError> {
    let parent = Parent::now();
    let connections = endpoints::connections(config, receiver.is_some())?;
    let inherited = systemd::sockets()?;
    *waiting = inherited.iter().filter_map(|(listener, _)| listener.try_clone().ok()).collect();
    let background = begin(config, receiver.is_some())?;
    let ending = ending(config, &parent)?;
    let (launcher, paths_changer) = launchers(config, descriptors)?;
    let (tls, tls_files) = tls_files::read(config)?;
    let Opened { all, is_default, adopted, common } = open(config, receiver.as_deref())?;
    let Some(first) = all.first() else { return Ok(()) };
    let (named, image) = (first.named.clone(), &first.named.image.clone());
    let kind = if config.poll { polled_queue(&all)? } else { queue_kind(config)? };
    let handed_over = receiver.as_ref().map(|receiver| &receiver.nodes[..]);
    let nodes = UblkNodes::open(config, &all, handed_over)?;
    let handed = receiver.as_deref_mut().map(Receiver::listeners).transpose()?;
    let Endpoints { mut listeners, listens, inherited, default_socket, states } =
        Endpoints::open(config, image, !nodes.is_empty(), inherited, handed, &ending)?;
    let (pid_file, log_file) = process_files(config, &ending)?;
    let (control, upgrades) = bind_control(config, receiver.as_deref_mut(), launcher, states)?;
    let devices = exports_of(config, &all, connections, &nodes, adopted.is_some())?;
    let files = needed_files(config, &all);
    let mut names = owned_paths(config, &listens[inherited..], default_socket.as_deref());
    control.token_file().iter().for_each(|path| names.file(path));
    keep_paths(paths_changer, names, &files, (pid_file.as_deref(), log_file.as_ref()))?;
    // The driver makes the nodes of a new device, or of one that waits, when its queues are served.
    let nodes_appear = receiver.is_none() && !nodes.is_empty();
    if !nodes_appear {
        confinement::enter(config, files.clone(), &nodes)?;
    }
    // A program that takes over accepts connections when the other one does no more.
    let later = receiver.as_ref().map(|_| std::mem::take(&mut listeners)).unwrap_or_default();
    let started = Server::start(devices, listeners, options(config, kind, tls));
    let server = started.and_then(|it| set_up(config, it)).map_err(|e| CliError::at(image, e))?;
    let tls_files = tls_files.into_iter().chain(control.tls()).collect();
    let reload = Reload::new(server.exports(), tls_files, log_file.clone());
    ending.serving(server.shutdown_handle(), reload);
    if nodes_appear {
        nodes.start()?;
        confinement::enter(config, files, &nodes)?;
    }
    let lines = ready_lines(config, &all, kind, &listens, &nodes);
    let disks = ServedDisks::new(served(config, &server, all, &listens, &nodes));
    let added = additions(config, listens.clone(), common);
    let running = RunningServer::new(server.exports(), disks.clone(), added, upgrades);
    if let Some(receiver) = &receiver {
        let clients = adopted.unwrap_or_default();
        add_places(&mut disks.lock(), &clients);
        receiver.serve(&server.exports(), later, clients)?;
        nodes.start()?;
    }
    pid_file.iter().filter_map(|file| file.appear().err()).for_each(|error| warn!("{error}"));
    let control = control.serve(running);
    print_ready(config, &lines, inherited > 0 || receiver.is_some());
    systemd::notify_ready(&uris(config, &listens, &named));
    is_default.then(|| print_hint(config, &listens, &named));
    start_long_run(server.exports(), background, log_file.as_ref(), waiting);
    let ended = serve_and_flush(server, &ending, &disks, image)?;
    end(config, ended, control, (default_socket, pid_file, nodes))?;
    // Without destructors: a request that never ends would block its worker, and the worker the end
    // of this process; and what another process has taken over stays.
    process::end(0);
}

/// Sets what holds for all threads of this process and for its successors. Goes to the background if `config` say so, unless
/// it is a `successor`.
fn begin(config: &ServeConfig, successor: bool) -> Result<Option<Background>, CliError> {
    io_flusher::set_if_asked(config)?;
    let forks = config.fork && !successor;
    forks.then(background::fork).transpose()
}

/// Binds the sockets of the control interface, or takes them over. Also returns what a program needs to take over from
/// this one, with the sockets of clients in `listeners`.
fn bind_control(
    config: &ServeConfig,
    receiver: Option<&mut Receiver>,
    launcher: Result<Arc<Launcher>, String>,
    listeners: Vec<(ListenerState, OwnedFd)>,
) -> Result<(BoundControl, Upgrades), CliError> {
    let bound = BoundControl::bind(config, receiver)?;
    let control = bound.states()?;
    let connects = config.connects_to_vmms();
    Ok((bound, Upgrades { launcher, listeners, control, connects }))
}

/// What ends the server of `config`: signals, and the end of its `parent` if it is asked to.
fn ending(config: &ServeConfig, parent: &Parent) -> Result<Ending, CliError> {
    let failed = |e| CliError::new(format!("cannot handle signals: {}", os_message(&e)));
    let ending = Ending::on_signal().map_err(failed)?;
    if config.exit_with_parent {
        parent.end_with_it()?;
    }
    Ok(ending)
}

fn log_stop() {
    let most = RegisteredMemory::of_this_process().most_bytes as u64;
    info!("registered buffers: {} at most", human(most));
    info!("stopped, everything is flushed");
}

/// How the server of `config` serves.
fn options(config: &ServeConfig, kind: QueueKind, tls: Tls) -> Options {
    Options {
        threads: config.threads(),
        kind,
        config: config.engine(),
        tls,
        max_connections: config.max_connections,
        slow_requests: config.slow_requests.0,
        ..Options::default()
    }
}

/// The PID file, which appears later, and the log file, which is used later.
fn process_files(
    config: &ServeConfig,
    ending: &Ending,
) -> Result<(Option<Arc<PidFile>>, Option<LogFile>), CliError> {
    let log_file = config.log_file.as_deref().map(LogFile::prepare).transpose()?;
    let pid_file = config.pid_file.as_deref().map(PidFile::prepare).transpose()?;
    let pid_file = pid_file.map(Arc::new);
    pid_file.iter().for_each(|file| ending.removes(file));
    Ok((pid_file, log_file))
}

/// Has `changer`, if there is one, change `names` and those of the PID file and the log file, have credentials given by its
/// program, and look up the addresses of hosts if `files` allow connections by TCP.
fn keep_paths(
    changer: Option<Changer>,
    mut names: OwnedPaths,
    files: &FileAccess,
    (pid_file, log_file): (Option<&PidFile>, Option<&LogFile>),
) -> Result<(), CliError> {
    pid_file.iter().for_each(|file| names.pid_file(file.names()));
    log_file.iter().for_each(|file| names.log_file(file.path()));
    let Some((launcher, command)) = changer else { return Ok(()) };
    launcher.keep(names, files.connects_by_tcp(), command)
}

/// Sets the limits of `config` for all exports, and when the server ends by itself.
fn set_up(config: &ServeConfig, server: Server) -> Result<Server, nowait::Error> {
    if config.exit_with_last_client {
        server.stop_after_last_client();
    }
    let exports = server.exports();
    exports.list().into_iter().try_for_each(|(id, _)| {
        exports.set_limits(id, config.limits())?;
        exports.set_client_limits(id, config.limits_per_client())
    })?;
    Ok(server)
}

/// Clients can connect: none of those `waiting` is disconnected any more, the watchdog watches the threads of `exports`,
/// messages go to the log file, and a process in the background lets its caller go.
fn start_long_run(
    exports: Exports,
    background: Option<Background>,
    log_file: Option<&LogFile>,
    waiting: &mut Vec<Listener>,
) {
    waiting.clear();
    watchdog::start(exports);
    if let Some(Err(error)) = log_file.map(LogFile::begin) {
        warn!("{error}");
    }
    if let Some(Err(error)) = background.map(|background| background.ready(log_file.is_some())) {
        warn!("--fork: {}", os_message(&error));
    }
}

/// The images that are served.
struct Opened {
    all: Vec<OpenedDisk>,
    /// None was given.
    is_default: bool,
    /// The clients of another program, if this one takes over.
    adopted: Option<SavedClients>,
    common: Common,
}

/// Opens the images of `config`, or those that another program hands over.
fn open(config: &ServeConfig, receiver: Option<&Receiver>) -> Result<Opened, CliError> {
    let exports = config.exports().map_err(CliError::new)?;
    let is_default = exports.is_empty();
    if let Some(receiver) = receiver {
        let policy = ReceiverPolicy::of(config, control_socket::directory())?;
        let SavedState { images, clients } = receiver.wait(&policy)?;
        let common = open_disk::common(config)?;
        let all = receiver.open(images, &common, &policy)?;
        return Ok(Opened { all, is_default: false, adopted: Some(clients), common });
    }
    let exports = if is_default { vec![default_export(config)?] } else { exports };
    let opened = open_disk::common(config)
        .and_then(|common| open_all(config, exports, &common).map(|all| (all, common)));
    let (all, common) = opened.map_err(|error| error.with_status(CANNOT_OPEN))?;
    Ok(Opened { all, is_default, adopted: None, common })
}

/// The process that changes the names of this server, and the command line of the program that gives it credentials.
type Changer = (Arc<Launcher>, Option<String>);
/// The process that starts the next program, or why there is none; the one that changes names.
type Launchers = (Result<Arc<Launcher>, String>, Option<Changer>);

/// The process that starts the next program, or why there is none, and the one that changes the names of this server if it
/// is confined.
///
/// # Errors
/// A confined server's cannot be started; as [`credential_processes::command_of`].
fn launchers(config: &ServeConfig, descriptors: Rlimit) -> Result<Launchers, CliError> {
    let command = credential_processes::command_of(config)?;
    let is_confined = config.sandbox.mode().is_some();
    let (starts, why) = match (why_no_upgrade(config), is_confined) {
        (Some(why), false) => return Ok((Err(why.into()), None)),
        (Some(why), true) => (Starts::Nothing, Some(why)),
        (None, true) => (Starts::Own, None),
        (None, false) => (Starts::Any, None),
    };
    let mut variables =
        if starts == Starts::Nothing { Vec::new() } else { files_of_images(config) };
    variables.extend(
        credential_processes::variable(command.as_deref()).filter(|_| starts == Starts::Own),
    );
    let launcher = Launcher::start(starts, config.fork, descriptors, variables);
    let changer = match &launcher {
        Ok(launcher) => is_confined.then(|| (launcher.clone(), command)),
        Err(why) if is_confined => return Err(CliError::new(why)),
        Err(_) => None,
    };
    Ok((why.map_or(launcher, |why| Err(why.into())), changer))
}

/// Why the program of this server cannot be exchanged, if that is so.
fn why_no_upgrade(config: &ServeConfig) -> Option<&'static str> {
    if let Some(why) = config.cannot_open_twice() {
        return Some(why);
    }
    if config.exit_with_parent {
        return Some("the process that started this server would not know the new one");
    }
    if std::process::id() == 1 {
        return Some("this server is process 1, with which its container ends");
    }
    config.control_is_off().then_some("there is no control socket")
}

/// Whether the control socket is at a path that was given, and stays there.
fn is_control_given(config: &ServeConfig) -> bool {
    matches!(config.control_socket(), Some(ControlAddress::Unix(_)))
}

/// The images of `all` with the ids of their exports and where these can be reached.
fn served(
    config: &ServeConfig,
    server: &Server,
    all: Vec<OpenedDisk>,
    listens: &[Address],
    nodes: &UblkNodes,
) -> Vec<ServedDisk> {
    let sockets = vhost_user_paths(config, &all);
    let ids = server.exports().list().into_iter().map(|(id, _)| id);
    let served = |(at, (id, (disk, sockets))): (usize, (_, (OpenedDisk, Vec<String>)))| {
        let sockets = sockets.into_iter().map(|path| format!("vhost-user:{path}"));
        let uris = uris(config, listens, &disk.named);
        let places = nodes.path(at).into_iter().chain(uris).chain(sockets).collect();
        ServedDisk { id, disk, places, ublk: nodes.device(at) }
    };
    ids.zip(all.into_iter().zip(sockets)).enumerate().map(served).collect()
}

/// Adds the vhost-user sockets of `clients` that are none of the arguments.
fn add_places(served: &mut [ServedDisk], clients: &SavedClients) {
    for (export, device) in &clients.devices {
        let path = device.listener.as_ref().and_then(|listener| listener.unix_path());
        let place = path.map(|path| format!("vhost-user:{}", path.display()));
        if let (Some(disk), Some(place)) = (served.get_mut(*export), place)
            && !disk.places.contains(&place)
        {
            disk.places.push(place);
        }
    }
}

/// What the exports have in common that are added later, at the addresses `listens`.
fn additions(config: &ServeConfig, listens: Vec<Address>, common: Common) -> Additions {
    let tls = config.requires_tls();
    Additions {
        common,
        allowed: AllowedPlaces::of(config, control_socket::directory()),
        max_connections: config.max_connections,
        places: Box::new(move |named| listens.iter().map(|at| at.uri(&named.name, tls)).collect()),
    }
}

/// Serves until stopped, and flushes. Returns the result of the flush; `None` if another process
/// serves.
fn serve_and_flush(
    server: Server,
    ending: &Ending,
    disks: &ServedDisks,
    image: &Path,
) -> Result<Option<Result<(), CliError>>, CliError> {
    let exports = server.exports();
    let stopped = server.run(CLOSE_TIMEOUT).map_err(|e| CliError::at(image, e))?;
    summary::log(&exports);
    if stopped.handed_over {
        info!("another process serves now");
        return Ok(None);
    }
    warn_of_unfinished(stopped.unfinished);
    ending.flushing();
    systemd::notify_flushing();
    // Without unfinished requests the flush has no timeout: the cache may hold much data.
    let all = disks.take();
    Ok(Some(match stopped.unfinished {
        0 => close(all, true),
        _ => close_with_timeout(all, image),
    }))
}

/// Ends a server that was `flushed`: the `leftovers` are dropped, which removes them. `None`: another
/// process serves, and has taken over all of them.
///
/// # Errors
/// Those of the flush.
fn end(
    config: &ServeConfig,
    flushed: Option<Result<(), CliError>>,
    control: Option<ControlInterface>,
    leftovers: impl Sized,
) -> Result<(), CliError> {
    match flushed {
        None => {
            control.into_iter().for_each(|control| control.leave(is_control_given(config)));
            std::mem::forget(leftovers);
            Ok(())
        }
        Some(flushed) => {
            drop((control, leftovers));
            flushed?;
            // The last thread of its export may be closing an image.
            RbdStorage::wait_until_closed(CLOSE_TIMEOUT);
            log_stop();
            Ok(())
        }
    }
}

fn warn_of_unfinished(requests: usize) {
    if requests > 0 {
        let time = CLOSE_TIMEOUT.as_secs();
        warn!("{requests} requests did not end within {time} s and were left");
    }
}

fn default_export(config: &ServeConfig) -> Result<NamedExport, CliError> {
    let image = default_image::image()?;
    print(format_args!("nowait: no image given, serving {}", image.display()));
    Ok(NamedExport { name: config.default_name().to_owned(), image })
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

/// A queue that polls, if the devices of all images can be polled.
fn polled_queue(all: &[OpenedDisk]) -> Result<QueueKind, CliError> {
    for opened in all {
        let refusal = match opened.image.polling_refusal() {
            Ok(refusal) => refusal.map(String::from),
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
fn queue_kind(config: &ServeConfig) -> Result<QueueKind, CliError> {
    if config.queue == Some(QueueChoice::Threads) {
        return Ok(QueueKind::Threads);
    }
    let error = match Uring::new() {
        Ok(ring) => {
            info!("io_uring: {}", ring.offered());
            info!("registered buffers: {}", summary::registrable());
            let must = config.queue.is_some() || !config.ublk.is_empty();
            return Ok(if must { QueueKind::Uring } else { QueueKind::Auto });
        }
        Err(error) => Uring::refusal(error),
    };
    if !config.ublk.is_empty() {
        return Err(CliError::new(format!("{error}: --ublk needs it")));
    }
    if config.queue.is_some() {
        let what = format!("{error}: try --queue threads");
        return Err(CliError::new(what));
    }
    warn!("{error}: serving with threads");
    Ok(QueueKind::Threads)
}
