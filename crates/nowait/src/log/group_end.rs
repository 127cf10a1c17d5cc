//! The end of a group, for which the callers of its records wait.
//!
//! Invariant: a thread that sleeps has seen no change, and each change wakes threads that sleep.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::Waker;

use rustix::thread::futex;

use crate::types::error::Error;

/// The end of a group.
#[derive(Default)]
pub(crate) struct GroupEnd {
    /// The position of the group.
    result: OnceLock<Result<u64, Error>>,
    /// Counts the changes: the group has ended, or needs a leader.
    changes: AtomicU32,
    /// Threads that sleep, or are about to.
    asleep: AtomicU32,
    /// The tasks that wait, by the place of their record in the group.
    wakers: Mutex<Vec<(u32, Waker)>>,
}

impl GroupEnd {
    /// The position of the group, when it has ended.
    #[inline]
    pub(crate) fn result(&self) -> Option<Result<u64, Error>> {
        self.result.get().copied()
    }

    /// The changes so far, for [`GroupEnd::sleep`].
    pub(crate) fn changes(&self) -> u32 {
        self.changes.load(Ordering::SeqCst)
    }

    /// Sleeps until there were other than `seen` changes. It may return earlier.
    pub(crate) fn sleep(&self, seen: u32) {
        self.asleep.fetch_add(1, Ordering::SeqCst);
        // An error is a change, or a signal.
        let _ = futex::wait(&self.changes, futex::Flags::PRIVATE, seen, None);
        self.asleep.fetch_sub(1, Ordering::SeqCst);
    }

    /// Ends the group.
    pub(crate) fn end(&self, result: Result<u64, Error>) {
        // Only the leader ends it, once.
        let _ = self.result.set(result);
    }

    /// Wakes all that wait for the end.
    pub(crate) fn wake_all(&self) {
        self.change(1, u32::MAX >> 1);
        self.wakers().drain(..).for_each(|(_, waker)| waker.wake());
    }

    /// Has one of the `threads` that wait look for the leader: one that is awake if there is one.
    pub(crate) fn wake_leader(&self, threads: u32) {
        self.change(threads, 1);
    }

    /// Counts a change, and wakes `count` threads if `least` sleep.
    fn change(&self, least: u32, count: u32) {
        self.changes.fetch_add(1, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) >= least {
            // It has no error: the word is there.
            let _ = futex::wake(&self.changes, futex::Flags::PRIVATE, count);
        }
    }

    fn wakers(&self) -> MutexGuard<'_, Vec<(u32, Waker)>> {
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has `waker` woken at the end, for the record at `at`.
    pub(crate) fn register(&self, at: u32, waker: &Waker) {
        let mut wakers = self.wakers();
        match wakers.iter_mut().find(|(its, _)| *its == at) {
            Some((_, old)) => old.clone_from(waker),
            None => wakers.push((at, waker.clone())),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    #[test]
    fn a_thread_that_has_missed_a_change_does_not_sleep() {
        let end = GroupEnd::default();
        let seen = end.changes();
        end.wake_leader(1);
        // It would sleep for ever.
        end.sleep(seen);
        assert_eq!((end.changes(), end.result()), (seen + 1, None));
    }

    #[test]
    fn all_that_sleep_are_woken_by_the_end() {
        let end = Arc::new(GroupEnd::default());
        let sleeper = |_| {
            let end = end.clone();
            thread::spawn(move || {
                loop {
                    let seen = end.changes();
                    match end.result() {
                        Some(result) => break result,
                        None => end.sleep(seen),
                    }
                }
            })
        };
        let sleepers: Vec<_> = (0..8).map(sleeper).collect();
        // All may look for the leader, and go on.
        for _ in 0..100 {
            end.wake_leader(0);
        }
        end.end(Ok(7));
        end.wake_all();
        for sleeper in sleepers {
            assert_eq!(sleeper.join().expect("no panic"), Ok(7));
        }
        assert_eq!(end.asleep.load(Ordering::SeqCst), 0);
    }
}
