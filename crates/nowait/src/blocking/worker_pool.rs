//! Requests that must wait: they run on a pool of threads, writes that touch together, and
//! their slots return to the owner thread through a `CompletionList`.
//!
//! Invariant: from `WorkerPool::push` until the slot has returned, the engine accesses nothing that
//! the job points to (the request's state is `Worker`).
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::block::block_map::BlockMap;
use crate::block::device::BlockDevice;
use crate::block::waiting_flushes::WaitingFlush;
use crate::blocking::{joined_writes, sync_io};
use crate::injected_panic;
use crate::threads::completion_list::CompletionList;
use crate::threads::thread_pool::ThreadPool;
use crate::threads::work_item::WorkItem;
use crate::types::error::{Error, Operation};
use crate::types::iovec::IoSegment;
use crate::types::request::{ExtentStatus, Op, Request};

/// The work that a worker does for a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WorkerTask {
    /// The whole request.
    Run,
    /// Only the sync of a durable write, whose data is written.
    Sync {
        /// The request's result if the sync succeeds.
        result: i64,
    },
    /// Nothing: the detour of a completion that is not inline.
    CompleteOnly {
        /// The request's result.
        result: i64,
    },
}

pub(crate) struct WorkerJob {
    pub(crate) task: WorkerTask,
    pub(crate) io: Request,
    pub(crate) segments: *const [IoSegment],
    pub(crate) extents: *mut Vec<ExtentStatus>,
    pub(crate) slot: u32,
    /// The number of the client within its engine.
    pub(crate) client: u32,
    /// It may run together with writes that touch it ([`crate::Config::merge`]).
    pub(crate) merge: bool,
    pub(crate) completions: Arc<CompletionList>,
    pub(crate) device: Arc<dyn JobDevice>,
}

/// The number of a client of an engine in the pool. The address of the completion list distinguishes the engines.
fn client_of(completions: &Arc<CompletionList>, client: u32) -> u64 {
    (Arc::as_ptr(completions) as u64).rotate_left(32) ^ u64::from(client)
}

impl WorkItem for WorkerJob {
    fn device(&self) -> u64 {
        self.device.number()
    }

    fn weight(&self) -> u32 {
        self.device.weight()
    }

    fn client(&self) -> u64 {
        client_of(&self.completions, self.client)
    }

    fn joins(run: &[Self], next: &Self) -> bool {
        let (Some(first), Some(last)) = (run.first(), run.last()) else { return false };
        first.merge
            && next.merge
            && Arc::ptr_eq(&last.completions, &next.completions)
            && Arc::ptr_eq(&last.device, &next.device)
            && joined_writes::joins(first.io, last.io, next.io, run.len())
    }
}

// SAFETY: the pointers are into a slot in state `Worker`, which its engine neither accesses nor
// moves until the slot has returned; the memory behind the segments stays valid until the request's
// completion.
unsafe impl Send for WorkerJob {}

/// The device of a job, whatever its map.
pub(crate) trait JobDevice: Send + Sync {
    /// The number of the device in the process, the same for all engines.
    fn number(&self) -> u64;

    /// Like [`BlockDevice::weight`].
    fn weight(&self) -> u32;

    /// Runs jobs of this device, several of them only if [`WorkItem::joins`] has put them together.
    fn run(&self, jobs: &mut Vec<WorkerJob>);
}

/// A device as its jobs name it.
pub(crate) struct BlockingDevice<M: BlockMap + ?Sized>(pub(crate) Arc<BlockDevice<M>>);

impl<M: BlockMap + ?Sized> JobDevice for BlockingDevice<M> {
    fn number(&self) -> u64 {
        Arc::as_ptr(&self.0).cast::<()>() as u64
    }

    fn weight(&self) -> u32 {
        self.0.weight()
    }

    fn run(&self, jobs: &mut Vec<WorkerJob>) {
        let disk = &*self.0;
        jobs.retain(|job| {
            let stop = job.completions.stop(job.slot).filter(|_| job.task == WorkerTask::Run);
            if let Some(errno) = stop {
                job.completions.push(job.slot, -i64::from(errno));
            }
            stop.is_none()
        });
        let joined = jobs.len() > 1 && run_joined(disk, jobs);
        for job in jobs.drain(..) {
            if let Some(result) = job.result_if_flushed() {
                let WorkerJob { completions, slot, .. } = job;
                disk.waiting.serve(WaitingFlush { completions, slot, result }, || {
                    caught(|| {
                        injected_panic::panic_at("flush");
                        disk.flush()
                    })
                });
                continue;
            }
            let result = if joined { job.io.range.len as i64 } else { run(disk, &job) };
            job.completions.push(job.slot, result);
        }
    }
}

/// Threads that may block, for any number of devices and engines.
#[derive(Clone)]
pub struct WorkerPool(Arc<ThreadPool<WorkerJob>>);

impl Default for WorkerPool {
    fn default() -> Self {
        Self::new(Self::DEFAULT_LIMIT)
    }
}

impl WorkerPool {
    /// The most threads of a pool of workers, unless another number is given.
    /// Beyond it: requests wait for a worker.
    pub const DEFAULT_LIMIT: u32 = 32;

    /// At most `limit` threads, 1 to 1024; they start when first needed. The devices take turns by their
    /// [weights](BlockDevice::set_weight), and then the clients of each. One device runs at most three quarters of the threads, and those whose jobs
    /// do not return are replaced, so that a device that hangs takes no thread from another one.
    #[must_use]
    pub fn new(limit: u32) -> Self {
        Self(Arc::new(ThreadPool::of_devices(limit, run_jobs)))
    }

    /// Drops the job of `slot`, a whole request of `client` in the engine of `completions`; false if it has begun.
    pub(crate) fn remove(
        &self,
        device: u64,
        client: u32,
        completions: &Arc<CompletionList>,
        slot: u32,
    ) -> bool {
        let client = client_of(completions, client);
        let removed = self.0.remove(device, client, |job| {
            job.slot == slot
                && Arc::ptr_eq(&job.completions, completions)
                && job.task == WorkerTask::Run
        });
        removed.is_some()
    }

    pub(crate) fn push(&self, jobs: impl IntoIterator<Item = WorkerJob>) {
        self.0.push(jobs);
    }
}

/// Runs jobs of one device.
fn run_jobs(jobs: &mut Vec<WorkerJob>) {
    if let Some(device) = jobs.first().map(|job| job.device.clone()) {
        device.run(jobs);
    }
}

/// Runs writes that [`WorkItem::joins`] has put together as one. If it returns false, some of their
/// bytes may be written, and each has to run on its own.
fn run_joined<M: BlockMap + ?Sized>(disk: &BlockDevice<M>, jobs: &[WorkerJob]) -> bool {
    let parts = jobs.iter().map(|job| (job.io, job.segments));
    // SAFETY: see `WorkerJob`.
    let done = caught(|| unsafe { joined_writes::run(disk, parts) });
    done.unwrap_or(false)
}

impl WorkerJob {
    /// For a job that is only a flush, its result if the sync succeeds.
    fn result_if_flushed(&self) -> Option<i64> {
        match self.task {
            WorkerTask::Sync { result } => Some(result),
            WorkerTask::Run if self.io.op == Op::Flush => Some(0),
            WorkerTask::Run | WorkerTask::CompleteOnly { .. } => None,
        }
    }
}

fn run<M: BlockMap + ?Sized>(disk: &BlockDevice<M>, job: &WorkerJob) -> i64 {
    if let WorkerTask::CompleteOnly { result } = job.task {
        return result;
    }
    let done = caught(|| {
        injected_panic::panic_at("worker");
        // SAFETY: see `WorkerJob`.
        unsafe { sync_io::run(disk, job.io, &*job.segments, &mut *job.extents) }
    });
    outcome(done.map(|bytes| bytes as i64))
}

/// The result of `run`, or `EIO` if it panics: the request completes, and the worker goes on.
fn caught<T>(run: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    let failed = |_| Err(Error::new(libc::EIO, Operation::Wait));
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(failed)
}

/// The result of a request, or its errno, negative.
fn outcome(done: Result<i64, Error>) -> i64 {
    done.unwrap_or_else(|error| -i64::from(error.errno()))
}

/// A job that a simulation has taken, with those that run together with it.
#[cfg(feature = "sim")]
pub struct SimJob(Vec<WorkerJob>);

#[cfg(feature = "sim")]
impl WorkerPool {
    /// A pool without threads: each job waits until a simulation takes it.
    #[must_use]
    pub fn simulated() -> Self {
        Self(Arc::new(ThreadPool::manual(run_jobs)))
    }

    /// Jobs that were not taken yet.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.0.queued()
    }

    /// Takes the job at index `n`, counted from the oldest one, and the following jobs that a worker
    /// would run together with it.
    #[must_use]
    pub fn take_simulated(&self, n: usize) -> Option<SimJob> {
        self.0.take(n).map(SimJob)
    }

    /// Runs a job on this thread.
    pub fn run(&self, job: SimJob) {
        self.0.run(job.0);
    }
}
