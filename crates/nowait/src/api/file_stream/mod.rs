//! A file as a stream with a position, for code that wants `AsyncRead`, `AsyncSeek` and `AsyncWrite`.
//!
//! Invariant: one request is in flight at most. `ready` are bytes of `buffer` that stand in the file from
//! `pos` on; it is empty while a request has the buffer.

/// The traits that two crates have with the same methods, but for `$close`.
macro_rules! common_traits {
    ($($io:ident)::+, $close:ident) => {
        impl<F: StreamFile> $($io)::+::AsyncBufRead for FileStream<F> {
            fn poll_fill_buf(
                self: Pin<&mut Self>,
                context: &mut Context<'_>,
            ) -> Poll<io::Result<&[u8]>> {
                self.get_mut().poll_fill(context)
            }

            fn consume(mut self: Pin<&mut Self>, count: usize) {
                self.take(count);
            }
        }

        impl<F: StreamFile> $($io)::+::AsyncWrite for FileStream<F> {
            fn poll_write(
                mut self: Pin<&mut Self>,
                context: &mut Context<'_>,
                data: &[u8],
            ) -> Poll<io::Result<usize>> {
                self.poll_send(context, data)
            }

            fn poll_flush(
                mut self: Pin<&mut Self>,
                context: &mut Context<'_>,
            ) -> Poll<io::Result<()>> {
                self.poll_idle(context)
            }

            fn $close(
                mut self: Pin<&mut Self>,
                context: &mut Context<'_>,
            ) -> Poll<io::Result<()>> {
                self.poll_idle(context)
            }
        }
    };
}

#[cfg(feature = "futures-io")]
mod futures_traits;
mod stream_file;
#[cfg(all(feature = "tokio", not(loom)))]
mod tokio_traits;

use std::fmt;
use std::io::{self, SeekFrom};
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use crate::api::async_file::AsyncFile;
use crate::memory::io_buffer::IoBuffer;
use crate::types::byte_range::ByteRange;
use crate::types::request::Op;
pub use stream_file::StreamFile;

/// Reads begin and end at multiples of this, so that they are transfers of direct I/O.
const BLOCK: usize = 4096;
/// Bytes that a request of a stream has if nothing else is asked for.
const DEFAULT_CAPACITY: usize = 64 << 10;
const MOST_CAPACITY: usize = 16 << 20;

/// An [`AsyncFile`], or a [`LocalAsyncFile`](crate::LocalAsyncFile), as a stream that one task reads, writes and
/// seeks.
///
/// With the feature `futures-io` it has the traits `AsyncRead`, `AsyncBufRead`, `AsyncSeek` and `AsyncWrite` of that
/// crate, with the feature `tokio` those of tokio.
///
/// It reads ahead, up to its capacity: what others write to these bytes meanwhile may not be seen. Its own writes
/// are. A write takes its bytes and is sent immediately; the next call waits for it and reports its error, so flush
/// before the stream is dropped. A flush waits for the write, and makes nothing durable: [`AsyncFile::flush`] does, or
/// [`Flags::DSYNC`](crate::Flags::DSYNC) by [`AsyncFile::with_flags`]. Each write is a request of its own: put a
/// `BufWriter` around a stream that takes many small ones. A read at the end of the file gives 0 bytes, and more when
/// the file has grown; a seek beyond it changes nothing, and a write there fills the gap with zeros (C57).
///
/// Dropping a stream, or a future that uses it, is safe: a request that was sent goes on, and the bytes of a read that
/// nothing waits for any more are there for the next one. The two halves of a stream that was split must not wait
/// simultaneously: a request wakes the task that has polled last.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("file");
/// use futures_lite::{AsyncReadExt, AsyncSeekExt, AsyncWriteExt};
/// use nowait::{AsyncFile, FileStream, OpenOptions};
///
/// pollster::block_on(async {
///     let mut stream = FileStream::new(AsyncFile::open(&path, OpenOptions::new().create(true))?);
///     stream.write_all(b"any length, anywhere").await?;
///     stream.seek(std::io::SeekFrom::Start(4)).await?;
///     let mut rest = String::new();
///     stream.read_to_string(&mut rest).await?;
///     assert_eq!(rest, "length, anywhere");
///     stream.get_ref().flush().await?; // durable
///     Ok(())
/// })
/// # }
/// ```
pub struct FileStream<F: StreamFile = AsyncFile> {
    file: F,
    pos: u64,
    capacity: usize,
    buffer: IoBuffer,
    ready: Range<usize>,
    request: Option<InFlight<F::Request>>,
    /// Where a seek of tokio that has begun goes to.
    #[cfg(all(feature = "tokio", not(loom)))]
    seek_to: Option<SeekFrom>,
}

/// The request in flight.
struct InFlight<R> {
    future: R,
    op: Op,
    /// Its position in the file, and its bytes.
    pos: u64,
    len: usize,
}

impl<F: StreamFile> FileStream<F> {
    /// A stream at the beginning of `file`, with requests of up to 64 KiB.
    pub fn new(file: F) -> Self {
        Self::with_capacity(DEFAULT_CAPACITY, file)
    }

    /// Like [`FileStream::new`], with requests of up to `bytes`, rounded up to a multiple of 4096 and at most 16 MiB.
    pub fn with_capacity(bytes: usize, file: F) -> Self {
        Self {
            file,
            pos: 0,
            capacity: bytes.clamp(1, MOST_CAPACITY).next_multiple_of(BLOCK),
            buffer: IoBuffer::default(),
            ready: 0..0,
            request: None,
            #[cfg(all(feature = "tokio", not(loom)))]
            seek_to: None,
        }
    }

    /// The file.
    pub fn get_ref(&self) -> &F {
        &self.file
    }

    /// The file; a write that was sent goes on.
    pub fn into_inner(self) -> F {
        self.file
    }

    /// The position of the next byte that is read or written.
    pub fn position(&self) -> u64 {
        self.pos
    }

    /// The bytes at the position, read from the file if there are none; none at its end.
    fn poll_fill(&mut self, context: &mut Context<'_>) -> Poll<io::Result<&[u8]>> {
        let was_reading = self.request.as_ref().is_some_and(|request| request.op == Op::Read);
        ready!(self.poll_idle(context))?;
        // A read that has ended without a byte has found the end of the file.
        if self.ready.is_empty() && !was_reading {
            let skipped = self.pos % BLOCK as u64;
            self.begin(Op::Read, self.pos - skipped, self.capacity)?;
            ready!(self.poll_idle(context))?;
        }
        Poll::Ready(Ok(&self.buffer[self.ready.clone()]))
    }

    /// Moves the position over `bytes` of those that [`FileStream::poll_fill`] has given.
    fn take(&mut self, bytes: usize) {
        let bytes = bytes.min(self.ready.len());
        self.ready.start += bytes;
        self.pos += bytes as u64;
    }

    /// Gives at most `room` of the bytes at the position to `put`, and moves it over them. Returns their number.
    fn poll_copy(
        &mut self,
        context: &mut Context<'_>,
        room: usize,
        put: impl FnOnce(&[u8]),
    ) -> Poll<io::Result<usize>> {
        if room == 0 {
            return Poll::Ready(Ok(0));
        }
        let bytes = ready!(self.poll_fill(context))?;
        let count = bytes.len().min(room);
        put(&bytes[..count]);
        self.take(count);
        Poll::Ready(Ok(count))
    }

    /// Sends a write of as much of `data` as one request holds, and returns how much that is.
    fn poll_send(&mut self, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_idle(context))?;
        let len = data.len().min(self.capacity);
        if len == 0 {
            return Poll::Ready(Ok(0));
        }
        self.reserve()?;
        self.buffer[..len].copy_from_slice(&data[..len]);
        let pos = self.pos;
        self.pos = pos.checked_add(len as u64).ok_or(io::ErrorKind::InvalidInput)?;
        self.begin(Op::Write, pos, len)?;
        match self.poll_idle(context) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Ready(Ok(())) | Poll::Pending => Poll::Ready(Ok(len)),
        }
    }

    /// Moves the position, when the request in flight has ended.
    fn poll_seek_to(
        &mut self,
        context: &mut Context<'_>,
        target: SeekFrom,
    ) -> Poll<io::Result<u64>> {
        ready!(self.poll_idle(context))?;
        let (base, offset) = match target {
            SeekFrom::Start(pos) => (pos, 0),
            SeekFrom::Current(offset) => (self.pos, offset),
            SeekFrom::End(offset) => (self.file.size(), offset),
        };
        let pos = base.checked_add_signed(offset).ok_or(io::ErrorKind::InvalidInput)?;
        if pos != self.pos {
            self.ready = 0..0;
        }
        self.pos = pos;
        Poll::Ready(Ok(pos))
    }

    fn reserve(&mut self) -> io::Result<()> {
        if self.buffer.len() < self.capacity {
            self.buffer = IoBuffer::zeroed(self.capacity)?;
        }
        Ok(())
    }

    /// Makes a request of the first `len` bytes of the buffer.
    fn begin(&mut self, op: Op, pos: u64, len: usize) -> io::Result<()> {
        self.reserve()?;
        self.ready = 0..0;
        let (buffer, range) = (std::mem::take(&mut self.buffer), ByteRange::new(pos, len as u64));
        let future = self.file.request(op, range, buffer);
        self.request = Some(InFlight { future, op, pos, len });
        Ok(())
    }

    /// Waits for the request in flight. The rest of a write that was cut short is written, too; after an error the
    /// position is that of the first byte that was not written.
    fn poll_idle(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while let Some(InFlight { future, op, pos, len }) = &mut self.request {
            let (done, buffer) = ready!(Pin::new(future).poll(context));
            let (op, pos, len) = (*op, *pos, *len);
            (self.request, self.buffer) = (None, buffer);
            if op == Op::Read {
                let skipped = self.pos.checked_sub(pos).map_or(usize::MAX, |it| it as usize);
                let done = done?;
                self.ready = skipped.min(done)..done;
                continue;
            }
            match done {
                Ok(done) if done == len => {}
                Ok(done) if done > 0 => {
                    self.buffer.copy_within(done..len, 0);
                    self.begin(Op::Write, pos + done as u64, len - done)?;
                }
                failed => {
                    self.pos = pos;
                    failed?;
                    return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                }
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl<F: StreamFile> fmt::Debug for FileStream<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileStream").field("position", &self.pos).finish_non_exhaustive()
    }
}

/// A stream of a file that may be sent may be sent as well.
const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<FileStream<AsyncFile>>();
};
