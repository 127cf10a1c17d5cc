//! The NBD server: exports, threads with a queue each, and the connections spread over them.
//!
//! Invariant: a connection belongs to one thread: once it has chosen an export, to one of that
//! export's threads. Threads share the export and their connection channels, nothing else.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

pub use nowait::QueueKind;
use nowait::{Engine, Error, IoQueue, Operation};

use crate::event_loop::EventLoop;
#[cfg(feature = "sim")]
pub use crate::event_loop::{SimChange, SimParked, Simulated, SimulatedUblk, SimulatedVhost};
use crate::export::{Export, ExportId};
use crate::export_threads::any_export::AnyExport;
use crate::export_threads::export_registry::Servable;
use crate::export_threads::{Shared, ThreadContext, ThreadEvent};
use crate::exports::Exports;
use crate::frontend::Frontend;
#[cfg(feature = "sim")]
pub use crate::injected_bug::{ServerBug, inject};
#[cfg(feature = "sim")]
pub use crate::injected_death::die_after;
use crate::nbd::command;
use crate::nbd::handshake::ExportInfo;
pub use crate::nbd::tls_config::{ClientAuth, Credentials, Tls, TlsError};
pub use crate::net::listener::Listener;
pub use crate::server_options::{ExportOptions, Options};
use crate::vhost_user::BlockProperties;

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
    /// Its threads run when this returns. The threads of another export start when clients choose
    /// it, and retire after the idle timeout; then all writes are durable.
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
        let (exports, sockets): (Vec<_>, Vec<_>) = exports
            .into_iter()
            .map(|AnyExport { export, has_devices, vhost_user }| {
                ((export, has_devices), vhost_user)
            })
            .unzip();
        let shared = Arc::new(Shared::new(exports, options, sender));
        let (ready, begun) = channel();
        let started = shared.start(listeners, &ready);
        drop(ready);
        let serve_devices = |()| {
            let ids = (0..).map(ExportId).zip(sockets);
            let mut all = ids.flat_map(|(id, sockets)| sockets.into_iter().map(move |s| (id, s)));
            all.try_for_each(|(id, socket)| shared.serve_devices(id, socket))
        };
        let started = started.and_then(|()| begun.iter().collect::<Result<(), _>>());
        match started.and_then(serve_devices) {
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
                Ok(ThreadEvent::ThreadEnded) => {}
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
        if let Some(device) = &self.shared.options.ublk {
            device.stop(timeout, || self.shared.wake_threads());
        }
        let deadline = Instant::now() + timeout;
        while self.shared.running() > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left) {
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
        }
        self.shared.summarize_faults();
        Ok(ShutdownReport { unfinished: self.shared.in_flight(), handed_over: false })
    }
}

impl Servable for Export {
    fn info(&self, id: ExportId) -> ExportInfo {
        command::export_info(id, self)
    }

    fn properties(&self) -> BlockProperties {
        let disk = self.disk();
        BlockProperties {
            // If the refresh fails, the device may be gone: then its requests fail.
            size: disk.refresh().unwrap_or(disk.size()),
            read_only: self.is_read_only(),
            discards: disk.supports_punch_hole(),
            block: disk.alignment().offset.clamp(4096, 1 << 20),
        }
    }

    fn name(&self) -> &str {
        Export::name(self)
    }

    fn description(&self) -> &str {
        Export::description(self)
    }

    fn is_read_only(&self) -> bool {
        Export::is_read_only(self)
    }

    fn set_read_only(&self, read_only: bool) -> Result<(), Error> {
        Export::set_read_only(self, read_only)
    }

    fn allocated_ahead(&self) -> u64 {
        self.disk().allocated_ahead()
    }

    fn size(&self) -> u64 {
        self.disk().size()
    }

    fn refresh(&self) -> Result<u64, Error> {
        self.disk().refresh()
    }

    fn grow(&self, size: u64) -> Result<(), Error> {
        self.disk().grow(size)
    }

    fn flush(&self) -> Result<(), Error> {
        Export::flush(self)
    }

    fn summarize_faults(&self) {
        Export::summarize_faults(self);
    }

    fn serve(self: Arc<Self>, context: ThreadContext) -> Result<(), Error> {
        let Options { kind, config, .. } = context.shared.options;
        match kind.open(config.slots) {
            Ok(queue) => {
                if let Some(error) = queue.refusal() {
                    context.shared.warn_no_io_uring(error);
                }
                serve_on(self, context, queue)
            }
            Err(error) => {
                context.fail_start(error);
                Ok(())
            }
        }
    }
}

/// Serves `export` as the thread of `context`.
fn serve_on<Q: IoQueue>(
    export: Arc<Export>,
    mut context: ThreadContext,
    queue: Q,
) -> Result<(), Error> {
    let nbd = context.nbd_frontend();
    let vhost = context.registered.has_devices.then(|| context.vhost_frontend());
    // A thread pays only for the frontends that it has.
    match (context.ublk_frontend(), vhost) {
        (None, None) => serve_with(export, context, queue, nbd),
        (Some(ublk), None) => serve_with(export, context, queue, (nbd, ublk)),
        (None, Some(vhost)) => serve_with(export, context, queue, (nbd, vhost)),
        (Some(ublk), Some(vhost)) => serve_with(export, context, queue, (nbd, (ublk, vhost))),
    }
}

/// The same with a frontend, or a pair of them.
fn serve_with<F: Frontend<Q>, Q: IoQueue>(
    export: Arc<Export>,
    mut context: ThreadContext,
    queue: Q,
    frontend: F,
) -> Result<(), Error> {
    let workers = context.shared.workers.clone();
    let (id, queue_index) = (context.registered.id, context.queue);
    let (config, budget) = (context.shared.options.config, &context.shared.budget);
    let engine = Engine::sharing(queue, workers, config, budget);
    let event_loop = engine.and_then(|engine| EventLoop::new(&context, export, engine, frontend));
    match event_loop {
        Ok(mut event_loop) => {
            context.report_started();
            drop(context);
            event_loop
                .run()
                .inspect_err(|error| tracing::error!("export {id}, queue {queue_index}: {error}"))
        }
        Err(error) => {
            context.fail_start(error);
            Ok(())
        }
    }
}
