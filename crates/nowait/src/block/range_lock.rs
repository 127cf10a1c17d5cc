//! Range locks of a device, by which a read-modify-write excludes all other writes to its blocks
//! (C12, C13).
//!
//! Invariant: each stripe of the device has either any number of shared holders or one exclusive
//! holder. A range is locked as a whole or not at all, so no thread waits while it holds a part.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::sim_hooks::injected_bug::EngineBug;
use crate::sim_hooks::{injected_bug, yield_point};
use crate::types::byte_range::ByteRange;

/// Bytes of the device that share a stripe, as a power of two: 64 KiB.
const STRIPE_SHIFT: u32 = 16;
const STRIPES: usize = 4096;
const EXCLUSIVE: u32 = 1 << 31;
/// A thread sleeps until this stripe is free; no new shared holder is admitted.
const CONTENDED: u32 = 1 << 30;

/// How a range is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LockMode {
    /// For writing whole blocks; other requests may do so at the same time.
    Shared,
    /// For a read-modify-write of blocks; no other request may write them.
    Exclusive,
}

/// The stripes of one device.
pub(crate) struct RangeLocks {
    stripes: Box<[AtomicU32]>,
    /// Sleeping threads: the wake-up, a system call, is skipped if there are none.
    sleepers: Mutex<u32>,
    freed: Condvar,
    /// Ranges that were locked so far.
    #[cfg(test)]
    pub(crate) locked: AtomicU32,
}

impl RangeLocks {
    pub(crate) fn new() -> Self {
        Self {
            stripes: (0..STRIPES).map(|_| AtomicU32::new(0)).collect(),
            sleepers: Mutex::new(0),
            freed: Condvar::new(),
            #[cfg(test)]
            locked: AtomicU32::new(0),
        }
    }

    /// The stripes of `range`, each once.
    fn stripes(range: ByteRange) -> impl Iterator<Item = usize> {
        let first = range.pos >> STRIPE_SHIFT;
        let last = range.end().saturating_sub(1).max(range.pos) >> STRIPE_SHIFT;
        let count = (last - first + 1).min(STRIPES as u64);
        (first..first + count).map(|stripe| stripe as usize % STRIPES)
    }

    /// Locks `range` if that needs no waiting.
    #[inline]
    pub(crate) fn try_lock(&self, range: ByteRange, mode: LockMode) -> bool {
        if injected_bug::injected(EngineBug::ForgetRangeLock) {
            return true;
        }
        for (taken, stripe) in Self::stripes(range).enumerate() {
            if !self.try_lock_stripe(stripe, mode) {
                for stripe in Self::stripes(range).take(taken) {
                    self.unlock_stripe(stripe, mode);
                }
                return false;
            }
        }
        self.count_lock();
        true
    }

    #[inline]
    fn try_lock_stripe(&self, stripe: usize, mode: LockMode) -> bool {
        let word = &self.stripes[stripe];
        match mode {
            LockMode::Shared => {
                if word.fetch_add(1, Ordering::Acquire) & (EXCLUSIVE | CONTENDED) == 0 {
                    return true;
                }
                self.unlock_stripe(stripe, mode);
                false
            }
            // A stripe that a sleeper marked is left to it: locking it here would erase the mark.
            LockMode::Exclusive => {
                word.compare_exchange(0, EXCLUSIVE, Ordering::Acquire, Ordering::Relaxed).is_ok()
            }
        }
    }

    #[inline]
    fn unlock_stripe(&self, stripe: usize, mode: LockMode) {
        let step = if mode == LockMode::Shared { 1 } else { EXCLUSIVE };
        let before = self.stripes[stripe].fetch_sub(step, Ordering::Release);
        if before & CONTENDED != 0 {
            self.wake(stripe);
        }
    }

    #[cold]
    fn wake(&self, stripe: usize) {
        let guard = self.sleep_lock();
        self.stripes[stripe].fetch_and(!CONTENDED, Ordering::Relaxed);
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

    /// Runs `run` with `range` locked. Unlocks it also when `run` panics, because other requests
    /// would wait for ever.
    pub(crate) fn with_lock<T>(
        &self,
        range: ByteRange,
        mode: LockMode,
        run: impl FnOnce() -> T,
    ) -> T {
        self.lock(range, mode);
        let _held = RangeGuard { ranges: self, range, mode };
        run()
    }

    /// Locks `range`, sleeping until it is free. For threads that may block.
    pub(crate) fn lock(&self, range: ByteRange, mode: LockMode) {
        if self.try_lock(range, mode) {
            return;
        }
        let mut guard = self.sleep_lock();
        loop {
            for stripe in Self::stripes(range) {
                self.stripes[stripe].fetch_or(CONTENDED, Ordering::Relaxed);
            }
            // A shared lock would be refused by this thread's own marks, so they are cleared first.
            if self.all_free(range, mode) {
                for stripe in Self::stripes(range) {
                    self.stripes[stripe].fetch_and(!CONTENDED, Ordering::Relaxed);
                }
                if self.try_lock_contended(range, mode) {
                    self.wake_all(&guard);
                    self.count_lock();
                    return;
                }
                continue;
            }
            guard = self.sleep(guard);
        }
    }

    /// Sleeps until a range is unlocked; in a simulation, yields to the other tasks.
    fn sleep<'a>(&'a self, mut guard: MutexGuard<'a, u32>) -> MutexGuard<'a, u32> {
        if !yield_point::is_simulated() {
            *guard += 1;
            guard = self.freed.wait(guard).unwrap_or_else(PoisonError::into_inner);
            *guard -= 1;
            return guard;
        }
        drop(guard);
        yield_point::yield_now();
        self.sleep_lock()
    }

    /// Whether no holder excludes `mode`, as of the moment of the load.
    fn all_free(&self, range: ByteRange, mode: LockMode) -> bool {
        let excluding = if mode == LockMode::Shared { EXCLUSIVE } else { !CONTENDED };
        Self::stripes(range)
            .all(|stripe| self.stripes[stripe].load(Ordering::Acquire) & excluding == 0)
    }

    /// As `try_lock`, with the sleepers' mutex held: a failed attempt unlocks without a wake-up,
    /// which would lock the mutex again.
    fn try_lock_contended(&self, range: ByteRange, mode: LockMode) -> bool {
        for (taken, stripe) in Self::stripes(range).enumerate() {
            let word = &self.stripes[stripe];
            let got = match mode {
                LockMode::Shared => word
                    .fetch_update(Ordering::Acquire, Ordering::Relaxed, |now| {
                        (now & EXCLUSIVE == 0).then_some(now + 1)
                    })
                    .is_ok(),
                LockMode::Exclusive => word
                    .fetch_update(Ordering::Acquire, Ordering::Relaxed, |now| {
                        (now & !CONTENDED == 0).then_some(now | EXCLUSIVE)
                    })
                    .is_ok(),
            };
            if !got {
                let step = if mode == LockMode::Shared { 1 } else { EXCLUSIVE };
                for stripe in Self::stripes(range).take(taken) {
                    self.stripes[stripe].fetch_sub(step, Ordering::Release);
                }
                return false;
            }
        }
        true
    }

    #[inline(always)]
    fn count_lock(&self) {
        #[cfg(test)]
        self.locked.fetch_add(1, Ordering::Relaxed);
    }

    /// Unlocks `range`.
    #[inline]
    pub(crate) fn unlock(&self, range: ByteRange, mode: LockMode) {
        if injected_bug::injected(EngineBug::ForgetRangeLock) {
            return;
        }
        for stripe in Self::stripes(range) {
            self.unlock_stripe(stripe, mode);
        }
    }
}

/// A range that is locked until this is dropped.
struct RangeGuard<'a> {
    ranges: &'a RangeLocks,
    range: ByteRange,
    mode: LockMode,
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        self.ranges.unlock(self.range, self.mode);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: ByteRange = ByteRange::new(4096, 4096);

    #[test]
    fn c13_shared_holders_exclude_an_exclusive_one_and_the_other_way_round() {
        let locks = RangeLocks::new();
        assert!(locks.try_lock(HERE, LockMode::Shared) && locks.try_lock(HERE, LockMode::Shared));
        assert!(!locks.try_lock(HERE, LockMode::Exclusive));
        locks.unlock(HERE, LockMode::Shared);
        locks.unlock(HERE, LockMode::Shared);
        assert!(locks.try_lock(HERE, LockMode::Exclusive));
        assert!(
            !locks.try_lock(HERE, LockMode::Shared) && !locks.try_lock(HERE, LockMode::Exclusive)
        );
        locks.unlock(HERE, LockMode::Exclusive);
        assert!(locks.try_lock(HERE, LockMode::Shared));
    }

    #[test]
    fn a_refused_range_holds_none_of_its_stripes() {
        let locks = RangeLocks::new();
        let (low, high) = (ByteRange::new(0, 1), ByteRange::new(3 << STRIPE_SHIFT, 1));
        assert!(locks.try_lock(high, LockMode::Exclusive));
        assert!(!locks.try_lock(ByteRange::new(0, 4 << STRIPE_SHIFT), LockMode::Exclusive));
        assert!(locks.try_lock(low, LockMode::Exclusive));
    }

    #[test]
    fn a_range_larger_than_all_stripes_takes_each_once() {
        let locks = RangeLocks::new();
        let all = ByteRange::new(0, u64::MAX);
        assert!(locks.try_lock(all, LockMode::Exclusive));
        locks.unlock(all, LockMode::Exclusive);
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
                        let range =
                            ByteRange::new(u64::from(n % 3) << STRIPE_SHIFT, 8 << STRIPE_SHIFT);
                        locks.lock(range, LockMode::Exclusive);
                        // Two steps: only the lock makes them one.
                        value.store(value.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                        locks.unlock(range, LockMode::Exclusive);
                        locks.lock(range, LockMode::Shared);
                        locks.unlock(range, LockMode::Shared);
                    }
                });
            }
        });
        assert_eq!(value.into_inner(), 8000);
    }
}
