//! The locked memory that the rings of this process register.
//!
//! Invariant: all rings together never register more than this process's part of `RLIMIT_MEMLOCK`,
//! unless the kernel does not count it. All processes of a user share the limit, and a ring itself
//! counts against it: a process that registered most of it would leave the next one without a ring.

use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::process::{Resource, getrlimit};
use rustix::thread::CapabilitySet;

use crate::memory::bounded_counter::BoundedCounter;

/// A process may register the limit divided by this.
const SHARE: u64 = 8;
/// The inode of the initial user namespace (`PROC_USER_INIT_INO` in the kernel's proc_ns.h).
const INITIAL_USER_NAMESPACE: u64 = 0xEFFF_FFFD;
/// Bytes that the rings of this process have registered.
static REGISTERED: BoundedCounter = BoundedCounter::new();
/// The most bytes that were registered together.
static MOST: AtomicUsize = AtomicUsize::new(0);

/// The memory that the rings of this process register as buffers, so that transfers cost less.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegisteredMemory {
    /// Bytes that are registered now.
    pub bytes: usize,
    /// The most bytes that were registered together.
    pub most_bytes: usize,
    /// The greatest number of bytes that may be registered: an eighth of `RLIMIT_MEMLOCK`. `None`
    /// where the kernel does not apply the limit (`CAP_IPC_LOCK`); then all pooled buffers may be.
    pub limit_bytes: Option<usize>,
}

impl RegisteredMemory {
    /// The memory of this process, as of now; the limit is that of the calling thread.
    #[must_use]
    pub fn of_this_process() -> Self {
        let (bytes, most_bytes) = (REGISTERED.used(), MOST.load(Ordering::Relaxed));
        Self { bytes, most_bytes, limit_bytes: limit() }
    }
}

/// The most bytes that rings which this thread makes may register together with all others.
pub(crate) fn limit() -> Option<usize> {
    if is_uncounted() {
        return None;
    }
    let limit = getrlimit(Resource::Memlock).current?;
    usize::try_from(limit / SHARE).ok()
}

/// Whether `bytes` more may be registered; if so, counts them until [`give_back`].
pub(crate) fn take(bytes: usize, limit: Option<usize>) -> bool {
    let taken = REGISTERED.take(bytes, limit.unwrap_or(usize::MAX));
    if taken {
        MOST.fetch_max(REGISTERED.used(), Ordering::Relaxed);
    }
    taken
}

/// Subtracts `bytes` that [`take`] counted.
pub(crate) fn give_back(bytes: usize) {
    REGISTERED.give_back(bytes);
}

/// Whether the kernel does not count what a ring of this thread registers. It asks when the ring is
/// made (`capable(CAP_IPC_LOCK)` in io_uring_create), and a capability counts only in the initial
/// user namespace: root of a container is often an ordinary user outside.
fn is_uncounted() -> bool {
    let sets = rustix::thread::capabilities(None);
    let namespace = || rustix::fs::stat("/proc/self/ns/user");
    sets.is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK))
        && namespace().is_ok_and(|namespace| namespace.st_ino == INITIAL_USER_NAMESPACE)
}
