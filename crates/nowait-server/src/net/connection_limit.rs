//! The connections of a server: how many there may be, and which there are.
//!
//! Invariant: a connection holds one permit from its acceptance until its socket is closed,
//! whichever thread it is on; at most `limit` permits exist at any time.

use std::collections::BTreeMap;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::SystemTime;

use crate::export::ExportId;
use crate::frontend_kind::FrontendKind;
use crate::locking::lock;
use crate::rate_limit::ClientBuckets;

/// The permits of a server.
pub(crate) struct ConnectionLimit {
    limit: u32,
    taken: AtomicU32,
    /// A client has chosen an export, now or before.
    had_client: AtomicBool,
    /// Called when no connection is left after that.
    on_empty: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// The connections by their ids.
    connections: Mutex<BTreeMap<u64, Described>>,
    next_id: AtomicU64,
    /// Ids of connections that their threads are asked to close.
    to_close: Mutex<Vec<u64>>,
    /// How many times a thread was asked.
    close_count: AtomicU64,
}

/// A connection that is listed.
struct Described {
    status: ConnectionStatus,
    /// The socket of one whose thread is in a call that ends when the socket is shut down; the threads
    /// of the others are asked.
    socket: Option<UnixStream>,
}

/// A connection of a client, from its acceptance on.
#[derive(Clone, Debug)]
pub struct ConnectionStatus {
    /// Its number; never used again by this server.
    pub id: u64,
    /// How its client speaks.
    pub frontend: FrontendKind,
    /// The client: a TCP address, or the user and the process at the other end of a Unix socket.
    pub peer: String,
    /// The export that the client has chosen; `None` during the handshake.
    pub export: Option<ExportId>,
    /// Whether it is encrypted.
    pub tls: bool,
    /// When it was accepted.
    pub since: SystemTime,
}

/// The permit of one connection; dropping it frees the permit.
pub(crate) struct ConnectionPermit {
    limit: Arc<ConnectionLimit>,
    id: u64,
    /// The limits of the client, on whichever thread it is.
    pub(crate) client: Arc<ClientBuckets>,
}

impl ConnectionLimit {
    pub(crate) fn new(limit: u32) -> Self {
        Self {
            limit,
            taken: AtomicU32::new(0),
            had_client: AtomicBool::new(false),
            on_empty: OnceLock::new(),
            connections: Mutex::default(),
            next_id: AtomicU64::new(1),
            to_close: Mutex::default(),
            close_count: AtomicU64::new(0),
        }
    }

    pub(crate) fn limit(&self) -> u32 {
        self.limit
    }

    /// Permits in use.
    #[inline]
    pub(crate) fn taken(&self) -> u32 {
        self.taken.load(Ordering::Acquire)
    }

    /// Takes a permit, if one is free.
    pub(crate) fn take(self: &Arc<Self>) -> Option<ConnectionPermit> {
        let next = |taken| (taken < self.limit).then_some(taken + 1);
        let taken = self.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
        taken.ok()?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        Some(ConnectionPermit { limit: self.clone(), id, client: Arc::default() })
    }

    /// The connections that are described, in the order of their acceptance.
    pub(crate) fn connections(&self) -> Vec<ConnectionStatus> {
        lock(&self.connections).values().map(|one| one.status.clone()).collect()
    }

    /// Shuts connection `id` down, or asks its thread to close it: the threads have to be woken up.
    /// Returns whether there is such a connection.
    pub(crate) fn request_close(&self, id: u64) -> bool {
        let connections = lock(&self.connections);
        let Some(described) = connections.get(&id) else { return false };
        if let Some(socket) = &described.socket {
            tracing::info!("{} is disconnected on request", described.status.peer);
            // The client may have gone already.
            let _ = socket.shutdown(Shutdown::Both);
            return true;
        }
        drop(connections);
        lock(&self.to_close).push(id);
        self.close_count.fetch_add(1, Ordering::Release);
        true
    }

    /// How many times [`ConnectionLimit::request_close`] was called: a thread that has seen the
    /// number looks for its connections only when it has changed.
    pub(crate) fn close_count(&self) -> u64 {
        self.close_count.load(Ordering::Acquire)
    }
}

impl ConnectionLimit {
    /// Calls `act` each time the last connection is closed, provided a client has ever chosen an
    /// export; immediately, if that has happened already. Only the first callback is kept.
    pub(crate) fn on_empty(&self, act: impl Fn() + Send + Sync + 'static) {
        let _ = self.on_empty.set(Box::new(act));
        if self.taken.load(Ordering::Acquire) == 0 {
            self.notify_empty();
        }
    }

    fn notify_empty(&self) {
        if self.had_client.load(Ordering::Acquire)
            && let Some(act) = self.on_empty.get()
        {
            act();
        }
    }
}

impl ConnectionPermit {
    /// The number of the connection.
    #[cfg(feature = "sim")]
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Lists the connection among those of the server. Its thread closes it on request.
    pub(crate) fn describe(&self, frontend: FrontendKind, peer: String) {
        self.list(frontend, peer, None);
    }

    /// A place for a connection whose thread is in a call that ends when `socket` is shut down.
    pub(crate) fn describe_socket(&self, frontend: FrontendKind, peer: String, socket: UnixStream) {
        self.list(frontend, peer, Some(socket));
    }

    fn list(&self, frontend: FrontendKind, peer: String, socket: Option<UnixStream>) {
        let (id, since) = (self.id, SystemTime::now());
        let status = ConnectionStatus { id, frontend, peer, export: None, tls: false, since };
        lock(&self.limit.connections).insert(id, Described { status, socket });
    }

    /// Notes that the client has chosen an export, so it did more than list them.
    pub(crate) fn mark_transmission(&self, export: ExportId, tls: bool) {
        self.limit.had_client.store(true, Ordering::Release);
        if let Some(described) = lock(&self.limit.connections).get_mut(&self.id) {
            (described.status.export, described.status.tls) = (Some(export), tls);
        }
    }

    /// Whether the connection has to be closed. It is asked once for each request.
    pub(crate) fn takes_close_request(&self) -> bool {
        let mut to_close = lock(&self.limit.to_close);
        let before = to_close.len();
        to_close.retain(|id| *id != self.id);
        to_close.len() < before
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        lock(&self.limit.connections).remove(&self.id);
        self.takes_close_request();
        if self.limit.taken.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.limit.notify_empty();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn there_are_limit_permits_and_a_dropped_one_is_free_again() {
        let limit = Arc::new(ConnectionLimit::new(2));
        let first = limit.take().unwrap();
        let _second = limit.take().unwrap();
        assert!(limit.take().is_none());
        drop(first);
        assert!(limit.take().is_some_and(|_third| limit.take().is_none()));
    }

    #[test]
    fn the_last_disconnect_is_reported_if_a_client_has_chosen_an_export() {
        let limit = Arc::new(ConnectionLimit::new(4));
        let left = Arc::new(AtomicU32::new(0));
        let count = left.clone();
        limit.on_empty(move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        let counted = || left.load(Ordering::Relaxed);
        drop(limit.take().unwrap());
        assert_eq!(counted(), 0, "it has chosen no export");
        let (first, second) = (limit.take().unwrap(), limit.take().unwrap());
        first.mark_transmission(ExportId(0), false);
        drop(first);
        assert_eq!(counted(), 0, "another is there");
        drop(second);
        assert_eq!(counted(), 1);
    }

    #[test]
    fn a_disconnect_before_the_callback_was_set_is_reported_too() {
        let limit = Arc::new(ConnectionLimit::new(1));
        limit.take().unwrap().mark_transmission(ExportId(0), false);
        let left = Arc::new(AtomicU32::new(0));
        let count = left.clone();
        limit.on_empty(move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(left.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_connection_is_listed_from_its_description_to_its_end() {
        let limit = Arc::new(ConnectionLimit::new(2));
        let (first, second) = (limit.take().unwrap(), limit.take().unwrap());
        let (socket, mut machine) = UnixStream::pair().unwrap();
        first.describe_socket(FrontendKind::VhostUser, "one".into(), socket);
        second.describe(FrontendKind::Nbd, "two".into());
        second.mark_transmission(ExportId(7), true);
        let all = limit.connections();
        let seen: Vec<_> =
            all.iter().map(|status| (&*status.peer, status.export, status.tls)).collect();
        assert_eq!(seen, [("one", None, false), ("two", Some(ExportId(7)), true)]);
        assert!(limit.request_close(all[0].id) && limit.close_count() == 0, "a thread is asked");
        assert_eq!(machine.read(&mut [0; 1]).unwrap(), 0, "it is not shut down");
        drop(first);
        assert_eq!(limit.connections().len(), 1);
        assert!(!limit.request_close(all[0].id) && limit.request_close(all[1].id));
        assert!(second.takes_close_request() && !second.takes_close_request());
    }
}
