//! An endpoint whose requests are run by workers, on all processors: what is compressed, or read and written by calls
//! that wait.
//!
//! Invariant: each accepted request is returned once, with its memory, when a worker has run it. The thread of the
//! copy does nothing that waits; workers exit when the endpoint is dropped.

use std::num::NonZero;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::{io, thread};

use nowait::{ByteRange, ExtentStatus};
use rustix::event::{EventfdFlags, PollFlags, eventfd};

use crate::endpoint::{Capabilities, Completed, CopyOperation, CopyRequest, Endpoint};
use crate::error::{Error, os_message};

/// The disk that workers use, several of them simultaneously.
pub(crate) trait WorkerDisk: Send + Sync + 'static {
    /// The size and the supported requests.
    fn capabilities(&self) -> Capabilities;

    /// Runs a request; the extents are the answer to [`CopyOperation::Status`].
    ///
    /// # Errors
    /// A message for the user; the copy has failed.
    fn run(
        &self,
        operation: &CopyOperation,
        range: ByteRange,
        memory: &mut [u8],
    ) -> Result<Vec<ExtentStatus>, String>;

    /// Completes a target after all its requests.
    ///
    /// # Errors
    /// A message for the user; the copy has failed.
    fn finish(&self) -> Result<(), String>;
}

/// The message for a request that a disk does not support.
pub(crate) const UNSUPPORTED: &str = "Operation not supported";

struct WorkerEndpoint<D> {
    name: String,
    disk: Arc<D>,
    /// Counts completed requests, for the thread of the copy.
    completed: Arc<OwnedFd>,
    /// `None` when no more requests follow.
    jobs: Option<Sender<CopyRequest>>,
    results: Receiver<Result<Completed, String>>,
    done: Vec<Completed>,
    workers: Vec<JoinHandle<()>>,
}

/// An endpoint of `disk`, which is called `name` in errors.
///
/// # Errors
/// No thread could be started.
pub(crate) fn open<D: WorkerDisk>(name: String, disk: D) -> Result<Box<dyn Endpoint>, Error> {
    let failed = |error: io::Error| Error::at(&name, os_message(&error));
    let completed = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
    let completed = Arc::new(completed.map_err(|errno| failed(errno.into()))?);
    let disk = Arc::new(disk);
    let (jobs, taken) = channel();
    let taken = Arc::new(Mutex::new(taken));
    let (sender, results) = channel();
    let mut workers = Vec::new();
    for _ in 0..thread::available_parallelism().map_or(1, NonZero::get) {
        let (disk, taken, sender) = (disk.clone(), taken.clone(), sender.clone());
        let completed = completed.clone();
        let worker = thread::Builder::new().name("copy".into());
        let worker =
            worker.spawn(move || work(&*disk, &taken, &sender, &completed)).map_err(failed)?;
        workers.push(worker);
    }
    let (jobs, done) = (Some(jobs), Vec::new());
    Ok(Box::new(WorkerEndpoint { name, disk, completed, jobs, results, done, workers }))
}

/// The value in `mutex`, also after a panic of another thread.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs requests until there are no more.
fn work(
    disk: &impl WorkerDisk,
    jobs: &Mutex<Receiver<CopyRequest>>,
    sender: &Sender<Result<Completed, String>>,
    completed: &OwnedFd,
) {
    loop {
        let Ok(request) = lock(jobs).recv() else { return };
        let CopyRequest { operation, range, tag, mut memory } = request;
        let result = disk.run(&operation, range, memory.as_deref_mut().unwrap_or_default());
        let result =
            result.map(|extents| Completed { tag, range, memory, extents, unreadable: false });
        let is_over = sender.send(result).is_err();
        // It cannot be full: there are far fewer requests.
        let _ = rustix::io::write(completed, &1u64.to_ne_bytes());
        if is_over {
            return;
        }
    }
}

impl<D: WorkerDisk> Endpoint for WorkerEndpoint<D> {
    fn capabilities(&self) -> Capabilities {
        self.disk.capabilities()
    }

    fn submit(&mut self, request: CopyRequest) {
        if let Some(jobs) = &self.jobs {
            // Workers take requests as long as there is a sender.
            let _ = jobs.send(request);
        }
    }

    fn advance(&mut self) -> Result<(), Error> {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.completed, &mut count);
        loop {
            let result = match self.results.try_recv() {
                Ok(result) => result,
                Err(TryRecvError::Empty) => return Ok(()),
                Err(TryRecvError::Disconnected) => Err("its threads have exited".into()),
            };
            self.done.push(result.map_err(|what| Error::at(&self.name, what))?);
        }
    }

    fn next(&mut self) -> Option<Completed> {
        self.done.pop()
    }

    fn report_unreadable(&mut self) {}

    fn finish(&mut self) -> Result<(), Error> {
        self.disk.finish().map_err(|what| Error::at(&self.name, what))
    }

    fn poll_fds<'a>(&'a self, poll_fds: &mut Vec<(BorrowedFd<'a>, PollFlags)>) {
        poll_fds.push((self.completed.as_fd(), PollFlags::IN));
    }
}

impl<D> Drop for WorkerEndpoint<D> {
    fn drop(&mut self) {
        drop(self.jobs.take());
        for worker in self.workers.drain(..) {
            // A panic of a worker has already been reported by the panic hook.
            let _ = worker.join();
        }
    }
}
