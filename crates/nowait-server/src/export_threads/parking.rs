//! Exports are not served for a while: their threads end, and what they had waits for others, of this
//! process or of another one.
//!
//! Invariant: no request of an export is in flight while it is parked, and no connection is lost:
//! either other threads serve it, or it was handed over.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use nowait::{Error, Operation};

use crate::export::ExportId;
use crate::export_threads::any_export::AnyExport;
use crate::export_threads::export_registry::{Destination, Parking, RegisteredExport, Registry};
use crate::export_threads::{Shared, ThreadEvent};
use crate::nbd::connection_state::ConnectionState;
use crate::net::listener::Listener;
use crate::refusal_log::{self, Refusal};
use crate::ublk::ublk_device::UblkDevice;
use crate::vhost_user::control_thread::{ParkedDevice, suspend_all};

/// How long the driver of a block device may take to notice that it was given back.
const RESUME_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a message of a VMM may be on its way in a pause. VMMs send each by one call.
const PARTIAL_MESSAGE_TIMEOUT: Duration = Duration::from_millis(500);
/// How often a wait for requests in flight looks whether the server is stopping.
const STOP_INTERVAL: Duration = Duration::from_millis(100);

/// A server that has stopped serving, all of its exports or one. It goes on when this is dropped.
pub struct ParkedServer {
    shared: Arc<Shared>,
    exports: Vec<Arc<RegisteredExport>>,
    /// Nothing stops the server meanwhile.
    hands_over: bool,
}

/// An export that is not served. It is again when this is dropped.
pub struct ParkedExport(ParkedServer);

impl Shared {
    /// As [`crate::Exports::park`].
    pub(crate) fn park(self: &Arc<Self>, timeout: Duration) -> Result<ParkedServer, Error> {
        self.park_all(self.registry.all(), timeout)
    }

    /// As [`crate::Exports::park_export`].
    pub(crate) fn park_export(
        self: &Arc<Self>,
        id: ExportId,
        timeout: Duration,
    ) -> Result<ParkedExport, Error> {
        self.park_all(vec![self.registered(id)?], timeout).map(ParkedExport)
    }

    fn park_all(
        self: &Arc<Self>,
        exports: Vec<Arc<RegisteredExport>>,
        timeout: Duration,
    ) -> Result<ParkedServer, Error> {
        let failed = |errno| Err(Error::new(errno, Operation::Wait));
        let deadline = Instant::now() + timeout;
        let mut parked =
            ParkedServer { shared: self.clone(), exports: Vec::new(), hands_over: false };
        if self.is_stopping() {
            return failed(libc::ECANCELED);
        }
        for export in exports {
            if self.ublk_of(&export).is_some_and(|device| !device.can_pause()) {
                return failed(libc::EOPNOTSUPP);
            }
            if !export.begin_parking() {
                return failed(libc::EALREADY);
            }
            parked.exports.push(export);
        }
        match self.wait_parked(&parked.exports, deadline) {
            true => Ok(parked),
            false => failed(libc::ETIMEDOUT),
        }
    }

    /// Waits until nothing of `exports`, which leave what they have, is in flight any more. All were
    /// asked before the first one is waited for.
    fn wait_parked(&self, exports: &[Arc<RegisteredExport>], deadline: Instant) -> bool {
        let with_node = || exports.iter().filter_map(|it| Some((it, self.ublk_of(it)?)));
        with_node().for_each(|(export, device)| device.pause(|| self.wake_parking(export)));
        let controls: Vec<_> = exports.iter().flat_map(|export| export.controls()).collect();
        let left = || deadline.saturating_duration_since(Instant::now());
        suspend_all(&controls, deadline)
            && exports.iter().all(|export| export.wait_ended(left()))
            && with_node().all(|(_, device)| device.give_back(deadline))
    }

    /// The block device of this machine that `export` is.
    fn ublk_of(&self, export: &RegisteredExport) -> Option<&Arc<UblkDevice>> {
        let device = self.options.ublk.as_ref().filter(|device| !device.is_lost());
        device.filter(|_| export.id == Registry::DEFAULT)
    }

    /// Wakes the threads of `export`, which have not ended.
    fn wake_parking(&self, export: &RegisteredExport) {
        export.with_parking(|parking| parking.wake());
    }

    /// Serves `export` again: what other threads have left, and devices.
    fn unpark(self: &Arc<Self>, export: &Arc<RegisteredExport>) {
        // First, so that each queue has the thread of its number.
        if let Some(device) = self.ublk_of(export)
            && let Err(error) = self.serve_again(export, device)
        {
            device.lose(&error);
        }
        let Parking { connections, listeners, .. } = export.end_parking();
        self.listen(listeners);
        for connection in connections {
            self.bring_back(export, connection);
        }
        export.resume_devices();
        self.tell_size(export, export.export().size());
    }

    /// Serves a device again that was given back to its driver.
    fn serve_again(
        self: &Arc<Self>,
        export: &Arc<RegisteredExport>,
        device: &UblkDevice,
    ) -> Result<(), String> {
        let failed = |error: Error| error.to_string();
        device.begin_again();
        let (ready, begun) = channel();
        for queue in 0..device.queues() {
            let ready = Some(ready.clone());
            let spawn = |queue| self.spawn(export, queue, Vec::new(), ready);
            export.add_thread(queue, spawn).map_err(failed)?;
        }
        drop(ready);
        begun.iter().collect::<Result<(), _>>().map_err(failed)?;
        device.start().map_err(|error| error.to_string())
    }

    /// Has threads of the default export accept the connections of `listeners`.
    pub(crate) fn listen(self: &Arc<Self>, listeners: Vec<Listener>) {
        let Some(export) = self.registry.default_export() else { return };
        if listeners.is_empty() {
            return;
        }
        self.listens.store(true, Ordering::Relaxed);
        self.assign_to(&export, |destination| match destination {
            Destination::Thread(thread) => thread.connections.give_listeners(listeners),
            Destination::Parking(parking) => parking.listeners.extend(listeners),
        });
    }

    /// Serves the connection of another process, whose client has chosen `export`. It is closed if
    /// there are too many.
    pub(crate) fn adopt(self: &Arc<Self>, export: ExportId, state: ConnectionState) {
        match (self.limit.take(), self.registry.get(export)) {
            (Some(permit), Some(registered)) => {
                self.bring_back(&registered, state.into_handoff(export, permit));
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

impl ParkedServer {
    /// The connections that another process can serve, as far as they have chosen an export and are
    /// not encrypted, each with the number of its export.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`: there is no descriptor for a copy of each socket.
    pub fn connections(&self) -> Result<Vec<(ExportId, ConnectionState)>, Error> {
        let failed = |error: std::io::Error| Error::from_io(&error, Operation::SetUp);
        let mut all = Vec::new();
        for export in &self.exports {
            let states = export.with_parking(|parking| {
                let states = parking.connections.iter().filter_map(ConnectionState::of);
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
    /// `ETIMEDOUT`: one was not handled. `EMFILE`, `ENFILE`: there are no descriptors for copies.
    pub fn devices(&self, timeout: Duration) -> Result<Vec<(ExportId, ParkedDevice)>, Error> {
        let now = Instant::now();
        let (soon, deadline) = (now + timeout.min(PARTIAL_MESSAGE_TIMEOUT), now + timeout);
        let mut all = Vec::new();
        for export in &self.exports {
            let devices = export.freeze_devices(soon, deadline)?;
            all.extend(devices.into_iter().map(|device| (export.id, device)));
        }
        Ok(all)
    }

    /// All connections of NBD, those included that another process cannot serve.
    #[must_use]
    pub fn connection_count(&self) -> usize {
        let count = |export: &Arc<RegisteredExport>| {
            export.with_parking(|parking| parking.connections.len()).unwrap_or_default()
        };
        self.exports.iter().map(count).sum()
    }

    /// Another process is told to serve next: until [`ParkedServer::release`], or until this is dropped, a signal, the end
    /// of the last connection or the like does not stop the server.
    ///
    /// # Errors
    /// `ECANCELED`: it stops already.
    pub fn begin_handing_over(&mut self) -> Result<(), Error> {
        self.hands_over = self.shared.begin_handing_over();
        match self.hands_over {
            true => Ok(()),
            false => Err(Error::new(libc::ECANCELED, Operation::Wait)),
        }
    }

    /// Another process serves from now on: this one never does again, and leaves socket files where
    /// they are. [`crate::Server::run`] returns.
    pub fn release(mut self) {
        // First: the last connection is closed here.
        self.shared.end_handing_over(true);
        self.hands_over = false;
        for export in std::mem::take(&mut self.exports) {
            export.release_devices();
            let left = export.with_parking(|parking| {
                let Parking { connections, listeners, .. } = std::mem::take(parking);
                (connections, listeners)
            });
            if let Some((connections, listeners)) = left {
                drop(connections);
                listeners.into_iter().for_each(Listener::abandon);
            }
        }
        // The receiver is gone if the server has ended meanwhile.
        let _ = self.shared.events.send(ThreadEvent::HandedOver);
    }
}

impl ParkedExport {
    /// Serves `export` instead, as soon as this is dropped: to the same clients, by the same name, with
    /// the same limits and counts. Changes are refused if they were. Its vhost-user sockets are those
    /// that there are.
    ///
    /// # Errors
    /// `EINVAL`: it has another name.
    pub fn replace(&self, export: AnyExport) -> Result<(), Error> {
        let AnyExport { export, .. } = export;
        match self.0.exports.first() {
            Some(parked) if parked.export().name() == export.name() => {
                parked.replace(export);
                Ok(())
            }
            _ => Err(Error::new(libc::EINVAL, Operation::SetUp)),
        }
    }

    /// It cannot be served any more: its clients are disconnected, and [`crate::Server::run`] fails.
    pub fn give_up(mut self) {
        for export in std::mem::take(&mut self.0.exports) {
            let left = export.with_parking(std::mem::take);
            drop(left);
        }
        // The receiver is gone if the server has ended meanwhile.
        let _ = self.0.shared.events.send(ThreadEvent::ThreadFailed);
    }
}

impl Drop for ParkedServer {
    fn drop(&mut self) {
        if self.hands_over {
            self.shared.end_handing_over(false);
        }
        for export in std::mem::take(&mut self.exports) {
            let shared = self.shared.clone();
            if shared.ublk_of(&export).is_none() || export.wait_ended(Duration::ZERO) {
                shared.unpark(&export);
                continue;
            }
            // Its queues have to end before they can begin again.
            let unpark = move || {
                while !export.wait_ended(STOP_INTERVAL) && !shared.is_stopping() {}
                if let Some(device) = shared.ublk_of(&export) {
                    device.give_back(Instant::now() + RESUME_TIMEOUT);
                }
                shared.unpark(&export);
            };
            if let Err(error) = std::thread::Builder::new().spawn(unpark) {
                tracing::error!("an export is not served any more: {error}");
            }
        }
    }
}
