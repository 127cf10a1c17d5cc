//! The engine: submit, poll, wait; one for each thread.
//!
//! Invariant: every accepted request is given back exactly once by `next` (C41), also when it
//! failed; memory that the kernel or a worker can see is held until then (C45).
//! Knows: everything above it. Known by: servers, benchmarks.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::align;
use crate::blocking;
use crate::buffer::{Buf, Buffers};
use crate::completion::{Completion, Rejected, Stats};
use crate::config::Config;
use crate::core::Core;
use crate::disk::Disk;
use crate::error::{Doing, Error, Range};
use crate::io::{Flags, Io, Op, Span};
use crate::iov::{self, Segment};
use crate::map::Map;
use crate::queue::{Interest, Queue, Token, WATCHED};
use crate::worker::Workers;

/// The token under which an engine watches for slots that come home.
const HOME: Token = WATCHED | 1 << 60;

/// One thread's engine on one device.
///
/// ```
/// # use std::sync::Arc;
/// use nowait::{Config, Disk, Engine, Flags, Io, Op, OpenOptions, Range, Threads, Workers};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("disk.img");
/// # std::fs::write(&path, [7; 65536])?;
/// let disk = Arc::new(Disk::open(&path, OpenOptions::default())?);
/// let (workers, config) = (Workers::new(&disk, 4), Config::default());
/// let queue = Threads::new(disk.fd(), config.slots, !disk.is_direct())?;
/// let mut engine = Engine::new(disk, workers, queue, config)?;
/// for tag in 0..4 {
///     let range = Range::new(tag * 4096, 4096);
///     let buf = engine.buffer(range).ok_or("no memory")?;
///     let io = Io { op: Op::Read, flags: Flags::NONE, range };
///     engine.submit(io, buf, tag).map_err(|rejected| rejected.error)?;
/// }
/// let mut bytes = 0;
/// while engine.in_flight() > 0 {
///     engine.wait(None, &mut |_, _| {})?;
///     while let Some(done) = engine.next() {
///         bytes += done.result()?;
///     }
/// }
/// assert_eq!(bytes, 4 * 4096);
/// # Ok(())
/// # }
/// ```
pub struct Engine<Q: Queue, M: Map> {
    pub(crate) core: Core<M>,
    queue: Q,
    buffers: Buffers,
}

impl<Q: Queue, M: Map> Engine<Q, M> {
    /// An engine for `disk` on `queue`, which must have been made for [`Disk::files`].
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: the wake-up descriptor could not be made or watched.
    pub fn new(
        disk: Arc<Disk<M>>,
        workers: Workers,
        mut queue: Q,
        config: Config,
    ) -> Result<Self, Error> {
        let core = Core::new(disk, workers, config)?;
        queue.watch(core.home(), HOME, Interest::Readable)?;
        Ok(Self { core, queue, buffers: Buffers::new(config.buffer_bytes) })
    }

    /// The device.
    #[must_use]
    pub fn disk(&self) -> &Disk<M> {
        self.core.disk()
    }

    /// Where the bytes of a request at `pos` begin in its buffer: `pos` modulo the block, so that
    /// buffer and device are aligned alike.
    #[inline]
    #[must_use]
    pub fn start(&self, pos: u64) -> usize {
        (pos & (u64::from(self.disk().alignment().offset) - 1)) as usize
    }

    /// A buffer for a request of `range`; its bytes begin at [`Engine::start`]. `None` when
    /// [`Config::buffer_bytes`] are in use, or `range` is longer than memory could hold.
    #[inline]
    pub fn buffer(&mut self, range: Range) -> Option<Buf> {
        if range.len > iov::MAX_TRANSFER_BYTES {
            return None;
        }
        let block = self.disk().alignment().offset;
        let room = self.start(range.pos) as u64 + range.len;
        let queue = &mut self.queue;
        self.buffers.get(align::up(room, block) as usize, |base, bytes| {
            // SAFETY: a chunk lives until the pool and every buffer are gone; the engine drops its
            // queue before its pool.
            unsafe { queue.register(base, bytes) }
        })
    }

    /// Submits a read or write of `buf`, which came from [`Engine::buffer`] for `io.range`.
    ///
    /// # Errors
    /// [`Rejected`], with the buffer.
    #[inline]
    pub fn submit(&mut self, io: Io, buf: Buf, tag: u64) -> Result<(), Rejected> {
        let start = self.start(io.range.pos);
        let base = buf.base().wrapping_add(start);
        let fits = start as u64 + io.range.len <= buf.len() as u64;
        if fits && let Some(extent) = self.core.simple(io, base) {
            let (queue, buf) = (&mut self.queue, Some(buf));
            // SAFETY: the buffer holds the range and moves into the slot, where it stays until the
            // request is given back.
            return unsafe { self.core.submit_simple(queue, io, extent, base, buf, tag) };
        }
        self.submit_checked(io, start, buf, tag)
    }

    #[inline(never)]
    fn submit_checked(&mut self, io: Io, start: usize, buf: Buf, tag: u64) -> Result<(), Rejected> {
        let fits = buf.len().checked_sub(start).is_some_and(|room| room as u64 >= io.range.len);
        if !fits || !matches!(io.op, Op::Read | Op::Write) {
            let error = Error::new(libc::EINVAL, Doing::Validate).at(io.range);
            return Err(Rejected { error, buf: Some(buf) });
        }
        let segment = Segment { base: buf.base().wrapping_add(start), len: io.range.len as usize };
        self.core.submit_whole(&mut self.queue, io, &[segment], Some(buf), tag)
    }

    /// Submits what needs no memory: flush, discard, zero, status.
    ///
    /// # Errors
    /// [`Rejected`], without a buffer.
    pub fn submit_bare(&mut self, io: Io, tag: u64) -> Result<(), Rejected> {
        if matches!(io.op, Op::Read | Op::Write) {
            let error = Error::new(libc::EINVAL, Doing::Validate).at(io.range);
            return Err(Rejected { error, buf: None });
        }
        self.core.submit_whole(&mut self.queue, io, &[], None, tag)
    }

    /// Submits a read or write of memory that the caller keeps. `io.range.len` is at most the
    /// length of the segments together (C06).
    ///
    /// # Errors
    /// [`Rejected`], without a buffer; `EINVAL` for more than 1024 segments (C04) or a negative
    /// length (C05).
    ///
    /// # Safety
    /// The memory stays valid, and is touched by nobody else, until the request is given back by
    /// [`Engine::next`] or the engine was dropped.
    #[inline]
    pub unsafe fn submit_segments(
        &mut self,
        io: Io,
        segments: &[Segment],
        tag: u64,
    ) -> Result<(), Rejected> {
        let &[one] = segments else {
            return self.submit_segments_checked(io.op, io.flags, io.range, segments, tag);
        };
        if io.range.len == one.len as u64
            && let Some(extent) = self.core.simple(io, one.base)
        {
            let queue = &mut self.queue;
            // SAFETY: as promised by the caller.
            return unsafe { self.core.submit_simple(queue, io, extent, one.base, None, tag) };
        }
        self.submit_segments_checked(io.op, io.flags, io.range, &[one], tag)
    }

    /// Takes the request in pieces and its one segment as a copy, so that a simple one never needs
    /// a place in memory before it is in its slot.
    #[inline(never)]
    fn submit_segments_checked(
        &mut self,
        op: Op,
        flags: Flags,
        range: Range,
        segments: &[Segment],
        tag: u64,
    ) -> Result<(), Rejected> {
        let total = blocking::check_rights(self.disk(), op)
            .and_then(|()| iov::total(segments))
            .map_err(|error| Rejected { error, buf: None })?;
        let range = Range::new(range.pos, range.len.min(total));
        self.core.submit_whole(&mut self.queue, Io { op, flags, range }, segments, None, tag)
    }

    /// Hands over what was submitted and takes what has ended, without waiting.
    ///
    /// # Errors
    /// What io_uring_enter(2) said; requests stay in flight.
    #[inline]
    pub fn poll(&mut self) -> Result<(), Error> {
        self.core.post();
        self.queue.kick()?;
        self.reap(&mut |_, _| {})
    }

    /// As [`Engine::poll`]; reports of watched descriptors go to `watched`.
    ///
    /// # Errors
    /// As for [`Engine::poll`].
    #[inline]
    pub fn poll_watched(&mut self, watched: &mut impl FnMut(Token, i32)) -> Result<(), Error> {
        self.core.post();
        self.queue.kick()?;
        self.reap(watched)
    }

    /// Hands over what was submitted, sleeps until something has ended, a watched descriptor is
    /// ready, or `timeout` has passed, and takes what there is.
    ///
    /// # Errors
    /// As for [`Engine::poll`].
    pub fn wait(
        &mut self,
        timeout: Option<Duration>,
        watched: &mut impl FnMut(Token, i32),
    ) -> Result<(), Error> {
        self.core.post();
        if self.core.has_done() {
            self.queue.kick()?;
        } else {
            self.queue.wait(timeout)?;
        }
        self.reap(watched)
    }

    #[inline]
    fn reap(&mut self, watched: &mut impl FnMut(Token, i32)) -> Result<(), Error> {
        let core = &mut self.core;
        let mut transfers = 0;
        self.queue.reap(|token, outcome| {
            if token & WATCHED == 0 {
                transfers += 1;
                core.ended(token as u32, outcome);
            } else if token == HOME {
                core.hears_home();
            } else {
                watched(token, outcome);
            }
        });
        self.core.judge(transfers);
        self.core.look_home();
        while self.core.continue_pieces(&mut self.queue) {
            self.queue.kick()?;
        }
        Ok(())
    }

    /// The next request that has ended, in the order in which they ended.
    #[inline]
    #[allow(clippy::should_implement_trait, reason = "an engine is not an iterator: it ends never")]
    pub fn next(&mut self) -> Option<Completion> {
        self.core.next()
    }

    /// The answer to an [`Op::Status`] that was given back under `tag`: the spans of its range from
    /// its start on, possibly not to its end.
    pub fn take_spans(&mut self, tag: u64) -> Vec<Span> {
        self.core.take_spans(tag)
    }

    /// Whether [`Engine::next`] has something.
    #[inline]
    #[must_use]
    pub fn has_done(&self) -> bool {
        self.core.has_done()
    }

    /// Whether a look at the queue would find something, asked without a system call where the
    /// queue can.
    #[inline]
    pub fn pending(&mut self) -> bool {
        self.core.has_done() || self.queue.pending()
    }

    /// Requests that were accepted and not given back.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.core.in_flight()
    }

    /// Whether another request would find a slot.
    #[inline]
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.core.has_room()
    }

    /// Reports `token`, which has [`WATCHED`] set and bits 60 to 62 clear, whenever `fd` is ready.
    ///
    /// # Errors
    /// As for [`Queue::watch`].
    pub fn watch(
        &mut self,
        fd: BorrowedFd<'_>,
        token: Token,
        interest: Interest,
    ) -> Result<(), Error> {
        self.queue.watch(fd, token, interest)
    }

    /// Ends a watch; before the descriptor is closed.
    pub fn unwatch(&mut self, fd: BorrowedFd<'_>, token: Token) {
        self.queue.unwatch(fd, token);
    }

    /// Readable when [`Engine::poll`] would find something.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.queue.fd()
    }

    /// How requests were served so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats { polled: self.queue.polled(), ..self.core.stats() }
    }
}

impl<Q: Queue, M: Map> Drop for Engine<Q, M> {
    /// Waits for everything in flight; if the queue fails, leaks the memory that the kernel may
    /// still write to (C45).
    fn drop(&mut self) {
        while self.core.in_flight() > 0 {
            while self.next().is_some() {}
            if self.core.in_flight() > 0 && self.wait(None, &mut |_, _| {}).is_err() {
                self.core.leak();
                return;
            }
        }
    }
}
