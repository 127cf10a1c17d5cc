//! A server: exports, threads with an engine each for all of them, and the connections and queues spread
//! over the threads.
//!
//! Invariant: the threads run from the start of the server to its end, whichever exports come and go.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

pub use nowait::QueueKind;
use nowait::{Error, Operation};

use crate::any_export::AnyExport;
use crate::backup_transaction;
use crate::exports::Exports;
use crate::frontends::export_device::ExportDevice;
#[cfg(feature = "sim")]
pub use crate::injected_bug::{ServerBug, inject};
#[cfg(feature = "sim")]
pub use crate::injected_death::die_after;
pub use crate::nbd::tls_config::{ClientAuth, Credentials, Tls, TlsError};
pub use crate::net::listener::Listener;
use crate::reactor;
pub use crate::server_options::{ExportOptions, Options};
use crate::threads::{Shared, ThreadEvent};

/// The state in which a server stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct ShutdownReport {
    /// Requests that had not completed in time.
    pub unfinished: usize,
    /// Another process serves the images now: this one must not touch them any more.
    pub handed_over: bool,
}

/// A running NBD server.
pub struct Server {
    shared: Arc<Shared>,
    events: Receiver<ThreadEvent>,
}

/// Stops a server, from any thread.
#[derive(Clone)]
pub struct ShutdownHandle(Arc<Shared>);

impl ShutdownHandle {
    /// The server takes no more requests; [`Server::run`] returns when those in flight have
    /// completed.
    pub fn stop(&self) {
        self.0.stop();
    }

    /// Requests in flight, as of a moment ago.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.0.in_flight()
    }
}

impl Server {
    /// Starts serving `exports` to the clients of `listeners`. The first export is the default,
    /// which a client gets that names none; of several with one name only the first can be chosen.
    /// Its threads run when this returns. An export without clients is detached from them after the idle
    /// timeout; then all writes are durable.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`, `EAGAIN`: a queue or a thread could not be made; for
    /// [`QueueKind::Uring`] also the errors of [`nowait::Uring::new`]. `EINVAL`: there is no export.
    pub fn start(
        exports: Vec<AnyExport>,
        listeners: Vec<Listener>,
        options: Options,
    ) -> Result<Self, Error> {
        let (sender, events) = channel();
        let shared = Arc::new(Shared::new(exports, options, sender)?);
        match reactor::start(&shared, listeners) {
            Ok(()) => Ok(Self { shared, events }),
            Err(error) => {
                shared.stop();
                Err(error)
            }
        }
    }

    /// A handle that stops this server.
    #[must_use]
    pub fn shutdown_handle(&self) -> ShutdownHandle {
        ShutdownHandle(self.shared.clone())
    }

    /// A handle to add and remove exports.
    #[must_use]
    pub fn exports(&self) -> Exports {
        Exports(self.shared.clone())
    }

    /// Makes [`Server::run`] return as if stopped when the last connection is closed, once a client
    /// has chosen an export: clients that only connect or list the exports do not count.
    pub fn stop_after_last_client(&self) {
        self.shared.report_last_client_left();
    }

    /// Serves until stopped. Then waits at most `timeout` for the users of a block device of this
    /// machine, and as long for the requests in flight. Making writes durable is the caller's next
    /// step.
    ///
    /// # Errors
    /// `EIO`: a thread has ended because its queue failed; it has logged why.
    pub fn run(self, timeout: Duration) -> Result<ShutdownReport, Error> {
        loop {
            match self.events.recv() {
                Ok(ThreadEvent::StopRequested) | Err(_) => break,
                // The thread could not start, or it stops and `StopRequested` follows.
                Ok(ThreadEvent::ThreadExited) => {}
                Ok(ThreadEvent::HandedOver) => {
                    return Ok(ShutdownReport { unfinished: 0, handed_over: true });
                }
                Ok(ThreadEvent::LastClientLeft) => {
                    self.shared.stop();
                    // Not while another process takes over: it has the clients.
                    if self.shared.is_stopping() {
                        break;
                    }
                }
                Ok(ThreadEvent::ThreadFailed) => {
                    self.shared.stop();
                    return Err(Error::new(libc::EIO, Operation::Wait));
                }
            }
        }
        self.shut_devices_down(timeout);
        let deadline = Instant::now() + timeout;
        while self.shared.running() > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left) {
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
        }
        backup_transaction::abort_all(&self.shared.registry);
        self.shared.summarize_faults();
        Ok(ShutdownReport { unfinished: self.shared.in_flight(), handed_over: false })
    }

    /// Waits at most `timeout` for the users of all local devices together.
    fn shut_devices_down(&self, timeout: Duration) {
        let shared = &*self.shared;
        let stop =
            move |device: &dyn ExportDevice| device.shut_down(timeout, &|| shared.wake_threads());
        std::thread::scope(|scope| {
            for device in shared.local_devices() {
                let stopping = device.clone();
                let thread = std::thread::Builder::new();
                // Without a thread of its own it waits for the one before.
                if thread.spawn_scoped(scope, move || stop(&*stopping)).is_err() {
                    stop(&*device);
                }
            }
        });
    }
}
