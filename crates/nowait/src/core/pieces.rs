//! Requests that one transfer does not serve: their pieces, placed, ended and gone on with.
//!
//! Invariant: a piece has a slot of its own that is nobody's request; its parent's `pending` counts
//! it until it has ended, and the parent ends when that is 0 and no piece is left to place.
//! Knows: core, of which it is a part. Known by: core.
#![allow(unsafe_code)]

use super::{Core, place};
use crate::align;
use crate::blocking;
use crate::breaks::{self, Break};
use crate::buffer::Buf;
use crate::complete::{Ended, judge};
use crate::generic::{Kind, Piece};
use crate::io::{Flags, Op, Outcome, Transfer, UNREGISTERED};
use crate::iov;
use crate::map::Map;
use crate::queue::Queue;
use crate::request::{Role, State};

impl<M: Map> Core<M> {
    /// Places the pieces of a request: all of them, or with `vectored` off the next one. Ends the
    /// request when none is left.
    pub(super) fn advance<Q: Queue>(&mut self, queue: &mut Q, slot: u32) {
        while let Some(piece) = self.pool[slot].pieces.pop() {
            if self.pool[slot].again || self.pool[slot].result < 0 {
                continue;
            }
            if piece.kind == Kind::Zero {
                let segments = self.pool[slot].segments.as_slice();
                // SAFETY: the caller vouched for the memory; no transfer covers these bytes.
                unsafe { blocking::fill_zero(segments, piece.start, piece.len) };
                self.stats.zero_filled += piece.len;
                continue;
            }
            match self.place_piece(queue, slot, piece) {
                true if self.config.vectored => {}
                true => break,
                // No slot, buffer or room in the queue: whoever may wait does it.
                false => self.pool[slot].again = true,
            }
        }
        let request = &mut self.pool[slot];
        if request.pending == 0 {
            self.whole_ended(slot);
        } else {
            request.state = State::Queued;
        }
    }

    fn place_piece<Q: Queue>(&mut self, queue: &mut Q, parent: u32, piece: Piece) -> bool {
        let io = self.pool[parent].io;
        let Some((slot, request)) = self.pool.get() else { return false };
        request.begin(Role::Piece, State::Submitting, io, None, 0);
        request.parent = parent;
        request.piece = piece;
        self.pieces += 1;
        if !self.aim(parent, slot, piece) {
            self.put_piece(slot);
            return false;
        }
        // SAFETY: the memory is the parent's, kept until all of its pieces have ended, or the
        // bounce buffer in the piece's own slot.
        if !unsafe { place(queue, &self.pool[slot].transfer, slot) } {
            self.put_piece(slot);
            return false;
        }
        self.pool[slot].state = State::Queued;
        self.pool[parent].pending += 1;
        true
    }

    fn put_piece(&mut self, slot: u32) {
        self.pool[slot].buf = None;
        self.pieces -= 1;
        self.pool.put(slot);
    }

    /// Sets up the transfer of a piece. False when there is no buffer for it.
    fn aim(&mut self, parent: u32, slot: u32, piece: Piece) -> bool {
        let io = self.pool[parent].io;
        let write = io.op == Op::Write;
        let pos = piece.pos;
        let mut transfer = Transfer {
            pos,
            file: piece.file,
            len: piece.len as u32,
            rw_flags: self.gate.rw_flags(io.flags.without(Flags::DSYNC)),
            write,
            must_not_wait: io.flags.has(Flags::NOWAIT),
            ..Transfer::NONE
        };
        let align = self.disk.alignment();
        let block = if write { align.offset } else { align.read_offset };
        match piece.kind {
            Kind::Zero => return false,
            Kind::Direct => {
                let mut parts = std::mem::take(&mut self.merged);
                parts.clear();
                let request = &self.pool[parent];
                iov::parts(request.segments.as_slice(), piece.start, piece.len, |s| parts.push(s));
                if let [one] = parts.as_slice() {
                    transfer.base = one.base;
                    transfer.buffer = request.buf.as_ref().map_or(UNREGISTERED, Buf::registered);
                } else {
                    self.pool[slot].segments.set(&parts);
                    let list = self.pool[slot].segments.as_slice();
                    transfer.base = list.as_ptr().cast_mut().cast();
                    transfer.segments = list.len() as u16;
                }
                self.merged = parts;
            }
            Kind::Widened { skip } => {
                let request = &self.pool[parent];
                let Some(buf) = &request.buf else { return false };
                let Some(one) = request.segments.as_slice().first() else { return false };
                transfer.base = one.base.wrapping_sub(skip as usize);
                transfer.buffer = buf.registered();
                transfer.pos = pos - u64::from(skip);
                transfer.len = align::up(u64::from(skip) + piece.len, block) as u32;
            }
            Kind::Bounce { skip } => {
                let len = align::up(u64::from(skip) + piece.len, block);
                let Some(mut buf) = self.bounce.get(len as usize, |_, _| None) else {
                    return false;
                };
                if write {
                    let segments = self.pool[parent].segments.as_slice();
                    // SAFETY: the caller vouched for the memory.
                    unsafe { blocking::copy_in(segments, piece.start, piece.len, &mut buf) };
                }
                transfer.base = buf.base();
                transfer.pos = pos - u64::from(skip);
                transfer.len = len as u32;
                self.pool[slot].buf = Some(buf);
            }
        }
        self.pool[slot].transfer = transfer;
        true
    }

    pub(super) fn piece_ended(&mut self, slot: u32, outcome: Outcome) {
        let request = &self.pool[slot];
        let (parent, piece) = (request.parent, request.piece);
        let skip = match piece.kind {
            Kind::Widened { skip } | Kind::Bounce { skip } => u64::from(skip),
            Kind::Zero | Kind::Direct => 0,
        };
        let ended = judge(outcome, skip + piece.len);
        let read = request.io.op == Op::Read;
        if let (Ended::Full, true, Kind::Bounce { skip }, Some(buf)) =
            (ended, read, piece.kind, &request.buf)
        {
            let segments = self.pool[parent].segments.as_slice();
            let from = &buf[skip as usize..];
            if !breaks::is(Break::ReplyFromStaleBuffer) {
                // SAFETY: the caller vouched for the memory; the buffer was read that far.
                unsafe { blocking::copy_out(from, segments, piece.start, piece.len) };
            }
        }
        self.put_piece(slot);
        self.note(parent, ended);
        let request = &mut self.pool[parent];
        request.pending -= 1;
        if request.pending == 0 {
            self.more.push(parent);
        }
    }

    /// Goes on with the requests whose pieces have ended. True when it has placed something.
    #[inline]
    pub(crate) fn continue_pieces<Q: Queue>(&mut self, queue: &mut Q) -> bool {
        let mut placed = false;
        while let Some(slot) = self.more.pop() {
            placed |= !self.pool[slot].pieces.is_empty();
            self.advance(queue, slot);
        }
        if self.pathfinder.is_none() && !self.parked.is_empty() {
            placed |= self.unpark(queue);
        }
        self.post();
        placed
    }
}
