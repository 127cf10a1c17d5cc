//! The jobs that an NBD storage was given and its thread has not taken yet.
//!
//! Invariant: a job that is added while the thread sleeps wakes it up; one that is added after the
//! storage was closed is dropped.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nowait::{AsyncTransfers, Error, Operation, PendingTransfer};
use rustix::event::{EventfdFlags, eventfd};

use crate::nbd::job::Job;

/// The jobs, and a descriptor that wakes the thread.
pub(super) struct Inbox {
    state: Mutex<State>,
    wake: OwnedFd,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// The thread sleeps, or is about to.
    sleeps: bool,
    closed: bool,
}

impl Inbox {
    /// # Errors
    /// The errno of eventfd(2).
    pub(super) fn new() -> Result<Self, Error> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake = wake.map_err(|errno| Error::new(errno.raw_os_error(), Operation::SetUp))?;
        Ok(Self { state: Mutex::default(), wake })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds jobs.
    pub(super) fn push(&self, jobs: impl Iterator<Item = Job>) {
        let mut refused = Vec::new();
        let mut state = self.lock();
        match state.closed {
            true => refused.extend(jobs),
            false => state.jobs.extend(jobs),
        }
        let wakes = std::mem::take(&mut state.sleeps);
        drop(state);
        // Their ends are told without the lock.
        drop(refused);
        if wakes {
            self.wake();
        }
    }

    fn wake(&self) {
        // EAGAIN: it is readable already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// No job is added from now on.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.wake();
    }

    /// Moves all jobs behind those in `jobs`. Returns whether the storage was closed.
    pub(super) fn take(&self, jobs: &mut VecDeque<Job>) -> bool {
        let mut state = self.lock();
        jobs.append(&mut state.jobs);
        state.closed
    }

    /// Prepares for a sleep on [`Inbox::fd`]; false if there is a job. When the storage is closed, the
    /// descriptor is readable once.
    pub(super) fn prepare_sleep(&self) -> bool {
        let mut state = self.lock();
        state.sleeps = state.jobs.is_empty();
        state.sleeps
    }

    /// The sleep has ended, by [`Inbox::fd`] if that has `woken` the thread.
    pub(super) fn awake(&self, woken: bool) {
        self.lock().sleeps = false;
        if woken {
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        }
    }

    /// Readable when the thread is to wake up.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

impl AsyncTransfers for Inbox {
    fn begin(&self, transfers: &mut Vec<PendingTransfer>) {
        self.push(transfers.drain(..).map(Job::of_transfer));
    }
}
