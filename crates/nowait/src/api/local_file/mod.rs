//! The async API of one thread: requests as futures, on an engine of the thread that polls them.
//!
//! Invariant: a future holds its file, and a file the engine; so the engine, and the memory of every
//! request in it, are there until the last future is gone (C45).

mod request_slab;
mod local_engine;
mod sent_requests;
mod wake_flag;
mod shared_engine;
mod thread_engines;
mod file_state;
pub(crate) mod request_future;
pub(crate) mod local_driver;
mod task_driver;
#[cfg(all(feature = "tokio", not(loom)))]
mod tokio_driver;

use std::fmt;
use std::fs::Metadata;
use std::future::Future;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::api::file_call;
use crate::api::handle_disk::HandleDisk;
use crate::api::timed_request::TimedRequest;
use crate::block::block_map::BlockMap;
use crate::block::device::BlockDevice;
use crate::blocking::worker_pool::WorkerPool;
use crate::engine::Engine;
use crate::memory::io_buffer::IoBuffer;
use crate::queue::IoQueue;
use crate::storage::file_calls::{Allocate, FileLock};
use crate::storage::open_options::OpenOptions;
use crate::types::byte_range::ByteRange;
use crate::types::config::Config;
use crate::types::error::Error;
use crate::types::io_priority::IoPriority;
use crate::types::request::{Flags, Op, Request};
use file_state::FileState;
use request_future::RequestFuture;
use shared_engine::SharedEngine;

/// A file or disk with futures for one thread: `Clone`, but neither `Send` nor `Sync`. Its tasks use an
/// engine of their own thread, so that a request costs no hop to another thread and no allocation.
/// [`AsyncFile`](crate::AsyncFile) is the version for executors with several threads.
///
/// All files of a thread share one engine, with one ring. It is made with the first file and is gone
/// when the last one is closed, so that a file costs little more than its descriptor.
///
/// A request is sent by the first poll of its future. It makes progress while a driver runs on the
/// thread: [`LocalDriver`](crate::LocalDriver), or with the feature `tokio` the future of
/// `LocalAsyncFile::tokio_driver`. Without one it never ends.
///
/// **Dropping a future is always safe.** If it is dropped before its first poll, no request is made.
/// If it is dropped later, the request may or may not be done, at any time until the last handle and
/// future of the file are gone; the engine keeps its memory until the kernel has finished with it
/// (C45). The drop of the last handle or future waits for the file's requests in flight, and wakes the
/// tasks of other files whose requests end meanwhile.
///
/// At most [`Config::slots`] requests are in flight, those of one file never more than three times
/// the slots that are free: so a file whose disk hangs leaves slots to the others. A further request
/// waits for room, in the order in which its file's were sent and by turns over the files, or fails
/// with `EAGAIN` under [`Flags::NOWAIT`] (C32). If the queue fails, every request and every later one
/// of these files ends with its error; a request that was in flight then gives back an empty buffer, as
/// its memory is leaked. A file that is opened later has a new engine.
///
/// A child process after fork(2) uses no file that its parent has opened: the ring is the parent's. Opening one
/// fails there, if the parent has made an engine or read ahead (`EOPNOTSUPP`, C85).
///
/// ```
/// # fn main() -> Result<(), nowait::Error> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("disk.img");
/// # std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
/// let driver = nowait::LocalDriver::new()?;
/// driver.block_on(async {
///     let file = nowait::LocalAsyncFile::open(&path, nowait::OpenOptions::default())?;
///     let mut buffer = nowait::IoBuffer::zeroed(8192)?;
///     buffer.fill(7);
///     let (written, buffer) = file.write_at(buffer, 4096, nowait::Flags::NONE).await;
///     assert_eq!(written?, 8192);
///     let (read, buffer) = file.read_at(buffer, 8192).await;
///     assert_eq!(read?, 8192);
///     assert!(buffer[..4096].iter().all(|&byte| byte == 7));
///     assert!(buffer[4096..].iter().all(|&byte| byte == 0));
///     file.flush().await
/// })
/// # }
/// ```
#[derive(Clone)]
pub struct LocalAsyncFile {
    state: Rc<FileState>,
    /// Of each read and write of this handle, beside its own.
    pub(super) flags: Flags,
    timeout: Option<Duration>,
}

impl LocalAsyncFile {
    /// Opens the file at `path`, or makes it, as one that grows ([`BlockDevice::open_file`]). A disk, of a
    /// fixed size, is opened by [`BlockDevice::open`].
    ///
    /// # Errors
    /// Like [`BlockDevice::open_file`] and [`LocalAsyncFile::new`].
    pub fn open(path: &Path, options: OpenOptions) -> Result<Self, Error> {
        let disk = HandleDisk::opened(Arc::new(BlockDevice::open_file(path, options)?));
        Self::on(thread_engines::shared()?, disk)
    }

    /// The async API of `disk`, a device of any map, for this thread; engines and other APIs, also
    /// those of other threads, may serve the device at the same time. The thread's engine is on a ring,
    /// or on a [`crate::AioThreadQueue`] where io_uring(7) is forbidden or missing; it has the settings of
    /// [`Config::default`].
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: a descriptor could not be made. `ECANCELED`: the thread is
    /// ending, and its thread-local values are being dropped.
    pub fn new(disk: Arc<BlockDevice<dyn BlockMap>>) -> Result<Self, Error> {
        Self::on(thread_engines::shared()?, HandleDisk::given(disk))
    }

    /// A file with an engine of its own, on `queue`, which was made on this thread. Others share that
    /// engine by [`LocalAsyncFile::another`].
    ///
    /// # Errors
    /// Like [`Engine::new`] and [`LocalAsyncFile::new`].
    pub fn with_queue<Q: IoQueue + 'static>(
        disk: Arc<BlockDevice<dyn BlockMap>>,
        workers: WorkerPool,
        queue: Q,
        config: Config,
    ) -> Result<Self, Error> {
        let engine: Engine<Q, dyn BlockMap> = Engine::new(queue, workers, config)?;
        Self::on(thread_engines::register(Box::new(engine))?, HandleDisk::given(disk))
    }

    /// The async API of another device, on the engine of this file.
    ///
    /// # Errors
    /// Like [`LocalAsyncFile::new`]; the queue's, if it has failed.
    pub fn another(&self, disk: Arc<BlockDevice<dyn BlockMap>>) -> Result<Self, Error> {
        Self::on(self.state.engine.clone(), HandleDisk::given(disk))
    }

    fn on(engine: Rc<SharedEngine>, disk: HandleDisk) -> Result<Self, Error> {
        let number = engine.requests.borrow_mut().open(Arc::clone(&disk))?;
        let state = Rc::new(FileState { engine, number, disk });
        Ok(Self { state, flags: Flags::NONE, timeout: None })
    }

    async_file_requests!(state);

    pub(super) fn request(
        &self,
        op: Op,
        flags: Flags,
        range: ByteRange,
        buffer: IoBuffer,
    ) -> TimedRequest<RequestFuture> {
        let request = Request { op, flags, range };
        TimedRequest::new(RequestFuture::new(self.state.clone(), request, buffer), self.timeout)
    }
}

/// Each future makes its call when it is first polled, on a thread of the process. If it is dropped
/// later, or its time is over (`with_timeout`), the call goes on.
impl LocalAsyncFile {
    async_file_calls!(state);
}

impl fmt::Debug for LocalAsyncFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalAsyncFile").field("size", &self.size()).finish_non_exhaustive()
    }
}
