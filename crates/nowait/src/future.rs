//! The async face: requests as futures, on any executor or none.
//!
//! Invariant: an unsent request holds its file, so that its driver is there when it is sent; a sent
//! one holds nothing but its end of the rendezvous, so that it may be dropped at any time (C45).
//! Knows: everything above it. Known by: nobody.

use std::fmt;
use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::task::{Context, Poll};

use crate::config::Config;
use crate::disk::Disk;
use crate::driver::Driver;
use crate::error::{Doing, Error, Range};
use crate::inbox::{Answer, Inbox, Job};
use crate::io::{Flags, Io, Op};
use crate::map::Extents;
use crate::memory::Buffer;
use crate::queue::{Queue, Threads, Uring};
use crate::rendezvous::{Poller, rendezvous};
use crate::storage::OpenOptions;
use crate::worker::Workers;

/// An image for callers that `await`: `Clone + Send + Sync`, at home in every executor. A thread of
/// its own, shared by all clones, owns an engine and wakes who waits; no runtime is needed.
///
/// A request is sent by the first poll of its future. **Dropping a future is always safe.** Before
/// that poll nothing happens; after it the request goes on, and its memory belongs to the thread
/// until the kernel is through with it (C45): a dropped write may or may not be done, at any time
/// until the last clone is gone and the thread has ended.
///
/// When the last clone is dropped, the thread finishes what is in flight and ends; the drop does
/// not wait for that, and futures that were sent are still answered (C46). Should the thread's
/// queue fail, every request that it has, or that is sent later, ends with the queue's error; one
/// that was in flight then gives back an empty buffer, as its memory is lost to the kernel.
///
/// At most [`Config::slots`] requests are in flight and twice as many on their way; a future beyond
/// that waits for room before it is sent, or fails with `EAGAIN` under [`Flags::NOWAIT`] (C32).
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
/// let mut buffer = nowait::Buffer::zeroed(8192)?;
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
pub struct AsyncFile(Arc<Handle>);

/// What the clones share. The driver has the inbox alone: it ends when this is dropped.
struct Handle {
    inbox: Arc<Inbox>,
    size: u64,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.inbox.close();
    }
}

impl AsyncFile {
    /// Opens the image at `path`, which nobody else writes to meanwhile: its holes are remembered.
    ///
    /// # Errors
    /// As [`Disk::open`] and [`AsyncFile::new`].
    pub fn open(path: &Path, options: OpenOptions) -> Result<Self, Error> {
        let disk = Disk::open(path, options)?;
        disk.scan();
        let config = Config { hint: !options.no_hint, ..Config::default() };
        let disk = Arc::new(disk);
        let workers = Workers::new(&disk, config.workers);
        Self::new(disk, workers, config)
    }

    /// The async face of `disk`, which other faces may serve at the same time; on a ring, or where
    /// io_uring(7) is forbidden or missing on [`Threads`].
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`, `EAGAIN`: a descriptor or the thread could not be made.
    pub fn new(disk: Arc<Disk<Extents>>, workers: Workers, config: Config) -> Result<Self, Error> {
        let (again, more) = (disk.clone(), workers.clone());
        Self::with_queue(disk, workers, config, |disk| Uring::new(disk.fd())).or_else(|_| {
            Self::with_queue(again, more, config, move |disk| {
                Threads::new(disk.fd(), config.slots, !disk.is_direct())
            })
        })
    }

    /// As [`AsyncFile::new`], on the queue that `make` makes in the thread that will own it.
    ///
    /// # Errors
    /// As there, and what `make` said.
    pub fn with_queue<Q: Queue>(
        disk: Arc<Disk<Extents>>,
        workers: Workers,
        config: Config,
        make: impl FnOnce(&Disk<Extents>) -> Result<Q, Error> + Send + 'static,
    ) -> Result<Self, Error> {
        let inbox = Arc::new(Inbox::new(config.slots as usize)?);
        let handle = Handle { inbox: inbox.clone(), size: disk.size() };
        let (ready, made) = channel();
        let run = move || {
            let driver =
                make(&disk).and_then(|queue| Driver::new(disk, workers, queue, config, inbox));
            match driver {
                Ok(driver) => {
                    // Whoever started this thread waits for the word.
                    let _ = ready.send(Ok(()));
                    driver.run();
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                }
            }
        };
        std::thread::Builder::new()
            .name("nowait-async".into())
            .spawn(run)
            .map_err(|e| Error::from_io(&e, Doing::SetUp))?;
        made.recv().unwrap_or(Err(Error::new(libc::EIO, Doing::SetUp)))?;
        Ok(Self(Arc::new(handle)))
    }

    /// Bytes of the device.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.0.size
    }

    /// Reads into `buffer` from byte `pos` on. Comes to the bytes read: fewer than `buffer.len()`
    /// only past the end of the device (C17).
    ///
    /// # Errors
    /// `EINVAL` for a range beyond `i64::MAX` (C08); what preadv2(2) said. The buffer comes back.
    pub fn read(
        &self,
        pos: u64,
        buffer: Buffer,
    ) -> impl Future<Output = (Result<usize, Error>, Buffer)> + Send + Unpin + use<> {
        self.request(Op::Read, Flags::NONE, Range::new(pos, buffer.len() as u64), buffer)
    }

    /// Writes `buffer` from byte `pos` on. Comes to the bytes written: fewer than `buffer.len()`
    /// only where the write crosses the end of the device (C25). With [`Flags::DSYNC`] they are
    /// durable (C28).
    ///
    /// # Errors
    /// `EROFS` on a read-only device, `ENOSPC` at or past its end, `EINVAL` for a range beyond
    /// `i64::MAX`, `EAGAIN` under [`Flags::NOWAIT`]; what pwritev2(2) or fdatasync(2) said. The
    /// buffer comes back.
    pub fn write(
        &self,
        pos: u64,
        buffer: Buffer,
        flags: Flags,
    ) -> impl Future<Output = (Result<usize, Error>, Buffer)> + Send + Unpin + use<> {
        self.request(Op::Write, flags, Range::new(pos, buffer.len() as u64), buffer)
    }

    /// Makes every write durable that had ended when this is first polled (C49).
    ///
    /// # Errors
    /// What fdatasync(2) said; `EIO` ever after a failed flush (C51).
    pub fn flush(&self) -> impl Future<Output = Result<(), Error>> + Send + use<> {
        self.bare(Op::Flush, Flags::NONE, Range::default())
    }

    /// Gives the storage of `range` back; it then reads as zeros where the file system can punch
    /// holes.
    ///
    /// # Errors
    /// `EOPNOTSUPP` where it cannot; `EROFS`; what fallocate(2) said.
    pub fn discard(&self, range: Range) -> impl Future<Output = Result<(), Error>> + Send + use<> {
        self.bare(Op::Discard, Flags::NONE, range)
    }

    /// Makes `range` read as zeros; with [`Flags::NO_UNMAP`] it keeps its storage, with
    /// [`Flags::FAST_ZERO`] nothing is done unless it is cheap.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for `FAST_ZERO` where it is not cheap; `EROFS`; what fallocate(2) or
    /// pwritev2(2) said.
    pub fn zero(
        &self,
        range: Range,
        flags: Flags,
    ) -> impl Future<Output = Result<(), Error>> + Send + use<> {
        self.bare(Op::Zero, flags, range)
    }

    fn bare(
        &self,
        op: Op,
        flags: Flags,
        range: Range,
    ) -> impl Future<Output = Result<(), Error>> + Send + use<> {
        let request = self.request(op, flags, range, Buffer::default());
        async move { request.await.0.map(|_| ()) }
    }

    fn request(&self, op: Op, flags: Flags, range: Range, buffer: Buffer) -> Request {
        let (completer, poller) = rendezvous();
        let job = Job { io: Io { op, flags, range }, buffer, completer };
        Request { unsent: Some(Unsent { job, file: self.clone() }), seat: None, poller }
    }
}

impl fmt::Debug for AsyncFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncFile").field("size", &self.size()).finish_non_exhaustive()
    }
}

struct Unsent {
    job: Job,
    file: AsyncFile,
}

/// A request as a future.
#[must_use = "a request is sent when it is awaited"]
struct Request {
    unsent: Option<Unsent>,
    /// Where it waits for room in the inbox.
    seat: Option<u64>,
    poller: Poller<Answer>,
}

impl Future for Request {
    type Output = Answer;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Answer> {
        let this = &mut *self;
        if let Some(Unsent { job, file }) = this.unsent.take()
            && let Some(job) = file.0.inbox.offer(job, &mut this.seat, context.waker())
        {
            this.unsent = Some(Unsent { job, file });
            return Poll::Pending;
        }
        this.poller.poll(context.waker()).map(|answer| {
            // No answer: the thread has panicked, which lost the memory as well.
            let lost = || (Err(Error::new(libc::EIO, Doing::Wait)), Buffer::default());
            answer.unwrap_or_else(lost)
        })
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if let (Some(unsent), Some(seat)) = (&self.unsent, self.seat) {
            unsent.file.0.inbox.leave(seat);
        }
    }
}

/// Nothing that a handle or a request holds belongs to a thread.
const _: () = {
    const fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<AsyncFile>();
    is_send_and_sync::<Buffer>();
    const fn is_send<T: Send>() {}
    is_send::<Request>();
};
