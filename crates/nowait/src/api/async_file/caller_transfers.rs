//! Transfers that the callers of the async API submit themselves, by Linux AIO: at low depth a request then costs one hop
//! between threads, from the driver that reaps it to its task, or none if the device completes it while it is submitted.
//! Reads whose bytes were read ahead end here, too.
//!
//! Invariant: the kernel has the only pointer to a `CallerTransfer` from its submission until it is drained; it holds
//! the memory (C45), and its file, so that no driver ends before. `in_flight` counts them, and is raised only while the
//! driver's channel is open, so that a driver that fails can wait for them.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, poll};

use crate::api::async_file::AsyncFileInner;
use crate::api::async_file::async_request::AsyncRequest;
use crate::block::device::ReadAhead;
use crate::block::range_lock::LockMode;
use crate::engine::simple_path::Verdict;
use crate::queue::linux_aio::Aio;
use crate::read_ahead::ahead_reads::Served;
use crate::types::io_cursor::ReadCursor;
use crate::types::iovec::IoSegment;
use crate::types::request::{Flags, Op, Request};
use crate::types::token::Token;
use crate::types::transfer::{Outcome, Transfer, UNREGISTERED};

/// The greatest number of such transfers of one channel, and of one file whose device completes them while they are
/// submitted; of another file it is 1. More go through the channel, where many are submitted by one system call.
const MOST: u32 = 64;
const MOST_OF_FILE: u32 = 4;
/// Requests of a file that are not tried after it had several in flight.
const CROWDED_PAUSE: u32 = 64;
/// Completions that are drained together.
const BATCH: usize = 16;
/// Requests of a file that are not tried after many refusals.
const LONGEST_PAUSE: u32 = 1023;
/// Wake-ups of the driver in a row that found nothing, after which it does not wait for transfers any more.
const IN_VAIN: u32 = 32;

/// A transfer in the kernel.
struct CallerTransfer {
    request: AsyncRequest,
    file: Arc<AsyncFileInner>,
}

/// The fate of a request that a caller has tried to submit itself.
pub(crate) enum Attempt {
    /// It is in the kernel, or has ended.
    Submitted,
    /// It is as before, for the channel.
    Refused(AsyncRequest),
}

/// Backs off from a file whose transfers the kernel refuses, such as one with holes that are written, and from one with
/// many requests in flight, which the driver submits together.
#[derive(Default)]
pub(crate) struct Refusals {
    /// Requests that are not tried after the last refusal; and how many are not to be tried now.
    pause: AtomicU32,
    left: AtomicU32,
}

impl Refusals {
    /// Whether a request is to be tried. Threads may count one together: no harm.
    fn lets_try(&self) -> bool {
        let left = self.left.load(Ordering::Relaxed);
        if left > 0 {
            self.left.store(left - 1, Ordering::Relaxed);
        }
        left == 0
    }

    fn pause_for(&self, requests: u32) {
        self.left.fetch_max(requests, Ordering::Relaxed);
    }

    fn count(&self, refused: bool) {
        let pause = self.pause.load(Ordering::Relaxed);
        match refused {
            true => {
                let longer = (2 * pause + 1).min(LONGEST_PAUSE);
                self.pause.store(longer, Ordering::Relaxed);
                self.left.store(longer, Ordering::Relaxed);
            }
            false if pause > 0 => self.pause.store(0, Ordering::Relaxed),
            false => {}
        }
    }
}

/// The transfers of a channel's files, in one AIO context.
pub(crate) struct CallerTransfers {
    aio: Aio,
    draining: Mutex<()>,
    in_flight: AtomicU32,
}

impl CallerTransfers {
    /// `None` where the kernel has no AIO, forbids it or has no room.
    pub(crate) fn new() -> Option<Self> {
        Some(Self { aio: Aio::new(MOST)?, draining: Mutex::new(()), in_flight: AtomicU32::new(0) })
    }

    /// Readable after a completion.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.aio.fd()
    }

    /// Counts a transfer that is about to be submitted, if there is room for one. The channel is open, and locked.
    pub(crate) fn begin(&self) -> bool {
        if self.in_flight.load(Ordering::Relaxed) >= MOST {
            return false;
        }
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Whether a transfer is in flight. The channel is locked.
    pub(crate) fn is_busy(&self) -> bool {
        self.in_flight.load(Ordering::Acquire) > 0
    }

    fn end(&self) {
        self.in_flight.fetch_sub(1, Ordering::Release);
    }

    /// Ends the transfers that have completed, and wakes their tasks. Returns their number.
    pub(crate) fn drain(&self) -> usize {
        let mut count = 0;
        while self.aio.has_ended() {
            let mut ended = [(0, 0); BATCH];
            let drained = self.drain_into(&mut ended);
            for &(token, outcome) in &ended[..drained] {
                // SAFETY: the token of a drained transfer, which the kernel returns once.
                let transfer = unsafe { *Box::from_raw(of_token(token)) };
                self.end();
                transfer.end(outcome);
            }
            count += drained;
        }
        count
    }

    /// Takes completions, and returns their number: no more than there is room for.
    fn drain_into(&self, ended: &mut [(Token, Outcome); BATCH]) -> usize {
        let _draining = self.draining.lock().unwrap_or_else(PoisonError::into_inner);
        let mut count = 0;
        // SAFETY: the lock is held.
        unsafe {
            self.aio.drain_shared(BATCH, |token, outcome| {
                ended[count] = (token, outcome);
                count += 1;
            })
        }
    }

    /// Waits until no transfer is in flight, and ends them. No other begins: the channel has failed.
    pub(crate) fn settle(&self) {
        loop {
            let _ = rustix::io::read(self.fd(), &mut [0; 8]);
            self.drain();
            if !self.is_busy() {
                return;
            }
            // EINTR: once more.
            let _ = poll(&mut [PollFd::from_borrowed_fd(self.fd(), PollFlags::IN)], None);
        }
    }
}

impl CallerTransfer {
    /// Ends the request; one that has failed or was cut short is made once more, by the driver.
    fn end(self, outcome: Outcome) {
        let Self { request, file } = self;
        file.transfers.fetch_sub(1, Ordering::Relaxed);
        let io = request.io;
        if io.op == Op::Write {
            file.disk.written(io.range);
        }
        file.unlock(io);
        let is_done = u64::try_from(outcome) == Ok(io.range.len);
        file.refusals.count(!is_done);
        if is_done {
            let bytes = io.range.len as usize;
            // The task may rely on the lock of a file that it has closed before.
            drop(file);
            request.sender.complete((Ok(bytes), request.buffer));
        } else {
            file.channel.send_again(file.number, request);
        }
    }
}

impl AsyncFileInner {
    /// Submits a request from the thread of its task, if one transfer serves it, the file has no more requests than a
    /// few, and the kernel does not wait for it. Those that have completed are ended.
    pub(crate) fn submit(self: &Arc<Self>, request: AsyncRequest) -> Attempt {
        let request = match self.disk.read_ahead() {
            Some(ahead) => match self.serve_ahead(ahead, request) {
                Some(request) => request,
                None => return Attempt::Submitted,
            },
            None => request,
        };
        let Some(callers) = &self.channel.callers else { return Attempt::Refused(request) };
        let io = request.io;
        let is_refused = !self.has_room()
            || !Flags::SYNC.contains(io.flags.without_priority())
            // Several buffers.
            || (request.buffer.len() as u64) < io.range.len
            || !self.disk.is_direct()
            || !self.disk.supports_nowait()
            || !self.refusals.lets_try();
        if is_refused {
            return Attempt::Refused(request);
        }
        let base = request.buffer.as_ptr().cast_mut();
        let Verdict::Simple(extent) = self.simple_path.map_for_simple_path(&self.disk, io, base)
        else {
            return Attempt::Refused(request);
        };
        let descriptor = self.disk.storage(extent.file).descriptor();
        let Some(fd) = descriptor.filter(|_| self.channel.begin_transfer(self.number)) else {
            self.unlock(io);
            self.crowded();
            return Attempt::Refused(request);
        };
        let transfer = Transfer {
            base,
            pos: extent.pos,
            file: 0,
            len: io.range.len as u32,
            rw_flags: self.simple_path.rw_flags(io.flags),
            segments: 0,
            buffer: UNREGISTERED,
            priority: io.flags.priority_number(),
            write: io.op == Op::Write,
            must_not_wait: true,
        };
        self.transfers.fetch_add(1, Ordering::Relaxed);
        let sent = Box::into_raw(Box::new(CallerTransfer { request, file: self.clone() }));
        // SAFETY: the buffer is in the box, which nothing touches until the transfer is drained.
        if unsafe { callers.aio.submit_one(fd, &transfer, sent.expose_provenance() as Token) } {
            callers.drain();
            return Attempt::Submitted;
        }
        // SAFETY: the kernel has not taken it.
        let CallerTransfer { request, .. } = unsafe { *Box::from_raw(sent) };
        self.transfers.fetch_sub(1, Ordering::Relaxed);
        callers.end();
        self.unlock(io);
        Attempt::Refused(request)
    }

    /// Ends a read whose bytes are in memory; else it is given back. The engine takes note of one that it gets.
    fn serve_ahead(&self, ahead: &ReadAhead, mut request: AsyncRequest) -> Option<AsyncRequest> {
        let (range, len) = (request.io.range, request.buffer.len());
        let is_one = request.io.op == Op::Read && len as u64 == range.len;
        if !is_one || self.channel.open_files().is_none() {
            return Some(request);
        }
        let segments = [IoSegment { base: request.buffer.as_mut_ptr(), len }];
        // SAFETY: the buffer is as long, and is not touched while the cursor lives.
        let mut memory = unsafe { ReadCursor::new(&segments, 0, range.len) };
        if ahead.serve(range, &mut memory, true) != Served::All {
            return Some(request);
        }
        ahead.note(range, self.disk.limit());
        request.sender.complete((Ok(len), request.buffer));
        None
    }

    /// Whether the file has no more transfers in flight than callers may have.
    fn has_room(&self) -> bool {
        let most = if self.is_slow.load(Ordering::Relaxed) { 1 } else { MOST_OF_FILE };
        let has_room = self.transfers.load(Ordering::Relaxed) < most;
        if !has_room {
            self.crowded();
        }
        has_room
    }

    /// Leaves a file with several requests in flight, whose device takes its time, to the driver for a while: it submits
    /// them together, and one wake-up ends several.
    fn crowded(&self) {
        if self.is_slow.load(Ordering::Relaxed) {
            self.refusals.pause_for(CROWDED_PAUSE);
        }
    }

    fn unlock(&self, io: Request) {
        if self.simple_path.needs_range_lock(io) {
            self.disk.ranges.unlock(io.range, LockMode::Shared);
        }
    }
}

/// The transfer that a token names.
fn of_token(token: Token) -> *mut CallerTransfer {
    std::ptr::with_exposed_provenance_mut(token as usize)
}

/// Whether the driver waits for the transfers of callers.
#[derive(Default)]
pub(crate) struct CallersWatch {
    is_on: bool,
    in_vain: u32,
}

impl CallersWatch {
    /// Whether the driver has to begin waiting.
    pub(crate) fn begins(&mut self, wanted: bool) -> bool {
        let begins = wanted && !self.is_on;
        self.is_on |= begins;
        begins
    }

    /// Counts a wake-up, in which `ended` transfers were ended. True after many in vain: those that complete while
    /// they are submitted need no driver.
    pub(crate) fn woke(&mut self, ended: usize) -> bool {
        self.in_vain = if ended == 0 { self.in_vain + 1 } else { 0 };
        self.in_vain >= IN_VAIN
    }

    /// The driver does not wait any more.
    pub(crate) fn ended(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
