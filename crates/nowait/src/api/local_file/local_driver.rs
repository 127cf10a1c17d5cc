//! The driver of one thread's files: it submits what tasks have sent, reaps, and sleeps when there
//! is nothing to do.
//!
//! Invariant: a thread sleeps only after all of its engines were polled in vain, and no longer than
//! until a request ends or the waker is woken.

use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::api::local_file::thread_engines::engines;
use crate::api::local_file::wake_flag::WakeFlag;
use crate::threads::adaptive_poll::AdaptivePoll;
use crate::types::error::Error;

/// How long a thread sleeps beside an engine whose descriptor could not be made.
const RETRY: Duration = Duration::from_millis(1);

/// Drives the [`LocalAsyncFile`](crate::LocalAsyncFile)s of its thread: their requests make
/// progress only while a driver runs.
///
/// [`LocalDriver::block_on`] is all that a program with one future, or with the executor of a
/// library as that future, needs. Another executor calls [`LocalDriver::wait`] when no task of it is
/// runnable, and [`LocalDriver::poll`] now and then while tasks are.
pub struct LocalDriver {
    wake: Arc<WakeFlag>,
    adaptive: RefCell<AdaptivePoll>,
    /// The driver belongs to its thread.
    _local: std::marker::PhantomData<Rc<()>>,
}

impl LocalDriver {
    /// A driver for the files of this thread, also those that are opened later.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: the wake-up descriptor could not be made.
    pub fn new() -> Result<Self, Error> {
        let (wake, adaptive) = (Arc::new(WakeFlag::new()?), RefCell::default());
        Ok(Self { wake, adaptive, _local: std::marker::PhantomData })
    }

    /// Runs `future` to its end, and drives the files of this thread meanwhile.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        let mut future = pin!(future);
        let waker = self.waker();
        let mut context = Context::from_waker(&waker);
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                // A driver around this one may have been woken.
                self.wake.wake_by_ref();
                return output;
            }
            self.wait(None);
            self.wake.take();
        }
    }

    /// A waker that ends [`LocalDriver::wait`], from any thread.
    #[must_use]
    pub fn waker(&self) -> Waker {
        self.wake.clone().into()
    }

    /// Submits the requests that tasks have sent, reaps, and wakes the tasks whose requests have
    /// ended, without waiting. True if there was one.
    pub fn poll(&self) -> bool {
        // A queue that fails has ended its requests with the error.
        engines().filter(|engine| engine.poll().unwrap_or(true)).count() > 0
    }

    /// Like [`LocalDriver::poll`]; if no request has ended, sleeps until one does, until
    /// [`LocalDriver::waker`] is woken or has been since the last sleep, or until `timeout` has
    /// passed. Before it sleeps it polls for up to 50 µs, as long as that was worth it lately.
    pub fn wait(&self, timeout: Option<Duration>) {
        if self.poll() || self.wake.is_woken() {
            return;
        }
        let began = Instant::now();
        let is_pending =
            || self.wake.is_woken() || engines().any(|engine| engine.has_completions());
        if timeout != Some(Duration::ZERO) && self.adaptive.borrow_mut().wait(began, is_pending) {
            self.poll();
        } else if self.wake.try_sleep() {
            self.sleep(timeout);
            self.adaptive.borrow_mut().slept(began);
        }
    }

    /// Sleeps, and ends `WakeFlag`'s sleep.
    fn sleep(&self, timeout: Option<Duration>) {
        let mut open = engines();
        let (first, second) = (open.next(), open.next());
        drop(open);
        match (first, second) {
            // The only engine also watches the waker's descriptor.
            (Some(engine), None) if engine.watch(&self.wake).is_ok() => {
                let _ = engine.wait(timeout, || self.wake.end_sleep());
            }
            _ => {
                self.sleep_on_descriptors(timeout);
                self.poll();
            }
        }
    }

    fn sleep_on_descriptors(&self, timeout: Option<Duration>) {
        let open: Vec<_> = engines().filter(|engine| !engine.has_failed()).collect();
        let readable = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let fds = open.iter().map(|engine| engine.fd());
        let mut fds: Vec<_> = fds.chain([Ok(self.wake.fd())]).flatten().map(readable).collect();
        // An engine without a descriptor has to be polled.
        let timeout = if fds.len() > open.len() { timeout } else { Some(RETRY) };
        let timeout = timeout.and_then(|time| Timespec::try_from(time).ok());
        // EINTR ends the sleep early.
        let _ = poll(&mut fds, timeout.as_ref());
        self.wake.end_sleep();
    }
}

impl Drop for LocalDriver {
    fn drop(&mut self) {
        engines().for_each(|engine| engine.unwatch(&self.wake));
    }
}

impl fmt::Debug for LocalDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalDriver").finish_non_exhaustive()
    }
}
