//! A bounded pool of threads that may block (C37, C40).
//!
//! Invariant: at most `limit` threads run. Jobs of one client start in the order of their push. No
//! job is lost: dropping the pool runs the queued jobs and joins the threads. A thread survives a
//! job that panics.

#[cfg(feature = "sim")]
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::threads::fair_queue::FairQueue;

/// How long a thread waits for a job before it ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// A job of the pool.
pub(crate) trait WorkItem: Send + 'static {
    /// The number of the client that the job is for; clients take turns.
    fn client(&self) -> u64;
}

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
    run: Box<dyn Fn(J) + Send + Sync>,
    idle: Duration,
}

impl<J: WorkItem> Shared<J> {
    fn lock(&self) -> MutexGuard<'_, PoolState<J>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run_worker(&self) {
        let mut jobs = self.lock();
        loop {
            if let Some((client, job)) = jobs.queue.pop() {
                drop(jobs);
                // A job that panics has to answer its own request.
                let _ = catch_unwind(AssertUnwindSafe(|| (self.run)(job)));
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
/// [`IDLE_TIMEOUT`] without a job.
pub(crate) struct ThreadPool<J: WorkItem> {
    shared: Arc<Shared<J>>,
    limit: usize,
}

impl<J: WorkItem> ThreadPool<J> {
    pub(crate) fn new(limit: u32, run: impl Fn(J) + Send + Sync + 'static) -> Self {
        Self::ending_after(IDLE_TIMEOUT, limit, run)
    }

    /// A pool whose threads end after the time `idle` without a job.
    fn ending_after(idle: Duration, limit: u32, run: impl Fn(J) + Send + Sync + 'static) -> Self {
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
        let mut queued = 0;
        for job in jobs {
            state.queue.push(job.client(), job);
            queued += 1;
        }
        self.start_missing(&mut state);
        if state.alive == 0 {
            let orphans = state.queue.drain();
            drop(state);
            orphans.into_iter().for_each(|job| (self.shared.run)(job));
            return;
        }
        drop(state);
        if queued == 1 { self.shared.ready.notify_one() } else { self.shared.ready.notify_all() }
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
    pub(crate) fn manual(run: impl Fn(J) + Send + Sync + 'static) -> Self {
        let pool = Self::new(1, run);
        pool.shared.lock().manual = Some(VecDeque::new());
        pool
    }

    /// Jobs that were not taken yet.
    pub(crate) fn queued(&self) -> usize {
        self.shared.lock().manual.as_ref().map_or(0, VecDeque::len)
    }

    /// Takes the job at index `n`, counted from the oldest one.
    pub(crate) fn take(&self, n: usize) -> Option<J> {
        self.shared.lock().manual.as_mut()?.remove(n)
    }

    /// Runs a job as a thread of the pool would.
    pub(crate) fn run(&self, job: J) {
        (self.shared.run)(job);
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

    #[test]
    fn idle_threads_end_and_start_again_for_new_jobs() {
        let ran = Arc::new(AtomicUsize::new(0));
        let ran2 = ran.clone();
        let pool = ThreadPool::ending_after(Duration::from_millis(1), 4, move |_: usize| {
            ran2.fetch_add(1, Ordering::SeqCst);
        });
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
        let pool = ThreadPool::new(1, move |job: usize| {
            assert!(job != 1, "on purpose");
            sender.send((job, std::thread::current().id())).unwrap();
        });
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
        let pool = ThreadPool::new(4, move |job: usize| {
            if job.is_multiple_of(5) {
                drop(blocker2.lock().unwrap());
            }
            sender.send(job).unwrap();
        });
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
        let pool = ThreadPool::new(3, move |job: usize| {
            peak2.fetch_max(now2.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            std::thread::yield_now();
            ran2.fetch_add(job, Ordering::SeqCst);
            now2.fetch_sub(1, Ordering::SeqCst);
        });
        for n in 0..100 {
            pool.push([n, n]);
        }
        drop(pool);
        assert_eq!(ran.load(Ordering::SeqCst), 99 * 100);
        assert!(peak.load(Ordering::SeqCst) <= 3 && now.load(Ordering::SeqCst) == 0);
    }
}
