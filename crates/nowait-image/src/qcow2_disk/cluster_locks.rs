//! Range locks on the clusters that are being allocated, so that each is allocated once.
//!
//! Invariant: no two held ranges share a cluster. A thread that holds one range takes no other.

use std::ops::Range;
use std::sync::{Condvar, Mutex};

use crate::qcow2_disk::yielding_lock::{lock, wait};

/// The ranges of clusters that are held.
#[derive(Default)]
pub(crate) struct ClusterLocks {
    held: Mutex<LockedClusters>,
    released: Condvar,
}

#[derive(Default)]
struct LockedClusters {
    ranges: Vec<Range<u64>>,
    /// Threads that wait for a range. Without any, a release wakes no thread, which would cost a
    /// system call.
    waiting: u32,
}

/// Holds a range of clusters until it is dropped.
pub(crate) struct ClusterGuard<'a> {
    locks: &'a ClusterLocks,
    clusters: Range<u64>,
}

impl ClusterLocks {
    /// Waits until none of `clusters` is held, and holds them.
    pub(crate) fn lock(&self, clusters: Range<u64>) -> ClusterGuard<'_> {
        let meets = |other: &Range<u64>| other.start < clusters.end && clusters.start < other.end;
        let mut held = lock(&self.held);
        held.waiting += 1;
        while held.ranges.iter().any(meets) {
            held = wait(&self.held, &self.released, held);
        }
        held.waiting -= 1;
        held.ranges.push(clusters.clone());
        ClusterGuard { locks: self, clusters }
    }
}

impl Drop for ClusterGuard<'_> {
    fn drop(&mut self) {
        let mut held = lock(&self.locks.held);
        if let Some(at) = held.ranges.iter().position(|other| *other == self.clusters) {
            held.ranges.swap_remove(at);
        }
        if held.waiting > 0 {
            self.locks.released.notify_all();
        }
    }
}
