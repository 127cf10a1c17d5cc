//! The async API of one thread: requests as futures, on an engine of the thread that polls them.
//!
//! Invariant: a future holds its file; so the engine, and the memory of every request in it, are
//! there until the last future is gone (C45).

mod request_slab;
mod local_engine;
mod sent_requests;
mod file_state;
mod request_future;
mod wake_flag;
pub(crate) mod local_driver;
#[cfg(all(feature = "tokio", not(loom)))]
mod tokio_driver;

use std::fmt;
use std::future::Future;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use crate::api::local_file::local_engine::FileEngine;
use crate::block::allocation_cache::AllocationCache;
use crate::block::block_map::BlockMap;
use crate::block::device::BlockDevice;
use crate::blocking::worker_pool::WorkerPool;
use crate::engine::Engine;
use crate::memory::io_buffer::IoBuffer;
use crate::queue::IoQueue;
use crate::queue::auto::QueueKind;
use crate::storage::file::OpenOptions;
use crate::types::byte_range::ByteRange;
use crate::types::config::Config;
use crate::types::error::Error;
use crate::types::request::{Flags, Op, Request};
use file_state::FileState;
use request_future::RequestFuture;

/// An image with futures for one thread: `Clone`, but neither `Send` nor `Sync`. Its tasks use an
/// engine of their own thread, so that a request costs no hop to another thread and no allocation.
/// [`AsyncFile`](crate::AsyncFile) is the version for executors with several threads.
///
/// A request is sent by the first poll of its future. It makes progress while a driver runs on the
/// thread: [`LocalDriver`](crate::LocalDriver), or with the feature `tokio` the future of
/// `LocalAsyncFile::tokio_driver`. Without one it never ends.
///
/// **Dropping a future is always safe.** If it is dropped before its first poll, no request is made.
/// If it is dropped later, the request may or may not be done, at any time until the last handle and
/// future are gone; the file keeps its memory until the kernel has finished with it (C45). The drop
/// of the last handle or future waits for the requests in flight.
///
/// At most [`Config::slots`] requests are in flight; a further one waits for room in the order in
/// which it was sent, or fails with `EAGAIN` under [`Flags::NOWAIT`] (C32). If the queue fails, every
/// request and every later one ends with its error; a request that was in flight then gives back an
/// empty buffer, as its memory is leaked.
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
///     let (written, buffer) = file.write(4096, buffer, nowait::Flags::NONE).await;
///     assert_eq!(written?, 8192);
///     let (read, buffer) = file.read(8192, buffer).await;
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
    flags: Flags,
}

impl LocalAsyncFile {
    /// Opens the image at `path`. No other process may write to it meanwhile: its holes are cached.
    ///
    /// # Errors
    /// As [`BlockDevice::open`] and [`LocalAsyncFile::new`].
    pub fn open(path: &Path, options: OpenOptions) -> Result<Self, Error> {
        let disk = BlockDevice::open(path, options)?;
        disk.scan();
        let (hint, allocate_ahead) = (!options.no_hint, !options.no_allocate_ahead);
        let config = Config { hint, allocate_ahead, ..Config::default() };
        let disk = Arc::new(disk);
        let workers = WorkerPool::new(config.workers);
        Self::new(disk, workers, config)
    }

    /// The async API of `disk` for this thread; engines and other APIs, also those of other threads,
    /// may serve the device at the same time. It uses a ring, or [`crate::AioThreadQueue`] where
    /// io_uring(7) is forbidden or missing.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: a descriptor could not be made.
    pub fn new(
        disk: Arc<BlockDevice<AllocationCache>>,
        workers: WorkerPool,
        config: Config,
    ) -> Result<Self, Error> {
        Self::with_queue(disk, workers, QueueKind::Auto.open(config.slots)?, config)
    }

    /// As [`LocalAsyncFile::new`], for any map and on `queue`, which was made on this thread.
    ///
    /// # Errors
    /// As [`Engine::new`].
    pub fn with_queue<Q: IoQueue + 'static, M: BlockMap + ?Sized>(
        disk: Arc<BlockDevice<M>>,
        workers: WorkerPool,
        queue: Q,
        config: Config,
    ) -> Result<Self, Error> {
        let size = disk.size();
        let mut engine = Engine::new(queue, workers, config)?;
        let disk = engine.attach(disk)?;
        let file = Rc::new(FileState::new(Box::new(FileEngine { engine, disk }), size));
        local_driver::register(&file);
        Ok(Self { state: file, flags: Flags::NONE })
    }

    /// Bytes of the device.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.state.size
    }

    /// The same file; each of its reads and writes has `flags` beside its own, such as
    /// [`Flags::HIPRI`].
    #[must_use]
    pub fn with_flags(self, flags: Flags) -> Self {
        Self { flags: self.flags.with(flags), ..self }
    }

    /// Reads into `buffer` from byte `pos` on. The result is the bytes read: fewer than
    /// `buffer.len()` only past the end of the device (C17).
    ///
    /// # Errors
    /// `EINVAL` for a range beyond `i64::MAX` (C08); the errno of preadv2(2). The buffer is given
    /// back.
    pub fn read(
        &self,
        pos: u64,
        buffer: IoBuffer,
    ) -> impl Future<Output = (Result<usize, Error>, IoBuffer)> + Unpin + use<> {
        self.request(Op::Read, self.flags, ByteRange::new(pos, buffer.len() as u64), buffer)
    }

    /// Writes `buffer` from byte `pos` on. The result is the bytes written: fewer than
    /// `buffer.len()` only where the write crosses the end of the device (C25). With
    /// [`Flags::DSYNC`] they are durable (C28).
    ///
    /// # Errors
    /// `EROFS` on a read-only device, `ENOSPC` at or past its end, `EINVAL` for a range beyond
    /// `i64::MAX`, `EAGAIN` under [`Flags::NOWAIT`]; the errno of pwritev2(2) or fdatasync(2). The
    /// buffer is given back.
    pub fn write(
        &self,
        pos: u64,
        buffer: IoBuffer,
        flags: Flags,
    ) -> impl Future<Output = (Result<usize, Error>, IoBuffer)> + Unpin + use<> {
        self.request(
            Op::Write,
            flags.with(self.flags),
            ByteRange::new(pos, buffer.len() as u64),
            buffer,
        )
    }

    /// Makes every write durable that had ended when this is first polled (C49).
    ///
    /// # Errors
    /// The errno of fdatasync(2); after a failed flush always `EIO` (C51).
    pub fn flush(&self) -> impl Future<Output = Result<(), Error>> + use<> {
        self.no_data(Op::Flush, Flags::NONE, ByteRange::default())
    }

    /// Releases the storage of `range`, which then reads as zeros where the file system can punch
    /// holes.
    ///
    /// # Errors
    /// `EOPNOTSUPP` where it cannot; `EROFS`; the errno of fallocate(2).
    pub fn discard(&self, range: ByteRange) -> impl Future<Output = Result<(), Error>> + use<> {
        self.no_data(Op::Discard, Flags::NONE, range)
    }

    /// Makes `range` read as zeros. With [`Flags::NO_UNMAP`] it keeps its storage; with
    /// [`Flags::FAST_ZERO`] the request fails unless zeroing is cheap.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for `FAST_ZERO` where zeroing is not cheap; `EROFS`; the errno of fallocate(2)
    /// or pwritev2(2).
    pub fn zero(
        &self,
        range: ByteRange,
        flags: Flags,
    ) -> impl Future<Output = Result<(), Error>> + use<> {
        self.no_data(Op::Zero, flags, range)
    }

    fn no_data(
        &self,
        op: Op,
        flags: Flags,
        range: ByteRange,
    ) -> impl Future<Output = Result<(), Error>> + use<> {
        let request = self.request(op, flags, range, IoBuffer::default());
        async move { request.await.0.map(|_| ()) }
    }

    fn request(&self, op: Op, flags: Flags, range: ByteRange, buffer: IoBuffer) -> RequestFuture {
        RequestFuture::new(self.state.clone(), Request { op, flags, range }, buffer)
    }
}

impl fmt::Debug for LocalAsyncFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalAsyncFile").field("size", &self.size()).finish_non_exhaustive()
    }
}
