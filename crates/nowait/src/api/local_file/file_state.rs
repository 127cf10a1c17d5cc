//! The state that the handles, the futures and the drivers of one thread's file share.
//!
//! Invariant: nothing is borrowed while a waker is woken or dropped, which may drop futures and
//! handles of this file.

use std::cell::{Cell, OnceCell, RefCell};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::task::Waker;
use std::time::Duration;

use crate::api::local_file::local_engine::LocalEngine;
use crate::api::local_file::sent_requests::SentRequests;
use crate::types::error::{Error, Operation};

pub(crate) struct FileState {
    pub(crate) requests: RefCell<SentRequests>,
    pub(crate) size: u64,
    /// The waker of a driver that waits for a request to be sent, or for the file's end.
    driver: Cell<Option<Waker>>,
    /// The descriptor that ends a `wait`.
    watched: Cell<Option<RawFd>>,
    readable: OnceCell<OwnedFd>,
}

impl FileState {
    pub(crate) fn new(engine: Box<dyn LocalEngine>, size: u64) -> Self {
        let requests = RefCell::new(SentRequests::new(engine));
        Self {
            requests,
            size,
            driver: Cell::new(None),
            watched: Cell::new(None),
            readable: OnceCell::new(),
        }
    }

    /// Submits the requests that were sent, ends those that are done, and wakes their tasks. True
    /// if there was one.
    ///
    /// # Errors
    /// The queue's: every request has ended with it.
    pub(crate) fn poll(&self) -> Result<bool, Error> {
        self.enter(|engine| engine.poll())
    }

    /// As `poll`, but sleeps until there is something to do, or `timeout` has passed. Calls
    /// `end_sleep` before it wakes a task.
    pub(crate) fn wait(
        &self,
        timeout: Option<Duration>,
        end_sleep: impl FnOnce(),
    ) -> Result<bool, Error> {
        self.enter(|engine| {
            let waited = engine.wait(timeout);
            end_sleep();
            waited
        })
    }

    fn enter(
        &self,
        enter: impl FnOnce(&mut dyn LocalEngine) -> Result<(), Error>,
    ) -> Result<bool, Error> {
        let mut requests = self.requests.borrow_mut();
        if let Some(error) = requests.failure {
            return Err(error);
        }
        let entered = enter(&mut *requests.engine);
        if let Err(error) = entered {
            let wakers = requests.fail(error);
            drop(requests);
            wakers.into_iter().for_each(Waker::wake);
            return Err(error);
        }
        drop(requests);
        Ok(self.wake_ended())
    }

    fn wake_ended(&self) -> bool {
        let mut ended = false;
        loop {
            let next = self.requests.borrow_mut().end_next();
            let Some(waker) = next else { return ended };
            ended = true;
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }

    /// Whether `poll` would find something; without a system call where the queue allows that.
    pub(crate) fn has_completions(&self) -> bool {
        self.requests.borrow_mut().engine.has_completions()
    }

    /// Whether the engine has requests that have not ended.
    #[cfg(all(feature = "tokio", not(loom)))]
    pub(crate) fn is_busy(&self) -> bool {
        let requests = self.requests.borrow();
        requests.failure.is_none() && requests.engine.in_flight() > 0
    }

    /// Wakes `waker` when the next request is sent, or when the last handle is gone.
    #[cfg(all(feature = "tokio", not(loom)))]
    pub(crate) fn set_driver(&self, waker: Option<Waker>) {
        drop(self.driver.replace(waker));
    }

    /// Wakes the driver that waits for a request.
    #[inline]
    pub(crate) fn wake_driver(&self) {
        if let Some(driver) = self.driver.take() {
            driver.wake();
        }
    }

    /// Makes `fd` the descriptor that ends a `wait`.
    ///
    /// # Errors
    /// As [`crate::Engine::watch`].
    pub(crate) fn watch(&self, fd: BorrowedFd<'_>) -> Result<(), Error> {
        if self.watched.get() != Some(fd.as_raw_fd()) {
            self.requests.borrow_mut().engine.watch(fd)?;
            self.watched.set(Some(fd.as_raw_fd()));
        }
        Ok(())
    }

    /// Ends the watch of `fd`, which is about to be closed.
    pub(crate) fn unwatch(&self, fd: BorrowedFd<'_>) {
        if self.watched.get() == Some(fd.as_raw_fd()) {
            self.watched.set(None);
            self.requests.borrow_mut().engine.unwatch(fd);
        }
    }

    /// A descriptor that is readable when `poll` would find something.
    ///
    /// # Errors
    /// `EMFILE`: no descriptor is left.
    pub(crate) fn fd(&self) -> Result<BorrowedFd<'_>, Error> {
        if let Some(fd) = self.readable.get() {
            return Ok(fd.as_fd());
        }
        let fd = self.requests.borrow().engine.fd().try_clone_to_owned();
        let fd = fd.map_err(|e| Error::from_io(&e, Operation::SetUp))?;
        Ok(self.readable.get_or_init(|| fd).as_fd())
    }

    /// Whether the queue has failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.requests.borrow().failure.is_some()
    }
}

impl Drop for FileState {
    fn drop(&mut self) {
        self.wake_driver();
    }
}
