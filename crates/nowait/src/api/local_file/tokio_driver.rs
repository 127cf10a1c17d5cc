//! The driver of a thread's files on tokio: the ring's descriptor is left to tokio's reactor.

use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::task::{Context, Poll, ready};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::api::local_file::LocalAsyncFile;
use crate::api::local_file::shared_engine::SharedEngine;
use crate::api::local_file::task_driver::Readiness;
use crate::types::error::Error;

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
        self.drive(TokioReadiness::default())
    }
}

/// The ring's descriptor, from the first time on that there is a reason to wait for it.
#[derive(Default)]
struct TokioReadiness(Option<AsyncFd<OwnedFd>>);

impl Readiness for TokioReadiness {
    fn poll_readable(
        &mut self,
        engine: &SharedEngine,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        let descriptor = match self.0.take() {
            Some(descriptor) => descriptor,
            None => registered(engine.fd()?.try_clone_to_owned()?)?,
        };
        ready!(self.0.insert(descriptor).poll_read_ready(context))?.clear_ready();
        Poll::Ready(Ok(()))
    }
}

#[allow(deprecated, reason = "its successor is unsafe and new; an `OwnedFd` is what it asks for")]
fn registered(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, Interest::READABLE)
}
