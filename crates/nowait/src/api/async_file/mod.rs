//! The async API: requests as futures, on any executor or none.
//!
//! Invariant: an unsent request holds its file, so that its driver exists when it is sent; a sent
//! request holds only the receiver of its result, so that it may be dropped at any time (C45).

mod oneshot;
mod channel;
mod driver;

use std::fmt;
use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc;
use std::task::{Context, Poll};

use crate::block::allocation_cache::AllocationCache;
use crate::block::device::BlockDevice;
use crate::blocking::worker_pool::WorkerPool;
use crate::memory::io_buffer::IoBuffer;
use crate::queue::IoQueue;
use crate::queue::auto::QueueKind;
use crate::storage::file::OpenOptions;
use crate::types::byte_range::ByteRange;
use crate::types::config::Config;
use crate::types::error::{Error, Operation};
use crate::types::request::{Flags, Op, Request};
use channel::{Answer, AsyncRequest, Channel};
use driver::Driver;
use oneshot::{Receiver, oneshot};

/// An image with futures: `Clone + Send + Sync`, for every executor. A thread of its own, shared by
/// all clones, owns an engine and wakes the waiting tasks; no runtime is needed.
///
/// Each request costs two hops between threads, and one or two allocations. Tasks of one thread spare them
/// with [`LocalAsyncFile`](crate::LocalAsyncFile), which is many times faster at low depth.
///
/// A request is sent by the first poll of its future. **Dropping a future is always safe.** If it
/// is dropped before that poll, no request is made. If it is dropped later, the request goes on,
/// and the thread keeps its memory until the kernel has finished with it (C45): a dropped write may
/// or may not be done, at any time until the last clone is gone and the thread has ended.
///
/// When the last clone is dropped, the thread finishes the requests in flight and ends; the drop
/// does not wait for that, and futures that were sent are still answered (C46). If the thread's
/// queue fails, every request that the thread has, and every later one, ends with the queue's
/// error; a request that was in flight then gives back an empty buffer, as its memory is leaked.
///
/// At most [`Config::slots`] requests are in flight and twice as many queued; a further future
/// waits for room before it is sent, or fails with `EAGAIN` under [`Flags::NOWAIT`] (C32).
///
/// ```
/// # use std::{pin::pin, sync::Arc, task::{Context, Poll, Wake, Waker}, thread};
/// # struct Unpark(thread::Thread);
/// # impl Wake for Unpark { fn wake(self: Arc<Self>) { self.0.unpark() } }
/// # fn block_on<F: Future>(future: F) -> F::Output {
/// #     let mut future = pin!(future);
/// #     let waker = Waker::from(Arc::new(Unpark(thread::current())));
/// #     loop {
/// #         match future.as_mut().poll(&mut Context::from_waker(&waker)) {
/// #             Poll::Ready(output) => return output,
/// #             Poll::Pending => thread::park(),
/// #         }
/// #     }
/// # }
/// # fn main() -> Result<(), nowait::Error> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("disk.img");
/// # std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
/// # block_on(async {
/// let file = nowait::AsyncFile::open(&path, nowait::OpenOptions::default())?;
/// let mut buffer = nowait::IoBuffer::zeroed(8192)?;
/// buffer.fill(7);
/// let (written, buffer) = file.write(4096, buffer, nowait::Flags::NONE).await;
/// assert_eq!(written?, 8192);
/// let (read, buffer) = file.read(8192, buffer).await;
/// assert_eq!(read?, 8192);
/// assert!(buffer[..4096].iter().all(|&byte| byte == 7));
/// assert!(buffer[4096..].iter().all(|&byte| byte == 0));
/// file.flush().await
/// # })
/// # }
/// ```
#[derive(Clone)]
pub struct AsyncFile {
    shared: Arc<AsyncFileInner>,
    /// Of each read and write of this handle, beside its own.
    flags: Flags,
}

/// The state that the clones share. The driver holds only the channel, so it ends when this is
/// dropped.
struct AsyncFileInner {
    channel: Arc<Channel>,
    size: u64,
}

impl Drop for AsyncFileInner {
    fn drop(&mut self) {
        self.channel.close();
    }
}

/// The parts of a driver but its queue, in the thread that will own it.
struct DriverStart {
    disk: Arc<BlockDevice<AllocationCache>>,
    workers: WorkerPool,
    config: Config,
    channel: Arc<Channel>,
    /// The thread that called [`AsyncFile::new`] waits at its other end.
    ready: mpsc::Sender<Result<(), Error>>,
}

impl DriverStart {
    /// Serves on `queue`, until all clones of the file are gone.
    ///
    /// # Errors
    /// As [`Engine::new`](crate::Engine::new): no request was served.
    fn serve<Q: IoQueue>(self, queue: Q) -> Result<(), Error> {
        let Self { disk, workers, config, channel, ready } = self;
        let driver = Driver::new(disk, workers, queue, config, channel)?;
        let _ = ready.send(Ok(()));
        driver.run();
        Ok(())
    }
}

impl AsyncFile {
    /// Opens the image at `path`. No other process may write to it meanwhile: its holes are cached.
    ///
    /// # Errors
    /// As [`BlockDevice::open`] and [`AsyncFile::new`].
    pub fn open(path: &Path, options: OpenOptions) -> Result<Self, Error> {
        let disk = BlockDevice::open(path, options)?;
        disk.scan();
        let (hint, allocate_ahead) = (!options.no_hint, !options.no_allocate_ahead);
        let config = Config { hint, allocate_ahead, ..Config::default() };
        let disk = Arc::new(disk);
        let workers = WorkerPool::new(config.workers);
        Self::new(disk, workers, config)
    }

    /// The async API of `disk`, which engines and other APIs may serve at the same time. It uses a
    /// ring, or [`crate::AioThreadQueue`] where io_uring(7) is forbidden or missing.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`, `EAGAIN`: a descriptor or the thread could not be made.
    pub fn new(
        disk: Arc<BlockDevice<AllocationCache>>,
        workers: WorkerPool,
        config: Config,
    ) -> Result<Self, Error> {
        Self::start(disk, workers, config, move |start| {
            let queue = QueueKind::Auto.open(config.slots)?;
            start.serve(queue)
        })
    }

    /// As [`AsyncFile::new`], on the queue that `make` makes in the thread that will own it.
    ///
    /// # Errors
    /// As [`AsyncFile::new`], and the error of `make`.
    pub fn with_queue<Q: IoQueue>(
        disk: Arc<BlockDevice<AllocationCache>>,
        workers: WorkerPool,
        config: Config,
        make: impl FnOnce() -> Result<Q, Error> + Send + 'static,
    ) -> Result<Self, Error> {
        Self::start(disk, workers, config, |start| {
            let queue = make()?;
            start.serve(queue)
        })
    }

    /// Starts the thread, which calls [`DriverStart::serve`] with a queue in `run`.
    fn start(
        disk: Arc<BlockDevice<AllocationCache>>,
        workers: WorkerPool,
        config: Config,
        run: impl FnOnce(DriverStart) -> Result<(), Error> + Send + 'static,
    ) -> Result<Self, Error> {
        let channel = Arc::new(Channel::new(config.slots as usize)?);
        let handle = AsyncFileInner { channel: channel.clone(), size: disk.size() };
        let (ready, made) = mpsc::channel();
        let start = DriverStart { disk, workers, config, channel, ready: ready.clone() };
        let run = move || run(start).or_else(|error| ready.send(Err(error)));
        std::thread::Builder::new()
            .name("nowait-async".into())
            .spawn(run)
            .map_err(|e| Error::from_io(&e, Operation::SetUp))?;
        made.recv().unwrap_or(Err(Error::new(libc::EIO, Operation::SetUp)))?;
        Ok(Self { shared: Arc::new(handle), flags: Flags::NONE })
    }

    /// Bytes of the device.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.shared.size
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
    ) -> impl Future<Output = (Result<usize, Error>, IoBuffer)> + Send + Unpin + use<> {
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
    ) -> impl Future<Output = (Result<usize, Error>, IoBuffer)> + Send + Unpin + use<> {
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
    pub fn flush(&self) -> impl Future<Output = Result<(), Error>> + Send + use<> {
        self.no_data(Op::Flush, Flags::NONE, ByteRange::default())
    }

    /// Releases the storage of `range`, which then reads as zeros where the file system can punch
    /// holes.
    ///
    /// # Errors
    /// `EOPNOTSUPP` where it cannot; `EROFS`; the errno of fallocate(2).
    pub fn discard(
        &self,
        range: ByteRange,
    ) -> impl Future<Output = Result<(), Error>> + Send + use<> {
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
    ) -> impl Future<Output = Result<(), Error>> + Send + use<> {
        self.no_data(Op::Zero, flags, range)
    }

    fn no_data(
        &self,
        op: Op,
        flags: Flags,
        range: ByteRange,
    ) -> impl Future<Output = Result<(), Error>> + Send + use<> {
        let request = self.request(op, flags, range, IoBuffer::default());
        async move { request.await.0.map(|_| ()) }
    }

    fn request(&self, op: Op, flags: Flags, range: ByteRange, buffer: IoBuffer) -> RequestFuture {
        let (sender, receiver) = oneshot();
        let request = AsyncRequest { io: Request { op, flags, range }, buffer, sender };
        RequestFuture {
            unsent: Some(PendingSubmit { request, file: self.clone() }),
            waiter_id: None,
            receiver,
        }
    }
}

impl fmt::Debug for AsyncFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncFile").field("size", &self.size()).finish_non_exhaustive()
    }
}

struct PendingSubmit {
    request: AsyncRequest,
    file: AsyncFile,
}

/// A request as a future.
#[must_use = "a request is sent when it is awaited"]
struct RequestFuture {
    unsent: Option<PendingSubmit>,
    /// Under which ID it waits for room in the channel.
    waiter_id: Option<u64>,
    receiver: Receiver<Answer>,
}

impl Future for RequestFuture {
    type Output = Answer;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Answer> {
        let this = &mut *self;
        if let Some(PendingSubmit { request, file }) = this.unsent.take()
            && let Some(request) =
                file.shared.channel.try_send(request, &mut this.waiter_id, context.waker())
        {
            this.unsent = Some(PendingSubmit { request, file });
            return Poll::Pending;
        }
        this.receiver.poll(context.waker()).map(|answer| {
            // No answer: the thread has panicked, and has lost the memory as well.
            let lost = || (Err(Error::new(libc::EIO, Operation::Wait)), IoBuffer::default());
            answer.unwrap_or_else(lost)
        })
    }
}

impl Drop for RequestFuture {
    fn drop(&mut self) {
        if let (Some(unsent), Some(waiter_id)) = (&self.unsent, self.waiter_id) {
            unsent.file.shared.channel.cancel_wait(waiter_id);
        }
    }
}

/// Handles and requests may be sent to other threads, handles and buffers also shared.
const _: () = {
    const fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<AsyncFile>();
    is_send_and_sync::<IoBuffer>();
    const fn is_send<T: Send>() {}
    is_send::<RequestFuture>();
};
