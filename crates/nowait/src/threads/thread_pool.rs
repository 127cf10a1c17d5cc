//! A bounded pool of threads that may block (C37, C40), for one device or for many.
//!
//! Invariant: at most `limit` threads run, not counted those whose jobs are stuck, up to
//! [`MAX_STUCK`]. Jobs of one client start in the order of their push, several of them together if
//! the job says so. No job is lost: dropping the pool runs the queued jobs and joins the threads. A
//! thread survives a job that panics.
//!
//! A pool for many devices keeps a quarter of its threads from each, and adds threads in place of
//! those whose jobs are stuck (`watcher.rs`), so that devices whose jobs never return take no
//! thread from another one.

#[cfg(feature = "sim")]
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::threads::fair_queue::FairQueue;
use crate::threads::thread_pool::watcher::{MAX_STUCK, STUCK, Watcher};
use crate::threads::work_item::WorkItem;

mod watcher;

/// The greatest limit of threads of a pool.
/// Beyond it: the pool has this limit.
const MAX_THREADS: u32 = 1024;
/// How long a worker waits for a job.
/// Beyond it: the thread ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs jobs: one, or several that [`WorkItem::joins`] has put together. It takes them out.
type RunJobs<J> = dyn Fn(&mut Vec<J>) + Send + Sync;

/// The place of a thread in `PoolState::places`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// No thread has it.
    Free,
    /// The thread runs no job.
    Idle,
    Running {
        /// `PoolState::tick` when the job began.
        since: u64,
    },
    /// The thread's job runs for so long that it is not counted.
    Stuck,
}

struct PoolState<J> {
    queue: FairQueue<J>,
    idle: usize,
    /// An idle thread was woken, and has not yet run.
    waking: bool,
    /// Threads that have not begun to end.
    alive: usize,
    /// Threads in [`Place::Stuck`].
    stuck: usize,
    places: Vec<Place>,
    watcher: Watcher,
    /// Periods that the watcher has begun.
    tick: u64,
    /// The last attempt to start a thread failed.
    refused: bool,
    threads: Vec<JoinHandle<()>>,
    closed: bool,
    /// Jobs of a pool without threads; a simulation takes them.
    #[cfg(feature = "sim")]
    manual: Option<VecDeque<J>>,
    /// The system starts no thread.
    #[cfg(test)]
    refuse: bool,
}

impl<J: WorkItem> PoolState<J> {
    /// Whether the caller has to wake an idle thread: a job may be taken, and no thread is being woken. Each thread wakes the next
    /// one before it runs its job. So jobs that wait have a thread each, one after the other, and those that do not wait are run by
    /// as many threads as there are free processors; all that are idle would compete with the threads that push.
    fn wakes_next(&mut self) -> bool {
        let wakes = self.queue.ready() > 0 && self.idle > 0 && !self.waking;
        self.waking |= wakes;
        wakes
    }
}

impl<J> PoolState<J> {
    /// Threads that count against the limit.
    fn counted(&self) -> usize {
        self.alive - self.stuck.min(MAX_STUCK)
    }

    /// Starts a thread, if the system can.
    fn spawn(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> bool {
        #[cfg(test)]
        if self.refuse {
            return false;
        }
        let Ok(thread) = std::thread::Builder::new().name(name.into()).spawn(run) else {
            return false;
        };
        self.threads.retain(|thread| !thread.is_finished());
        self.threads.push(thread);
        true
    }

    /// A place that no thread has.
    fn free_place(&mut self) -> usize {
        let free = self.places.iter().position(|&place| place == Place::Free);
        free.unwrap_or_else(|| {
            self.places.push(Place::Free);
            self.places.len() - 1
        })
    }
}

/// The sizes and times of a pool.
#[derive(Clone, Copy)]
struct Bounds {
    /// The greatest number of threads that count.
    threads: usize,
    /// The greatest number of threads of one device.
    device: usize,
    /// How long a thread waits for a job before it ends.
    idle: Duration,
    /// The period of the watcher; `None` if there is none.
    stuck: Option<Duration>,
}

impl Bounds {
    /// Bounds of a pool for one device, with at most `limit` threads.
    fn of_one_device(limit: u32) -> Self {
        let threads = limit.clamp(1, MAX_THREADS) as usize;
        Self { threads, device: threads, idle: IDLE_TIMEOUT, stuck: None }
    }

    /// Bounds of a pool for many devices, with at most `limit` threads.
    fn of_devices(limit: u32) -> Self {
        let one = Self::of_one_device(limit);
        // A device with many slow jobs leaves a quarter of the threads to other devices.
        let device = (one.threads - one.threads.div_ceil(4)).max(1);
        Self { device, stuck: Some(STUCK), ..one }
    }

    /// The greatest number of threads of one client of a device.
    fn client(&self) -> usize {
        // A client with many slow jobs leaves a quarter of the threads to other clients.
        self.device - self.device / 4
    }
}

struct Shared<J> {
    jobs: Mutex<PoolState<J>>,
    /// Wakes idle threads.
    ready: Condvar,
    /// Wakes the watcher.
    watched: Condvar,
    run: Box<RunJobs<J>>,
    bounds: Bounds,
}

impl<J: WorkItem> Shared<J> {
    fn lock(&self) -> MutexGuard<'_, PoolState<J>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The life of the thread at `place`.
    fn run_worker(self: &Arc<Self>, place: usize) {
        let mut jobs = self.lock();
        let mut run = Vec::new();
        loop {
            if jobs.counted() > self.bounds.threads {
                // A stuck job has returned: there is another thread in place of this one.
                return self.end_worker(&mut jobs, place);
            }
            if let Some(client) = jobs.queue.pop(&mut run) {
                jobs.places[place] = Place::Running { since: jobs.tick };
                self.ensure_watched(&mut jobs);
                let wakes = jobs.wakes_next();
                drop(jobs);
                if wakes {
                    self.ready.notify_one();
                }
                // A job that panics has to answer its own request.
                let _ = catch_unwind(AssertUnwindSafe(|| (self.run)(&mut run)));
                run.clear();
                jobs = self.lock();
                jobs.queue.ended(client);
                if std::mem::replace(&mut jobs.places[place], Place::Idle) == Place::Stuck {
                    self.returned(&mut jobs);
                }
            } else if jobs.closed {
                // Jobs that are still queued belong to clients and devices at their limits: the
                // threads that run their jobs take them.
                return self.end_worker(&mut jobs, place);
            } else {
                jobs.idle += 1;
                let waited = self.ready.wait_timeout(jobs, self.bounds.idle);
                let timeout;
                (jobs, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
                jobs.idle -= 1;
                jobs.waking = false;
                if timeout.timed_out() && jobs.queue.ready() == 0 {
                    return self.end_worker(&mut jobs, place);
                }
            }
        }
    }

    fn end_worker(self: &Arc<Self>, jobs: &mut PoolState<J>, place: usize) {
        jobs.alive -= 1;
        jobs.places[place] = Place::Free;
        self.wake_for_ready(jobs);
        if jobs.closed {
            self.watched.notify_all();
        }
    }

    /// Has a thread look at the jobs that may be taken, if there are any: an idle thread, new ones, or
    /// the watcher.
    fn wake_for_ready(self: &Arc<Self>, jobs: &mut PoolState<J>) {
        if jobs.queue.ready() > 0 {
            if jobs.wakes_next() {
                self.ready.notify_one();
            }
            self.start_missing(jobs);
            self.ensure_watched(jobs);
        }
    }

    /// Starts a thread for each job that may be taken beyond the idle threads, up to the limit.
    fn start_missing(self: &Arc<Self>, jobs: &mut PoolState<J>) {
        let missing = jobs.queue.ready().saturating_sub(jobs.idle);
        let more = missing.min(self.bounds.threads.saturating_sub(jobs.counted()));
        for _ in 0..more {
            let (shared, place) = (self.clone(), jobs.free_place());
            jobs.refused = !jobs.spawn("nowait-worker", move || shared.run_worker(place));
            if jobs.refused {
                break;
            }
            jobs.places[place] = Place::Idle;
            jobs.alive += 1;
        }
    }
}

/// The pool. Threads start when more jobs are queued than threads are idle, and end after
/// [`IDLE_TIMEOUT`] without a job. A function that runs jobs leaves none in its argument.
///
/// Dropping it waits until all jobs have run, however long that takes; before the drop, an owner
/// whose devices may hang calls [`ThreadPool::close`], which waits for a time that it chooses.
pub(crate) struct ThreadPool<J: WorkItem> {
    shared: Arc<Shared<J>>,
}

impl<J: WorkItem> ThreadPool<J> {
    /// A pool of at most `limit` threads for many devices; 1 to 1024, and what is outside is taken
    /// as the nearer bound. Three quarters of them run jobs of one device. Threads whose jobs have
    /// run for more than [`STUCK`] while others waited do not count, but at most [`MAX_STUCK`] of
    /// them.
    pub(crate) fn of_devices(
        limit: u32,
        run: impl Fn(&mut Vec<J>) + Send + Sync + 'static,
    ) -> Self {
        Self::with(Bounds::of_devices(limit), run)
    }

    fn with(bounds: Bounds, run: impl Fn(&mut Vec<J>) + Send + Sync + 'static) -> Self {
        let queue = FairQueue::new(bounds.device, bounds.client());
        let jobs = Mutex::new(PoolState {
            queue,
            idle: 0,
            waking: false,
            alive: 0,
            stuck: 0,
            places: Vec::new(),
            watcher: Watcher::None,
            tick: 0,
            refused: false,
            threads: Vec::new(),
            closed: false,
            #[cfg(feature = "sim")]
            manual: None,
            #[cfg(test)]
            refuse: false,
        });
        let [ready, watched] = [const { Condvar::new() }; 2];
        let run = Box::new(run);
        Self { shared: Arc::new(Shared { jobs, ready, watched, run, bounds }) }
    }

    /// Queues `jobs`. Runs them on the calling thread only if no thread at all can be started.
    pub(crate) fn push(&self, jobs: impl IntoIterator<Item = J>) {
        let shared = &self.shared;
        let mut state = shared.lock();
        #[cfg(feature = "sim")]
        if let Some(by_hand) = &mut state.manual {
            return by_hand.extend(jobs);
        }
        for job in jobs {
            state.queue.push(job);
        }
        shared.start_missing(&mut state);
        if state.alive == 0 {
            let orphans = state.queue.drain();
            drop(state);
            orphans.into_iter().for_each(|job| (shared.run)(&mut vec![job]));
            return;
        }
        shared.ensure_watched(&mut state);
        let wakes = state.wakes_next();
        drop(state);
        if wakes {
            shared.ready.notify_one();
        }
    }

    /// Takes the job of this client of a device for which `is_it`, if it has not begun.
    pub(crate) fn remove(&self, device: u64, client: u64, is_it: impl Fn(&J) -> bool) -> Option<J> {
        let mut state = self.shared.lock();
        #[cfg(feature = "sim")]
        if let Some(by_hand) = &mut state.manual {
            let at = by_hand.iter().position(is_it)?;
            return by_hand.remove(at);
        }
        state.queue.remove(device, client, is_it)
    }
}

impl<J> Shared<J> {
    fn set_closed(&self, jobs: &mut PoolState<J>) {
        jobs.closed = true;
        self.ready.notify_all();
        self.watched.notify_all();
    }
}

#[cfg(feature = "sim")]
impl<J: WorkItem> ThreadPool<J> {
    /// A pool without threads, whose jobs wait for [`ThreadPool::take`].
    pub(crate) fn manual(run: impl Fn(&mut Vec<J>) + Send + Sync + 'static) -> Self {
        let pool = Self::of_devices(1, run);
        pool.shared.lock().manual = Some(VecDeque::new());
        pool
    }

    /// Jobs that were not taken yet.
    pub(crate) fn queued(&self) -> usize {
        self.shared.lock().manual.as_ref().map_or(0, VecDeque::len)
    }

    /// Takes the job at index `n`, counted from the oldest one, and those that join it.
    pub(crate) fn take(&self, n: usize) -> Option<Vec<J>> {
        let mut state = self.shared.lock();
        let jobs = state.manual.as_mut()?;
        let mut run = vec![jobs.remove(n)?];
        while let Some(job) = jobs.get(n)
            && (job.device(), job.client()) == (run[0].device(), run[0].client())
            && J::joins(&run, job)
        {
            run.extend(jobs.remove(n));
        }
        Some(run)
    }

    /// Runs jobs that were taken as a thread of the pool would.
    pub(crate) fn run(&self, mut jobs: Vec<J>) {
        (self.shared.run)(&mut jobs);
    }
}

impl<J: WorkItem> Drop for ThreadPool<J> {
    fn drop(&mut self) {
        self.shared.set_closed(&mut self.shared.lock());
        // The watcher may start more threads meanwhile.
        loop {
            let threads = std::mem::take(&mut self.shared.lock().threads);
            if threads.is_empty() {
                break;
            }
            for thread in threads {
                let _ = thread.join();
            }
        }
    }
}

#[cfg(test)]
mod tests;
