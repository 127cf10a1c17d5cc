//! The old program's side of an upgrade: it hands over what it has.
//!
//! Invariant: this program goes on unless the new one has said that it is ready; from the word to
//! serve on it touches nothing any more.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::os_message;
use nowait_control::{ControlError, UpgradeReport};
use nowait_nbd::Address;
use nowait_server::{ConnectionState, Listener, PausedDevice};

use crate::upgrade::channel::{Bounds, Channel};
use crate::upgrade::launcher::Launcher;
use crate::upgrade::messages::{
    Answer, Begin, ConnectionMessage, ControlStates, DeviceMessage, Drained, ExportState, Go,
    ListenerState, SplitMessage, VmmMessage,
};

/// How long the new program may take until it waits for the images, while the old one serves.
/// Beyond it: the upgrade fails, and the old program serves on.
const PREPARE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the new program may take to open the images, while nothing is served.
/// Beyond it: the upgrade fails, and the old program serves on.
const READY_TIMEOUT: Duration = Duration::from_secs(10);
/// How long requests in flight may take to end for an upgrade.
/// Beyond it: the upgrade fails, and the old program serves on.
pub(crate) const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Everything that a server needs to be handed over, from its start on.
pub(crate) struct Upgrades {
    /// Or why there is none.
    pub(crate) launcher: Result<Arc<Launcher>, String>,
    pub(crate) listeners: Vec<(ListenerState, OwnedFd)>,
    pub(crate) control: ControlStates,
    /// VMMs are connected to.
    pub(crate) connects: bool,
}

impl Upgrades {
    /// Why no upgrade is possible any more, if that is so.
    pub(crate) fn warning(&self) -> Option<&'static str> {
        self.launcher.as_ref().ok().and_then(|launcher| launcher.warning())
    }
}

/// A server that has stopped serving, and goes on when this is dropped.
pub(crate) trait Paused {
    /// When it stopped to serve.
    fn begun(&self) -> Instant;

    /// The descriptors that hold the locks of each export's image.
    fn images(&self) -> Vec<Vec<BorrowedFd<'_>>>;

    /// The connections that can be handed over, each with the index of its export.
    ///
    /// # Errors
    /// There are not enough descriptors for copies of their sockets.
    fn connections(&self) -> Result<Vec<(usize, ConnectionState)>, ControlError>;

    /// The disks of virtual machines, each with the index of its export.
    ///
    /// # Errors
    /// A VMM has sent a part of a message only; there are not enough descriptors for copies.
    fn devices(&self) -> Result<Vec<(usize, PausedDevice)>, ControlError>;

    /// The bits of each dirty bitmap of `exports`, in their order, for which there is a file.
    fn bitmaps(&self, exports: &[ExportState]) -> Vec<Option<OwnedFd>>;

    /// How many connections there are beside `count` of these.
    fn left_over(&self, count: usize) -> usize;

    /// The other process is told to serve next: nothing stops this one meanwhile.
    ///
    /// # Errors
    /// It stops already.
    fn begin_handing_over(&mut self) -> Result<(), ControlError>;

    /// Process `successor` serves: nothing is touched any more.
    fn release(self, successor: u32);
}

/// Hands over to `binary`, or else to the program from which this process was started: `exports`, and the numbers of
/// `nodes` with the indices of their exports. When this returns `Ok`, another process serves.
///
/// # Errors
/// Why the new program does not serve; this one goes on.
pub(crate) fn send<P: Paused>(
    upgrades: &Upgrades,
    binary: Option<&Path>,
    exports: Vec<ExportState>,
    nodes: &[(usize, u32)],
    pause: impl FnOnce() -> Result<P, ControlError>,
) -> Result<UpgradeReport, ControlError> {
    let launcher = upgrades.launcher.as_ref();
    let launcher = launcher.map_err(|why| ControlError::Conflict(why.clone()))?;
    let (channel, process) = launcher.launch(binary)?;
    let deadline = Instant::now() + PREPARE_TIMEOUT;
    let version = announce(&channel, upgrades, (&exports, nodes), deadline)?;
    let mut paused = pause()?;
    let connections = paused.connections()?;
    let devices = paused.devices()?;
    let machines = devices.iter().filter(|(_, device)| device.vmm.is_some()).count();
    let count = (connections.len() + machines) as u64;
    let closed = paused.left_over(connections.len()) as u64;
    let deadline = Instant::now() + READY_TIMEOUT;
    let bitmaps = paused.bitmaps(&exports);
    send_drained(&channel, &paused.images(), (&connections, &devices, &bitmaps), deadline)?;
    drop((connections, devices, bitmaps));
    receive(&channel, deadline)?;
    paused.begin_handing_over()?;
    channel.send(&Go, &[], &[], deadline).map_err(|error| lost(&error))?;
    let pause_ms = paused.begun().elapsed().as_secs_f64() * 1e3;
    let pid = process.serves();
    paused.release(pid);
    Ok(UpgradeReport { pid, version, pause_ms, connections: count, closed })
}

/// Tells the new program what comes. Returns its version.
fn announce(
    channel: &Channel,
    upgrades: &Upgrades,
    (exports, nodes): (&[ExportState], &[(usize, u32)]),
    deadline: Instant,
) -> Result<String, ControlError> {
    let Upgrades { listeners, control, .. } = upgrades;
    let sockets = listeners.iter().chain(&control.unix).chain(&control.tcp);
    let sockets: Vec<_> = sockets.map(|(_, file)| file.as_fd()).collect();
    let has_bitmaps = exports.iter().any(|export| !export.bitmaps.is_empty());
    let begin = Begin {
        protocol: Begin::protocol_for(nodes, upgrades.connects, has_bitmaps),
        exports: exports.to_vec(),
        listeners: listeners.iter().map(|(state, _)| state.clone()).collect(),
        control: control.unix.as_ref().map(|(state, _)| state.clone()),
        control_tcp: control.tcp.iter().map(|(state, _)| state.clone()).collect(),
        ublk: nodes.iter().find(|(at, _)| *at == 0).map(|(_, id)| *id),
        nodes: nodes.to_vec(),
    };
    channel.send(&begin, &[], &sockets, deadline).map_err(|error| lost(&error))?;
    receive(channel, deadline)
}

/// The new program's answer: its version.
fn receive(channel: &Channel, deadline: Instant) -> Result<String, ControlError> {
    match channel.receive(deadline, Bounds::ANSWER).map_err(|error| lost(&error))?.body {
        Answer::Yes { version } => Ok(version),
        Answer::No { why } => {
            Err(ControlError::Failed(format!("the new program cannot serve: {why}")))
        }
    }
}

/// The clients and the bits of the bitmaps, which are sent together.
type Clients<'a> =
    (&'a [(usize, ConnectionState)], &'a [(usize, PausedDevice)], &'a [Option<OwnedFd>]);

fn send_drained(
    channel: &Channel,
    images: &[Vec<BorrowedFd<'_>>],
    (connections, devices, bitmaps): Clients<'_>,
    deadline: Instant,
) -> Result<(), ControlError> {
    let mut files: Vec<BorrowedFd<'_>> = images.iter().flatten().copied().collect();
    let mut bytes: Vec<&[u8]> = Vec::new();
    let mut messages = Vec::new();
    for (export, state) in connections {
        files.push(state.socket.as_fd());
        bytes.extend([&state.unparsed[..], &state.unsent[..]]);
        messages.push(ConnectionMessage {
            export: *export,
            reply_mode: state.reply_mode,
            contexts: state.contexts,
            bitmaps: state.bitmaps.clone(),
            discard: state.discard,
            split: state.split.map(SplitMessage::from),
            unparsed: state.unparsed.len(),
            unsent: state.unsent.len(),
            ended: state.ended,
        });
    }
    let devices =
        devices.iter().map(|(export, device)| device_message(*export, device, &mut files));
    let devices = devices.collect::<io::Result<_>>().map_err(|error| lost(&error))?;
    let files_of = images.iter().map(Vec::len).collect();
    files.extend(bitmaps.iter().flatten().map(AsFd::as_fd));
    let bitmaps = bitmaps.iter().map(Option::is_some).collect();
    let drained = Drained { files: files_of, connections: messages, devices, bitmaps };
    channel.send(&drained, &bytes, &files, deadline).map_err(|error| lost(&error))
}

/// The message about `device`, whose files are appended to `files`.
fn device_message<'a>(
    export: usize,
    device: &'a PausedDevice,
    files: &mut Vec<BorrowedFd<'a>>,
) -> io::Result<DeviceMessage> {
    let state = |listener: &'a Arc<Listener>| {
        files.push(listener.as_fd());
        let path = listener.unix_path().ok_or(io::ErrorKind::Unsupported)?;
        Ok::<_, io::Error>(ListenerState::at(&Address::Unix(path), listener.is_own(), None))
    };
    let listener = device.listener.as_ref().map(state).transpose()?;
    let vmm = device.vmm.as_ref().map(|vmm| {
        files.push(vmm.socket.as_fd());
        files.extend(vmm.channel.iter().chain(&vmm.files).map(AsFd::as_fd));
        let (setup, has_channel) = (vmm.setup.clone(), vmm.channel.is_some());
        VmmMessage { setup, has_channel, files: vmm.files.len() }
    });
    let connects_to = device.connects_to.clone().map(OsString::from);
    Ok(DeviceMessage { export, listener, connects_to, vmm })
}

/// The new program has ended or is silent.
fn lost(error: &io::Error) -> ControlError {
    let why = match error.kind() {
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::BrokenPipe => {
            "it has exited, see what it has written to standard error".to_owned()
        }
        io::ErrorKind::WouldBlock => "it is not ready in time".to_owned(),
        _ => os_message(error),
    };
    ControlError::Failed(format!("the new program does not serve: {why}"))
}
