//! Counts of what became of the connection to an NBD server.
//!
//! Invariant: only the storage's own thread counts; every thread may read.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::open_list::OpenList;

static OPEN: OpenList<LinkCounters> = OpenList::new();

/// The counts of all exports of NBD servers that this process has open, by their URIs.
#[must_use]
pub fn open_links() -> Vec<(String, LinkCounts)> {
    OPEN.all().into_iter().map(|(uri, counters)| (uri, *counters.lock())).collect()
}

nowait::counts! {
    /// The counts of one storage, since it was opened.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    pub struct LinkCounts {
        /// Whether there is a connection.
        pub connected: bool => Gauge "nowait_nbd_server_connected",
        /// Connections that were made in place of one that was lost.
        pub reconnects: u64 => Counter "nowait_nbd_server_reconnects",
        /// Requests that were asked again because a connection was lost.
        pub asked_again: u64 => Counter "nowait_nbd_server_requests_again",
        /// Bytes that were written and are covered by no flush: they are kept, to be written again.
        pub unflushed_bytes: u64 => Gauge "nowait_nbd_server_unflushed" "bytes",
    }
}

/// The counters of one storage.
#[derive(Debug, Default)]
pub(super) struct LinkCounters(Mutex<LinkCounts>);

impl LinkCounters {
    /// Counters of the storage at `uri`, which is connected.
    pub(super) fn listed(uri: String) -> Arc<Self> {
        let counters = OPEN.add(uri);
        counters.lock().connected = true;
        counters
    }

    /// The connection was lost, and `again` requests will be asked again.
    pub(super) fn lost(&self, again: usize) {
        let mut counts = self.lock();
        counts.connected = false;
        counts.asked_again += again as u64;
    }

    /// There is a connection again.
    pub(super) fn reconnected(&self) {
        let mut counts = self.lock();
        counts.connected = true;
        counts.reconnects += 1;
    }

    /// So many bytes were written and are covered by no flush.
    pub(super) fn unflushed(&self, bytes: u64) {
        self.lock().unflushed_bytes = bytes;
    }

    fn lock(&self) -> MutexGuard<'_, LinkCounts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
