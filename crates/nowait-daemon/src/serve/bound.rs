//! The third phase: sockets, block devices, and the files that come with them.
//!
//! Invariant: everything that a server opens by a path is open, or recorded as what it may open later.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use nowait_nbd::Address;
use nowait_server::{AnyExport, Credentials, Listener, QueueKind, Tls};

use crate::config::ServeConfig;
use crate::confinement::{needed_files, owned_paths};
use crate::control::control_interface::BoundControl;
use crate::devices::Devices;
use crate::disks::default_image::DefaultSocket;
use crate::endpoints::signals::Ending;
use crate::endpoints::tls_files::TlsFiles;
use crate::endpoints::{Endpoints, exports_of};
use crate::error::CliError;
use crate::process::background::Detached;
use crate::process::lifetime::PidFile;
use crate::process::log_file::LogFile;
use crate::process::owned_paths::OwnedPaths;
use crate::sandbox::FileAccess;
use crate::serve::Context;
use crate::serve::launching::Changer;
use crate::serve::opened::{Images, Opened};
use crate::upgrade::launcher::Launcher;
use crate::upgrade::messages::ListenerState;
use crate::upgrade::receiver::Receiver;
use crate::upgrade::sender::Upgrades;

/// A server whose clients could connect, if it accepted them.
pub(super) struct Bound<'a> {
    pub(super) context: Context<'a>,
    pub(super) images: Images,
    pub(super) exports: Vec<AnyExport>,
    pub(super) listeners: Vec<Listener>,
    pub(super) places: Places,
    pub(super) control: BoundControl,
    pub(super) upgrades: Upgrades,
    pub(super) tls: Tls,
    pub(super) tls_files: Option<(TlsFiles, Credentials)>,
    pub(super) kind: QueueKind,
    /// Files that a confined server may open.
    pub(super) files: FileAccess,
    pub(super) detached: Detached,
    pub(super) ending: Ending,
    /// Private: no other module makes one.
    _made_here: (),
}

/// Where clients find a server, and what is removed at its end.
pub(super) struct Places {
    /// The addresses of NBD, those that were handed over first.
    pub(super) listens: Vec<Address>,
    /// How many were handed over.
    pub(super) inherited: usize,
    pub(super) default_socket: Option<Arc<DefaultSocket>>,
    pub(super) pid_file: Option<Arc<PidFile>>,
    pub(super) log_file: Option<LogFile>,
    pub(super) devices: Devices,
}

impl<'a> Bound<'a> {
    /// Binds the sockets and makes the block devices of the server that is `opened`, or takes them over.
    ///
    /// # Errors
    /// One line that names what cannot be had.
    pub(super) fn of(opened: Opened<'a>) -> Result<Self, CliError> {
        let Opened { mut context, images, connections, inherited, ending, launcher, .. } = opened;
        let (config, all) = (context.config, &images.all);
        let handed_over = context.receiver.as_ref().map(|receiver| &receiver.nodes[..]);
        let devices = Devices::open(config, all, connections, handed_over)?;
        let handed = context.receiver.as_deref_mut().map(Receiver::listeners).transpose()?;
        let has_devices = !devices.is_empty();
        let endpoints =
            Endpoints::open(config, images.path(), has_devices, inherited, handed, &ending)?;
        let Endpoints { listeners, listens, inherited, default_socket, states } = endpoints;
        let (pid_file, log_file) = process_files(config, &ending)?;
        let mut places = Places { listens, inherited, default_socket, pid_file, log_file, devices };
        let receiver = context.receiver.as_deref_mut();
        let (control, upgrades) = bind_control(config, receiver, launcher, states)?;
        let takes_over = images.adopted.is_some();
        let exports = exports_of(config, all, &mut places.devices, takes_over)?;
        let files = needed_files(config, all);
        keep_paths(opened.changer, owned_by(config, &places, &control), &files)?;
        Ok(Self {
            context,
            images,
            exports,
            listeners,
            places,
            control,
            upgrades,
            tls: opened.tls,
            tls_files: opened.tls_files,
            kind: opened.kind,
            files,
            detached: opened.detached,
            ending,
            _made_here: (),
        })
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
    let connects = config.connects_to_clients();
    Ok((bound, Upgrades { launcher, listeners, control, connects }))
}

/// The names that the server removes and renames itself: those of its sockets, its PID file, its log file and its token.
fn owned_by(config: &ServeConfig, places: &Places, control: &BoundControl) -> OwnedPaths {
    let bound_here = &places.listens[places.inherited..];
    let mut names = owned_paths(config, bound_here, places.default_socket.as_deref());
    control.token_file().iter().for_each(|path| names.file(path));
    places.pid_file.iter().for_each(|file| names.pid_file(file.names()));
    places.log_file.iter().for_each(|file| names.log_file(file.path()));
    names
}

/// Has `changer`, if there is one, change `names`, have credentials given by its program, and look up the addresses of
/// hosts if `files` allow connections by TCP.
fn keep_paths(
    changer: Option<Changer>,
    names: OwnedPaths,
    files: &FileAccess,
) -> Result<(), CliError> {
    let Some((launcher, command)) = changer else { return Ok(()) };
    launcher.keep(names, files.connects_by_tcp(), command)
}
