//! What became of the connection to an NBD server.
//!
//! Invariant: only the storage's own thread counts; every thread may read.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::open_list::OpenList;

static OPEN: OpenList<LinkCounters> = OpenList::new();

/// The counts of all exports of NBD servers that this process has open, by their URIs.
#[must_use]
pub fn open_links() -> Vec<(String, LinkCounts)> {
    OPEN.all().into_iter().map(|(uri, counters)| (uri, counters.counts())).collect()
}

/// The counters of one storage.
#[derive(Debug, Default)]
pub(super) struct LinkCounters {
    connected: AtomicBool,
    reconnects: AtomicU64,
    asked_again: AtomicU64,
    unflushed_bytes: AtomicU64,
}

impl LinkCounters {
    /// Those of the storage at `uri`, which is connected.
    pub(super) fn listed(uri: String) -> Arc<Self> {
        let counters = OPEN.add(uri);
        counters.connected.store(true, Ordering::Relaxed);
        counters
    }

    /// The connection was lost, and `again` requests will be asked again.
    pub(super) fn lost(&self, again: usize) {
        self.connected.store(false, Ordering::Relaxed);
        self.asked_again.fetch_add(again as u64, Ordering::Relaxed);
    }

    /// There is a connection again.
    pub(super) fn reconnected(&self) {
        self.connected.store(true, Ordering::Relaxed);
        self.reconnects.fetch_add(1, Ordering::Relaxed);
    }

    /// So many bytes were written and are covered by no flush.
    pub(super) fn unflushed(&self, bytes: u64) {
        self.unflushed_bytes.store(bytes, Ordering::Relaxed);
    }

    fn counts(&self) -> LinkCounts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        LinkCounts {
            connected: self.connected.load(Ordering::Relaxed),
            reconnects: get(&self.reconnects),
            asked_again: get(&self.asked_again),
            unflushed_bytes: get(&self.unflushed_bytes),
        }
    }
}

/// The counts of one storage, since it was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkCounts {
    /// Whether there is a connection now.
    pub connected: bool,
    /// Connections that were made in place of one that was lost.
    pub reconnects: u64,
    /// Requests that were asked again because a connection was lost.
    pub asked_again: u64,
    /// Bytes in the replay log: written, and covered by no flush.
    pub unflushed_bytes: u64,
}
