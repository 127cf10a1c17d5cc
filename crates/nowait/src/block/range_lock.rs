//! Range locks of a device, by which a read-modify-write excludes all other writes to its blocks
//! (C12, C13).
//!
//! Invariant: each stripe of the device has either any number of shared holders or one exclusive
//! holder. A range is locked as a whole or not at all, so no thread waits while it holds a part.
//!
//! Shared holders are counted in shards, so that two threads that write do not take a cache line
//! from each other. A shared holder counts itself, then looks whether the stripe is taken; an
//! exclusive holder takes the stripe, then looks whether it is counted in any shard. Each makes its
//! step before it looks, in one order for all threads (`SeqCst`), so one of the two sees the other.

use std::cell::Cell;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::memory::zeroed::zeroed_atomics;
use crate::sim_hooks::injected_bug::EngineBug;
use crate::sim_hooks::{injected_bug, yield_point};
use crate::types::byte_range::ByteRange;

/// Bytes of the device that share a stripe, as a power of two: 64 KiB.
const STRIPE_SHIFT: u32 = 16;
const STRIPES: usize = 4096;
/// Threads that count their shared locks apart from each other; the next ones share with these.
const SHARDS: usize = 16;
/// Numbers of a row: one for each stripe, and two cache lines that keep the rows of two threads apart.
const ROW: usize = STRIPES + 128 / size_of::<AtomicU32>();
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

/// The numbers of all stripes. Of a device that is not written to they take no memory.
struct Table {
    rows: Box<[[AtomicU32; ROW]; 1 + SHARDS]>,
}

impl Table {
    /// [`EXCLUSIVE`] and [`CONTENDED`] of a stripe.
    #[inline]
    fn state(&self, stripe: usize) -> &AtomicU32 {
        &self.rows[0][stripe % STRIPES]
    }

    /// Shared locks of a shard's threads on a stripe: locks minus unlocks, modulo 2³². A lock may be
    /// undone in another shard, by the thread that its engine was moved to; the sum over all shards is
    /// the number of holders.
    #[inline]
    fn holders(&self, shard: usize, stripe: usize) -> &AtomicU32 {
        &self.rows[1 + shard % SHARDS][stripe % STRIPES]
    }
}

/// The shard of this thread.
#[inline]
fn this_shard() -> usize {
    thread_local! {
        static SHARD: Cell<usize> = const { Cell::new(SHARDS) };
    }
    SHARD.with(|shard| {
        if shard.get() == SHARDS {
            shard.set(next_shard());
        }
        shard.get()
    })
}

#[cold]
fn next_shard() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    THREADS.fetch_add(1, Ordering::Relaxed) % SHARDS
}

/// The stripes of one device.
pub(crate) struct RangeLocks {
    table: Table,
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
            table: Table { rows: zeroed_atomics() },
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

    /// The stripe of a range that has only one, as most have.
    #[inline]
    fn only_stripe(range: ByteRange) -> Option<usize> {
        let bytes_left = (1 << STRIPE_SHIFT) - range.pos % (1 << STRIPE_SHIFT);
        let stripe = (range.pos >> STRIPE_SHIFT) as usize % STRIPES;
        (range.len <= bytes_left).then_some(stripe)
    }

    /// Locks `range` if that needs no waiting.
    #[inline]
    pub(crate) fn try_lock(&self, range: ByteRange, mode: LockMode) -> bool {
        if injected_bug::injected(EngineBug::ForgetRangeLock) {
            return true;
        }
        let locked = match Self::only_stripe(range) {
            Some(stripe) => self.try_lock_stripe(stripe, mode),
            None => self.try_lock_stripes(range, mode),
        };
        if locked {
            self.count_lock();
        }
        locked
    }

    #[cold]
    #[inline(never)]
    fn try_lock_stripes(&self, range: ByteRange, mode: LockMode) -> bool {
        for (taken, stripe) in Self::stripes(range).enumerate() {
            if !self.try_lock_stripe(stripe, mode) {
                for stripe in Self::stripes(range).take(taken) {
                    self.unlock_stripe(stripe, mode);
                }
                return false;
            }
        }
        true
    }

    #[inline]
    fn try_lock_stripe(&self, stripe: usize, mode: LockMode) -> bool {
        let locked = match mode {
            LockMode::Shared => {
                self.count(stripe).fetch_add(1, SeqCst);
                self.table.state(stripe).load(SeqCst) == 0
            }
            // A stripe that a sleeper marked is left to it: locking it here would erase the mark.
            LockMode::Exclusive => {
                let taken = self.table.state(stripe).compare_exchange(0, EXCLUSIVE, SeqCst, SeqCst);
                if taken.is_err() {
                    return false;
                }
                self.shared_holders(stripe) == 0
            }
        };
        if !locked {
            self.unlock_stripe(stripe, mode);
        }
        locked
    }

    #[inline]
    fn unlock_stripe(&self, stripe: usize, mode: LockMode) {
        if self.release(stripe, mode) & CONTENDED != 0 {
            self.wake(stripe);
        }
    }

    /// Ends a hold without waking sleepers. Returns the stripe's marks.
    #[inline]
    fn release(&self, stripe: usize, mode: LockMode) -> u32 {
        match mode {
            LockMode::Shared => {
                self.count(stripe).fetch_sub(1, SeqCst);
                self.table.state(stripe).load(SeqCst)
            }
            LockMode::Exclusive => self.table.state(stripe).fetch_and(!EXCLUSIVE, SeqCst),
        }
    }

    /// This thread's count of shared holders.
    #[inline]
    fn count(&self, stripe: usize) -> &AtomicU32 {
        self.table.holders(this_shard(), stripe)
    }

    /// At least the number of shared holders that had locked the stripe before it was taken or
    /// marked; 0 only if all of them have left.
    fn shared_holders(&self, stripe: usize) -> u32 {
        let counts = (0..SHARDS).map(|shard| self.table.holders(shard, stripe).load(SeqCst));
        counts.fold(0, u32::wrapping_add)
    }

    #[cold]
    fn wake(&self, stripe: usize) {
        let guard = self.sleep_lock();
        self.table.state(stripe).fetch_and(!CONTENDED, SeqCst);
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
                self.table.state(stripe).fetch_or(CONTENDED, SeqCst);
            }
            // A shared lock would be refused by this thread's own marks, so they are cleared first.
            if self.all_free(range, mode) {
                for stripe in Self::stripes(range) {
                    self.table.state(stripe).fetch_and(!CONTENDED, SeqCst);
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
        Self::stripes(range).all(|stripe| {
            self.table.state(stripe).load(SeqCst) & EXCLUSIVE == 0
                && (mode == LockMode::Shared || self.shared_holders(stripe) == 0)
        })
    }

    /// Like `try_lock`, with the sleepers' mutex held: a failed attempt unlocks without a wake-up,
    /// which would lock the mutex again. Marks of sleepers do not hold it up.
    fn try_lock_contended(&self, range: ByteRange, mode: LockMode) -> bool {
        for (taken, stripe) in Self::stripes(range).enumerate() {
            let before = match mode {
                LockMode::Shared => {
                    self.count(stripe).fetch_add(1, SeqCst);
                    self.table.state(stripe).load(SeqCst)
                }
                LockMode::Exclusive => self.table.state(stripe).fetch_or(EXCLUSIVE, SeqCst),
            };
            let excluded = before & EXCLUSIVE != 0;
            if excluded || mode == LockMode::Exclusive && self.shared_holders(stripe) != 0 {
                if !(excluded && mode == LockMode::Exclusive) {
                    self.release(stripe, mode);
                }
                for stripe in Self::stripes(range).take(taken) {
                    self.release(stripe, mode);
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
        match Self::only_stripe(range) {
            Some(stripe) => self.unlock_stripe(stripe, mode),
            None => self.unlock_stripes(range, mode),
        }
    }

    #[cold]
    #[inline(never)]
    fn unlock_stripes(&self, range: ByteRange, mode: LockMode) {
        Self::stripes(range).for_each(|stripe| self.unlock_stripe(stripe, mode));
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
        assert!(locks.try_lock(all, LockMode::Shared));
        locks.unlock(all, LockMode::Shared);
        let mut counts = locks.table.rows.iter().flatten();
        assert!(counts.all(|word| word.load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn a_lock_that_another_thread_undoes_leaves_the_range_free() {
        let locks = RangeLocks::new();
        assert!(locks.try_lock(HERE, LockMode::Shared));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert!(!locks.try_lock(HERE, LockMode::Exclusive));
                locks.unlock(HERE, LockMode::Shared);
            });
        });
        assert!(locks.try_lock(HERE, LockMode::Exclusive));
    }

    #[test]
    fn c13_a_shared_holder_never_sees_an_increment_begin_or_end() {
        let locks = RangeLocks::new();
        let [begun, ended] = [const { std::sync::atomic::AtomicU64::new(0) }; 2];
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (begun, ended, locks) = (&begun, &ended, &locks);
                scope.spawn(move || {
                    for n in 0..4000 {
                        if (n + thread) % 4 > 0 {
                            locks.lock(HERE, LockMode::Shared);
                            let seen = ended.load(Ordering::Relaxed);
                            std::hint::spin_loop();
                            assert_eq!(begun.load(Ordering::Relaxed), seen);
                            locks.unlock(HERE, LockMode::Shared);
                        } else if locks.try_lock(HERE, LockMode::Exclusive) {
                            begun.fetch_add(1, Ordering::Relaxed);
                            ended.fetch_add(1, Ordering::Relaxed);
                            locks.unlock(HERE, LockMode::Exclusive);
                        }
                    }
                });
            }
        });
        assert!(locks.try_lock(HERE, LockMode::Exclusive));
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
