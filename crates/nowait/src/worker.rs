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
        let disk = disk.clone();
        Self(Arc::new(Crew::new(limit, move |job: Job| {
            let result = run(&disk, &job);
            job.home.push(job.slot, result);
        })))
    }

    pub(crate) fn post(&self, jobs: impl IntoIterator<Item = Job>) {
        self.0.post(jobs);
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
