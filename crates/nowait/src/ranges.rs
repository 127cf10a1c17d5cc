//! Which blocks of a device are being written, so that a read-modify-write excludes every other
//! writer of its blocks (C12, C13).
//!
//! Invariant: each stripe of the device has either any number of shared holders or one exclusive
//! holder. A range is taken whole or not at all, so nobody waits while holding.
//! Knows: error, breaks, pause. Known by: disk, blocking, engine.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::breaks::{self, Break};
use crate::error::Range;
use crate::pause;

/// Bytes of the device that share a stripe, as a power of two: 64 KiB.
const STRIPE_SHIFT: u32 = 16;
const STRIPES: usize = 4096;
const EXCLUSIVE: u32 = 1 << 31;
/// Somebody sleeps until this stripe is free; new shared holders stay away.
const WANTED: u32 = 1 << 30;

/// How a range is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// Whole blocks are written: others may write whole blocks too.
    Shared,
    /// Blocks are read and written back: nobody else may write them.
    Exclusive,
}

/// The stripes of one device.
pub(crate) struct RangeLocks {
    stripes: Box<[AtomicU32]>,
    /// How many sleep: if nobody does, nobody is woken, which costs a system call.
    sleepers: Mutex<u32>,
    freed: Condvar,
}

impl RangeLocks {
    pub(crate) fn new() -> Self {
        Self {
            stripes: (0..STRIPES).map(|_| AtomicU32::new(0)).collect(),
            sleepers: Mutex::new(0),
            freed: Condvar::new(),
        }
    }

    /// The stripes of `range`, each once.
    fn stripes(range: Range) -> impl Iterator<Item = usize> {
        let first = range.pos >> STRIPE_SHIFT;
        let last = range.end().saturating_sub(1).max(range.pos) >> STRIPE_SHIFT;
        let count = (last - first + 1).min(STRIPES as u64);
        (first..first + count).map(|stripe| stripe as usize % STRIPES)
    }

    /// Takes `range` if that needs no waiting.
    #[inline]
    pub(crate) fn try_take(&self, range: Range, hold: Hold) -> bool {
        if breaks::is(Break::ForgetRangeLock) {
            return true;
        }
        for (taken, stripe) in Self::stripes(range).enumerate() {
            if !self.try_stripe(stripe, hold) {
                for stripe in Self::stripes(range).take(taken) {
                    self.free_stripe(stripe, hold);
                }
                return false;
            }
        }
        true
    }

    #[inline]
    fn try_stripe(&self, stripe: usize, hold: Hold) -> bool {
        let word = &self.stripes[stripe];
        match hold {
            Hold::Shared => {
                if word.fetch_add(1, Ordering::Acquire) & (EXCLUSIVE | WANTED) == 0 {
                    return true;
                }
                self.free_stripe(stripe, hold);
                false
            }
            // A stripe that a sleeper marked is left to it: taking it here would wipe the mark.
            Hold::Exclusive => {
                word.compare_exchange(0, EXCLUSIVE, Ordering::Acquire, Ordering::Relaxed).is_ok()
            }
        }
    }

    #[inline]
    fn free_stripe(&self, stripe: usize, hold: Hold) {
        let step = if hold == Hold::Shared { 1 } else { EXCLUSIVE };
        let before = self.stripes[stripe].fetch_sub(step, Ordering::Release);
        if before & WANTED != 0 {
            self.wake(stripe);
        }
    }

    #[cold]
    fn wake(&self, stripe: usize) {
        let guard = self.sleep_lock();
        self.stripes[stripe].fetch_and(!WANTED, Ordering::Relaxed);
        self.wake_all(&guard);
    }

    fn wake_all(&self, sleepers: &u32) {
        if *sleepers > 0 {
            self.freed.notify_all();
        }
    }

    fn sleep_lock(&self) -> MutexGuard<'_, u32> {
        self.sleepers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes `range`, sleeping until it is free. For threads that may block.
    pub(crate) fn take(&self, range: Range, hold: Hold) {
        if self.try_take(range, hold) {
            return;
        }
        let mut guard = self.sleep_lock();
        loop {
            for stripe in Self::stripes(range) {
                self.stripes[stripe].fetch_or(WANTED, Ordering::Relaxed);
            }
            // A shared taker would refuse its own mark, so the marks of free stripes go first.
            if self.all_free(range, hold) {
                for stripe in Self::stripes(range) {
                    self.stripes[stripe].fetch_and(!WANTED, Ordering::Relaxed);
                }
                if self.try_take_marked(range, hold) {
                    self.wake_all(&guard);
                    return;
                }
                continue;
            }
            guard = self.sleep(guard);
        }
    }

    /// Sleeps until something was freed; in a simulation, until the others have gone on.
    fn sleep<'a>(&'a self, mut guard: MutexGuard<'a, u32>) -> MutexGuard<'a, u32> {
        if !pause::is_possible() {
            *guard += 1;
            guard = self.freed.wait(guard).unwrap_or_else(PoisonError::into_inner);
            *guard -= 1;
            return guard;
        }
        drop(guard);
        pause::here();
        self.sleep_lock()
    }

    /// Whether nothing that excludes `hold` was held a moment ago.
    fn all_free(&self, range: Range, hold: Hold) -> bool {
        let excluding = if hold == Hold::Shared { EXCLUSIVE } else { !WANTED };
        Self::stripes(range)
            .all(|stripe| self.stripes[stripe].load(Ordering::Acquire) & excluding == 0)
    }

    /// As `try_take`, while the sleepers' mutex is held: a failed try frees without waking, which
    /// would take the mutex again.
    fn try_take_marked(&self, range: Range, hold: Hold) -> bool {
        for (taken, stripe) in Self::stripes(range).enumerate() {
            let word = &self.stripes[stripe];
            let got = match hold {
                Hold::Shared => word
                    .fetch_update(Ordering::Acquire, Ordering::Relaxed, |now| {
                        (now & EXCLUSIVE == 0).then_some(now + 1)
                    })
                    .is_ok(),
                Hold::Exclusive => word
                    .fetch_update(Ordering::Acquire, Ordering::Relaxed, |now| {
                        (now & !WANTED == 0).then_some(now | EXCLUSIVE)
                    })
                    .is_ok(),
            };
            if !got {
                let step = if hold == Hold::Shared { 1 } else { EXCLUSIVE };
                for stripe in Self::stripes(range).take(taken) {
                    self.stripes[stripe].fetch_sub(step, Ordering::Release);
                }
                return false;
            }
        }
        true
    }

    /// Gives `range` back.
    #[inline]
    pub(crate) fn free(&self, range: Range, hold: Hold) {
        if breaks::is(Break::ForgetRangeLock) {
            return;
        }
        for stripe in Self::stripes(range) {
            self.free_stripe(stripe, hold);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Range = Range::new(4096, 4096);

    #[test]
    fn c13_shared_holders_exclude_an_exclusive_one_and_the_other_way_round() {
        let locks = RangeLocks::new();
        assert!(locks.try_take(HERE, Hold::Shared) && locks.try_take(HERE, Hold::Shared));
        assert!(!locks.try_take(HERE, Hold::Exclusive));
        locks.free(HERE, Hold::Shared);
        locks.free(HERE, Hold::Shared);
        assert!(locks.try_take(HERE, Hold::Exclusive));
        assert!(!locks.try_take(HERE, Hold::Shared) && !locks.try_take(HERE, Hold::Exclusive));
        locks.free(HERE, Hold::Exclusive);
        assert!(locks.try_take(HERE, Hold::Shared));
    }

    #[test]
    fn a_refused_range_holds_none_of_its_stripes() {
        let locks = RangeLocks::new();
        let (low, high) = (Range::new(0, 1), Range::new(3 << STRIPE_SHIFT, 1));
        assert!(locks.try_take(high, Hold::Exclusive));
        assert!(!locks.try_take(Range::new(0, 4 << STRIPE_SHIFT), Hold::Exclusive));
        assert!(locks.try_take(low, Hold::Exclusive));
    }

    #[test]
    fn a_range_larger_than_all_stripes_takes_each_once() {
        let locks = RangeLocks::new();
        let all = Range::new(0, u64::MAX);
        assert!(locks.try_take(all, Hold::Exclusive));
        locks.free(all, Hold::Exclusive);
        assert!(locks.stripes.iter().all(|word| word.load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn c13_no_increment_under_exclusive_locks_is_lost() {
        let locks = RangeLocks::new();
        let value = std::sync::atomic::AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let (value, locks) = (&value, &locks);
                scope.spawn(move || {
                    for n in 0..2000u32 {
                        let range = Range::new(u64::from(n % 3) << STRIPE_SHIFT, 8 << STRIPE_SHIFT);
                        locks.take(range, Hold::Exclusive);
                        // Two steps: only the lock makes them one.
                        value.store(value.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                        locks.free(range, Hold::Exclusive);
                        locks.take(range, Hold::Shared);
                        locks.free(range, Hold::Shared);
                    }
                });
            }
        });
        assert_eq!(value.into_inner(), 8000);
    }
}
