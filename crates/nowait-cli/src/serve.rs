//! `nowait serve`: serves images until told to stop.
//!
//! Invariant: the ready line is printed when clients can connect, and the exit status is 0 only if the last flush succeeded.
//! Knows: args, default_image, error, export, listen, opened, service. Known by: main.

use std::io::{self, Write};
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use nowait_server::{Clients, Credentials, Listener, Options, QueueKind, Server, Stopper, Tls};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing::{info, warn};

use crate::args::{self, ServeArgs};
use crate::default_image;
use crate::error::{CliError, reason};
use crate::export::Named;
use crate::listen::Listen;
use crate::opened::{Opened, open_all};
use crate::service;
use crate::tls_args::Encryption;

/// How long requests in flight may take after the signal to stop, and if they take longer, the
/// flush behind them.
const PATIENCE: Duration = Duration::from_secs(10);
/// Descriptors for all but connections, more or less: images, queues, listeners.
const OTHER_DESCRIPTORS: u64 = 1024;

/// Serves `exports`, the default image if there are none, until SIGINT or SIGTERM.
///
/// # Errors
/// An image cannot be opened or is in use, an address is taken, the queues cannot be made or
/// fail, or the last flush failed.
pub(crate) fn run(args: &ServeArgs, exports: Vec<Named>) -> Result<(), CliError> {
    let inherited = service::sockets()?;
    let signals = Signals::new([SIGINT, SIGTERM])
        .map_err(|e| CliError::new(format!("cannot handle signals: {}", reason(&e))))?;
    let is_default = exports.is_empty();
    let exports = if is_default { vec![default_export(args)?] } else { exports };
    let all = open_all(args, exports)?;
    let Some(first) = all.first() else { return Ok(()) };
    let image = &first.named.image.clone();
    let config = args.config();
    let tls = tls(args)?;
    let kind = queue_kind(args, first)?;
    let default_socket = match args.nbd.is_empty() && inherited.is_empty() {
        true => Some(default_image::socket(image)?),
        false => None,
    };
    let listens = match &default_socket {
        Some(socket) => std::slice::from_ref(&socket.listen),
        None => &args.nbd,
    };
    let (listeners, listens) = bind(inherited, listens)?;
    let devices = all.iter().map(|opened| opened.export(config.workers));
    let max_connections = args.max_connections;
    allow_descriptors(max_connections);
    let options = Options { queues: args.queues(), kind, config, tls, max_connections };
    let server =
        Server::start(devices.collect(), listeners, options).map_err(|e| CliError::at(image, e))?;
    stop_on_signal(signals, server.stopper());
    say_ready(args, &all, kind, &listens);
    service::tell_ready(&uris(args, &listens, &first.named));
    if is_default {
        say_what_to_try(args, &listens, &first.named);
    }
    let stopped = server.run(PATIENCE).map_err(|e| CliError::at(image, e))?;
    if stopped.unfinished > 0 {
        let (left, time) = (stopped.unfinished, PATIENCE.as_secs());
        warn!("{left} requests did not end within {time} s and were left");
    }
    service::tell_flushing();
    // With nothing left a flush may take its time: there may be much that only the cache has.
    let flushed = match stopped.unfinished {
        0 => close(all, true),
        _ => close_if_it_answers(all, image),
    };
    drop(default_socket);
    flushed?;
    info!("stopped, everything is flushed");
    // A request that never ends would keep its worker, and the worker this process.
    std::process::exit(0);
}

fn default_export(args: &ServeArgs) -> Result<Named, CliError> {
    let image = default_image::image()?;
    say(format_args!("nowait: no image given, serving {}", image.display()));
    Ok(Named { name: args.default_name().to_owned(), image })
}

/// Flushes every image, also when one of them fails.
fn close(all: Vec<Opened>, ended: bool) -> Result<(), CliError> {
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

/// As `close` where something is in flight, but waits for no more than `PATIENCE`: storage that
/// leaves requests unanswered may never answer this either.
fn close_if_it_answers(all: Vec<Opened>, image: &Path) -> Result<(), CliError> {
    let (sender, closed) = mpsc::channel();
    let closing = std::thread::Builder::new().spawn(move || sender.send(close(all, false)));
    closing.map_err(|e| CliError::at(image, format!("cannot flush: {}", reason(&e))))?;
    let unanswered = |_| {
        let time = PATIENCE.as_secs();
        Err(CliError::at(image, format!("not flushed: its storage did not answer for {time} s")))
    };
    closed.recv_timeout(PATIENCE).unwrap_or_else(unanswered)
}

/// What encrypts connections, if anything does.
fn tls(args: &ServeArgs) -> Result<Tls, CliError> {
    let load = |directory, clients| {
        Credentials::load(directory, clients).map_err(|error| CliError::new(error.to_string()))
    };
    Ok(match args.tls.encryption() {
        Encryption::Off => Tls::Off,
        Encryption::Offered(directory) => Tls::Offered(load(directory, Clients::Any)?),
        Encryption::Required { directory, verify } => {
            let clients = if verify { Clients::Verified } else { Clients::Any };
            Tls::Required(load(directory, clients)?)
        }
    })
}

/// The queue asked for, or what works here.
fn queue_kind(args: &ServeArgs, opened: &Opened) -> Result<QueueKind, CliError> {
    if args.queue == Some(args::QueueKind::Threads) {
        return Ok(QueueKind::Threads);
    }
    let error = match opened.ring() {
        Ok(ring) => {
            info!("io_uring: {:?}", ring.offered());
            let must = args.queue.is_some();
            return Ok(if must { QueueKind::Uring } else { QueueKind::Auto });
        }
        Err(error) => reason(&io::Error::from_raw_os_error(error.errno())),
    };
    if args.queue.is_some() {
        let what = format!("io_uring cannot be used: {error} (try --queue threads)");
        return Err(CliError::at(&opened.named.image, what));
    }
    warn!("io_uring cannot be used ({error}), serving with threads");
    Ok(QueueKind::Threads)
}

/// Lets this process have as many descriptors as it may, if it needs more than it has. The lower
/// of the two limits is low by default for the sake of programs that use select(2).
fn allow_descriptors(max_connections: u32) {
    let limit = getrlimit(Resource::Nofile);
    let needed = u64::from(max_connections) + OTHER_DESCRIPTORS;
    if limit.current.is_some_and(|current| current < needed) {
        // What is not allowed shows when a connection cannot be accepted.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    }
}

/// Binds every address; what is listened on is first what was inherited, then they in their order.
fn bind(
    inherited: Vec<(Listener, Listen)>,
    listens: &[Listen],
) -> Result<(Vec<Listener>, Vec<Listen>), CliError> {
    let (mut listeners, mut bound_to): (Vec<_>, Vec<_>) = inherited.into_iter().unzip();
    for listen in listens {
        let bound = match listen {
            Listen::Unix(path) => Listener::unix(path),
            Listen::Tcp { host, port } => Listener::tcp(host, *port),
        };
        let listener = bound.map_err(|error| bind_failure(listen, &error))?;
        let listen = match (listen, listener.tcp_address()) {
            (Listen::Tcp { host, .. }, Some(address)) => {
                Listen::Tcp { host: host.clone(), port: address.port() }
            }
            (listen, _) => listen.clone(),
        };
        bound_to.push(listen);
        listeners.push(listener);
    }
    Ok((listeners, bound_to))
}

fn bind_failure(listen: &Listen, error: &io::Error) -> CliError {
    let (at, hint) = match listen {
        Listen::Unix(path) => (path.display().to_string(), "another path"),
        Listen::Tcp { host, port } => (format!("{host}:{port}"), "another port"),
    };
    if error.kind() == io::ErrorKind::AddrInUse {
        return CliError::new(format!("{at}: the address is in use (give {hint})"));
    }
    CliError::new(format!("{at}: cannot listen: {}", reason(error)))
}

fn stop_on_signal(mut signals: Signals, stopper: Stopper) {
    // Without this thread a signal would still be noticed by nobody: there is no way around it.
    std::thread::spawn(move || {
        for _ in signals.forever() {
            service::tell_stopping();
            stopper.stop();
        }
    });
}

fn say_ready(args: &ServeArgs, all: &[Opened], kind: QueueKind, listens: &[Listen]) {
    let queue = match kind {
        QueueKind::Auto | QueueKind::Uring => "uring",
        QueueKind::Threads => "threads",
    };
    let exports = all.iter().map(|opened| {
        serde_json::json!({
            "name": opened.named.name,
            "image": opened.named.image.to_string_lossy(),
            "format": opened.format().name(),
            "uris": uris(args, listens, &opened.named),
            "size_bytes": opened.size(),
            "read_only": opened.is_read_only(),
            "direct_io": opened.is_direct(),
        })
    });
    let lines = if args.json {
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
        // The default export's also where they are if there is no other.
        for key in ["image", "format", "uris", "size_bytes", "read_only", "direct_io"] {
            ready[key] = ready["exports"][0][key].clone();
        }
        format!("{ready}\n")
    } else {
        let uris = all.iter().flat_map(|opened| uris(args, listens, &opened.named));
        uris.map(|uri| format!("serving {uri}\n")).collect()
    };
    // Who has closed our standard output does not wait for the line.
    let _ = io::stdout().write_all(lines.as_bytes()).and_then(|()| io::stdout().flush());
}

/// Where clients find `named`, one URI for each address.
fn uris(args: &ServeArgs, listens: &[Listen], named: &Named) -> Vec<String> {
    let tls = matches!(args.tls.encryption(), Encryption::Required { .. });
    listens.iter().map(|listen| listen.uri(&named.name, tls)).collect()
}

fn say_what_to_try(args: &ServeArgs, listens: &[Listen], named: &Named) {
    if let Some(uri) = uris(args, listens, named).first() {
        say(format_args!(
            "try:  nbdinfo '{uri}'\n      qemu-img info '{uri}'\n      nbdcopy '{uri}' copy.img"
        ));
    }
}

fn say(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{line}");
}
