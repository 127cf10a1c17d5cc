//! Workers without threads: each job is a coroutine with its own stack, which runs until it would
//! block.
//!
//! Invariant: one job runs at a time, and the simulation chooses the next. A stack is used by one
//! job at a time and reused after the job has returned.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::mem::ManuallyDrop;

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};
use nowait::{WorkerPool, sim};

/// Bytes of a job's stack. Its large buffers are on the heap.
const STACK_BYTES: usize = 256 << 10;

thread_local! {
    /// The yielder of the running job.
    static RUNNING: Cell<*const Yielder<(), ()>> = const { Cell::new(std::ptr::null()) };
}

type Job = Coroutine<(), (), (), DefaultStack>;

/// The jobs that have started and not returned.
pub struct Coroutines {
    /// `ManuallyDrop`: dropping a paused job would unwind its stack; see `drop`.
    paused: Vec<ManuallyDrop<(Job, *const Yielder<(), ()>)>>,
    stacks: Vec<DefaultStack>,
    limit: usize,
}

impl Coroutines {
    /// Runs at most `limit` jobs at the same time, on this thread.
    pub fn new(limit: usize) -> Self {
        sim::set_yield(Some(yield_now));
        Self { paused: Vec::new(), stacks: Vec::new(), limit }
    }

    /// The number of jobs that could resume or start.
    pub fn choices(&self, workers: &WorkerPool) -> usize {
        let free = self.limit.saturating_sub(self.paused.len());
        self.paused.len() + workers.waiting().min(free)
    }

    /// Runs one of the choices until it pauses or ends.
    ///
    /// # Errors
    /// The errno of mmap(2) if there is no memory for a stack.
    pub fn run(&mut self, choice: usize, workers: &WorkerPool) -> std::io::Result<()> {
        if let Some(index) = choice.checked_sub(self.paused.len()) {
            let Some(job) = workers.take_simulated(index) else { return Ok(()) };
            let workers = workers.clone();
            return self.start(move || workers.run(job));
        }
        let (job, yielder) = ManuallyDrop::into_inner(self.paused.swap_remove(choice));
        RUNNING.set(yielder);
        self.resume(job);
        Ok(())
    }

    /// Starts a job that is not a worker's, and runs it until it pauses or ends.
    ///
    /// # Errors
    /// Like [`Coroutines::run`].
    pub fn start(&mut self, job: impl FnOnce() + 'static) -> std::io::Result<()> {
        let stack = match self.stacks.pop() {
            Some(stack) => stack,
            None => DefaultStack::new(STACK_BYTES)?,
        };
        self.resume(Coroutine::with_stack(stack, move |yielder, ()| {
            RUNNING.set(yielder);
            job();
        }));
        Ok(())
    }

    fn resume(&mut self, mut job: Job) {
        let done = job.resume(());
        let yielder = RUNNING.replace(std::ptr::null());
        match done {
            CoroutineResult::Return(()) => self.stacks.push(job.into_stack()),
            CoroutineResult::Yield(()) => self.paused.push(ManuallyDrop::new((job, yielder))),
        }
    }
}

impl Drop for Coroutines {
    /// Leaks the jobs that have not ended, with everything that they own; only a failed simulation
    /// has some.
    fn drop(&mut self) {
        sim::set_yield(None);
    }
}

/// Yields, if the caller runs in a job.
fn yield_now() {
    let yielder = RUNNING.get();
    // SAFETY: the pointer was set by the running job, whose stack holds the yielder.
    if let Some(yielder) = unsafe { yielder.as_ref() } {
        yielder.suspend(());
    }
}
