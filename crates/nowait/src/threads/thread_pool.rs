//! A bounded pool of threads that may block (C37, C40).
//!
//! Invariant: at most `limit` threads run. Jobs of one client start in the order of their push,
//! several of them together if the job says so. No job is lost: dropping the pool runs the queued
//! jobs and joins the threads. A thread survives a job that panics.

#[cfg(feature = "sim")]
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::threads::fair_queue::FairQueue;
use crate::threads::work_item::WorkItem;

/// How long a thread waits for a job before it ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs jobs: one, or several that [`WorkItem::joins`] has put together. It takes them out.
type RunJobs<J> = dyn Fn(&mut Vec<J>) + Send + Sync;

struct PoolState<J> {
    queue: FairQueue<J>,
    idle: usize,
    /// Threads that have not begun to end.
    alive: usize,
    threads: Vec<JoinHandle<()>>,
    closed: bool,
    /// Jobs of a pool without threads; a simulation takes them.
    #[cfg(feature = "sim")]
    manual: Option<VecDeque<J>>,
}

struct Shared<J> {
    jobs: Mutex<PoolState<J>>,
    ready: Condvar,
    run: Box<RunJobs<J>>,
    idle: Duration,
}

impl<J: WorkItem> Shared<J> {
    fn lock(&self) -> MutexGuard<'_, PoolState<J>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run_worker(&self) {
        let mut jobs = self.lock();
        let mut run = Vec::new();
        loop {
            if let Some(client) = jobs.queue.pop(&mut run) {
                let more = run.len() > 1 && jobs.idle > 0 && jobs.queue.has_ready();
                drop(jobs);
                // `push` has counted all that is behind a job that joins as one.
                if more {
                    self.ready.notify_one();
                }
                // A job that panics has to answer its own request.
                let _ = catch_unwind(AssertUnwindSafe(|| (self.run)(&mut run)));
                run.clear();
                jobs = self.lock();
                jobs.queue.ended(client);
            } else if jobs.closed {
                // Jobs that are still queued belong to clients at their limit: the threads that run
                // those clients' jobs take them.
                return;
            } else {
                jobs.idle += 1;
                let waited = self.ready.wait_timeout(jobs, self.idle);
                let timeout;
                (jobs, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
                jobs.idle -= 1;
                if timeout.timed_out() && jobs.queue.len() == 0 {
                    jobs.alive -= 1;
                    return;
                }
            }
        }
    }
}

/// The pool. Threads start when more jobs are queued than threads are idle, and end after
/// [`IDLE_TIMEOUT`] without a job. A function that runs jobs leaves none in its argument.
pub(crate) struct ThreadPool<J: WorkItem> {
    shared: Arc<Shared<J>>,
    limit: usize,
}

impl<J: WorkItem> ThreadPool<J> {
    pub(crate) fn new(limit: u32, run: impl Fn(&mut Vec<J>) + Send + Sync + 'static) -> Self {
        Self::ending_after(IDLE_TIMEOUT, limit, run)
    }

    /// A pool whose threads end after the time `idle` without a job.
    fn ending_after(
        idle: Duration,
        limit: u32,
        run: impl Fn(&mut Vec<J>) + Send + Sync + 'static,
    ) -> Self {
        let limit = limit.clamp(1, 1024) as usize;
        let jobs = PoolState {
            // A client with many slow jobs leaves a quarter of the threads to other clients.
            queue: FairQueue::new(limit - limit / 4),
            idle: 0,
            alive: 0,
            threads: Vec::new(),
            closed: false,
            #[cfg(feature = "sim")]
            manual: None,
        };
        let (jobs, ready, run) = (Mutex::new(jobs), Condvar::new(), Box::new(run));
        Self { shared: Arc::new(Shared { jobs, ready, run, idle }), limit }
    }

    /// Queues `jobs`. Runs them on the calling thread only if no thread at all can be started.
    pub(crate) fn push(&self, jobs: impl IntoIterator<Item = J>) {
        let mut state = self.shared.lock();
        #[cfg(feature = "sim")]
        if let Some(by_hand) = &mut state.manual {
            return by_hand.extend(jobs);
        }
        let mut runs = 0;
        for job in jobs {
            let begins = state.queue.push(job.client(), job);
            runs += usize::from(begins);
        }
        self.start_missing(&mut state);
        if state.alive == 0 {
            let orphans = state.queue.drain();
            drop(state);
            orphans.into_iter().for_each(|job| (self.shared.run)(&mut vec![job]));
            return;
        }
        let idle = state.idle;
        drop(state);
        if runs < idle {
            (0..runs).for_each(|_| self.shared.ready.notify_one());
        } else {
            self.shared.ready.notify_all();
        }
    }

    /// Starts a thread for each queued job beyond the idle threads, up to the limit.
    fn start_missing(&self, state: &mut PoolState<J>) {
        let missing = state.queue.len().saturating_sub(state.idle);
        let more = missing.min(self.limit - state.alive);
        if more > 0 {
            state.threads.retain(|thread| !thread.is_finished());
        }
        for _ in 0..more {
            let shared = self.shared.clone();
            let thread = std::thread::Builder::new().name("nowait-worker".into());
            match thread.spawn(move || shared.run_worker()) {
                Ok(handle) => state.threads.push(handle),
                Err(_) => break,
            }
            state.alive += 1;
        }
    }
}

#[cfg(feature = "sim")]
impl<J: WorkItem> ThreadPool<J> {
    /// A pool without threads, whose jobs wait for [`ThreadPool::take`].
    pub(crate) fn manual(run: impl Fn(&mut Vec<J>) + Send + Sync + 'static) -> Self {
        let pool = Self::new(1, run);
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
            && job.client() == run[0].client()
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
        let mut jobs = self.shared.lock();
        jobs.closed = true;
        let threads = std::mem::take(&mut jobs.threads);
        drop(jobs);
        self.shared.ready.notify_all();
        for thread in threads {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    impl WorkItem for usize {
        fn client(&self) -> u64 {
            *self as u64 % 5
        }
    }

    /// Runs jobs one by one.
    fn each(run: impl Fn(usize) + Send + Sync) -> impl Fn(&mut Vec<usize>) + Send + Sync {
        move |jobs| jobs.drain(..).for_each(&run)
    }

    #[test]
    fn idle_threads_end_and_start_again_for_new_jobs() {
        let ran = Arc::new(AtomicUsize::new(0));
        let ran2 = ran.clone();
        let pool = ThreadPool::ending_after(
            Duration::from_millis(1),
            4,
            each(move |_| {
                ran2.fetch_add(1, Ordering::SeqCst);
            }),
        );
        for round in 1..=3 {
            pool.push(0..10);
            while pool.shared.lock().alive > 0 || pool.shared.lock().queue.len() > 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(ran.load(Ordering::SeqCst), round * 10);
            assert!(pool.shared.lock().threads.len() <= 2 * 4);
        }
    }

    #[test]
    fn a_thread_survives_a_job_that_panics() {
        let (sender, ran) = std::sync::mpsc::channel();
        let run = each(move |job| {
            assert!(job != 1, "on purpose");
            sender.send((job, std::thread::current().id())).unwrap();
        });
        let pool = ThreadPool::new(1, run);
        pool.push(0..3);
        let (first, second) = (ran.recv().unwrap(), ran.recv().unwrap());
        assert_eq!((first.0, second.0, first.1), (0, 2, second.1));
    }

    /// One client has more slow jobs than there are threads.
    #[test]
    fn a_client_with_slow_jobs_leaves_threads_to_other_clients() {
        let blocker = Arc::new(Mutex::new(()));
        let (sender, ran) = std::sync::mpsc::channel();
        let blocker2 = blocker.clone();
        let run = each(move |job| {
            if job.is_multiple_of(5) {
                drop(blocker2.lock().unwrap());
            }
            sender.send(job).unwrap();
        });
        let pool = ThreadPool::new(4, run);
        let blocked = blocker.lock().unwrap();
        pool.push((0..20).map(|n| n * 5));
        pool.push([1, 2]);
        // Two threads run these jobs, in either order.
        let mut quick = [ran.recv().unwrap(), ran.recv().unwrap()];
        quick.sort_unstable();
        assert_eq!(quick, [1, 2]);
        drop(blocked);
        assert_eq!(ran.iter().take(20).count(), 20);
    }

    #[test]
    fn c40_every_job_runs_once_on_no_more_threads_than_the_limit() {
        let (ran, now, peak) = (
            Arc::new(AtomicUsize::new(0)),
            Arc::new(AtomicUsize::new(0)),
            Arc::new(AtomicUsize::new(0)),
        );
        let (ran2, now2, peak2) = (ran.clone(), now.clone(), peak.clone());
        let run = each(move |job| {
            peak2.fetch_max(now2.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            std::thread::yield_now();
            ran2.fetch_add(job, Ordering::SeqCst);
            now2.fetch_sub(1, Ordering::SeqCst);
        });
        let pool = ThreadPool::new(3, run);
        for n in 0..100 {
            pool.push([n, n]);
        }
        drop(pool);
        assert_eq!(ran.load(Ordering::SeqCst), 99 * 100);
        assert!(peak.load(Ordering::SeqCst) <= 3 && now.load(Ordering::SeqCst) == 0);
    }
}
