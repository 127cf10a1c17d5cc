//! The thread of a vhost-user socket, which serves one VMM after the other.
//!
//! Invariant: a socket has one connection and one thread, however many programs connect. The thread
//! ends when the server stops.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use nowait::{Error, Operation};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use vhost::vhost_user::{BackendReqHandler, Error as MessageError};

use crate::export::ExportId;
use crate::locking::lock;
use crate::net::connection_limit::ConnectionPermit;
use crate::net::listener::Listener;
use crate::net::peer::Peer;
use crate::statistics::FrontendKind;
use crate::vhost_user::config_change;
use crate::vhost_user::device::{Device, QueueThreads};
use crate::vhost_user::queue_channel::{DeviceState, ID_BYTES};

/// The pause after a connection that has failed, or could not be accepted.
const BACK_OFF: Duration = Duration::from_millis(100);

/// The end of a control thread, from any thread.
pub(crate) struct ControlHandle {
    wake: OwnedFd,
    state: Mutex<ControlState>,
}

#[derive(Default)]
struct ControlState {
    is_stopped: bool,
    /// The connection that is served.
    connection: Option<UnixStream>,
    /// Where its VMM is told of changes, if it has handed that over.
    channel: Option<OwnedFd>,
    /// What its VMM has set up.
    device: Option<Arc<Mutex<Device>>>,
    /// No device runs for a while.
    suspended: bool,
}

impl ControlHandle {
    /// The handle of a thread that is about to start.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: there is no descriptor for it.
    pub(crate) fn new() -> Result<Self, Error> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::new(e.raw_os_error(), Operation::SetUp))?;
        Ok(Self { wake, state: Mutex::default() })
    }

    /// Ends the thread and its connection.
    pub(crate) fn stop(&self) {
        let mut state = self.lock();
        state.is_stopped = true;
        if let Some(connection) = &state.connection {
            // The VMM may have gone already.
            let _ = connection.shutdown(std::net::Shutdown::Both);
        }
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Tells the VMM that the configuration of its device has changed.
    pub(crate) fn tell_config_change(&self) {
        self.lock().channel.iter().for_each(config_change::tell);
    }

    /// Stops the queues of its device until [`ControlHandle::resume`]; those of a VMM that connects
    /// meanwhile do not start. As [`Device::suspend`].
    pub(crate) fn suspend(&self, deadline: Instant) -> bool {
        let device = {
            let mut state = self.lock();
            state.suspended = true;
            state.device.clone()
        };
        device.is_none_or(|device| lock(&device).suspend(deadline))
    }

    /// Starts them again.
    pub(crate) fn resume(&self) {
        let device = {
            let mut state = self.lock();
            state.suspended = false;
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

    /// Its device ends with the last use.
    fn has_no_device(&self) {
        let device = self.lock().device.take();
        // Its queues stop, while others may ask for the lock.
        drop(device);
    }

    /// Notes the connection that is served. Returns whether the thread goes on.
    fn serves(&self, connection: Option<UnixStream>) -> bool {
        let mut state = self.lock();
        (state.connection, state.channel) = (connection, None);
        !state.is_stopped
    }

    fn lock(&self) -> MutexGuard<'_, ControlState> {
        lock(&self.state)
    }
}

/// The server, for the thread of a socket.
pub(crate) trait ControlServer: QueueThreads {
    /// Counts a connection, unless there are too many.
    fn permit(&self) -> Option<ConnectionPermit>;

    /// The export that the socket is a disk of.
    fn export(&self) -> ExportId;
}

/// Where the VMMs of a device come from.
pub(crate) enum DeviceSocket {
    /// One after the other connects.
    Listener(Listener),
    /// The only one has connected already.
    Connected(UnixStream),
}

impl DeviceSocket {
    /// The socket, in messages.
    fn label(&self) -> String {
        match self {
            Self::Listener(listener) => match listener.unix_path() {
                Some(path) => format!("vhost-user socket {}", path.display()),
                None => "vhost-user socket".to_owned(),
            },
            Self::Connected(_) => "vhost-user connection".to_owned(),
        }
    }
}

/// Serves the VMMs of `socket`, one after the other, until `handle` is stopped; then a socket file is
/// removed. The only VMM of a connection that was handed over is served until it has left. `name` is
/// what guests are told as the name of the disk.
pub(crate) fn run<S: ControlServer + 'static>(
    socket: DeviceSocket,
    server: &Arc<S>,
    handle: &ControlHandle,
    name: &str,
) {
    let label = socket.label();
    let mut id = [0; ID_BYTES];
    let printable = name.bytes().filter(u8::is_ascii_graphic);
    id.iter_mut().zip(printable).for_each(|(to, from)| *to = from);
    let (mut connected, listener) = match socket {
        DeviceSocket::Listener(listener) => (None, Some(listener)),
        DeviceSocket::Connected(stream) => (Some(stream), None),
    };
    while handle.serves(None) {
        let next = match (connected.take(), &listener) {
            (Some(stream), _) => Ok(Some(stream)),
            (None, Some(listener)) => accept(listener, handle),
            (None, None) => return,
        };
        let stream = match next {
            Ok(Some(stream)) => stream,
            Ok(None) => continue,
            Err(error) => {
                tracing::warn!("{label}: cannot accept a connection: {error}");
                std::thread::sleep(BACK_OFF);
                continue;
            }
        };
        let Some(permit) = server.permit() else {
            tracing::warn!("{label}: a connection was closed: too many are open");
            std::thread::sleep(BACK_OFF);
            continue;
        };
        let (Ok(copy), Ok(to_close)) = (stream.try_clone(), stream.try_clone()) else { continue };
        let peer = Peer::of(&stream).address();
        permit.describe_socket(FrontendKind::VhostUser, peer, to_close);
        permit.mark_transmission(server.export(), false);
        if !handle.serves(Some(copy)) {
            return;
        }
        tracing::info!("{label}: a VMM has connected");
        let state = Arc::new(DeviceState::new(id, label.clone()));
        match serve(stream, server.clone(), handle, state) {
            MessageError::Disconnected | MessageError::PartialMessage => {
                tracing::info!("{label}: the VMM has left");
            }
            error => {
                tracing::warn!("{label}: the VMM was disconnected: {error}");
                std::thread::sleep(BACK_OFF);
            }
        }
        drop(permit);
    }
}

/// Handles the messages of one connection. Returns why it has ended; then its queues have stopped.
fn serve(
    stream: UnixStream,
    threads: Arc<dyn QueueThreads>,
    handle: &ControlHandle,
    state: Arc<DeviceState>,
) -> MessageError {
    let Ok(socket) = stream.try_clone() else { return MessageError::Disconnected };
    let device = Arc::new(Mutex::new(Device::new(threads, state)));
    handle.has_device(&device);
    let mut messages = BackendReqHandler::from_stream(stream, device);
    loop {
        let channel = config_change::peek_channel(&socket);
        if let Err(error) = messages.handle_request() {
            handle.has_no_device();
            return error;
        }
        if channel.is_some() {
            handle.lock().channel = channel;
        }
    }
}

/// The next connection; `None` if there is none yet or the thread was stopped.
fn accept(listener: &Listener, handle: &ControlHandle) -> std::io::Result<Option<UnixStream>> {
    let mut fds = [
        PollFd::new(listener, PollFlags::IN),
        PollFd::from_borrowed_fd(handle.wake.as_fd(), PollFlags::IN),
    ];
    match poll(&mut fds, None) {
        Ok(_) => {}
        Err(rustix::io::Errno::INTR) => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    match listener.accept() {
        Ok(socket) => {
            let stream = UnixStream::from(socket);
            stream.set_nonblocking(false)?;
            Ok(Some(stream))
        }
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}
