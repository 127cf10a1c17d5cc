//! Flushes that share a sync.
//!
//! A sync that runs may have missed a write that was completed after it began (C49). So a flush
//! waits for the next sync to begin, which is made for all who wait, by one of them. Of syncs side by
//! side one would be told of a loss and the others not, and their callers would go on before the first
//! one's thread says a word: the kernel reports a lost write once.
//!
//! Who waits here sleeps, and needs nothing but the end of the sync that runs. Flushes that workers
//! are to make do not even hold a worker while they wait (`worker.rs`).
//! Invariant: one sync runs at a time. That it failed is known before another one begins, and before
//! anyone whom it covers goes on; from then on every flush fails (C51).
//! Knows: error, pause, sync. Known by: disk.

use crate::error::{Doing, Error};
use crate::pause;
use crate::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The syncs of a device, by number, from 1 on.
#[derive(Default)]
struct Syncs {
    begun: u64,
    /// As `begun`, unless one runs: then one less.
    ended: u64,
    failed: bool,
    sleepers: usize,
}

/// Who flushes a device.
#[derive(Default)]
pub(crate) struct Flushes {
    syncs: Mutex<Syncs>,
    /// Where those sleep who wait for the sync that runs, and those for the next one: by the number of
    /// the sync, even or odd.
    ended: [Condvar; 2],
}

impl Flushes {
    fn lock(&self) -> MutexGuard<'_, Syncs> {
        self.syncs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ended(&self, sync: u64) -> &Condvar {
        let [even, odd] = &self.ended;
        if sync.is_multiple_of(2) { even } else { odd }
    }

    /// Returns when a sync has ended that began after this was called: `sync` made it, if nobody
    /// else's call did.
    ///
    /// # Errors
    /// What `sync` said; `EIO` where another's failed, and after every failure.
    pub(crate) fn share(&self, sync: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        let mut syncs = self.lock();
        let mine = syncs.begun + 1;
        loop {
            if syncs.failed {
                return Err(Error::new(libc::EIO, Doing::Flush));
            }
            if syncs.ended >= mine {
                return Ok(());
            }
            if syncs.begun == syncs.ended {
                break;
            }
            syncs = self.sleep(syncs, mine);
        }
        syncs.begun = mine;
        drop(syncs);
        let done = sync();
        let mut syncs = self.lock();
        syncs.ended = mine;
        syncs.failed |= done.is_err();
        if syncs.sleepers > 0 {
            self.ended(mine).notify_all();
            match done {
                // It makes the next sync, unless somebody comes before it.
                Ok(()) => self.ended(mine + 1).notify_one(),
                Err(_) => self.ended(mine + 1).notify_all(),
            }
        }
        done
    }

    /// Sleeps until something may have changed for who waits for the sync `mine`; in a simulation,
    /// until the others have gone on.
    fn sleep<'a>(&'a self, mut syncs: MutexGuard<'a, Syncs>, mine: u64) -> MutexGuard<'a, Syncs> {
        if pause::is_possible() {
            drop(syncs);
            pause::here();
            return self.lock();
        }
        syncs.sleepers += 1;
        let mut syncs = self.ended(mine).wait(syncs).unwrap_or_else(PoisonError::into_inner);
        syncs.sleepers -= 1;
        syncs
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
    fn await_sleepers(flushes: &Flushes, count: usize) {
        let begun = Instant::now();
        while flushes.lock().sleepers < count {
            assert!(begun.elapsed() < Duration::from_secs(60), "nobody sleeps");
            thread::yield_now();
        }
    }

    /// What five threads are told that flush while a sync runs, which comes to `first`, and how many
    /// syncs they make, each of which comes to `then`.
    fn come_meanwhile(
        first: Result<(), Error>,
        then: Result<(), Error>,
    ) -> (Vec<Result<(), Error>>, u32) {
        let (flushes, made) = (Flushes::default(), AtomicU32::new(0));
        let told = thread::scope(|scope| {
            let mut others = Vec::new();
            let done = flushes.share(|| {
                for _ in 0..5 {
                    others.push(scope.spawn(|| {
                        flushes.share(|| {
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
        (told, made.into_inner())
    }

    const LOST: Error = Error::new(libc::ENOSPC, Doing::Flush);
    const LATCHED: Error = Error::new(libc::EIO, Doing::Flush);

    #[test]
    fn c49_all_who_come_while_a_sync_runs_share_the_next_one() {
        assert_eq!(come_meanwhile(Ok(()), Ok(())), (vec![Ok(()); 5], 1));
    }

    #[test]
    fn c51_a_sync_that_failed_fails_all_who_waited_for_it_or_behind_it() {
        assert_eq!(come_meanwhile(Err(LOST), Ok(())), (vec![Err(LATCHED); 5], 0));
        let (mut told, made) = come_meanwhile(Ok(()), Err(LOST));
        told.sort_by_key(|told| told.is_err_and(|error| error == LATCHED));
        assert_eq!((told.remove(0), told, made), (Err(LOST), vec![Err(LATCHED); 4], 1));
    }

    #[test]
    fn c51_after_a_failed_sync_none_is_made() {
        let flushes = Flushes::default();
        assert_eq!(flushes.share(|| Ok(())), Ok(()));
        assert_eq!(flushes.share(|| Err(LOST)), Err(LOST));
        for _ in 0..3 {
            assert_eq!(flushes.share(|| panic!("a sync after a failed one")), Err(LATCHED));
        }
    }
}

/// `cargo test` with `--cfg loom`: every order in which three threads flush, with at most two of them
/// interrupted where they do not wait; without that bound it takes hours.
#[cfg(test)]
#[cfg(loom)]
mod loom_tests {
    use super::*;
    use crate::sync::{Arc, AtomicU32, Ordering};
    use loom::thread;

    fn in_every_order(run: impl Fn() + Sync + Send + 'static) {
        let mut orders = loom::model::Builder::new();
        orders.preemption_bound = Some(2);
        orders.check(run);
    }

    #[derive(Default)]
    struct Device {
        flushes: Flushes,
        /// Writes that were completed.
        written: AtomicU32,
        /// Of these, how many are durable.
        durable: AtomicU32,
        /// A write was lost, and nobody was told yet.
        lost: AtomicU32,
        running: AtomicU32,
    }

    impl Device {
        fn flush(&self) -> Result<(), Error> {
            self.flushes.share(|| {
                assert_eq!(self.running.swap(1, Ordering::Relaxed), 0, "two syncs at a time");
                let written = self.written.load(Ordering::Relaxed);
                let lost = self.lost.swap(0, Ordering::Relaxed);
                self.durable.store(written, Ordering::Relaxed);
                self.running.store(0, Ordering::Relaxed);
                if lost > 0 { Err(Error::new(libc::ENOSPC, Doing::Flush)) } else { Ok(()) }
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
    fn c49_whoever_makes_the_sync_it_covers_what_was_written_before_the_flush() {
        in_every_order(|| {
            let device = Arc::new(Device::default());
            let others = [device.clone(), device.clone()].map(|it| thread::spawn(move || it.put()));
            device.put();
            others.into_iter().for_each(|other| other.join().unwrap());
        });
    }

    #[test]
    fn c51_of_flushes_side_by_side_none_succeeds_when_one_is_told_of_a_loss() {
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
