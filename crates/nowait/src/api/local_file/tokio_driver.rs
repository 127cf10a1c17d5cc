//! The driver of one file on tokio: a task that polls the ring as long as that completes requests,
//! and then leaves the ring's descriptor to tokio's reactor.
//!
//! Invariant: the task is woken by the reactor, by the next request that is sent, and by the end of
//! the file; it does not keep the file open.

use std::future::{Future, poll_fn};
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};
use std::time::Instant;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::api::local_file::LocalAsyncFile;
use crate::api::local_file::file_state::FileState;
use crate::threads::adaptive_poll::AdaptivePoll;
use crate::types::error::{Error, Operation};

impl LocalAsyncFile {
    /// The driver of this file on a current-thread runtime of tokio, for
    /// `tokio::task::spawn_local`. It ends when the last handle and future of the file are gone.
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
    ///     let (read, _) = file.read(4096, nowait::IoBuffer::zeroed(512)?).await;
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
            file: Rc::downgrade(&self.state),
            descriptor: None,
            adaptive: AdaptivePoll::default(),
            yielded: false,
            parked: None,
        };
        poll_fn(move |context| driver.poll(context))
    }
}

struct TokioDriver {
    file: Weak<FileState>,
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
        let Some(file) = self.file.upgrade() else { return Poll::Ready(Ok(())) };
        if let Some(began) = self.parked.take() {
            self.adaptive.slept(began);
        }
        loop {
            let ended = file.poll()?;
            if file.is_busy() && (ended || !self.yielded) {
                // The other tasks run, and send their requests, before the ring is polled again.
                self.yielded = !ended;
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            if !file.is_busy() {
                return self.park(&file, context);
            }
            self.yielded = false;
            let began = Instant::now();
            if self.adaptive.wait(began, || file.has_completions()) {
                continue;
            }
            match self.descriptor(&file)?.poll_read_ready(context) {
                Poll::Ready(ready) => {
                    ready.map_err(|e| Error::from_io(&e, Operation::Wait))?.clear_ready()
                }
                Poll::Pending => {
                    self.parked = Some(began);
                    return self.park(&file, context);
                }
            }
        }
    }

    /// Waits for the next request, or the end of the file.
    fn park(&self, file: &FileState, context: &Context<'_>) -> Poll<Result<(), Error>> {
        file.set_driver(Some(context.waker().clone()));
        Poll::Pending
    }

    #[allow(
        deprecated,
        reason = "its successor is unsafe and new; an `OwnedFd` is what it asks for"
    )]
    fn descriptor(&mut self, file: &FileState) -> Result<&AsyncFd<OwnedFd>, Error> {
        let descriptor = match self.descriptor.take() {
            Some(descriptor) => descriptor,
            None => {
                let set_up = |e: std::io::Error| Error::from_io(&e, Operation::SetUp);
                let fd = file.fd()?.try_clone_to_owned().map_err(set_up)?;
                AsyncFd::with_interest(fd, Interest::READABLE).map_err(set_up)?
            }
        };
        Ok(self.descriptor.insert(descriptor))
    }
}
