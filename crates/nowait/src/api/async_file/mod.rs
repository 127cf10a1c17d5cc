//! The async API: requests as futures, on any executor or none.
//!
//! Invariant: an unsent request holds its file, and so its thread, so that its driver exists when it is
//! sent; a sent request holds only the receiver of its result, so that it may be dropped at any time
//! (C45). One that its task's thread has submitted is held by the kernel.

mod async_request;
mod caller_transfers;
mod channel;
mod driver;
mod engine_threads;

use std::fmt;
use std::fs::Metadata;
use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use crate::api::file_call;
use crate::api::handle_disk::HandleDisk;
use crate::api::oneshot::{Receiver, oneshot};
use crate::api::timed_request::TimedRequest;
use crate::block::block_map::BlockMap;
use crate::block::device::BlockDevice;
use crate::blocking::worker_pool::WorkerPool;
use crate::engine::simple_path::SimplePath;
use crate::memory::io_buffer::IoBuffer;
use crate::queue::IoQueue;
use crate::storage::file_calls::{Allocate, FileLock};
use crate::storage::open_options::OpenOptions;
use crate::types::byte_range::ByteRange;
use crate::types::config::Config;
use crate::types::error::{Error, Operation};
use crate::types::io_priority::IoPriority;
use crate::types::request::{Flags, Op, Request};
use async_request::{Answer, AsyncRequest};
use caller_transfers::{Attempt, Refusals};
use channel::Channel;

/// A file or disk with futures: `Clone + Send + Sync`, for every executor. A thread of the library owns an
/// engine and wakes the waiting tasks; no runtime is needed.
///
/// All files of the process share these threads, one for each processor that the process may use and
/// at most four: a file goes to the one with the fewest files. A thread starts with its first file and
/// ends with its last one, so that a file costs little more than its descriptor.
///
/// A lone request is submitted by the thread of its task, if it is aligned and the file does direct I/O and takes
/// `RWF_NOWAIT`: it costs one hop between threads, or none if the device answers while it is submitted. Of several in
/// flight each costs two, which they share. A read whose bytes were read ahead costs none. Each costs two allocations. Tasks of one thread spare hops and allocations
/// with [`LocalAsyncFile`](crate::LocalAsyncFile).
///
/// A request is sent by the first poll of its future. **Dropping a future is always safe.** If it
/// is dropped before that poll, no request is made. If it is dropped later, the request goes on,
/// and the thread keeps its memory until the kernel has finished with it (C45): a dropped write may
/// or may not be done, at any time until the last clone is gone and the thread has finished the file's
/// requests.
///
/// When the last clone is dropped, the thread finishes the requests in flight, closes the file, and
/// ends if that was its last one; the drop does not wait for that, and futures that were sent are still
/// answered (C46). If the thread's queue fails, every request that the thread has, and every later one
/// of its files, ends with the queue's error; a request that was in flight then gives back an empty
/// buffer, as its memory is leaked. A file that is opened later goes to another thread.
///
/// At most [`Config::slots`] requests of a thread's files are in flight, and 64 that tasks have submitted; those of one file never more
/// than three times the slots that are free: so a file whose disk hangs leaves slots to the others.
/// Of each file twice as many as there are slots may be queued, and the files take turns; a further future
/// waits for room before it is sent, or fails with `EAGAIN` under [`Flags::NOWAIT`] (C32).
///
/// A child process after fork(2) uses no file that its parent has opened: the threads are the
/// parent's. Opening one fails there, if the parent has made an engine or read ahead (`EOPNOTSUPP`, C85).
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
/// let (written, buffer) = file.write_at(buffer, 4096, nowait::Flags::NONE).await;
/// assert_eq!(written?, 8192);
/// let (read, buffer) = file.read_at(buffer, 8192).await;
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
    pub(super) flags: Flags,
    timeout: Option<Duration>,
}

/// The state that the clones share. The driver holds only the channel, and closes the file when this
/// is dropped.
struct AsyncFileInner {
    channel: Arc<Channel>,
    /// The number of the file in the channel.
    number: u32,
    disk: HandleDisk,
    simple_path: SimplePath,
    /// Transfers in flight that callers have submitted themselves.
    transfers: AtomicU32,
    refusals: Refusals,
    /// The last of these was in flight when its submission had returned.
    is_slow: AtomicBool,
    /// Requests that had ended when they were submitted.
    ended_inline: AtomicU32,
}

impl Drop for AsyncFileInner {
    fn drop(&mut self) {
        self.channel.close(self.number, &self.disk);
    }
}

impl AsyncFile {
    /// Opens the file at `path`, or makes it, as one that grows ([`BlockDevice::open_file`]). A disk, of a
    /// fixed size, is opened by [`BlockDevice::open`].
    ///
    /// # Errors
    /// Like [`BlockDevice::open_file`] and [`AsyncFile::new`].
    pub fn open(path: &Path, options: OpenOptions) -> Result<Self, Error> {
        Self::of(HandleDisk::opened(Arc::new(BlockDevice::open_file(path, options)?)))
    }

    /// The async API of `disk`, a device of any map, which engines and other APIs may serve at the same
    /// time. The threads use rings, or [`crate::AioThreadQueue`]s where io_uring(7) is forbidden or
    /// missing, and the settings of [`Config::default`].
    ///
    /// If a descriptor is missing that the thread needs for the file, each request fails with `EMFILE`
    /// until there is one.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`, `EAGAIN`: there is no thread yet, and a descriptor or the thread
    /// could not be made.
    pub fn new(disk: Arc<BlockDevice<dyn BlockMap>>) -> Result<Self, Error> {
        Self::of(HandleDisk::given(disk))
    }

    fn of(disk: HandleDisk) -> Result<Self, Error> {
        let (channel, number) = engine_threads::open(Arc::clone(&disk))?;
        Ok(Self::with(channel, number, disk))
    }

    /// A file with a thread of its own, on the queue that `make` makes in that thread. Others share the
    /// thread by [`AsyncFile::another`].
    ///
    /// # Errors
    /// Like [`AsyncFile::new`], and the error of `make`.
    pub fn with_queue<Q: IoQueue>(
        disk: Arc<BlockDevice<dyn BlockMap>>,
        workers: WorkerPool,
        config: Config,
        make: impl FnOnce() -> Result<Q, Error> + Send + 'static,
    ) -> Result<Self, Error> {
        Self::on(engine_threads::start(workers, config, None, make)?, disk)
    }

    /// The async API of another device, on the thread of this file.
    ///
    /// # Errors
    /// The queue's, if it has failed.
    pub fn another(&self, disk: Arc<BlockDevice<dyn BlockMap>>) -> Result<Self, Error> {
        Self::on(self.shared.channel.clone(), disk)
    }

    fn on(channel: Arc<Channel>, disk: Arc<BlockDevice<dyn BlockMap>>) -> Result<Self, Error> {
        // A channel with an open file, or without an earlier one, is open.
        let closed = Error::new(libc::EIO, Operation::SetUp);
        let number = channel.open(disk.clone())?.ok_or(closed)?;
        Ok(Self::with(channel, number, HandleDisk::given(disk)))
    }

    fn with(channel: Arc<Channel>, number: u32, disk: HandleDisk) -> Self {
        let simple_path = SimplePath::new(&disk, &Config::default());
        let [transfers, ended_inline] = [0, 0].map(AtomicU32::new);
        let shared = Arc::new(AsyncFileInner {
            channel,
            number,
            disk,
            simple_path,
            transfers,
            refusals: Refusals::default(),
            is_slow: AtomicBool::new(false),
            ended_inline,
        });
        Self { shared, flags: Flags::NONE, timeout: None }
    }

    async_file_requests!(shared, Send);

    pub(super) fn request(
        &self,
        op: Op,
        flags: Flags,
        range: ByteRange,
        buffer: IoBuffer,
    ) -> TimedRequest<RequestFuture> {
        let (sender, receiver) = oneshot();
        let request = AsyncRequest { io: Request { op, flags, range }, buffer, sender };
        let future = RequestFuture {
            unsent: Some(PendingSubmit { request, file: self.clone() }),
            waiter_id: None,
            receiver,
        };
        TimedRequest::new(future, self.timeout)
    }
}

/// Each future makes its call when it is first polled, on a thread of the process. If it is dropped
/// later, or its time is over (`with_timeout`), the call goes on.
impl AsyncFile {
    async_file_calls!(shared, Send);
}

impl fmt::Debug for AsyncFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncFile").field("size", &self.size()).finish_non_exhaustive()
    }
}

/// Requests of a file that end while they are submitted, after which a task lets others of its thread run.
const TURN: u32 = 32;

struct PendingSubmit {
    request: AsyncRequest,
    file: AsyncFile,
}

/// A request as a future.
#[must_use = "a request is sent when it is awaited"]
#[allow(unreachable_pub, reason = "with the features of `FileStream` its trait names it")]
pub struct RequestFuture {
    unsent: Option<PendingSubmit>,
    /// Under which ID it waits for room in the channel.
    waiter_id: Option<u64>,
    receiver: Receiver<Answer>,
}

impl Future for RequestFuture {
    type Output = Answer;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Answer> {
        let this = &mut *self;
        if let Some(PendingSubmit { request, file }) = this.unsent.take() {
            match file.shared.submit(request) {
                Attempt::Submitted => return this.poll_submitted(&file, context),
                Attempt::Refused(request) => {
                    let AsyncFileInner { channel, number, .. } = &*file.shared;
                    let waiter_id = &mut this.waiter_id;
                    let full = channel.try_send(*number, request, waiter_id, context.waker());
                    if let Some(request) = full {
                        this.unsent = Some(PendingSubmit { request, file });
                        return Poll::Pending;
                    }
                }
            }
        }
        this.poll_answer(context)
    }
}

impl RequestFuture {
    /// The answer to a request that this thread has submitted. A task whose requests all end meanwhile lets others run
    /// now and then.
    fn poll_submitted(&mut self, file: &AsyncFile, context: &Context<'_>) -> Poll<Answer> {
        let is_turn = |ended: u32| ended % TURN == TURN - 1;
        if self.receiver.has_ended()
            && is_turn(file.shared.ended_inline.fetch_add(1, Ordering::Relaxed))
        {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let answer = self.poll_answer(context);
        file.shared.is_slow.store(answer.is_pending(), Ordering::Relaxed);
        if answer.is_pending() {
            file.shared.channel.watch_callers();
        }
        answer
    }

    fn poll_answer(&mut self, context: &Context<'_>) -> Poll<Answer> {
        self.receiver.poll(context.waker()).map(|answer| {
            // No answer: the thread has panicked, and has lost the memory as well.
            let lost = || (Err(Error::new(libc::EIO, Operation::Wait)), IoBuffer::default());
            answer.unwrap_or_else(lost)
        })
    }
}

impl Drop for RequestFuture {
    fn drop(&mut self) {
        if let (Some(unsent), Some(waiter_id)) = (&self.unsent, self.waiter_id) {
            let AsyncFileInner { channel, number, .. } = &*unsent.file.shared;
            channel.cancel_wait(*number, waiter_id);
        }
    }
}

/// Handles and requests may be sent to other threads, handles and buffers also shared.
const _: () = {
    const fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<AsyncFile>();
    is_send_and_sync::<IoBuffer>();
    const fn is_send<T: Send>() {}
    is_send::<TimedRequest<RequestFuture>>();
};
