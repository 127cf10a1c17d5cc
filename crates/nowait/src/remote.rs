//! The way home: slots that another thread has ended.
//!
//! Invariant: a slot is pushed by at most one thread at a time and taken once; a push costs one
//! atomic exchange and, when the list was empty, one write to the wake-up descriptor.
//! Knows: error, io. Known by: crew's users (worker jobs, queue/threads), engine.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

use rustix::event::{EventfdFlags, eventfd};

use crate::error::{Doing, Error};

const EMPTY: u32 = u32::MAX;

/// A list of ended slots, with what each came to.
pub(crate) struct Remote {
    head: AtomicU32,
    next: Box<[AtomicU32]>,
    outcome: Box<[AtomicI64]>,
    wake: OwnedFd,
}

impl Remote {
    /// For slots 0 to `slots` - 1.
    pub(crate) fn new(slots: u32) -> Result<Self, Error> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::from_os(e, Doing::SetUp))?;
        Ok(Self {
            head: AtomicU32::new(EMPTY),
            next: (0..slots).map(|_| AtomicU32::new(EMPTY)).collect(),
            outcome: (0..slots).map(|_| AtomicI64::new(0)).collect(),
            wake,
        })
    }

    /// Hands `slot` home. The caller gives up every access to what the slot holds.
    pub(crate) fn push(&self, slot: u32, outcome: i64) {
        self.outcome[slot as usize].store(outcome, Ordering::Relaxed);
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            self.next[slot as usize].store(head, Ordering::Relaxed);
            match self.head.compare_exchange_weak(head, slot, Ordering::Release, Ordering::Relaxed)
            {
                Ok(_) => break,
                Err(now) => head = now,
            }
        }
        if head == EMPTY {
            self.wake();
        }
    }

    /// Makes the descriptor readable.
    pub(crate) fn wake(&self) {
        // A full counter (EAGAIN) is readable already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Whether there is something to take.
    #[inline]
    pub(crate) fn has_some(&self) -> bool {
        self.head.load(Ordering::Relaxed) != EMPTY
    }

    /// Takes the whole list at once and gives each slot to `sink`.
    pub(crate) fn take(&self, mut sink: impl FnMut(u32, i64)) -> usize {
        if self.head.load(Ordering::Relaxed) == EMPTY {
            return 0;
        }
        let mut slot = self.head.swap(EMPTY, Ordering::Acquire);
        let mut taken = 0;
        while slot != EMPTY {
            let next = self.next[slot as usize].load(Ordering::Relaxed);
            sink(slot, self.outcome[slot as usize].load(Ordering::Relaxed));
            slot = next;
            taken += 1;
        }
        taken
    }

    /// Makes the descriptor unreadable until the next push to an empty list. To be called before
    /// `take`, so that no wake-up is lost.
    pub(crate) fn clear_wake(&self) {
        let mut count = [0u8; 8];
        // EAGAIN: it was not readable.
        let _ = rustix::io::read(&self.wake, &mut count);
    }

    /// Readable after a push to an empty list.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c47_slots_freed_on_other_threads_all_come_home_once() {
        let remote = Remote::new(400).unwrap();
        let mut seen = [0u32; 400];
        std::thread::scope(|scope| {
            let remote = &remote;
            for thread in 0..4u32 {
                scope.spawn(move || {
                    for n in 0..100 {
                        let slot = thread * 100 + n;
                        remote.push(slot, i64::from(slot) * 3);
                    }
                });
            }
            let mut home = 0;
            while home < 400 {
                home += remote.take(|slot, outcome| {
                    assert_eq!(outcome, i64::from(slot) * 3);
                    seen[slot as usize] += 1;
                });
            }
        });
        assert!(seen.iter().all(|&times| times == 1));
    }

    #[test]
    fn a_push_to_an_empty_list_makes_the_descriptor_readable() {
        let remote = Remote::new(2).unwrap();
        let readable = || {
            let mut fds = [rustix::event::PollFd::from_borrowed_fd(
                remote.fd(),
                rustix::event::PollFlags::IN,
            )];
            let none = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            rustix::event::poll(&mut fds, Some(&none)).unwrap() == 1
        };
        assert!(!readable());
        remote.push(1, 0);
        assert!(readable());
        remote.clear_wake();
        assert!(!readable());
    }
}
