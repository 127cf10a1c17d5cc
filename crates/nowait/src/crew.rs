//! A bounded crew of threads that may block (C37, C40).
//!
//! Invariant: at most `limit` threads; a job waits its turn in order and is never dropped, also
//! not when the crew is: dropping it runs what is queued and joins the threads.
//! Knows: nothing. Known by: queue/threads, disk.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

struct Jobs<J> {
    queued: VecDeque<J>,
    idle: usize,
    threads: Vec<JoinHandle<()>>,
    closed: bool,
    /// No thread is started: somebody else takes the jobs.
    #[cfg(feature = "sim")]
    by_hand: bool,
}

struct Shared<J> {
    jobs: Mutex<Jobs<J>>,
    ready: Condvar,
    run: Box<dyn Fn(J) + Send + Sync>,
}

impl<J> Shared<J> {
    fn lock(&self) -> MutexGuard<'_, Jobs<J>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut jobs = self.lock();
        loop {
            if let Some(job) = jobs.queued.pop_front() {
                drop(jobs);
                (self.run)(job);
                jobs = self.lock();
            } else if jobs.closed {
                return;
            } else {
                jobs.idle += 1;
                jobs = self.ready.wait(jobs).unwrap_or_else(PoisonError::into_inner);
                jobs.idle -= 1;
            }
        }
    }
}

/// The crew. Threads start when there is more to do than there are idle ones.
pub(crate) struct Crew<J: Send + 'static> {
    shared: Arc<Shared<J>>,
    limit: usize,
}

impl<J: Send + 'static> Crew<J> {
    pub(crate) fn new(limit: u32, run: impl Fn(J) + Send + Sync + 'static) -> Self {
        let jobs = Jobs {
            queued: VecDeque::new(),
            idle: 0,
            threads: Vec::new(),
            closed: false,
            #[cfg(feature = "sim")]
            by_hand: false,
        };
        let shared = Shared { jobs: Mutex::new(jobs), ready: Condvar::new(), run: Box::new(run) };
        Self { shared: Arc::new(shared), limit: limit.clamp(1, 1024) as usize }
    }

    /// Queues `jobs`. Runs them on this thread only if no thread at all can be started.
    pub(crate) fn post(&self, jobs: impl IntoIterator<Item = J>) {
        let mut state = self.shared.lock();
        let mut posted = 0;
        for job in jobs {
            state.queued.push_back(job);
            posted += 1;
        }
        #[cfg(feature = "sim")]
        if state.by_hand {
            return;
        }
        let missing = state.queued.len().saturating_sub(state.idle);
        for _ in 0..missing.min(self.limit - state.threads.len()) {
            let shared = self.shared.clone();
            let thread = std::thread::Builder::new().name("nowait-worker".into());
            match thread.spawn(move || shared.work()) {
                Ok(handle) => state.threads.push(handle),
                Err(_) => break,
            }
        }
        if state.threads.is_empty() {
            let orphans: Vec<J> = state.queued.drain(..).collect();
            drop(state);
            orphans.into_iter().for_each(|job| (self.shared.run)(job));
            return;
        }
        drop(state);
        if posted == 1 { self.shared.ready.notify_one() } else { self.shared.ready.notify_all() }
    }
}

#[cfg(feature = "sim")]
impl<J: Send + 'static> Crew<J> {
    /// A crew without threads, whose jobs wait for [`Crew::take`].
    pub(crate) fn by_hand(run: impl Fn(J) + Send + Sync + 'static) -> Self {
        let crew = Self::new(1, run);
        crew.shared.lock().by_hand = true;
        crew
    }

    /// Jobs that nobody has taken.
    pub(crate) fn queued(&self) -> usize {
        self.shared.lock().queued.len()
    }

    /// Takes one of the jobs, counted from the one that was posted first.
    pub(crate) fn take(&self, n: usize) -> Option<J> {
        self.shared.lock().queued.remove(n)
    }

    /// Does what a thread would do with a job.
    pub(crate) fn run(&self, job: J) {
        (self.shared.run)(job);
    }
}

impl<J: Send + 'static> Drop for Crew<J> {
    fn drop(&mut self) {
        let mut jobs = self.shared.lock();
        jobs.closed = true;
        let threads = std::mem::take(&mut jobs.threads);
        drop(jobs);
        self.shared.ready.notify_all();
        for thread in threads {
            // A worker that panicked has said so on stderr; there is nothing to add.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn c40_every_job_runs_once_and_no_more_threads_than_the_bound() {
        let (ran, now, most) = (
            Arc::new(AtomicUsize::new(0)),
            Arc::new(AtomicUsize::new(0)),
            Arc::new(AtomicUsize::new(0)),
        );
        let (ran2, now2, most2) = (ran.clone(), now.clone(), most.clone());
        let crew = Crew::new(3, move |job: usize| {
            most2.fetch_max(now2.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            std::thread::yield_now();
            ran2.fetch_add(job, Ordering::SeqCst);
            now2.fetch_sub(1, Ordering::SeqCst);
        });
        for n in 0..100 {
            crew.post([n, n]);
        }
        drop(crew);
        assert_eq!(ran.load(Ordering::SeqCst), 99 * 100);
        assert!(most.load(Ordering::SeqCst) <= 3 && now.load(Ordering::SeqCst) == 0);
    }
}
