//! A serving thread as the other threads see it: its wake-up, and its counters.
//!
//! Invariant: nothing here waits. A thread that was woken up finds the reason for it elsewhere.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use nowait::{Error, Operation};
use rustix::event::{EventfdFlags, eventfd};

/// The handle of one thread.
pub(crate) struct ThreadHandle {
    wake: OwnedFd,
    /// Connections that are on the thread or on their way to it.
    connections: AtomicUsize,
    /// How many times a thread of the server has become idle.
    idle_count: Arc<AtomicU64>,
    /// The value of `idle_count` when it became idle; meaningless while it has connections.
    idle_sequence: AtomicU64,
    /// The thread must retire as soon as it has no connections.
    retires_early: AtomicBool,
    /// The same, even if there are connections on their way to it.
    retires_for_good: AtomicBool,
    /// The thread must hand over its members and end.
    parks: AtomicBool,
    /// Requests in flight, as of the end of the thread's last iteration.
    in_flight: AtomicUsize,
    /// How many times the thread has answered a wake-up.
    answers: AtomicU64,
}

impl ThreadHandle {
    /// The handle of a thread that is about to start; all threads of the server share `idle_count`.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: there is no descriptor for the wake-up.
    pub(crate) fn new(idle_count: Arc<AtomicU64>) -> Result<Self, Error> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::new(e.raw_os_error(), Operation::SetUp))?;
        Ok(Self {
            wake,
            connections: AtomicUsize::new(0),
            idle_count,
            idle_sequence: AtomicU64::new(0),
            retires_early: AtomicBool::new(false),
            retires_for_good: AtomicBool::new(false),
            parks: AtomicBool::new(false),
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
        self.retires_early.store(false, Ordering::Relaxed);
    }

    /// Counts one connection less.
    pub(crate) fn remove_connection(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// Connections that are on the thread or on their way to it.
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// Whether the thread has no connections and none is on its way.
    pub(crate) fn is_idle(&self) -> bool {
        self.connections() == 0
    }

    /// Records that the thread has no connections any more.
    pub(crate) fn on_idle(&self) {
        let sequence = self.idle_count.fetch_add(1, Ordering::Relaxed);
        self.idle_sequence.store(sequence, Ordering::Relaxed);
    }

    /// Of two idle threads, the one with the smaller number has been idle longer.
    pub(crate) fn idle_sequence(&self) -> u64 {
        self.idle_sequence.load(Ordering::Relaxed)
    }

    /// Makes the thread retire if it gets no connection before.
    pub(crate) fn retire_early(&self) {
        self.retires_early.store(true, Ordering::Release);
        self.wake();
    }

    /// Makes the thread retire as soon as it has no connections.
    pub(crate) fn retire_for_good(&self) {
        self.retires_for_good.store(true, Ordering::Release);
        self.wake();
    }

    /// Whether the thread must retire as soon as it has no connections.
    pub(crate) fn retires_early(&self) -> bool {
        self.retires_early.load(Ordering::Acquire) || self.retires_for_good.load(Ordering::Acquire)
    }

    /// Makes the thread hand over its members and end, or no more.
    pub(crate) fn set_parking(&self, parks: bool) {
        self.parks.store(parks, Ordering::Release);
        self.wake();
    }

    /// Whether the thread must hand over its members and end.
    #[inline]
    pub(crate) fn is_parking(&self) -> bool {
        self.parks.load(Ordering::Acquire)
    }

    /// Publishes the number of requests in flight on the thread.
    pub(crate) fn publish_in_flight(&self, count: usize) {
        self.in_flight.store(count, Ordering::Release);
    }

    /// As published last.
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
