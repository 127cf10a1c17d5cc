//! The driver of a thread's files as a task of any executor: it polls the ring as long as that completes requests,
//! and then leaves the ring's descriptor to the executor's reactor.
//!
//! Invariant: the task is woken by the reactor, by the next request that is sent, and by the end of
//! the last file; it keeps no file open. One driver of an engine is at work; when it is dropped,
//! another one takes over.

use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};
use std::time::Instant;

use crate::api::local_file::LocalAsyncFile;
use crate::api::local_file::shared_engine::SharedEngine;
use crate::threads::adaptive_poll::AdaptivePoll;
use crate::types::error::{Error, Operation};

impl LocalAsyncFile {
    /// A descriptor of the thread's engine for the reactor of an executor: it is readable when requests have ended.
    ///
    /// # Errors
    /// `EMFILE`: no descriptor is left.
    pub fn driver_fd(&self) -> Result<OwnedFd, Error> {
        let fd = self.state.engine.fd()?.try_clone_to_owned();
        fd.map_err(|e| Error::from_io(&e, Operation::SetUp))
    }

    /// The driver of the files of this thread, as a task of any executor of this thread. `readable` asks the executor's
    /// reactor whether the descriptor of [`LocalAsyncFile::driver_fd`] is readable, and has the task woken when it
    /// becomes so; spurious answers do no harm. It ends when the last file of the thread is closed.
    ///
    /// One driver serves all files, those that were opened before and later ones. A further one waits
    /// until it has to take over, as the first one was dropped with its executor.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let path = dir.path().join("disk.img");
    /// # std::fs::File::create(&path)?.set_len(1 << 20)?;
    /// let executor = async_executor::LocalExecutor::new();
    /// async_io::block_on(executor.run(async {
    ///     let file = nowait::LocalAsyncFile::open(&path, nowait::OpenOptions::default())?;
    ///     let ring = async_io::Async::new_nonblocking(file.driver_fd()?)?;
    ///     executor.spawn(file.driver(move |context| ring.poll_readable(context))).detach();
    ///     let (read, _) = file.read_at(nowait::IoBuffer::zeroed(512)?, 4096).await;
    ///     assert_eq!(read?, 512);
    ///     Ok(())
    /// }))
    /// # }
    /// ```
    ///
    /// # Errors
    /// The queue's: every request has ended with it. That of `readable`.
    pub fn driver<F>(&self, readable: F) -> impl Future<Output = Result<(), Error>> + use<F>
    where
        F: FnMut(&mut Context<'_>) -> Poll<io::Result<()>> + Unpin,
    {
        self.drive(readable)
    }

    /// Like [`LocalAsyncFile::driver`], with any readiness.
    pub(super) fn drive<R: Readiness>(
        &self,
        readiness: R,
    ) -> impl Future<Output = Result<(), Error>> + use<R> {
        let mut driver = TaskDriver {
            engine: Rc::downgrade(&self.state.engine),
            role: Role::New,
            readiness,
            adaptive: AdaptivePoll::default(),
            yielded: false,
            parked: None,
        };
        poll_fn(move |context| driver.poll(context))
    }
}

/// The reactor's word on the descriptor of an engine.
pub(super) trait Readiness: Unpin {
    /// Whether the descriptor is readable; the task is woken when it is.
    fn poll_readable(
        &mut self,
        engine: &SharedEngine,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<()>>;
}

impl<F: FnMut(&mut Context<'_>) -> Poll<io::Result<()>> + Unpin> Readiness for F {
    fn poll_readable(
        &mut self,
        _engine: &SharedEngine,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        self(context)
    }
}

enum Role {
    New,
    /// It waits for the end of another driver, under this number.
    Standby(usize),
    /// It drives the engine.
    Active,
}

struct TaskDriver<R: Readiness> {
    engine: Weak<SharedEngine>,
    role: Role,
    readiness: R,
    adaptive: AdaptivePoll,
    /// The other tasks have run since a request has ended.
    yielded: bool,
    /// Since when the task has waited for a request that is in flight.
    parked: Option<Instant>,
}

impl<R: Readiness> TaskDriver<R> {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Error>> {
        let Some(engine) = self.engine.upgrade() else { return Poll::Ready(Ok(())) };
        if !self.is_active(&engine, context) {
            return Poll::Pending;
        }
        if let Some(began) = self.parked.take() {
            self.adaptive.slept(began);
        }
        loop {
            let ended = engine.poll()?;
            if engine.is_busy() && (ended || !self.yielded) {
                // The other tasks run, and send their requests, before the ring is polled again.
                self.yielded = !ended;
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            if !engine.is_busy() {
                return self.park(&engine, context);
            }
            self.yielded = false;
            let began = Instant::now();
            if self.adaptive.wait(began, || engine.has_completions()) {
                continue;
            }
            match self.readiness.poll_readable(&engine, context) {
                Poll::Ready(ready) => ready.map_err(|e| Error::from_io(&e, Operation::Wait))?,
                Poll::Pending => {
                    self.parked = Some(began);
                    return self.park(&engine, context);
                }
            }
        }
    }

    /// Whether this driver is at work. If another one is, waits for its end.
    fn is_active(&mut self, engine: &SharedEngine, context: &Context<'_>) -> bool {
        if matches!(self.role, Role::Active) {
            return true;
        }
        let waker = context.waker().clone();
        let mut standby = engine.standby.borrow_mut();
        let old = match self.role {
            Role::Standby(number) => standby.try_remove(number),
            Role::New | Role::Active => None,
        };
        let is_active = !engine.has_driver.replace(true);
        self.role = match is_active {
            true => Role::Active,
            false => Role::Standby(standby.insert(waker)),
        };
        drop(standby);
        drop(old);
        is_active
    }

    /// Waits for the next request, or the end of the last file.
    fn park(&self, engine: &SharedEngine, context: &Context<'_>) -> Poll<Result<(), Error>> {
        engine.set_driver(Some(context.waker().clone()));
        Poll::Pending
    }
}

impl<R: Readiness> Drop for TaskDriver<R> {
    fn drop(&mut self) {
        let Some(engine) = self.engine.upgrade() else { return };
        match self.role {
            Role::New => {}
            Role::Standby(number) => {
                let waker = engine.standby.borrow_mut().try_remove(number);
                drop(waker);
            }
            Role::Active => {
                engine.has_driver.set(false);
                engine.set_driver(None);
                engine.wake_standby();
            }
        }
    }
}
