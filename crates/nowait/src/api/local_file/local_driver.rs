//! The driver of one thread's files: it submits what tasks have sent, reaps, and sleeps when there
//! is nothing to do.
//!
//! Invariant: a thread sleeps only after all of its files were polled in vain, and no longer than
//! until a request ends or the waker is woken.

use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::api::local_file::file_state::FileState;
use crate::api::local_file::wake_flag::WakeFlag;
use crate::threads::adaptive_poll::AdaptivePoll;
use crate::types::error::Error;

thread_local! {
    /// The files of this thread.
    static FILES: RefCell<Vec<Weak<FileState>>> = const { RefCell::new(Vec::new()) };
}

/// How long a thread sleeps beside a file whose descriptor could not be made.
const RETRY: Duration = Duration::from_millis(1);

/// Adds a file to those of this thread.
pub(crate) fn register(file: &Rc<FileState>) {
    FILES.with_borrow_mut(|files| {
        files.retain(|file| file.strong_count() > 0);
        files.push(Rc::downgrade(file));
    });
}

/// The file with this index among those of this thread; `Some(None)` if it is closed.
fn file(index: usize) -> Option<Option<Rc<FileState>>> {
    FILES.with_borrow(|files| files.get(index).map(Weak::upgrade))
}

/// The files of this thread that are open, one after the other. None is borrowed meanwhile, so that
/// tasks which are woken may open and close files.
fn files() -> impl Iterator<Item = Rc<FileState>> {
    (0..).map_while(file).flatten()
}

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
        files().filter(|file| file.poll().unwrap_or(true)).count() > 0
    }

    /// As [`LocalDriver::poll`]; if no request has ended, sleeps until one does, until
    /// [`LocalDriver::waker`] is woken or has been since the last sleep, or until `timeout` has
    /// passed. Before it sleeps it polls for up to 50 µs, as long as that was worth it lately.
    pub fn wait(&self, timeout: Option<Duration>) {
        if self.poll() || self.wake.is_woken() {
            return;
        }
        let began = Instant::now();
        let is_pending = || self.wake.is_woken() || files().any(|file| file.has_completions());
        if timeout != Some(Duration::ZERO) && self.adaptive.borrow_mut().wait(began, is_pending) {
            self.poll();
        } else if self.wake.try_sleep() {
            self.sleep(timeout);
            self.adaptive.borrow_mut().slept(began);
        }
    }

    /// Sleeps, and ends `WakeFlag`'s sleep.
    fn sleep(&self, timeout: Option<Duration>) {
        let mut open = files();
        let (first, second) = (open.next(), open.next());
        drop(open);
        match (first, second) {
            // The ring of the only file also watches the waker's descriptor.
            (Some(file), None) if file.watch(self.wake.fd()).is_ok() => {
                let _ = file.wait(timeout, || self.wake.end_sleep());
            }
            _ => {
                self.sleep_on_descriptors(timeout);
                self.poll();
            }
        }
    }

    fn sleep_on_descriptors(&self, timeout: Option<Duration>) {
        let open: Vec<_> = files().filter(|file| !file.has_failed()).collect();
        let readable = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let fds = open.iter().map(|file| file.fd());
        let mut fds: Vec<_> = fds.chain([Ok(self.wake.fd())]).flatten().map(readable).collect();
        // A file without a descriptor of its own has to be polled.
        let timeout = if fds.len() > open.len() { timeout } else { Some(RETRY) };
        let timeout = timeout.and_then(|time| Timespec::try_from(time).ok());
        // EINTR ends the sleep early.
        let _ = poll(&mut fds, timeout.as_ref());
        self.wake.end_sleep();
    }
}

impl Drop for LocalDriver {
    fn drop(&mut self) {
        files().for_each(|file| file.unwatch(self.wake.fd()));
    }
}

impl fmt::Debug for LocalDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalDriver").finish_non_exhaustive()
    }
}
