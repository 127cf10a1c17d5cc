//! The watcher of a pool for many devices: it notices that jobs run for long while others wait.
//!
//! It is a thread, which starts when jobs could run but all threads are busy, and ends when that
//! has not been so for the idle time. It looks at the threads in periods. A job that has run for a
//! whole period is stuck until it returns: its thread is not counted, and another one may start.
//!
//! Invariant: with up to 64 devices of which all jobs hang, and more if they hang one after the
//! other, a thread is left for the jobs of each other device: while jobs are stuck a device may run
//! a sixteenth of the places for stuck threads that are left, and at least one job.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::threads::thread_pool::{Place, PoolState, Shared};
use crate::threads::work_item::WorkItem;

/// The period of the watcher. Jobs that others wait for are stuck after once to twice this time.
pub(super) const STUCK: Duration = Duration::from_millis(500);
/// The greatest number of stuck threads that are not counted.
/// Beyond it: no thread is started in place of a stuck one.
pub(super) const MAX_STUCK: usize = 512;
/// The places for stuck threads are left in such parts.
const PARTS: usize = 16;

/// The state of the watcher's thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Watcher {
    /// There is none.
    None,
    /// It waits for the next time that it is needed.
    Idle,
    Watching,
}

impl<J: WorkItem> Shared<J> {
    /// Whether only the passing of time can help jobs that may be taken.
    fn needs_watcher(&self, jobs: &PoolState<J>) -> bool {
        let busy = jobs.idle == 0 && jobs.queue.ready() > 0;
        busy && (jobs.counted() >= self.bounds.threads || jobs.refused)
    }

    /// Has the watcher watch, if it is needed. If it cannot be started, a later call tries again.
    pub(super) fn ensure_watched(self: &Arc<Self>, jobs: &mut PoolState<J>) {
        let Some(period) = self.bounds.stuck else { return };
        if jobs.watcher == Watcher::Watching || !self.needs_watcher(jobs) {
            return;
        }
        if jobs.watcher == Watcher::Idle {
            self.watched.notify_all();
        } else {
            let shared = self.clone();
            if !jobs.spawn("nowait-watcher", move || shared.watch(period)) {
                return;
            }
        }
        jobs.watcher = Watcher::Watching;
    }

    /// The life of the watcher.
    fn watch(self: &Arc<Self>, period: Duration) {
        let mut jobs = self.lock();
        while jobs.watcher == Watcher::Watching {
            while self.needs_watcher(&jobs) {
                jobs.tick += 1;
                let goes_on = |jobs: &mut PoolState<J>| !jobs.closed || self.needs_watcher(jobs);
                let waited = self.watched.wait_timeout_while(jobs, period, goes_on);
                jobs = waited.unwrap_or_else(PoisonError::into_inner).0;
                self.find_stuck(&mut jobs);
            }
            jobs.watcher = Watcher::Idle;
            let idle = |jobs: &mut PoolState<J>| jobs.watcher == Watcher::Idle && !jobs.closed;
            let waited = self.watched.wait_timeout_while(jobs, self.bounds.idle, idle);
            jobs = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        jobs.watcher = Watcher::None;
    }

    /// Finds the jobs that ran when this period began, and starts threads in place of theirs.
    fn find_stuck(self: &Arc<Self>, jobs: &mut PoolState<J>) {
        if self.needs_watcher(jobs) {
            for place in &mut jobs.places {
                if matches!(*place, Place::Running { since } if since < jobs.tick) {
                    *place = Place::Stuck;
                    jobs.stuck += 1;
                }
            }
            self.limit_devices(jobs);
            self.start_missing(jobs);
        }
    }

    /// A stuck job has returned.
    pub(super) fn returned(self: &Arc<Self>, jobs: &mut PoolState<J>) {
        jobs.stuck -= 1;
        self.limit_devices(jobs);
        self.wake_for_ready(jobs);
    }

    /// Sets what a device may run by what is stuck.
    fn limit_devices(&self, jobs: &mut PoolState<J>) {
        jobs.queue.set_device_limit(device_limit(self.bounds.device, jobs.stuck));
    }
}

/// The greatest number of jobs of a device that run at the same time, if that is `share` as long as
/// no job is stuck.
fn device_limit(share: usize, stuck: usize) -> usize {
    let left = MAX_STUCK.saturating_sub(stuck) / PARTS;
    if stuck == 0 { share } else { left.clamp(1, share) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads::thread_pool::Bounds;

    /// Threads that are left for new jobs while those of `stuck` jobs hang.
    fn free(limit: usize, stuck: usize) -> usize {
        limit - (stuck - stuck.min(MAX_STUCK)).min(limit)
    }

    /// Devices that hang until no thread is left, each with all that it may run before the next one
    /// has jobs.
    fn one_after_the_other(limit: usize, share: usize) -> usize {
        let (mut stuck, mut devices) = (0, 0);
        while free(limit, stuck) > 0 {
            let mut runs = 0;
            while runs < device_limit(share, stuck) && free(limit, stuck) > 0 {
                let more = (device_limit(share, stuck) - runs).min(free(limit, stuck));
                (runs, stuck) = (runs + more, stuck + more);
            }
            devices += 1;
        }
        devices
    }

    /// Devices that hang until no thread is left, in each period as many as it takes for all threads.
    fn many_in_each_period(limit: usize, share: usize) -> usize {
        let (mut stuck, mut devices) = (0, 0);
        while free(limit, stuck) > 0 {
            let (runs, most) = (free(limit, stuck), device_limit(share, stuck));
            (stuck, devices) = (stuck + runs, devices + runs.div_ceil(most));
        }
        devices
    }

    #[test]
    fn more_than_64_devices_have_to_hang_before_no_thread_is_left() {
        for limit in 1..=1024 {
            let Bounds { threads, device, .. } = Bounds::of_devices(limit);
            let devices =
                [one_after_the_other, many_in_each_period].map(|hang| hang(threads, device));
            assert!(devices.iter().all(|&devices| devices > 64), "limit {limit}: {devices:?}");
        }
    }

    #[test]
    fn a_device_may_run_its_share_or_a_part_of_what_is_left_and_always_one_job() {
        assert_eq!(
            [0, 1, 320, 321, 480, 481, 512, 900].map(|stuck| device_limit(12, stuck)),
            [12, 12, 12, 11, 2, 1, 1, 1]
        );
        assert_eq!([0, 1].map(|stuck| device_limit(768, stuck)), [768, 31]);
        assert_eq!([0, 1, 511, 512].map(|stuck| device_limit(1, stuck)), [1; 4]);
    }
}
