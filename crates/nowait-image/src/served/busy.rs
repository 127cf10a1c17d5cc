//! Which clusters are being allocated, so that each is allocated once.
//!
//! Invariant: no two ranges that are held share a cluster; who holds one takes no other.
//! Knows: nothing. Known by: write.

use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The ranges of clusters that are held.
#[derive(Default)]
pub(crate) struct Busy {
    held: Mutex<Vec<Range<u64>>>,
    freed: Condvar,
}

/// A range of clusters that is held until this is dropped.
pub(crate) struct Hold<'a> {
    busy: &'a Busy,
    clusters: Range<u64>,
}

impl Busy {
    fn lock(&self) -> MutexGuard<'_, Vec<Range<u64>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until nobody holds any of `clusters`, and holds them.
    pub(crate) fn hold(&self, clusters: Range<u64>) -> Hold<'_> {
        let shares = |held: &mut Vec<Range<u64>>| {
            held.iter().any(|other| other.start < clusters.end && clusters.start < other.end)
        };
        let mut held =
            self.freed.wait_while(self.lock(), shares).unwrap_or_else(PoisonError::into_inner);
        held.push(clusters.clone());
        Hold { busy: self, clusters }
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        let mut held = self.busy.lock();
        if let Some(at) = held.iter().position(|other| *other == self.clusters) {
            held.swap_remove(at);
        }
        drop(held);
        self.busy.freed.notify_all();
    }
}
