//! The locked memory that the rings of this process register.
//!
//! Invariant: all rings together never register more than this process's part of `RLIMIT_MEMLOCK`.
//! All processes of a user share the limit, and a ring itself counts against it: a process that
//! registered most of it would leave the next one without a ring.

use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::process::{Resource, getrlimit};
use rustix::thread::CapabilitySet;

/// A process may register the limit divided by this.
const SHARE: u64 = 8;
/// The same for a process with `CAP_IPC_LOCK`, to which the kernel applies no limit.
const SHARE_WITHOUT_LIMIT: u64 = 2;
/// Bytes that the rings of this process have registered.
static REGISTERED: AtomicUsize = AtomicUsize::new(0);

/// Whether `bytes` more may be registered; if so, counts them until [`give_back`].
pub(crate) fn take(bytes: usize) -> bool {
    let part = if has_no_limit() { SHARE_WITHOUT_LIMIT } else { SHARE };
    let limit = getrlimit(Resource::Memlock).current;
    let limit = limit.map_or(usize::MAX, |limit| (limit / part) as usize);
    take_of(&REGISTERED, bytes, limit)
}

/// Subtracts `bytes` that [`take`] counted.
pub(crate) fn give_back(bytes: usize) {
    REGISTERED.fetch_sub(bytes, Ordering::Relaxed);
}

fn has_no_limit() -> bool {
    let sets = rustix::thread::capabilities(None);
    sets.is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK))
}

fn take_of(counter: &AtomicUsize, bytes: usize, limit: usize) -> bool {
    let more = |now: usize| now.checked_add(bytes).filter(|&then| then <= limit);
    counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_holds_and_refused_bytes_are_not_counted() {
        let counter = AtomicUsize::new(0);
        assert!(take_of(&counter, 3, 8) && take_of(&counter, 5, 8));
        assert!(!take_of(&counter, 1, 8) && !take_of(&counter, usize::MAX, usize::MAX));
        assert_eq!(counter.into_inner(), 8);
    }
}
