//! The thread of a vhost-user socket, which serves one VMM after the other.
//!
//! Invariant: a socket has one connection and one thread, however many programs connect. The thread
//! ends when the server stops. While it is frozen it takes nothing from its sockets, so that another
//! process can go on with them.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use nowait::{Error, Operation};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use vhost::vhost_user::{BackendReqHandler, Error as MessageError};

use crate::export::ExportId;
use crate::export_error::ExportError;
use crate::frontend_kind::FrontendKind;
use crate::locking::lock;
use crate::net::connection_limit::ConnectionPermit;
use crate::net::listener::Listener;
use crate::net::peer::Peer;
use crate::vhost_user::config_change;
use crate::vhost_user::device::vmm_state::VmmState;
use crate::vhost_user::device::{Device, QueueThreads};
use crate::vhost_user::message_replay::replayed;
use crate::vhost_user::queue_channel::{DeviceState, ID_BYTES};
use crate::vhost_user::vmm_log::VmmLog;

/// The pause after a connection that has failed, or could not be accepted.
const BACK_OFF: Duration = Duration::from_millis(100);
/// The pause before a VMM that listens is connected to again, in seconds.
const CONNECT_AGAIN: i64 = 1;

/// A control thread, from any thread.
pub(crate) struct ControlHandle {
    wake: OwnedFd,
    state: Mutex<ControlState>,
    /// Notified when the thread may go on, and when it is not busy any more.
    changed: Condvar,
}

#[derive(Default)]
struct ControlState {
    is_stopped: bool,
    /// The thread takes nothing from its sockets.
    is_frozen: bool,
    /// Another process has the sockets.
    is_released: bool,
    /// The thread takes a connection or a message, or handles it.
    is_busy: bool,
    listener: Weak<Listener>,
    /// Where a VMM listens that is connected to.
    connects_to: Option<PathBuf>,
    /// The connection that is served.
    connection: Option<UnixStream>,
    /// Where its VMM is told of changes, if it has handed that over.
    channel: Option<OwnedFd>,
    /// The set-up by its VMM.
    device: Option<Arc<Mutex<Device>>>,
    /// No device runs for a while.
    suspended: bool,
}

impl ControlHandle {
    /// The handle of a thread that is about to start for `socket`.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: there is no descriptor for it.
    pub(crate) fn new(socket: &DeviceSocket) -> Result<Self, Error> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::new(e.raw_os_error(), Operation::SetUp))?;
        let connects_to = match socket {
            DeviceSocket::ConnectsTo(path) => Some(path.clone()),
            DeviceSocket::Paused(paused) => paused.connects_to.clone(),
            DeviceSocket::Listener(_) | DeviceSocket::Connected(_) => None,
        };
        let state = Mutex::new(ControlState { connects_to, ..ControlState::default() });
        Ok(Self { wake, state, changed: Condvar::new() })
    }

    /// Ends the thread and its connection.
    pub(crate) fn stop(&self) {
        let mut state = self.lock();
        state.is_stopped = true;
        if let Some(connection) = &state.connection {
            // The VMM may have gone already.
            let _ = connection.shutdown(std::net::Shutdown::Both);
        }
        self.wake(&state);
    }

    /// The thread looks at its state, which is as it is to be.
    fn wake(&self, _: &ControlState) {
        self.changed.notify_all();
        // It cannot block: nothing else adds to the count but these few calls.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// The device, its VMM and its listener for another process, once the thread is between two messages. The rest of
    /// a message that has come in part is waited for until `soon`; then its connection is closed. The thread takes
    /// nothing from its sockets from then on until [`ControlHandle::resume`]. The device has to be suspended.
    ///
    /// # Errors
    /// [`ExportError::DoesNotEnd`]: a message was not handled before `deadline`. [`ExportError::System`]: there are no
    /// descriptors for copies.
    pub(crate) fn freeze(
        &self,
        soon: Instant,
        deadline: Instant,
    ) -> Result<PausedDevice, ExportError> {
        let mut state = self.lock();
        state.is_frozen = true;
        let mut state = self.wait_until(soon, state, |state| state.is_busy);
        if state.is_busy {
            if let Some(connection) = &state.connection {
                tracing::warn!(
                    "a vhost-user message of {} that came in part was not waited for any longer: its connection is closed",
                    Peer::of(connection).address()
                );
                // The VMM may have gone already.
                let _ = connection.shutdown(std::net::Shutdown::Both);
            }
            let is_there = |state: &ControlState| state.is_busy || state.connection.is_some();
            state = self.wait_until(deadline, state, is_there);
            if is_there(&state) {
                return Err(ExportError::DoesNotEnd);
            }
        }
        let failed =
            |error: std::io::Error| ExportError::System(Error::from_io(&error, Operation::SetUp));
        let vmm = match (&state.device, &state.connection) {
            (Some(device), Some(connection)) => {
                Some(lock(device).vmm_state(connection, state.channel.as_ref()).map_err(failed)?)
            }
            _ => None,
        };
        let (listener, connects_to) = (state.listener.upgrade(), state.connects_to.clone());
        Ok(PausedDevice { listener, connects_to, vmm })
    }

    /// Waits while `is_so`, until `deadline` at most.
    fn wait_until<'a>(
        &self,
        deadline: Instant,
        state: MutexGuard<'a, ControlState>,
        is_so: impl Fn(&ControlState) -> bool,
    ) -> MutexGuard<'a, ControlState> {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self.changed.wait_timeout_while(state, left, |state| is_so(state));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Another process has the sockets of a frozen thread, which ends.
    pub(crate) fn release(&self) {
        let mut state = self.lock();
        (state.is_released, state.connection) = (true, None);
        self.wake(&state);
    }

    /// The thread is about to take something from a socket, once it is not frozen. `None` if it is to
    /// end.
    fn take(&self) -> Option<Taking<'_>> {
        let is_frozen =
            |state: &mut ControlState| state.is_frozen && !state.is_stopped && !state.is_released;
        let state = self.changed.wait_while(self.lock(), is_frozen);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        if state.is_stopped || state.is_released {
            return None;
        }
        state.is_busy = true;
        Some(Taking(self))
    }

    /// Waits until `socket` is readable, and then for [`ControlHandle::take`].
    fn wait(&self, socket: &impl AsFd) -> Result<Option<Taking<'_>>, rustix::io::Errno> {
        loop {
            let mut fds =
                [PollFd::new(socket, PollFlags::IN), PollFd::new(&self.wake, PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) => return Ok(self.take()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits for the pause before another connection, or until the thread is to end.
    fn pause(&self) {
        let mut fds = [PollFd::new(&self.wake, PollFlags::IN)];
        // A signal that ends the wait early does no harm.
        let _ = poll(&mut fds, Some(&Timespec { tv_sec: CONNECT_AGAIN, tv_nsec: 0 }));
    }

    /// Tells the VMM that the configuration of its device has changed.
    pub(crate) fn tell_config_change(&self) {
        self.lock().channel.iter().for_each(config_change::tell);
    }

    /// Asks the queues of the device to stop, until [`ControlHandle::resume`]; those of a VMM that connects meanwhile do
    /// not start.
    pub(crate) fn begin_suspending(&self) {
        let device = {
            let mut state = self.lock();
            state.suspended = true;
            state.device.clone()
        };
        device.iter().for_each(|device| lock(device).begin_suspending());
    }

    /// Waits for the queues that were asked to stop, as [`Device::wait_suspended`].
    pub(crate) fn wait_suspended(&self, deadline: Instant) -> bool {
        let device = self.lock().device.clone();
        device.is_none_or(|device| lock(&device).wait_suspended(deadline))
    }

    /// Starts them again.
    pub(crate) fn resume(&self) {
        let device = {
            let mut state = self.lock();
            (state.suspended, state.is_frozen) = (false, false);
            self.changed.notify_all();
            state.device.clone()
        };
        device.iter().for_each(|device| lock(device).resume());
    }

    /// Notes the device of the connection that is served.
    fn has_device(&self, device: &Arc<Mutex<Device>>) {
        let mut state = self.lock();
        if state.suspended {
            // It has no queue yet.
            lock(device).suspend(Instant::now());
        }
        state.device = Some(device.clone());
    }

    /// Its device ends with the last use. Returns whether it had memory.
    fn has_no_device(&self) -> bool {
        let device = self.lock().device.take();
        // Its queues stop, while others may ask for the lock.
        device.is_some_and(|device| lock(&device).has_memory())
    }

    /// Notes the connection that is served. Returns whether the thread goes on.
    fn serves(&self, connection: Option<UnixStream>) -> bool {
        let mut state = self.lock();
        (state.connection, state.channel) = (connection, None);
        self.changed.notify_all();
        !state.is_stopped && !state.is_released
    }

    fn lock(&self) -> MutexGuard<'_, ControlState> {
        lock(&self.state)
    }
}

/// A thread takes something from a socket, until this is dropped.
struct Taking<'a>(&'a ControlHandle);

impl Drop for Taking<'_> {
    fn drop(&mut self) {
        self.0.lock().is_busy = false;
        self.0.changed.notify_all();
    }
}

/// A device of virtual machines that is not served, for another process.
pub struct PausedDevice {
    /// Where its VMMs connect, unless the only one has connected already, or they listen.
    pub listener: Option<Arc<Listener>>,
    /// Where its VMMs listen.
    pub connects_to: Option<PathBuf>,
    /// Its VMM and what this has set up, if one has connected.
    pub vmm: Option<VmmState>,
}

/// The server, for the thread of a socket.
pub(crate) trait ControlServer: QueueThreads {
    /// Counts a connection, unless there are too many.
    fn permit(&self) -> Option<ConnectionPermit>;

    /// The export that the socket is a disk of.
    fn export(&self) -> ExportId;
}

/// A vhost-user-blk device for virtual machines, by where their VMMs come from.
pub enum DeviceSocket {
    /// One after the other connects to a Unix socket.
    Listener(Listener),
    /// The only one has connected already. A server that clients can reach by nothing else stops when it has left.
    Connected(UnixStream),
    /// One after the other listens at the Unix socket of this path: it is connected to, every second until it is there, and
    /// again when the VMM has left.
    ConnectsTo(PathBuf),
    /// The state that another process has handed over.
    Paused(PausedDevice),
}

/// Where the next VMM comes from.
enum Source {
    Listener(Arc<Listener>),
    ConnectsTo(PathBuf),
    /// There is only the first.
    None,
}

impl Source {
    /// How it is called in the log.
    fn label(&self) -> String {
        match self {
            Self::Listener(listener) => match listener.unix_path() {
                Some(path) => format!("vhost-user socket {}", path.display()),
                None => "vhost-user socket".to_owned(),
            },
            Self::ConnectsTo(path) => format!("vhost-user socket {} of a VMM", path.display()),
            Self::None => "vhost-user connection".to_owned(),
        }
    }
}

/// Serves the VMMs of `socket`, one after the other, until `handle` is stopped; then a socket file is
/// removed, unless it is a VMM's. The only VMM of a connection that was handed over is served until it has left. `name` is
/// what guests are told as the name of the disk.
pub(crate) fn run<S: ControlServer + 'static>(
    socket: DeviceSocket,
    server: &Arc<S>,
    handle: &ControlHandle,
    name: &str,
) {
    let mut id = [0; ID_BYTES];
    let printable = name.bytes().filter(u8::is_ascii_graphic);
    id.iter_mut().zip(printable).for_each(|(to, from)| *to = from);
    let (mut first, source) = match socket {
        DeviceSocket::Listener(listener) => (None, Source::Listener(Arc::new(listener))),
        DeviceSocket::Connected(stream) => (Some(Vmm::Connected(stream)), Source::None),
        DeviceSocket::ConnectsTo(path) => (None, Source::ConnectsTo(path)),
        DeviceSocket::Paused(PausedDevice { listener, connects_to, vmm }) => {
            let source = match (listener, connects_to) {
                (Some(listener), _) => Source::Listener(listener),
                (None, Some(path)) => Source::ConnectsTo(path),
                (None, None) => Source::None,
            };
            (vmm.map(Vmm::Paused), source)
        }
    };
    if let Source::Listener(listener) = &source {
        handle.lock().listener = Arc::downgrade(listener);
    }
    let mut log = VmmLog::new(source.label());
    while handle.serves(None) {
        let next = match (first.take(), &source) {
            (Some(vmm), _) => Ok(handle.take().map(|taking| (vmm, taking))),
            (None, Source::Listener(listener)) => accept(listener, handle),
            (None, Source::ConnectsTo(path)) => Ok(connected(path, handle, &mut log)),
            (None, Source::None) => return,
        };
        match next {
            Ok(Some((vmm, taking))) => {
                serve_vmm((vmm, taking), server, handle, (id, &mut log));
                if let Source::ConnectsTo(_) = source {
                    handle.pause();
                }
            }
            Ok(None) => {}
            Err(error) => {
                log.cannot_accept(&error);
                std::thread::sleep(BACK_OFF);
            }
        }
    }
    if handle.lock().is_released {
        // The socket file is another process's now.
        std::mem::forget(source);
    }
}

/// A VMM that has connected.
enum Vmm {
    Connected(UnixStream),
    /// To another process.
    Paused(VmmState),
}

/// Serves one VMM until it has left.
fn serve_vmm<S: ControlServer + 'static>(
    (vmm, taking): (Vmm, Taking<'_>),
    server: &Arc<S>,
    handle: &ControlHandle,
    (id, log): ([u8; ID_BYTES], &mut VmmLog),
) {
    let Some(permit) = server.permit() else {
        log.too_many();
        std::thread::sleep(BACK_OFF);
        return;
    };
    let socket = match &vmm {
        Vmm::Connected(stream) => stream.try_clone(),
        Vmm::Paused(state) => state.socket.try_clone().map(UnixStream::from),
    };
    let Ok(socket) = socket else { return };
    let (Ok(copy), Ok(to_close)) = (socket.try_clone(), socket.try_clone()) else { return };
    let peer = Peer::of(&socket).address();
    permit.describe_socket(FrontendKind::VhostUser, peer, to_close);
    permit.mark_transmission(server.export(), false);
    if !handle.serves(Some(copy)) {
        return;
    }
    log.connected();
    let state = Arc::new(DeviceState::new(id, log.label().to_owned()));
    let device = Arc::new(Mutex::new(Device::new(server.clone(), state)));
    let messages = match vmm {
        Vmm::Connected(stream) => Ok(BackendReqHandler::from_stream(stream, device.clone())),
        Vmm::Paused(state) => take_over(state, &device, handle),
    };
    let ended = messages.map_or_else(
        |error| error,
        |mut messages| {
            handle.has_device(&device);
            drop((device, taking));
            serve(&mut messages, &socket, handle)
        },
    );
    let had_memory = handle.has_no_device();
    if handle.lock().is_released {
        return;
    }
    if log.ended(&ended, had_memory) {
        std::thread::sleep(BACK_OFF);
    }
    drop(permit);
}

/// Sets `device` up as it was in another process, and goes on with the messages of its VMM.
fn take_over(
    mut state: VmmState,
    device: &Arc<Mutex<Device>>,
    handle: &ControlHandle,
) -> Result<BackendReqHandler<Mutex<Device>>, MessageError> {
    let socket = UnixStream::from(state.socket.try_clone().map_err(MessageError::SocketError)?);
    handle.lock().channel = state.channel.take();
    let messages = replayed(socket, device.clone(), &state)?;
    lock(device).set_up(state)?;
    Ok(messages)
}

/// Handles the messages of one connection. Returns why it has ended.
fn serve(
    messages: &mut BackendReqHandler<Mutex<Device>>,
    socket: &UnixStream,
    handle: &ControlHandle,
) -> MessageError {
    loop {
        let _taking = match handle.wait(socket) {
            Ok(Some(taking)) => taking,
            Ok(None) => return MessageError::Disconnected,
            Err(errno) => return MessageError::SocketError(errno.into()),
        };
        // Before the answer: from then on the VMM counts on being told.
        if let Some(channel) = config_change::peek_channel(socket) {
            handle.lock().channel = Some(channel);
        }
        if let Err(error) = messages.handle_request() {
            return error;
        }
    }
}

/// The next connection; `None` if there is none yet or the thread is to end.
fn accept<'a>(
    listener: &Listener,
    handle: &'a ControlHandle,
) -> std::io::Result<Option<(Vmm, Taking<'a>)>> {
    let Some(taking) = handle.wait(listener)? else { return Ok(None) };
    match listener.accept() {
        Ok(socket) => {
            let stream = UnixStream::from(socket);
            stream.set_nonblocking(false)?;
            Ok(Some((Vmm::Connected(stream), taking)))
        }
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

/// A connection to the VMM that listens at `path`; `None` after a pause if there is none yet, or if the thread is to end.
fn connected<'a>(
    path: &Path,
    handle: &'a ControlHandle,
    log: &mut VmmLog,
) -> Option<(Vmm, Taking<'a>)> {
    let taking = handle.take()?;
    match connect(path) {
        Ok(stream) => Some((Vmm::Connected(stream), taking)),
        Err(error) => {
            drop(taking);
            log.cannot_connect(&error);
            handle.pause();
            None
        }
    }
}

/// Connects to a Unix socket without a wait: one whose queue of connections is full is one that does not listen.
fn connect(path: &Path) -> std::io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}
