//! Workers without threads: each job has a stack of its own and runs until it would wait.
//!
//! Invariant: one runs at a time, and who runs next is said by the simulation. A stack is used by
//! one job only, and again when that has ended.
//! Knows: nothing here. Known by: world.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::mem::ManuallyDrop;

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};
use nowait::{Workers, sim};

/// Bytes of a job's stack. Its large buffers are on the heap.
const STACK_BYTES: usize = 256 << 10;

thread_local! {
    /// What the job that runs now pauses with.
    static RUNNING: Cell<*const Yielder<(), ()>> = const { Cell::new(std::ptr::null()) };
}

type Job = Coroutine<(), (), (), DefaultStack>;

/// Jobs that have begun and not ended.
pub struct Fibers {
    /// A job that is dropped in the middle would be torn down frame by frame; see `drop`.
    paused: Vec<ManuallyDrop<(Job, *const Yielder<(), ()>)>>,
    stacks: Vec<DefaultStack>,
    limit: usize,
}

impl Fibers {
    /// At most `limit` jobs at the same time, on this thread.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        sim::set_pause(Some(pause));
        Self { paused: Vec::new(), stacks: Vec::new(), limit }
    }

    /// Jobs that could go on, or begin.
    #[must_use]
    pub fn choices(&self, workers: &Workers) -> usize {
        let free = self.limit.saturating_sub(self.paused.len());
        self.paused.len() + workers.waiting().min(free)
    }

    /// Lets one of the choices run until it pauses or ends.
    ///
    /// # Errors
    /// What mmap(2) said when there is no memory for a stack.
    pub fn run(&mut self, choice: usize, workers: &Workers) -> std::io::Result<()> {
        if let Some(index) = choice.checked_sub(self.paused.len()) {
            let Some(job) = workers.take(index) else { return Ok(()) };
            let workers = workers.clone();
            return self.begin(move || workers.run(job));
        }
        let (job, yielder) = ManuallyDrop::into_inner(self.paused.swap_remove(choice));
        RUNNING.set(yielder);
        self.go_on(job);
        Ok(())
    }

    /// Begins a job beside those of workers, and lets it run until it pauses or ends.
    ///
    /// # Errors
    /// As [`Fibers::run`].
    pub fn begin(&mut self, job: impl FnOnce() + 'static) -> std::io::Result<()> {
        let stack = match self.stacks.pop() {
            Some(stack) => stack,
            None => DefaultStack::new(STACK_BYTES)?,
        };
        self.go_on(Coroutine::with_stack(stack, move |yielder, ()| {
            RUNNING.set(yielder);
            job();
        }));
        Ok(())
    }

    fn go_on(&mut self, mut job: Job) {
        let done = job.resume(());
        let yielder = RUNNING.replace(std::ptr::null());
        match done {
            CoroutineResult::Return(()) => self.stacks.push(job.into_stack()),
            CoroutineResult::Yield(()) => self.paused.push(ManuallyDrop::new((job, yielder))),
        }
    }
}

impl Drop for Fibers {
    /// Leaves jobs that have not ended as they are, and leaks what they hold: what is left of a
    /// simulation that has failed.
    fn drop(&mut self) {
        sim::set_pause(None);
    }
}

/// Lets others run, if it is a job that asks.
fn pause() {
    let yielder = RUNNING.get();
    // SAFETY: set by the job that runs now, on whose stack the yielder is.
    if let Some(yielder) = unsafe { yielder.as_ref() } {
        yielder.suspend(());
    }
}
