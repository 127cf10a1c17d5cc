//! Engines on every queue, with each switch of [`Config`] off, and waits for their requests.
//!
//! Invariant: no wait for a request is longer than [`BOUND`]; a queue that this system lacks is
//! skipped by name.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use nowait::{
    AioThreadQueue, BlockDevice, BlockMap, Completion, Config, Engine, Error, EventSource, IoQueue,
    Null, OpenOptions, Outcome, QueueFile, QueueFull, SingleDisk, Token, Transfer, Uring,
    WorkerPool,
};

use crate::requirements::required;
use crate::wait::BOUND;

/// The queues of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TestQueueKind {
    /// [`Uring`].
    Uring,
    /// [`AioThreadQueue`].
    Threads,
    /// [`Null`], which moves no data.
    Null,
}

impl TestQueueKind {
    /// The queues that move data.
    pub const REAL: [Self; 2] = [Self::Uring, Self::Threads];
    /// Every queue.
    pub const ALL: [Self; 3] = [Self::Uring, Self::Threads, Self::Null];

    /// A queue with room for `slots` transfers.
    ///
    /// # Errors
    /// As those of the queue.
    pub fn try_queue(self, slots: u32) -> Result<TestQueue, Error> {
        match self {
            Self::Uring => Uring::new().map(TestQueue::Uring),
            Self::Threads => AioThreadQueue::new(slots).map(TestQueue::Threads),
            Self::Null => Null::new().map(TestQueue::Null),
        }
    }

    /// Like `try_queue`; `None` where the system does not have it.
    pub fn queue(self, slots: u32) -> Option<TestQueue> {
        let what = match self {
            Self::Uring => "io_uring",
            Self::Threads => "queue of threads",
            Self::Null => "null queue",
        };
        required(what, self.try_queue(slots))
    }

    /// An engine on such a queue; `None` where the system does not have it.
    pub fn engine<M: BlockMap>(
        self,
        disk: &Arc<BlockDevice<M>>,
        workers: u32,
        config: Config,
    ) -> Option<SingleDisk<TestQueue, M>> {
        let queue = self.queue(config.slots)?;
        let workers = WorkerPool::new(workers);
        Some(SingleDisk::new(disk.clone(), workers, queue, config).expect("an engine"))
    }
}

/// An engine and a disk with all switches on, and with each of them off, by name.
pub fn switches(on: Config) -> [(&'static str, Config, OpenOptions); 12] {
    let disk = OpenOptions::new().cache_holes(true);
    [
        ("all on", on, disk),
        ("simple off", Config { simple: false, ..on }, disk),
        ("inline completion off", Config { inline_completion: false, ..on }, disk),
        ("vectored off", Config { vectored: false, ..on }, disk),
        ("merge off", Config { merge: false, ..on }, disk),
        ("pool off", Config { pool: false, ..on }, disk),
        ("nowait first off", Config { nowait_first: false, ..on }, disk),
        ("back-off off", Config { back_off: false, ..on }, disk),
        ("hint off", on, disk.cache_holes(false)),
        ("group syncs off", Config { group_syncs: false, ..on }, disk),
        ("allocate ahead off", on, disk.allocate_ahead(false)),
        ("read ahead on", on, disk.read_ahead(true)),
    ]
}

/// Bounded waits for the requests of an engine.
pub trait WaitForRequests {
    /// Waits for an event once.
    fn wait_once(&mut self);

    /// Waits until no request is in flight. Returns all completions.
    fn finish(&mut self) -> Vec<Completion>;

    /// Waits for the only request in flight.
    fn only(&mut self) -> Completion {
        let mut all = self.finish();
        assert_eq!(all.len(), 1, "completions of one request");
        all.remove(0)
    }
}

impl<Q: IoQueue, M: BlockMap + ?Sized> WaitForRequests for Engine<Q, M> {
    fn wait_once(&mut self) {
        let begin = std::time::Instant::now();
        self.wait(Some(BOUND), &mut |_, _| {}).expect("a queue that works");
        let in_flight = self.in_flight();
        assert!(begin.elapsed() < BOUND, "not within {BOUND:?}: {in_flight} requests in flight");
    }

    fn finish(&mut self) -> Vec<Completion> {
        let mut completions = Vec::new();
        loop {
            while let Some(completion) = self.next() {
                completions.push(completion);
            }
            if self.in_flight() == 0 {
                return completions;
            }
            self.wait_once();
        }
    }
}

/// Methods of an [`IoQueue`] that do what those of its field do: `pass_on!(self.queue: attach detach events)`.
#[macro_export]
macro_rules! pass_on {
    (self.$field:ident: $($method:ident)*) => {
        $($crate::pass_on!(@$method $field);)*
    };
    (@attach $field:ident) => {
        fn attach(&mut self, files: &[::nowait::QueueFile<'_>]) -> Result<u32, ::nowait::Error> {
            self.$field.attach(files)
        }
    };
    (@detach $field:ident) => {
        fn detach(&mut self, first: u32, count: u32) {
            self.$field.detach(first, count);
        }
    };
    (@submit $field:ident) => {
        fn submit(&mut self) -> Result<(), ::nowait::Error> {
            self.$field.submit()
        }
    };
    (@drain_completions $field:ident) => {
        fn drain_completions(
            &mut self,
            sink: impl FnMut(::nowait::Token, ::nowait::Outcome),
        ) -> usize {
            self.$field.drain_completions(sink)
        }
    };
    (@wait $field:ident) => {
        fn wait(&mut self, timeout: Option<std::time::Duration>) -> Result<(), ::nowait::Error> {
            self.$field.wait(timeout)
        }
    };
    (@has_completions $field:ident) => {
        fn has_completions(&mut self) -> bool {
            self.$field.has_completions()
        }
    };
    (@events $field:ident) => {
        fn events(&self) -> &dyn ::nowait::EventSource {
            self.$field.events()
        }

        fn events_mut(&mut self) -> &mut dyn ::nowait::EventSource {
            self.$field.events_mut()
        }
    };
}

/// Any of the engine's queues.
#[allow(clippy::large_enum_variant, reason = "there is one of it")]
pub enum TestQueue {
    /// [`Uring`].
    Uring(Uring),
    /// [`AioThreadQueue`].
    Threads(AioThreadQueue),
    /// [`Null`].
    Null(Null),
}

macro_rules! each {
    ($self:expr, $queue:ident => $call:expr) => {
        match $self {
            TestQueue::Uring($queue) => $call,
            TestQueue::Threads($queue) => $call,
            TestQueue::Null($queue) => $call,
        }
    };
}

// SAFETY: every call goes to the one queue.
unsafe impl IoQueue for TestQueue {
    fn attach(&mut self, files: &[QueueFile<'_>]) -> Result<u32, Error> {
        each!(self, queue => queue.attach(files))
    }

    fn detach(&mut self, first: u32, count: u32) {
        each!(self, queue => queue.detach(first, count));
    }

    // SAFETY: the caller's promise is passed on.
    unsafe fn push(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull> {
        // SAFETY: as promised by the caller.
        unsafe { each!(self, queue => queue.push(transfer, token)) }
    }

    fn cancel(&mut self, token: Token) {
        each!(self, queue => queue.cancel(token));
    }

    fn submit(&mut self) -> Result<(), Error> {
        each!(self, queue => queue.submit())
    }

    fn drain_completions(&mut self, sink: impl FnMut(Token, Outcome)) -> usize {
        each!(self, queue => queue.drain_completions(sink))
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        each!(self, queue => queue.wait(timeout))
    }

    fn has_completions(&mut self) -> bool {
        each!(self, queue => queue.has_completions())
    }

    fn events(&self) -> &dyn EventSource {
        each!(self, queue => queue.events())
    }

    fn events_mut(&mut self) -> &mut dyn EventSource {
        each!(self, queue => queue.events_mut())
    }

    // SAFETY: the caller's promise is passed on.
    unsafe fn register(&mut self, base: *mut u8, bytes: usize) -> Option<u16> {
        // SAFETY: as promised by the caller.
        unsafe { each!(self, queue => queue.register(base, bytes)) }
    }

    fn polled(&self) -> u64 {
        each!(self, queue => queue.polled())
    }

    fn has_stopped_polling(&self) -> bool {
        each!(self, queue => queue.has_stopped_polling())
    }
}
