//! Requests that must wait: they go to the device's crew and come home through `Remote`.
//!
//! Invariant: between `Workers::post` and the slot's way home, the engine touches nothing that the
//! job points to (the request's state is `Worker`).
//! Knows: blocking, crew, remote, disk. Known by: engine.
#![allow(unsafe_code)]

use std::sync::Arc;

use crate::blocking;
use crate::crew::Crew;
use crate::disk::Disk;
use crate::io::{Io, Span};
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
    let disk = disk.clone();
    move |job: Job| {
        let result = run(&disk, &job);
        job.home.push(job.slot, result);
    }
}

fn run<M: Map>(disk: &Disk<M>, job: &Job) -> i64 {
    let done = match job.task {
        Task::Echo { result } => return result,
        Task::Sync { result } => disk.flush().map(|()| result),
        Task::Run => {
            // SAFETY: see `Job`.
            let done = unsafe { blocking::run(disk, job.io, &*job.segments, &mut *job.spans) };
            done.map(|bytes| bytes as i64)
        }
    };
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
