//! A queue that fails on demand.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nowait::{Error, IoQueue, Operation, QueueFull, Token, Transfer};
use nowait_testkit::engines::TestQueue;

/// A queue that drops transfers and fails from the first one on that comes when `fails` is set.
pub(crate) struct FailingQueue {
    pub(crate) queue: TestQueue,
    pub(crate) fails: Arc<AtomicBool>,
    /// Such a transfer has come.
    pub(crate) has_dropped: bool,
}

impl FailingQueue {
    fn checked(&self) -> Result<(), Error> {
        match self.has_dropped {
            true => Err(Error::new(libc::ENXIO, Operation::Wait)),
            false => Ok(()),
        }
    }
}

// SAFETY: tokens are reported as the inner queue reports them; the token of a dropped transfer
// never is.
unsafe impl IoQueue for FailingQueue {
    nowait_testkit::pass_on!(self.queue: attach detach drain_completions has_completions events);

    // SAFETY: a dropped transfer accesses no memory; the others are passed on unchanged.
    unsafe fn push(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull> {
        self.has_dropped |= self.fails.load(Ordering::SeqCst);
        if self.has_dropped {
            return Ok(());
        }
        // SAFETY: as promised by the caller.
        unsafe { self.queue.push(transfer, token) }
    }

    fn submit(&mut self) -> Result<(), Error> {
        self.checked().and_then(|()| self.queue.submit())
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        self.checked().and_then(|()| self.queue.wait(timeout))
    }
}
