//! The locked memory that the rings of this process register.
//!
//! Invariant: all rings together never register more than this process's part of `RLIMIT_MEMLOCK`.
//! All processes of a user share the limit, and a ring itself counts against it: a process that
//! registered most of it would leave the next one without a ring.

use rustix::process::{Resource, getrlimit};
use rustix::thread::CapabilitySet;

use crate::memory::bounded_counter::BoundedCounter;

/// A process may register the limit divided by this.
const SHARE: u64 = 8;
/// The same for a process with `CAP_IPC_LOCK`, to which the kernel applies no limit.
const SHARE_WITHOUT_LIMIT: u64 = 2;
/// Bytes that the rings of this process have registered.
static REGISTERED: BoundedCounter = BoundedCounter::new();

/// Whether `bytes` more may be registered; if so, counts them until [`give_back`].
pub(crate) fn take(bytes: usize) -> bool {
    let part = if has_no_limit() { SHARE_WITHOUT_LIMIT } else { SHARE };
    let limit = getrlimit(Resource::Memlock).current;
    let limit = limit.map_or(usize::MAX, |limit| (limit / part) as usize);
    REGISTERED.take(bytes, limit)
}

/// Subtracts `bytes` that [`take`] counted.
pub(crate) fn give_back(bytes: usize) {
    REGISTERED.give_back(bytes);
}

fn has_no_limit() -> bool {
    let sets = rustix::thread::capabilities(None);
    sets.is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK))
}
