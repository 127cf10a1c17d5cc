//! The completion list, by which slots that other threads have ended return to their owner thread.
//!
//! Invariant: a slot is pushed by at most one thread at a time and taken once; a push costs one
//! atomic exchange and, when the list was empty, one write to the wake-up descriptor.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::pipe::{PipeFlags, pipe_with};

use crate::loom_shim::{AtomicI64, AtomicU32, Ordering};
use crate::sim_hooks::yield_point;
use crate::types::error::{Error, Operation};

const EMPTY: u32 = u32::MAX;

/// A list of ended slots and their results: any thread pushes, one thread takes all.
struct MpscList {
    head: AtomicU32,
    next: Box<[AtomicU32]>,
    outcome: Box<[AtomicI64]>,
}

impl MpscList {
    fn new(slots: u32) -> Self {
        Self {
            head: AtomicU32::new(EMPTY),
            next: (0..slots).map(|_| AtomicU32::new(EMPTY)).collect(),
            outcome: (0..slots).map(|_| AtomicI64::new(0)).collect(),
        }
    }

    /// Pushes a slot; returns whether the list was empty before.
    fn push(&self, slot: u32, outcome: i64) -> bool {
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
        head == EMPTY
    }

    #[inline]
    fn is_not_empty(&self) -> bool {
        self.head.load(Ordering::Relaxed) != EMPTY
    }

    fn take(&self, mut sink: impl FnMut(u32, i64)) -> usize {
        if !self.is_not_empty() {
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
}

/// The list, and a descriptor that wakes its owner thread.
pub(crate) struct CompletionList {
    list: MpscList,
    /// The errno with which the work for a slot ends that has not begun; 0 if it is to be done.
    stops: Box<[AtomicU32]>,
    wake: OwnedFd,
    waker: OwnedFd,
}

impl CompletionList {
    /// For slots 0 to `slots` - 1.
    pub(crate) fn new(slots: u32) -> Result<Self, Error> {
        // A pipe, not an eventfd: if a ring watches an eventfd, Linux 6.18 forwards only the first
        // write to it to the eventfd of that ring (`EventSource::fd`).
        let (wake, waker) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)
            .map_err(|e| Error::from_os(e, Operation::SetUp))?;
        let stops = (0..slots).map(|_| AtomicU32::new(0)).collect();
        Ok(Self { list: MpscList::new(slots), stops, wake, waker })
    }

    /// Returns `slot` to its owner thread. The caller must not access the slot's data any more.
    pub(crate) fn push(&self, slot: u32, outcome: i64) {
        if self.list.push(slot, outcome) {
            self.wake();
        }
    }

    /// Sets the errno with which work for `slot` ends that has not begun; 0: it is to be done.
    pub(crate) fn set_stop(&self, slot: u32, errno: u32) {
        self.stops[slot as usize].store(errno, Ordering::Relaxed);
    }

    /// The errno with which the work for `slot` is to end instead of being done, if there is one.
    pub(crate) fn stop(&self, slot: u32) -> Option<i32> {
        let errno = self.stops[slot as usize].load(Ordering::Relaxed);
        (errno != 0).then_some(errno.cast_signed())
    }

    /// Makes the descriptor readable.
    fn wake(&self) {
        if !yield_point::notify() {
            // A full pipe (EAGAIN) is readable already.
            let _ = rustix::io::write(&self.waker, &[1]);
        }
    }

    /// Whether `take` would find a slot.
    #[inline]
    pub(crate) fn is_not_empty(&self) -> bool {
        self.list.is_not_empty()
    }

    /// Takes the whole list together and passes each slot to `sink`; returns their number.
    pub(crate) fn take(&self, sink: impl FnMut(u32, i64)) -> usize {
        self.list.take(sink)
    }

    /// Makes the descriptor unreadable until the next push to an empty list. To be called before
    /// `take`, so that no wake-up is lost.
    pub(crate) fn clear_wake(&self) {
        // EAGAIN: it was not readable. Bytes beyond these cause a spurious wake-up only.
        let _ = rustix::io::read(&self.wake, &mut [0u8; 256]);
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
    fn c47_slots_freed_on_other_threads_all_return_once() {
        let completions = CompletionList::new(400).unwrap();
        let mut seen = [0u32; 400];
        std::thread::scope(|scope| {
            let completions = &completions;
            for thread in 0..4u32 {
                scope.spawn(move || {
                    for n in 0..100 {
                        let slot = thread * 100 + n;
                        completions.push(slot, i64::from(slot) * 3);
                    }
                });
            }
            let mut returned = 0;
            while returned < 400 {
                returned += completions.take(|slot, outcome| {
                    assert_eq!(outcome, i64::from(slot) * 3);
                    seen[slot as usize] += 1;
                });
            }
        });
        assert!(seen.iter().all(|&times| times == 1));
    }

    #[test]
    fn a_push_to_an_empty_list_makes_the_descriptor_readable() {
        let completions = CompletionList::new(2).unwrap();
        let readable = || {
            let mut fds = [rustix::event::PollFd::from_borrowed_fd(
                completions.fd(),
                rustix::event::PollFlags::IN,
            )];
            let none = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            rustix::event::poll(&mut fds, Some(&none)).unwrap() == 1
        };
        assert!(!readable());
        completions.push(1, 0);
        assert!(readable());
        completions.clear_wake();
        assert!(!readable());
    }
}

/// `cargo test` with `--cfg loom`: every order in which two threads push and one takes.
#[cfg(test)]
#[cfg(loom)]
mod loom_tests {
    use super::*;
    use crate::loom_shim::Arc;
    use loom::thread;

    fn take(list: &MpscList, seen: &mut [u32; 3]) -> usize {
        list.take(|slot, outcome| {
            assert_eq!(outcome, i64::from(slot) + 10);
            seen[slot as usize] += 1;
        })
    }

    #[test]
    fn c47_slots_pushed_by_two_threads_are_taken_exactly_once() {
        loom::model(|| {
            let list = Arc::new(MpscList::new(3));
            let (one, two) = (list.clone(), list.clone());
            let first = thread::spawn(move || {
                let empty = one.push(0, 10);
                u32::from(empty) + u32::from(one.push(1, 11))
            });
            let second = thread::spawn(move || u32::from(two.push(2, 12)));
            let mut seen = [0; 3];
            let meanwhile = take(&list, &mut seen);
            let wakes = first.join().unwrap() + second.join().unwrap();
            let rest = take(&list, &mut seen);
            assert_eq!((meanwhile + rest, seen), (3, [1; 3]));
            // Each batch began with a push to an empty list, so it was announced.
            assert!(wakes >= u32::from(meanwhile > 0) + u32::from(rest > 0));
        });
    }

    #[test]
    fn c47_a_returned_slot_can_be_pushed_again_while_another_thread_pushes() {
        loom::model(|| {
            let list = Arc::new(MpscList::new(3));
            let (one, two) = (list.clone(), list.clone());
            list.push(0, 10);
            let second = thread::spawn(move || two.push(2, 12));
            let mut seen = [0; 3];
            take(&list, &mut seen);
            let first = thread::spawn(move || one.push(0, 10));
            first.join().unwrap();
            second.join().unwrap();
            take(&list, &mut seen);
            assert_eq!(seen, [2, 0, 1]);
        });
    }
}
