//! The sixth phase: clients can connect, and everything that watches the process knows.
//!
//! Invariant: the PID file, the ready line and the word to the service manager come when clients can connect.

use std::path::PathBuf;
use std::time::Duration;

use nowait_nbd::Address;
use nowait_server::{Exports, Listener, Server};
use tracing::{info, warn};

use crate::config::ServeConfig;
use crate::control::control_interface::ControlInterface;
use crate::control::control_socket;
use crate::control::running_server::{Additions, RunningServer};
use crate::devices::{Devices, place_of};
use crate::disks::allowed_places::AllowedPlaces;
use crate::disks::open_disk::{Common, OpenedDisk};
use crate::disks::served_disks::{ServedDisk, ServedDisks};
use crate::endpoints::ready_lines::{hint, ready_lines, uris};
use crate::endpoints::signals::Ending;
use crate::error::{CliError, os_message};
use crate::moves::Tasks;
use crate::moves::move_state::Job;
use crate::moves::replication_state::Replica;
use crate::process::background::Detached;
use crate::process::log_file::LogFile;
use crate::process::systemd;
use crate::process::watchdog;
use crate::serve::Context;
use crate::serve::bound::Places;
use crate::serve::confined::Confined;
use crate::serve::opened::Images;
use crate::serve::started::Started;
use crate::upgrade::receiver::SavedClients;

/// A server that serves.
pub(super) struct Serving<'a> {
    pub(super) config: &'a ServeConfig,
    pub(super) server: Server,
    /// The path or URI of the first image.
    pub(super) image: PathBuf,
    pub(super) disks: ServedDisks,
    pub(super) moves: Tasks<Job>,
    pub(super) replicas: Tasks<Replica>,
    pub(super) control: Option<ControlInterface>,
    pub(super) places: Places,
    pub(super) ending: Ending,
    /// Private: no other module makes one.
    _made_here: (),
}

impl<'a> Serving<'a> {
    /// Lets clients connect to the server that is `confined`, those of another program first if it takes over.
    ///
    /// # Errors
    /// The other program has ended, or has called it off; the driver's.
    pub(super) fn of(confined: Confined<'a>) -> Result<Self, CliError> {
        // Where this fails, the server is dropped first, then its nodes.
        let Started { kind, detached, ending, context, images, later, .. } = confined.started;
        let Started { places, control, upgrades, server, .. } = confined.started;
        let Context { config, output, receiver, waiting, .. } = context;
        let (image, listens) = (images.path().to_owned(), &places.listens);
        let Images { all, is_default, adopted, common } = images;
        let lines = ready_lines(config, &all, kind, listens, &places.devices);
        let uris = all.first().map(|first| uris(config, listens, &first.named)).unwrap_or_default();
        let disks = ServedDisks::new(served(config, &server, all, listens, &places.devices));
        let (moves, replicas) = <(Tasks<Job>, Tasks<Replica>)>::default();
        let tasks = (moves.clone(), replicas.clone());
        let added = additions(config, listens.clone(), common);
        let running = RunningServer::new(server.exports(), disks.clone(), tasks, added, upgrades);
        let takes_over = receiver.is_some();
        if let Some(receiver) = receiver {
            let clients = adopted.unwrap_or_default();
            add_places(&mut disks.lock(), &clients);
            receiver.restore(&server.exports(), later, clients)?;
            places.devices.start()?;
            running.restore_replications(&receiver.exports);
        }
        let pid_file = places.pid_file.iter().filter_map(|file| file.appear().err());
        pid_file.for_each(|error| warn!("{error}"));
        let control = control.serve(running);
        // The parent process knows inherited sockets, and standard output may be read by another program then, as in
        // `nbdcopy -- [ nowait serve IMAGE ] -`.
        match (places.inherited > 0 || takes_over) && !config.json {
            true => lines.lines().for_each(|line| info!("{line}")),
            false => output.ready(&lines),
        }
        systemd::notify_ready(&uris);
        if let Some(uri) = uris.first().filter(|_| is_default) {
            output.note(format_args!("{}", hint(uri)));
        }
        start_long_run(server.exports(), detached, places.log_file.as_ref(), waiting);
        Ok(Self {
            config,
            server,
            image,
            disks,
            moves,
            replicas,
            control,
            places,
            ending,
            _made_here: (),
        })
    }
}

/// How often regions of stored bitmaps are looked for that were not written to since: after one to two of this time their bits on
/// storage are exact again.
const COOLING_TIME: Duration = Duration::from_secs(60);

/// Clients can connect: none of those `waiting` is disconnected any more, stored bitmaps become exact where nothing is
/// written, the watchdog watches the threads of `exports`, messages go to the log file, and a process in the background
/// lets its caller go.
fn start_long_run(
    exports: Exports,
    detached: Detached,
    log_file: Option<&LogFile>,
    waiting: &mut Vec<Listener>,
) {
    waiting.clear();
    if let Err(error) = exports.cool_regularly(COOLING_TIME) {
        warn!(
            "stored bitmaps are not exact before the end: cannot start a thread: {}",
            os_message(&error)
        );
    }
    watchdog::start(exports);
    if let Some(Err(error)) = log_file.map(LogFile::begin) {
        warn!("{error}");
    }
    if let Err(error) = detached.ready(log_file.is_some()) {
        warn!("--fork: {}", os_message(&error));
    }
}

/// The images of `all` with the ids of their exports and where these can be reached.
fn served(
    config: &ServeConfig,
    server: &Server,
    all: Vec<OpenedDisk>,
    listens: &[Address],
    devices: &Devices,
) -> Vec<ServedDisk> {
    let ids = server.exports().list().into_iter().map(|(id, _)| id);
    let served = |(at, (id, disk)): (usize, (_, OpenedDisk))| {
        let uris = uris(config, listens, &disk.named);
        let (local, others) = (devices.local_places(at), devices.other_places(at));
        let places = local.chain(uris).chain(others).collect();
        ServedDisk { id, disk, places, local: devices.local(at) }
    };
    ids.zip(all).enumerate().map(served).collect()
}

/// Adds the places of the devices of `clients` that are none of the arguments.
fn add_places(served: &mut [ServedDisk], clients: &SavedClients) {
    for (export, device) in &clients.devices {
        if let (Some(disk), Some(place)) = (served.get_mut(*export), place_of(device))
            && !disk.places.contains(&place)
        {
            disk.places.push(place);
        }
    }
}

/// The common options of exports that are added later, at the addresses `listens`.
fn additions(config: &ServeConfig, listens: Vec<Address>, common: Common) -> Additions {
    let tls = config.requires_tls();
    Additions {
        common,
        allowed: AllowedPlaces::of(config, control_socket::directory()),
        max_connections: config.max_connections,
        places: Box::new(move |named| listens.iter().map(|at| at.uri(&named.name, tls)).collect()),
    }
}
