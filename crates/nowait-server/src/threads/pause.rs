//! Exports are not served for a while: their connections and queues leave the threads, and wait for the
//! end of the pause, or for another process.
//!
//! Invariant: no request of an export is in flight while it is paused, and no connection is lost: either
//! a thread serves it again, or another process has it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nowait::{Error, Operation};

use crate::any_export::AnyExport;
use crate::export::ExportId;
use crate::export_error::ExportError;
use crate::nbd::connection_state::ConnectionState;
use crate::net::listener::Listener;
use crate::refusal_log::{self, Refusal};
use crate::registered_export::{RegisteredExport, Waiting};
use crate::threads::{Shared, ThreadEvent};
use crate::vhost_user::control_thread::PausedDevice;

/// How long the driver of a block device may take to notice that it was given back.
/// Beyond it: the export goes on without waiting for it.
const RESUME_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a message of a VMM may be on its way in a pause. VMMs send each by one call.
/// Beyond it: the pause fails, and all goes on.
const PARTIAL_MESSAGE_TIMEOUT: Duration = Duration::from_millis(500);
/// How often a wait for requests in flight looks whether the server is stopping.
const STOP_INTERVAL: Duration = Duration::from_millis(100);

/// A server that has stopped serving, all of its exports or one. It goes on when this is dropped.
pub struct PausedServer {
    shared: Arc<Shared>,
    exports: Vec<Arc<RegisteredExport>>,
    /// Nothing stops the server meanwhile.
    hands_over: bool,
}

/// An export that is not served. It is again when this is dropped.
pub struct PausedExport(PausedServer);

impl Shared {
    /// Like [`crate::Exports::pause`].
    pub(crate) fn pause(self: &Arc<Self>, timeout: Duration) -> Result<PausedServer, ExportError> {
        let deadline = Instant::now() + timeout;
        let paused = self.pause_exports(self.registry.all(), deadline)?;
        // A connection that is accepted from now on is for another process.
        self.channels.iter().for_each(|channels| channels.nbd.want_listeners());
        let (mut listeners, mut has_all) = (Vec::new(), true);
        for channels in &self.channels {
            match channels.nbd.wait_listeners(time_until(deadline)) {
                Some(given) => listeners.extend(given),
                None => has_all = false,
            }
        }
        if let Some(export) = paused.exports.first() {
            export.with_waiting(|waiting| waiting.listeners = listeners);
        }
        if has_all { Ok(paused) } else { Err(ExportError::DoesNotEnd) }
    }

    /// Like [`crate::Exports::pause_export`].
    pub(crate) fn pause_export(
        self: &Arc<Self>,
        id: ExportId,
        timeout: Duration,
    ) -> Result<PausedExport, ExportError> {
        let deadline = Instant::now() + timeout;
        self.pause_exports(vec![self.registered(id)?], deadline).map(PausedExport)
    }

    /// Like [`crate::Exports::pause_export`], of several.
    pub(crate) fn pause_exports(
        self: &Arc<Self>,
        exports: Vec<Arc<RegisteredExport>>,
        deadline: Instant,
    ) -> Result<PausedServer, ExportError> {
        let paused = self.begin_pause(exports)?;
        match paused.wait(deadline) {
            true => Ok(paused),
            false => Err(ExportError::DoesNotEnd),
        }
    }

    /// Has `exports` take no more requests: they are paused when [`PausedServer::wait`] says so.
    fn begin_pause(
        self: &Arc<Self>,
        exports: Vec<Arc<RegisteredExport>>,
    ) -> Result<PausedServer, ExportError> {
        let mut paused =
            PausedServer { shared: self.clone(), exports: Vec::new(), hands_over: false };
        if self.is_stopping() {
            return Err(ExportError::Stopping);
        }
        let mut devices = exports.iter().flat_map(|export| export.devices());
        if devices.any(|device| !device.can_pause()) {
            return Err(ExportError::CannotKeepBack);
        }
        for export in exports {
            if !export.begin_pause() {
                // No device was told to pause: none is resumed.
                paused.exports.drain(..).for_each(|begun| self.end_pause(&begun));
                return Err(ExportError::AlreadyPaused);
            }
            paused.exports.push(export);
        }
        self.review_exports();
        Ok(paused)
    }

    /// Begins to pause export `id` for a simulation, which runs its threads itself until the export is paused.
    #[cfg(feature = "sim")]
    pub(crate) fn begin_pause_of(
        self: &Arc<Self>,
        id: ExportId,
    ) -> Result<PausedExport, ExportError> {
        self.begin_pause(vec![self.registered(id)?]).map(PausedExport)
    }

    /// Serves what has waited for `export`.
    fn end_pause(&self, export: &Arc<RegisteredExport>) {
        let Waiting { connections, listeners } = export.end_pause();
        self.review_exports();
        self.listen(listeners);
        for connection in connections {
            self.serve_client(export, connection);
        }
    }

    /// Serves `export` again: what has waited, and devices.
    fn resume(self: &Arc<Self>, export: &Arc<RegisteredExport>) {
        self.end_pause(export);
        let devices = export.devices();
        if !devices.is_empty() {
            let server = self.for_devices_of(export);
            devices.into_iter().for_each(|device| device.resume(&server));
        }
        self.tell_size(export, export.export().disk().size());
    }

    /// Serves the connection of another process, whose client has chosen `export`. It is closed if
    /// there are too many.
    pub(crate) fn restore(self: &Arc<Self>, export: ExportId, state: ConnectionState) {
        match (self.limit.take(), self.registry.get(export)) {
            (Some(permit), Some(registered)) => {
                self.serve_client(
                    &registered,
                    state.into_handoff(export, permit, &registered.bitmaps),
                );
            }
            (Some(_), None) => {}
            (None, _) => {
                let message =
                    format_args!("a connection was closed that was handed over: too many are open");
                refusal_log::note(Refusal::Connections, message);
            }
        }
    }
}

/// The time that is left until `deadline`.
fn time_until(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

impl PausedServer {
    /// Waits until nothing of its exports, which leave what they have, is in flight any more. All were
    /// told before the first one is waited for.
    fn wait(&self, deadline: Instant) -> bool {
        let devices: Vec<_> = self.exports.iter().flat_map(|export| export.devices()).collect();
        devices.iter().for_each(|device| device.begin_pause(&|| self.shared.wake_threads()));
        // Each is waited for, also after one that does not end: it may be resumed only then.
        let ended = devices.iter().filter(|device| device.wait_paused(deadline)).count();
        ended == devices.len()
            && self.exports.iter().all(|export| export.wait_unused(time_until(deadline)))
            && devices.iter().all(|device| device.give_back(deadline))
    }

    /// The connections that another process can serve, as far as they have chosen an export and are
    /// not encrypted, each with the number of its export.
    ///
    /// # Errors
    /// [`ExportError::System`]: there is no descriptor for a copy of each socket.
    pub fn connections(&self) -> Result<Vec<(ExportId, ConnectionState)>, ExportError> {
        let failed =
            |error: std::io::Error| ExportError::System(Error::from_io(&error, Operation::SetUp));
        let mut all = Vec::new();
        for export in &self.exports {
            let states = export.with_waiting(|waiting| {
                let states = waiting.connections.iter().filter_map(ConnectionState::of);
                states.map(|state| Ok((export.id, state.map_err(failed)?))).collect()
            });
            all.extend(states.transpose()?.unwrap_or_else(Vec::new));
        }
        Ok(all)
    }

    /// The devices of virtual machines, each with the number of its export. Waits at most `timeout` for messages that
    /// are being handled, and half a second for those that have come in part: then their connections are closed.
    ///
    /// # Errors
    /// [`ExportError::DoesNotEnd`]: one was not handled. [`ExportError::System`]: there are no descriptors
    /// for copies.
    pub fn devices(&self, timeout: Duration) -> Result<Vec<(ExportId, PausedDevice)>, ExportError> {
        let now = Instant::now();
        let (soon, deadline) = (now + timeout.min(PARTIAL_MESSAGE_TIMEOUT), now + timeout);
        let mut all = Vec::new();
        for export in &self.exports {
            for device in export.devices() {
                all.extend(device.freeze(soon, deadline)?.map(|frozen| (export.id, frozen)));
            }
        }
        Ok(all)
    }

    /// All connections of NBD, those included that another process cannot serve.
    #[must_use]
    pub fn connection_count(&self) -> usize {
        let count = |export: &Arc<RegisteredExport>| {
            export.with_waiting(|waiting| waiting.connections.len()).unwrap_or_default()
        };
        self.exports.iter().map(count).sum()
    }

    /// Another process is told to serve next: until [`PausedServer::release`], or until this is dropped, a signal, the end
    /// of the last connection or the like does not stop the server.
    ///
    /// # Errors
    /// [`ExportError::Stopping`].
    pub fn begin_handing_over(&mut self) -> Result<(), ExportError> {
        self.hands_over = self.shared.begin_handing_over();
        match self.hands_over {
            true => Ok(()),
            false => Err(ExportError::Stopping),
        }
    }

    /// Another process serves from now on: this one never does again, and leaves socket files where
    /// they are. [`crate::Server::run`] returns.
    pub fn release(mut self) {
        // First: the last connection is closed here.
        self.shared.end_handing_over(true);
        self.hands_over = false;
        for export in std::mem::take(&mut self.exports) {
            export.devices().iter().for_each(|device| device.release());
            if let Some(Waiting { connections, listeners }) = export.with_waiting(std::mem::take) {
                drop(connections);
                listeners.into_iter().for_each(Listener::abandon);
            }
        }
        self.shared.send(ThreadEvent::HandedOver);
    }
}

impl PausedExport {
    /// Whether nothing of the export is in flight any more.
    #[cfg(feature = "sim")]
    pub(crate) fn has_begun(&self) -> bool {
        self.0.wait(Instant::now())
    }

    /// Serves `export` instead, as soon as this is dropped: to the same clients, by the same name, with
    /// the same limits and counts. Changes are refused if they were. Its vhost-user sockets are those
    /// that there are.
    ///
    /// # Errors
    /// [`ExportError::OtherName`].
    pub fn replace(&self, export: AnyExport) -> Result<(), ExportError> {
        let AnyExport { export, .. } = export;
        match self.0.exports.first() {
            Some(paused) if paused.export().name() == export.name() => {
                paused.replace(export);
                Ok(())
            }
            _ => Err(ExportError::OtherName),
        }
    }

    /// It cannot be served any more: its clients are disconnected, and [`crate::Server::run`] fails.
    pub fn give_up(mut self) {
        for export in std::mem::take(&mut self.0.exports) {
            drop(export.with_waiting(std::mem::take));
        }
        self.0.shared.send(ThreadEvent::ThreadFailed);
    }
}

impl Drop for PausedServer {
    fn drop(&mut self) {
        if self.hands_over {
            self.shared.end_handing_over(false);
        }
        for export in std::mem::take(&mut self.exports) {
            let shared = self.shared.clone();
            let devices = export.devices();
            let leaves_first = devices.iter().any(|device| device.leaves_before_resuming());
            if !leaves_first || export.wait_unused(Duration::ZERO) {
                shared.resume(&export);
                continue;
            }
            // Its queues have to leave before they can begin again.
            let resume = move || {
                while !export.wait_unused(STOP_INTERVAL) && !shared.is_stopping() {}
                let deadline = Instant::now() + RESUME_TIMEOUT;
                devices.iter().for_each(|device| _ = device.give_back(deadline));
                shared.resume(&export);
            };
            if let Err(error) = std::thread::Builder::new().spawn(resume) {
                tracing::error!("an export is not served any more: {error}");
            }
        }
    }
}
