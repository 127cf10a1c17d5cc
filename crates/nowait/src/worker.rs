//! Requests that must wait: they go to the device's crew and come home through `Remote`.
//!
//! Invariant: between `Workers::post` and the slot's way home, the engine touches nothing that the
//! job points to (the request's state is `Worker`).
//! Knows: error, io, blocking, crew, remote, disk. Known by: engine.
#![allow(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError};

use crate::blocking;
use crate::crew::Crew;
use crate::disk::Disk;
use crate::error::Error;
use crate::io::{Io, Op, Span};
use crate::iov::Segment;
use crate::map::Map;
use crate::remote::Remote;

/// What a worker does for a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Task {
    /// The whole request.
    Run,
    /// Only what makes its write durable; the data is in place and `result` bytes long.
    Sync {
        /// What the request comes to when that succeeds.
        result: i64,
    },
    /// Nothing: the detour of a completion that is not inline.
    Echo {
        /// What the request came to.
        result: i64,
    },
}

pub(crate) struct Job {
    pub(crate) task: Task,
    pub(crate) io: Io,
    pub(crate) segments: *const [Segment],
    pub(crate) spans: *mut Vec<Span>,
    pub(crate) slot: u32,
    pub(crate) home: Arc<Remote>,
}

// SAFETY: the pointers are into a slot in state `Worker`, which its engine leaves alone and keeps
// in place until the slot came home; the memory behind the segments was promised to stay valid
// until the request's completion.
unsafe impl Send for Job {}

/// The threads of one device that may block; shared by all of its engines.
#[derive(Clone)]
pub struct Workers(Arc<Crew<Job>>);

impl Workers {
    /// At most `limit` threads for `disk`; they start when first needed.
    pub fn new<M: Map>(disk: &Arc<Disk<M>>, limit: u32) -> Self {
        Self(Arc::new(Crew::new(limit, work_on(disk))))
    }

    pub(crate) fn post(&self, jobs: impl IntoIterator<Item = Job>) {
        self.0.post(jobs);
    }
}

/// What a worker of `disk` does with a job.
fn work_on<M: Map>(disk: &Arc<Disk<M>>) -> impl Fn(Job) + Send + Sync + use<M> {
    let (disk, flushing) = (disk.clone(), Mutex::default());
    move |job: Job| {
        if let Some(result) = job.flushed() {
            return flush(&disk, &flushing, job, result);
        }
        let result = run(&disk, &job);
        job.home.push(job.slot, result);
    }
}

/// Jobs that are nothing but a flush, and wait for the next sync. So they share it however few
/// workers there are, and hold none of them.
#[derive(Default)]
struct Flushing {
    /// A worker makes a sync, and looks for those who wait when it is through.
    running: bool,
    /// Each with what it comes to if the sync succeeds.
    waiting: Vec<(Job, i64)>,
}

/// Flushes for `job` and all who wait, as long as somebody does; or leaves that to the worker that
/// makes a sync now. While one tells those whom a sync has served, another may make the next one.
fn flush<M: Map>(disk: &Disk<M>, flushing: &Mutex<Flushing>, job: Job, result: i64) {
    let lock = || flushing.lock().unwrap_or_else(PoisonError::into_inner);
    let mut now = lock();
    now.waiting.push((job, result));
    while !now.running && !now.waiting.is_empty() {
        let served = std::mem::take(&mut now.waiting);
        now.running = true;
        drop(now);
        let flushed = disk.flush();
        lock().running = false;
        for (job, result) in served {
            job.home.push(job.slot, outcome(flushed.map(|()| result)));
        }
        now = lock();
    }
}

impl Job {
    /// What it comes to if it is nothing but a flush, and that succeeds.
    fn flushed(&self) -> Option<i64> {
        match self.task {
            Task::Sync { result } => Some(result),
            Task::Run if self.io.op == Op::Flush => Some(0),
            Task::Run | Task::Echo { .. } => None,
        }
    }
}

fn run<M: Map>(disk: &Disk<M>, job: &Job) -> i64 {
    if let Task::Echo { result } = job.task {
        return result;
    }
    // SAFETY: see `Job`.
    let done = unsafe { blocking::run(disk, job.io, &*job.segments, &mut *job.spans) };
    outcome(done.map(|bytes| bytes as i64))
}

/// What a request comes to, or its errno, negative.
fn outcome(done: Result<i64, Error>) -> i64 {
    done.unwrap_or_else(|error| -i64::from(error.errno()))
}

/// A job that a simulation has taken.
#[cfg(feature = "sim")]
pub struct SimJob(Job);

#[cfg(feature = "sim")]
impl Workers {
    /// Workers for `disk` that are no threads: each job waits until a simulation takes it.
    pub fn simulated<M: Map>(disk: &Arc<Disk<M>>) -> Self {
        Self(Arc::new(Crew::by_hand(work_on(disk))))
    }

    /// Jobs that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.0.queued()
    }

    /// Takes one of the jobs that wait, counted from the oldest.
    #[must_use]
    pub fn take(&self, n: usize) -> Option<SimJob> {
        self.0.take(n).map(SimJob)
    }

    /// Does what was taken, on this thread.
    pub fn run(&self, job: SimJob) {
        self.0.run(job.0);
    }
}
