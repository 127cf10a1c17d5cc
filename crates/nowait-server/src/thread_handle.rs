//! A serving thread as the other threads see it: its wake-up, and its counters.
//!
//! Invariant: nothing here waits. A thread that was woken up finds the reason for it elsewhere.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;

use nowait::{ByteRange, Error, Operation};
use rustix::event::{EventfdFlags, eventfd};

use crate::export::ExportId;
use crate::locking::lock;

/// The question which changes of an export are in flight on a thread.
#[derive(Clone)]
pub(crate) struct InFlightQuery {
    pub(crate) export: ExportId,
    pub(crate) answer: Sender<Vec<ByteRange>>,
}

/// The handle of one thread.
pub(crate) struct ThreadHandle {
    wake: OwnedFd,
    /// Connections and queues that are on the thread or on their way to it.
    connections: AtomicUsize,
    /// Exports were paused, resumed, removed or limited since the thread has looked.
    exports_changed: AtomicBool,
    /// The counts of the exports are to be published.
    publishes: AtomicBool,
    /// Questions for the changes that are in flight.
    queries: Mutex<Vec<InFlightQuery>>,
    /// Requests in flight, as of the end of the thread's last iteration.
    in_flight: AtomicUsize,
    /// How many times the thread has answered a wake-up.
    answers: AtomicU64,
}

impl ThreadHandle {
    /// The handle of a thread that is about to start.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: there is no descriptor for the wake-up.
    pub(crate) fn new() -> Result<Self, Error> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::new(e.raw_os_error(), Operation::SetUp))?;
        Ok(Self {
            wake,
            connections: AtomicUsize::new(0),
            exports_changed: AtomicBool::new(false),
            publishes: AtomicBool::new(false),
            queries: Mutex::default(),
            in_flight: AtomicUsize::new(0),
            answers: AtomicU64::new(0),
        })
    }

    /// Wakes the thread up.
    pub(crate) fn wake(&self) {
        // A full counter (EAGAIN) is readable already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// How many times the thread has answered a wake-up: a thread that is woken up and does not
    /// answer hangs.
    pub(crate) fn answers(&self) -> u64 {
        self.answers.load(Ordering::Acquire)
    }

    /// Ends the readable state until the next wake-up. To be called by the thread itself.
    pub(crate) fn acknowledge(&self) {
        self.answers.fetch_add(1, Ordering::AcqRel);
        // EAGAIN: the thread was not woken up since.
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }

    /// Counts one connection more, or a member of another kind.
    pub(crate) fn add_connection(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts one connection less.
    pub(crate) fn remove_connection(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// Connections that are on the thread or on their way to it.
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// Has the thread look at its exports: some were paused, resumed, removed or limited.
    pub(crate) fn review_exports(&self) {
        self.exports_changed.store(true, Ordering::Release);
        self.wake();
    }

    /// Whether that was asked for since the last call.
    pub(crate) fn takes_review(&self) -> bool {
        self.exports_changed.swap(false, Ordering::AcqRel)
    }

    /// Has the thread publish the counts of its exports.
    pub(crate) fn publish(&self) {
        self.publishes.store(true, Ordering::Release);
        self.wake();
    }

    /// Whether that was asked for since the last call.
    pub(crate) fn takes_publication(&self) -> bool {
        self.publishes.swap(false, Ordering::AcqRel)
    }

    /// Has the thread answer `query`.
    pub(crate) fn ask(&self, query: InFlightQuery) {
        lock(&self.queries).push(query);
        self.wake();
    }

    /// The queries since the last call.
    pub(crate) fn take_queries(&self) -> Vec<InFlightQuery> {
        std::mem::take(&mut lock(&self.queries))
    }

    /// Publishes the number of requests in flight on the thread.
    pub(crate) fn publish_in_flight(&self, count: usize) {
        self.in_flight.store(count, Ordering::Release);
    }

    /// The count that was published last.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Acquire)
    }
}

/// Readable when the thread was woken up.
impl AsFd for ThreadHandle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
