//! The driver of a thread's files on tokio: a task that polls the ring as long as that completes requests,
//! and then leaves the ring's descriptor to tokio's reactor.
//!
//! Invariant: the task is woken by the reactor, by the next request that is sent, and by the end of
//! the last file; it keeps no file open. One driver of an engine is at work; when it is dropped,
//! another one takes over.

use std::future::{Future, poll_fn};
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};
use std::time::Instant;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::api::local_file::LocalAsyncFile;
use crate::api::local_file::shared_engine::SharedEngine;
use crate::threads::adaptive_poll::AdaptivePoll;
use crate::types::error::{Error, Operation};

impl LocalAsyncFile {
    /// The driver of the files of this thread on a current-thread runtime of tokio, for
    /// `tokio::task::spawn_local`. It ends when the last file of the thread is closed.
    ///
    /// One driver serves all files, those that were opened before and later ones. A further one waits
    /// until it has to take over, as the first one was dropped with its runtime.
    ///
    /// ```
    /// # fn main() -> Result<(), nowait::Error> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("disk.img");
    /// # std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    /// let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
    /// tokio::task::LocalSet::new().block_on(&runtime, async {
    ///     let file = nowait::LocalAsyncFile::open(&path, nowait::OpenOptions::default())?;
    ///     tokio::task::spawn_local(file.tokio_driver());
    ///     let (read, _) = file.read_at(nowait::IoBuffer::zeroed(512)?, 4096).await;
    ///     assert_eq!(read?, 512);
    ///     Ok(())
    /// })
    /// # }
    /// ```
    ///
    /// # Errors
    /// The queue's: every request has ended with it. `EMFILE`, `ENFILE`: there is no descriptor for
    /// the reactor.
    ///
    /// # Panics
    /// When it is polled outside of a runtime whose I/O is enabled.
    pub fn tokio_driver(&self) -> impl Future<Output = Result<(), Error>> + use<> {
        let mut driver = TokioDriver {
            engine: Rc::downgrade(&self.state.engine),
            role: Role::New,
            descriptor: None,
            adaptive: AdaptivePoll::default(),
            yielded: false,
            parked: None,
        };
        poll_fn(move |context| driver.poll(context))
    }
}

enum Role {
    New,
    /// It waits for the end of another driver, under this number.
    Standby(usize),
    /// It drives the engine.
    Active,
}

struct TokioDriver {
    engine: Weak<SharedEngine>,
    role: Role,
    /// The ring's descriptor, from the first time on that there is a reason to wait for it.
    descriptor: Option<AsyncFd<OwnedFd>>,
    adaptive: AdaptivePoll,
    /// The other tasks have run since a request has ended.
    yielded: bool,
    /// Since when the task has waited for a request that is in flight.
    parked: Option<Instant>,
}

impl TokioDriver {
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
            match self.descriptor(&engine)?.poll_read_ready(context) {
                Poll::Ready(ready) => {
                    ready.map_err(|e| Error::from_io(&e, Operation::Wait))?.clear_ready()
                }
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

    #[allow(
        deprecated,
        reason = "its successor is unsafe and new; an `OwnedFd` is what it asks for"
    )]
    fn descriptor(&mut self, engine: &SharedEngine) -> Result<&AsyncFd<OwnedFd>, Error> {
        let descriptor = match self.descriptor.take() {
            Some(descriptor) => descriptor,
            None => {
                let set_up = |e: std::io::Error| Error::from_io(&e, Operation::SetUp);
                let fd = engine.fd()?.try_clone_to_owned().map_err(set_up)?;
                AsyncFd::with_interest(fd, Interest::READABLE).map_err(set_up)?
            }
        };
        Ok(self.descriptor.insert(descriptor))
    }
}

impl Drop for TokioDriver {
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
