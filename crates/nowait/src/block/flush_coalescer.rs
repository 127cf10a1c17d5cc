//! Flushes that share a sync.
//!
//! A running sync may miss a write that completed after the sync began (C49). So a flush waits for
//! the next sync, which one of the waiting threads makes for all of them. Syncs never run in
//! parallel: the kernel reports a lost write once, so only one of them would see the error, and the
//! callers of the others could continue before it is recorded.
//!
//! A waiting thread sleeps and depends on nothing but the end of the running sync. Flushes on the
//! worker pool do not even occupy a worker while they wait (`worker_pool.rs`).
//! Invariant: one sync runs at a time. Its failure is recorded before another sync begins and
//! before any flush that it covers returns; from then on every flush fails (C51), unless the storage
//! says that nothing is lost.

use crate::loom_shim::{Condvar, Mutex, MutexGuard, PoisonError};
use crate::sim_hooks::yield_point;
use crate::types::error::{Error, Operation};

/// The syncs of a device, numbered from 1 on.
#[derive(Default)]
struct SyncSequence {
    started: u64,
    /// Equals `started`, or one less while a sync runs.
    ended: u64,
    /// The last one that has not failed.
    succeeded: u64,
    /// One has failed that may have lost what it covers.
    failed: bool,
    sleepers: usize,
}

/// Coalesces the flushes of a device or of an image's metadata.
#[derive(Default)]
pub struct FlushCoalescer {
    sequence: Mutex<SyncSequence>,
    /// The threads that wait for the running sync, and those that wait for the next one, by the
    /// parity of the sync's number.
    ended: [Condvar; 2],
}

impl FlushCoalescer {
    fn lock(&self) -> MutexGuard<'_, SyncSequence> {
        self.sequence.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ended(&self, sync: u64) -> &Condvar {
        let [even, odd] = &self.ended;
        if sync.is_multiple_of(2) { even } else { odd }
    }

    /// Returns when a sync has ended that began after this call. Calls `sync` for it, unless
    /// another call makes that sync.
    ///
    /// # Errors
    /// That of `sync`; `EIO` if the sync of another call failed, and after every failure.
    pub fn flush_shared(&self, sync: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        self.flush_unless_kept(sync, || false)
    }

    /// Like [`FlushCoalescer::flush_shared`], but a failure is that of one sync alone if `keeps` says
    /// then that a later sync can make durable what this one covers.
    ///
    /// # Errors
    /// The error of `sync`; `EIO` if the sync of another call failed, and after every failure of one whose
    /// data were not kept.
    pub fn flush_unless_kept(
        &self,
        sync: impl FnOnce() -> Result<(), Error>,
        keeps: impl FnOnce() -> bool,
    ) -> Result<(), Error> {
        let mut syncs = self.lock();
        let mine = syncs.started + 1;
        loop {
            if syncs.failed {
                return Err(Error::new(libc::EIO, Operation::Flush));
            }
            if syncs.succeeded >= mine {
                return Ok(());
            }
            if syncs.ended >= mine {
                return Err(Error::new(libc::EIO, Operation::Flush));
            }
            if syncs.started == syncs.ended {
                break;
            }
            syncs = self.sleep(syncs, mine);
        }
        syncs.started = mine;
        drop(syncs);
        // A sync that panics counts as failed: its effect is unknown, and other threads wait for
        // its end.
        let mut running = RunningSync { flushes: self, sync: mine, end: SyncEnd::Lost };
        let done = sync();
        running.end = match &done {
            Ok(()) => SyncEnd::Durable,
            Err(_) if keeps() => SyncEnd::Kept,
            Err(_) => SyncEnd::Lost,
        };
        done
    }

    /// Whether a sync has failed, so that every flush fails (C51).
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.lock().failed
    }

    /// Whether a sync is running, as of a moment ago.
    #[must_use]
    pub fn is_running(&self) -> bool {
        let syncs = self.lock();
        syncs.started > syncs.ended
    }

    /// An injected bug: forgets that a sync has failed.
    #[cfg(feature = "sim")]
    pub fn forget_failure(&self) {
        self.lock().failed = false;
    }

    /// The sync with this number has ended.
    fn end(&self, sync: u64, end: SyncEnd) {
        let failed = end == SyncEnd::Lost;
        let mut syncs = self.lock();
        syncs.ended = sync;
        if end == SyncEnd::Durable {
            syncs.succeeded = sync;
        }
        syncs.failed |= failed;
        if syncs.sleepers > 0 {
            self.ended(sync).notify_all();
            match failed {
                // The woken thread makes the next sync, unless another flush comes first.
                false => self.ended(sync + 1).notify_one(),
                true => self.ended(sync + 1).notify_all(),
            }
        }
    }

    /// Sleeps until the state may have changed for a thread that waits for the sync `mine`; in a
    /// simulation, yields to the other tasks.
    fn sleep<'a>(
        &'a self,
        mut syncs: MutexGuard<'a, SyncSequence>,
        mine: u64,
    ) -> MutexGuard<'a, SyncSequence> {
        if yield_point::is_simulated() {
            drop(syncs);
            yield_point::yield_now();
            return self.lock();
        }
        syncs.sleepers += 1;
        let mut syncs = self.ended(mine).wait(syncs).unwrap_or_else(PoisonError::into_inner);
        syncs.sleepers -= 1;
        syncs
    }
}

/// The end of a sync.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SyncEnd {
    Durable,
    /// It has failed, and a later one can make up for it.
    Kept,
    /// It has failed, and what it covers may be lost.
    Lost,
}

/// A running sync; dropping this ends it.
struct RunningSync<'a> {
    flushes: &'a FlushCoalescer,
    sync: u64,
    end: SyncEnd,
}

impl Drop for RunningSync<'_> {
    fn drop(&mut self) {
        self.flushes.end(self.sync, self.end);
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread;
    use std::time::{Duration, Instant};

    /// Waits until `count` threads sleep.
    fn await_sleepers(flushes: &FlushCoalescer, count: usize) {
        let begun = Instant::now();
        while flushes.lock().sleepers < count {
            assert!(begun.elapsed() < Duration::from_secs(60), "no thread sleeps");
            thread::yield_now();
        }
    }

    #[test]
    fn c51_a_sync_that_panics_counts_as_failed_and_blocks_no_later_flush() {
        let flushes = FlushCoalescer::default();
        let panics = || flushes.flush_shared(|| panic!("on purpose"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
        assert_eq!(flushes.flush_shared(|| Ok(())).unwrap_err().errno(), libc::EIO);
    }

    /// The results of five threads that flush while a sync runs, and the number of syncs that they
    /// make. The running sync returns `first`, and each of theirs `then`.
    fn flush_during_a_sync(
        first: Result<(), Error>,
        then: Result<(), Error>,
    ) -> (Vec<Result<(), Error>>, u32) {
        let (flushes, made) = (FlushCoalescer::default(), AtomicU32::new(0));
        let results = thread::scope(|scope| {
            let mut others = Vec::new();
            let done = flushes.flush_shared(|| {
                for _ in 0..5 {
                    others.push(scope.spawn(|| {
                        flushes.flush_shared(|| {
                            made.fetch_add(1, Ordering::Relaxed);
                            then
                        })
                    }));
                }
                await_sleepers(&flushes, 5);
                first
            });
            assert_eq!(done, first);
            others.into_iter().map(|other| other.join().unwrap()).collect()
        });
        (results, made.into_inner())
    }

    const LOST: Error = Error::new(libc::ENOSPC, Operation::Flush);
    const LATCHED: Error = Error::new(libc::EIO, Operation::Flush);

    #[test]
    fn c49_all_flushes_that_arrive_during_a_sync_share_the_next_one() {
        assert_eq!(flush_during_a_sync(Ok(()), Ok(())), (vec![Ok(()); 5], 1));
    }

    #[test]
    fn c51_a_failed_sync_fails_the_flushes_that_wait_for_it_or_behind_it() {
        assert_eq!(flush_during_a_sync(Err(LOST), Ok(())), (vec![Err(LATCHED); 5], 0));
        let (mut results, made) = flush_during_a_sync(Ok(()), Err(LOST));
        results.sort_by_key(|result| result.is_err_and(|error| error == LATCHED));
        assert_eq!((results.remove(0), results, made), (Err(LOST), vec![Err(LATCHED); 4], 1));
    }

    #[test]
    fn c51_a_failed_sync_that_has_lost_nothing_fails_its_own_flushes_only() {
        let flushes = FlushCoalescer::default();
        let kept = |result| flushes.flush_unless_kept(|| result, || true);
        assert_eq!(kept(Err(LOST)), Err(LOST));
        assert!(!flushes.has_failed());
        thread::scope(|scope| {
            let mut others = Vec::new();
            let first = flushes.flush_unless_kept(
                || {
                    others.extend((0..5).map(|_| scope.spawn(|| kept(Err(LOST)))));
                    await_sleepers(&flushes, 5);
                    Ok(())
                },
                || true,
            );
            assert_eq!(first, Ok(()));
            // All of them share the next sync, which fails.
            let results = others.into_iter().map(|other| other.join().unwrap());
            assert!(results.into_iter().all(|result| result.is_err()));
        });
        assert_eq!(kept(Ok(())), Ok(()));
        assert_eq!(flushes.flush_unless_kept(|| Err(LOST), || false), Err(LOST));
        assert_eq!(kept(Ok(())), Err(LATCHED));
    }

    #[test]
    fn c51_no_sync_is_made_after_a_failed_one() {
        let flushes = FlushCoalescer::default();
        assert_eq!(flushes.flush_shared(|| Ok(())), Ok(()));
        assert_eq!(flushes.flush_shared(|| Err(LOST)), Err(LOST));
        for _ in 0..3 {
            assert_eq!(flushes.flush_shared(|| panic!("a sync after a failed one")), Err(LATCHED));
        }
    }
}

/// `cargo test` with `--cfg loom`: every order in which three threads flush, with at most two
/// preemptions; without that bound it takes hours.
#[cfg(test)]
#[cfg(loom)]
mod loom_tests {
    use super::*;
    use crate::loom_shim::{Arc, AtomicU32, Ordering};
    use loom::thread;

    fn in_every_order(run: impl Fn() + Sync + Send + 'static) {
        let mut orders = loom::model::Builder::new();
        orders.preemption_bound = Some(2);
        orders.check(run);
    }

    #[derive(Default)]
    struct Device {
        flushes: FlushCoalescer,
        /// Writes that were completed.
        written: AtomicU32,
        /// Of these, how many are durable.
        durable: AtomicU32,
        /// 1 if a write was lost and no sync has reported it yet.
        lost: AtomicU32,
        running: AtomicU32,
    }

    impl Device {
        fn flush(&self) -> Result<(), Error> {
            self.flushes.flush_shared(|| {
                assert_eq!(self.running.swap(1, Ordering::Relaxed), 0, "two syncs at a time");
                let written = self.written.load(Ordering::Relaxed);
                let lost = self.lost.swap(0, Ordering::Relaxed);
                self.durable.store(written, Ordering::Relaxed);
                self.running.store(0, Ordering::Relaxed);
                if lost > 0 { Err(Error::new(libc::ENOSPC, Operation::Flush)) } else { Ok(()) }
            })
        }

        /// A write, and a flush that covers it.
        fn put(&self) {
            let written = self.written.fetch_add(1, Ordering::Relaxed) + 1;
            assert_eq!(self.flush(), Ok(()));
            assert!(self.durable.load(Ordering::Relaxed) >= written);
        }
    }

    #[test]
    fn c49_a_shared_sync_covers_every_write_before_each_of_its_flushes() {
        in_every_order(|| {
            let device = Arc::new(Device::default());
            let others = [device.clone(), device.clone()].map(|it| thread::spawn(move || it.put()));
            device.put();
            others.into_iter().for_each(|other| other.join().unwrap());
        });
    }

    #[test]
    fn c51_no_concurrent_flush_succeeds_when_a_sync_reports_a_loss() {
        in_every_order(|| {
            let device = Arc::new(Device::default());
            device.lost.store(1, Ordering::Relaxed);
            let others =
                [device.clone(), device.clone()].map(|it| thread::spawn(move || it.flush()));
            assert!(device.flush().is_err());
            assert!(others.map(|other| other.join().unwrap()).iter().all(Result::is_err));
        });
    }
}
