//! A source with read errors: a read that fails is retried in smaller pieces, and pieces that still
//! cannot be read become zeros.
//!
//! Invariant: each byte is read at most three times; a read always succeeds, with each unreadable
//! piece recorded. The retries of a read need at most [`RETRY_BYTES`], or the smallest piece if
//! that is longer, in addition to the memory of the read.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;

use nowait::{ByteRange, ExtentStatus, IoBuffer};
use rustix::event::PollFlags;
use slab::Slab;

use crate::endpoint::{Capabilities, Completed, CopyOperation, CopyRequest, Endpoint};
use crate::error::Error;
use crate::lost_ranges::{Lost, LostRanges};

/// The pieces of the first retry in bytes. On a medium where each failure takes seconds, few large
/// steps fail less often than many halvings.
const RETRY_BYTES: u64 = 64 << 10;
/// The smallest piece in bytes, where the source allows it.
const MIN_BYTES: u64 = 4096;
/// The shortest range whose failed status request is retried, in bytes; shorter ranges are assumed
/// to be data.
const STATUS_BYTES: u64 = 1 << 20;
/// A status request that failed is retried for a range this many times shorter.
const STATUS_SHORTER: u64 = 16;
/// Tags of retries begin here; a piece of the copy has a smaller one.
const RETRY_TAG: u64 = 1 << 62;

/// A source that records unreadable ranges instead of failing.
pub(crate) struct Rescue {
    inner: Box<dyn Endpoint>,
    /// Failed reads that are being retried, indexed by their tag less [`RETRY_TAG`].
    retried: Slab<Retried>,
    done: VecDeque<Completed>,
    losses: LostRanges,
    /// The smallest piece in bytes.
    min_bytes: u64,
}

/// A failed read. Its pieces are read one at a time.
struct Retried {
    tag: u64,
    range: ByteRange,
    memory: IoBuffer,
    /// Pieces still to be read, the last one first.
    left: Vec<ByteRange>,
}

impl Rescue {
    /// Wraps `inner`, which from now on reports unreadable ranges.
    pub(crate) fn new(mut inner: Box<dyn Endpoint>) -> Self {
        inner.report_unreadable();
        let min_bytes = MIN_BYTES.max(inner.capabilities().alignment);
        let (retried, done, losses) = (Slab::new(), VecDeque::new(), LostRanges::default());
        Self { inner, retried, done, losses, min_bytes }
    }

    /// Handles a completion of the source. Returns whether a retry was submitted.
    fn on_completed(&mut self, done: Completed) -> Result<bool, Error> {
        let retry = done.tag.checked_sub(RETRY_TAG).map(|index| index as usize);
        if let Some(index) = retry.filter(|&index| self.retried.contains(index)) {
            return Ok(self.on_retry_completed(index, done));
        }
        if !done.unreadable {
            self.done.push_back(done);
            return Ok(false);
        }
        let Completed { tag, range, memory, .. } = done;
        let Some(memory) = memory else { return Ok(self.status_failed(tag, range)) };
        let mut left = match range.len > self.min_bytes {
            true => pieces(range, self.min_bytes),
            false => vec![range],
        };
        let longest = left.iter().map(|piece| piece.len).max().unwrap_or_default() as usize;
        let scratch = IoBuffer::zeroed(longest).map_err(|error| Error::at(&"memory", error))?;
        let Some(first) = left.pop() else { return Ok(false) };
        let index = self.retried.insert(Retried { tag, range, memory, left });
        self.read(index, first, scratch);
        Ok(true)
    }

    fn read(&mut self, index: usize, range: ByteRange, scratch: IoBuffer) {
        let (tag, memory) = (RETRY_TAG + index as u64, Some(scratch));
        self.inner.submit(CopyRequest { operation: CopyOperation::Read, range, tag, memory });
    }

    fn on_retry_completed(&mut self, index: usize, done: Completed) -> bool {
        let Completed { range, memory, unreadable, .. } = done;
        let (Some(retried), Some(scratch)) = (self.retried.get_mut(index), memory) else {
            return false;
        };
        if unreadable && range.len > self.min_bytes {
            retried.left.extend(pieces(range, self.min_bytes));
        } else {
            let at = (range.pos - retried.range.pos) as usize;
            let to = retried.memory.get_mut(at..).and_then(|to| to.get_mut(..range.len as usize));
            match (to, scratch.get(..range.len as usize)) {
                (Some(to), Some(from)) if !unreadable => to.copy_from_slice(from),
                (to, _) => {
                    to.unwrap_or_default().fill(0);
                    self.losses.add(range);
                }
            }
        }
        if let Some(next) = retried.left.pop() {
            self.read(index, next, scratch);
            return true;
        }
        let Retried { tag, range, memory, .. } = self.retried.remove(index);
        self.done.push_back(Completed::read(tag, range, memory));
        false
    }

    /// The mapping of `range` cannot be read: a shorter range is queried, and the shortest is
    /// assumed to be data; the read that follows shows whether it is readable.
    fn status_failed(&mut self, tag: u64, range: ByteRange) -> bool {
        if range.len > STATUS_BYTES {
            let len = (range.len / STATUS_SHORTER / STATUS_BYTES).max(1) * STATUS_BYTES;
            let range = ByteRange::new(range.pos, len);
            self.inner.submit(CopyRequest {
                operation: CopyOperation::Status,
                range,
                tag,
                memory: None,
            });
            return true;
        }
        let extents = vec![ExtentStatus::top(range.len, false)];
        self.done.push_back(Completed { tag, range, memory: None, extents, unreadable: false });
        false
    }
}

/// The next smaller pieces of `range`, cut at multiples of their length, the last one first.
/// `min_bytes` is a power of two and smaller than the range.
fn pieces(range: ByteRange, min_bytes: u64) -> Vec<ByteRange> {
    let retry = RETRY_BYTES.max(min_bytes);
    let step = if range.len > retry { retry } else { min_bytes };
    let mut pieces = Vec::new();
    let mut pos = range.pos;
    while pos < range.end() {
        let len = (step - pos % step).min(range.end() - pos);
        pieces.push(ByteRange::new(pos, len));
        pos += len;
    }
    pieces.reverse();
    pieces
}

impl Endpoint for Rescue {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn submit(&mut self, request: CopyRequest) {
        self.inner.submit(request);
    }

    fn advance(&mut self) -> Result<(), Error> {
        loop {
            self.inner.advance()?;
            let mut retried = false;
            while let Some(done) = self.inner.next() {
                retried |= self.on_completed(done)?;
            }
            if !retried {
                return Ok(());
            }
        }
    }

    fn next(&mut self) -> Option<Completed> {
        self.done.pop_front()
    }

    fn report_unreadable(&mut self) {}

    fn lost(&self) -> Lost {
        self.losses.lost()
    }

    fn poll_fds<'a>(&'a self, poll_fds: &mut Vec<(BorrowedFd<'a>, PollFlags)>) {
        self.inner.poll_fds(poll_fds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1024;

    #[test]
    fn smaller_pieces_cover_a_range_exactly_and_end_at_multiples_of_their_length() {
        for (pos, len, min_bytes) in [
            (0, 1024 * KIB, 4 * KIB),
            (512, 1024 * KIB, 4 * KIB),
            (60 * KIB, 8 * KIB + 1, 4 * KIB),
            (3 * KIB, 64 * KIB, 4 * KIB),
            (0, 512 * KIB, 256 * KIB),
        ] {
            let (mut at, mut step) = (pos, 0);
            for piece in pieces(ByteRange::new(pos, len), min_bytes).iter().rev() {
                assert_eq!(piece.pos, at);
                assert!(piece.len > 0 && piece.len < len, "{piece:?} of {len}");
                (at, step) = (piece.end(), step.max(piece.len));
                assert!(at % min_bytes == 0 || at == pos + len, "{piece:?}");
            }
            assert_eq!(at, pos + len);
            assert!(step == min_bytes || step == RETRY_BYTES, "{step}");
        }
    }
}
