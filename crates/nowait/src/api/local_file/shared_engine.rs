//! The engine of a thread's files, with the drivers that wait for it.
//!
//! Invariant: nothing is borrowed while a waker is woken or dropped, which may drop futures and
//! handles of files.

use std::cell::{Cell, OnceCell, RefCell};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use crate::api::local_file::local_engine::LocalEngine;
use crate::api::local_file::sent_requests::SentRequests;
use crate::api::local_file::wake_flag::WakeFlag;
use crate::types::error::{Error, Operation};

pub(crate) struct SharedEngine {
    pub(crate) requests: RefCell<SentRequests>,
    /// The waker of a driver that waits for a request to be sent, or for the end of the last file.
    driver: Cell<Option<Waker>>,
    /// The wakers of drivers that wait for the end of another one, or of the last file.
    pub(crate) standby: RefCell<slab::Slab<Waker>>,
    /// A driver of tokio is at work.
    pub(crate) has_driver: Cell<bool>,
    /// The flag whose descriptor ends a `wait`.
    watched: RefCell<Option<Arc<WakeFlag>>>,
    readable: OnceCell<OwnedFd>,
}

impl SharedEngine {
    pub(crate) fn new(engine: Box<dyn LocalEngine>) -> Self {
        Self {
            requests: RefCell::new(SentRequests::new(engine)),
            driver: Cell::new(None),
            standby: RefCell::default(),
            has_driver: Cell::new(false),
            watched: RefCell::new(None),
            readable: OnceCell::new(),
        }
    }

    /// Removes a file without futures, when its requests have ended. Those of other files that end
    /// meanwhile have their tasks woken.
    pub(crate) fn close(&self, file: u32) {
        loop {
            let device = self.requests.borrow_mut().close(file);
            if device.is_some() {
                return;
            }
            if self.wait(None, || ()).is_err() {
                let device = self.requests.borrow_mut().close(file);
                return drop(device);
            }
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

    /// Like `poll`, but sleeps until there is something to do, or `timeout` has passed. Calls
    /// `end_sleep` before it wakes a task.
    pub(crate) fn wait(
        &self,
        timeout: Option<Duration>,
        end_sleep: impl FnOnce(),
    ) -> Result<bool, Error> {
        self.enter(|engine| {
            let waited = engine.sleep(timeout);
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
    pub(crate) fn is_busy(&self) -> bool {
        let requests = self.requests.borrow();
        requests.failure.is_none() && requests.engine.in_flight() > 0
    }

    /// Wakes `waker` when the next request is sent, or when the last file is closed.
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

    /// Wakes the drivers that wait for the end of another one.
    pub(crate) fn wake_standby(&self) {
        let wakers: Vec<Waker> =
            self.standby.borrow().iter().map(|(_, waker)| waker.clone()).collect();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Makes the descriptor of `flag` the one that ends a `wait`.
    ///
    /// # Errors
    /// Like [`crate::Engine::watch`].
    pub(crate) fn watch(&self, flag: &Arc<WakeFlag>) -> Result<(), Error> {
        let mut watched = self.watched.borrow_mut();
        if watched.as_ref().is_some_and(|old| Arc::ptr_eq(old, flag)) {
            return Ok(());
        }
        let engine = &mut self.requests.borrow_mut().engine;
        if let Some(old) = watched.take() {
            engine.unwatch_waker(old.fd());
        }
        engine.watch_waker(flag.fd())?;
        *watched = Some(flag.clone());
        Ok(())
    }

    /// Ends the watch of `flag`.
    pub(crate) fn unwatch(&self, flag: &Arc<WakeFlag>) {
        let mut watched = self.watched.borrow_mut();
        if let Some(old) = watched.take_if(|old| Arc::ptr_eq(old, flag)) {
            self.requests.borrow_mut().engine.unwatch_waker(old.fd());
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

impl Drop for SharedEngine {
    fn drop(&mut self) {
        self.wake_driver();
        self.wake_standby();
    }
}
