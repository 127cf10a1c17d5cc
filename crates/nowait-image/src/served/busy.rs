//! Which clusters are being allocated, so that each is allocated once.
//!
//! Invariant: no two ranges that are held share a cluster; who holds one takes no other.
//! Knows: wait. Known by: write.

use std::ops::Range;
use std::sync::{Condvar, Mutex};

use super::wait::{lock, wait};

/// The ranges of clusters that are held.
#[derive(Default)]
pub(crate) struct Busy {
    held: Mutex<Held>,
    freed: Condvar,
}

#[derive(Default)]
struct Held {
    ranges: Vec<Range<u64>>,
    /// How many wait for one of them: if nobody does, nobody is woken, which costs a system call.
    waiting: u32,
}

/// A range of clusters that is held until this is dropped.
pub(crate) struct Hold<'a> {
    busy: &'a Busy,
    clusters: Range<u64>,
}

impl Busy {
    /// Waits until nobody holds any of `clusters`, and holds them.
    pub(crate) fn hold(&self, clusters: Range<u64>) -> Hold<'_> {
        let meets = |other: &Range<u64>| other.start < clusters.end && clusters.start < other.end;
        let mut held = lock(&self.held);
        held.waiting += 1;
        while held.ranges.iter().any(meets) {
            held = wait(&self.held, &self.freed, held);
        }
        held.waiting -= 1;
        held.ranges.push(clusters.clone());
        Hold { busy: self, clusters }
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        let mut held = lock(&self.busy.held);
        if let Some(at) = held.ranges.iter().position(|other| *other == self.clusters) {
            held.ranges.swap_remove(at);
        }
        if held.waiting > 0 {
            self.busy.freed.notify_all();
        }
    }
}
