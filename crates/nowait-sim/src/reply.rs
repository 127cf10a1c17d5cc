//! The simulated client's reply parser, chunk by chunk, for partially received input.
//!
//! Invariant: only answers that NBD proto.md allows for the request are accepted; an answer is
//! complete or an error, never both.

use std::ops::ControlFlow::{self, Break, Continue};

use nowait::{ByteRange, ExtentStatus, Op};
use nowait_nbd::{self as nbd, Extents, Fields, ReplyHeader, ReplyMode};

use crate::model::Violation;

/// The part of an answer that has arrived so far.
pub struct Answer {
    op: Op,
    range: ByteRange,
    /// The id of the context that a status request is about.
    context: u32,
    /// Whether the data must arrive in one piece.
    one_piece: bool,
    /// The bytes of the range that have arrived.
    pub bytes: Vec<u8>,
    pieces: Vec<ByteRange>,
    /// The extents of a status request.
    pub extents: Vec<ExtentStatus>,
    /// The error, if the answer is one.
    pub errno: Option<i32>,
}

fn wrong(what: &str, about: impl std::fmt::Debug) -> Violation {
    Violation::new(format!("reply: {what}: {about:?}"))
}

impl Answer {
    /// An empty answer to `op` on `range`.
    pub fn to(op: Op, range: ByteRange, context: u32, one_piece: bool) -> Self {
        let (bytes, pieces) = (Vec::new(), Vec::new());
        Self { op, range, context, one_piece, bytes, pieces, extents: Vec::new(), errno: None }
    }

    /// Parses the message that begins with `head` from `input`; returns its length, and whether it
    /// completes the answer. `Break`: it has not arrived completely.
    ///
    /// # Errors
    /// The message is not allowed in this answer.
    pub fn take(
        &mut self,
        mode: ReplyMode,
        (head, head_bytes): (ReplyHeader, usize),
        input: &[u8],
    ) -> Result<ControlFlow<(), (usize, bool)>, Violation> {
        let behind = input.get(head_bytes..).unwrap_or_default();
        let ReplyHeader::Chunk { kind, length, .. } = head else {
            return self.take_simple(mode, head, behind, head_bytes);
        };
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let Some(payload) = behind.get(..length) else { return Ok(Break(())) };
        if self.take_chunk(mode, kind, payload).is_none() {
            return Err(wrong("a chunk", (head, self.so_far())));
        }
        if head.is_last() {
            self.check_whole()?;
        }
        Ok(Continue((head_bytes + length, head.is_last())))
    }

    fn take_simple(
        &mut self,
        mode: ReplyMode,
        head: ReplyHeader,
        behind: &[u8],
        head_bytes: usize,
    ) -> Result<ControlFlow<(), (usize, bool)>, Violation> {
        let ReplyHeader::Simple { error, .. } = head else { return Ok(Break(())) };
        let chunked = mode == ReplyMode::Structured && matches!(self.op, Op::Read | Op::Status);
        if chunked || self.op == Op::Status {
            return Err(wrong("not in chunks", (self.op, head)));
        }
        let data = if self.op == Op::Read && error == 0 { self.range.len } else { 0 };
        let Some(bytes) = behind.get(..data as usize) else { return Ok(Break(())) };
        self.bytes.extend_from_slice(bytes);
        if data > 0 {
            self.pieces.push(self.range);
        }
        self.errno = (error > 0).then_some(error as i32);
        Ok(Continue((head_bytes + bytes.len(), true)))
    }

    fn take_chunk(&mut self, mode: ReplyMode, kind: u16, payload: &[u8]) -> Option<()> {
        let mut rest = Fields(payload);
        match (kind, self.op) {
            (nbd::REPLY_TYPE_NONE, _) => {}
            (nbd::REPLY_TYPE_ERROR, _) => {
                let (errno, words) = (rest.u32()?, rest.u16()?);
                (errno > 0 && self.errno.is_none()).then_some(())?;
                self.errno = Some(errno as i32);
                rest.take(usize::from(words))?;
            }
            (nbd::REPLY_TYPE_OFFSET_DATA, Op::Read) => {
                let pos = rest.u64()?;
                let bytes = rest.take(rest.0.len())?;
                self.piece_memory(ByteRange::new(pos, bytes.len() as u64))?.copy_from_slice(bytes);
            }
            (nbd::REPLY_TYPE_OFFSET_HOLE, Op::Read) => {
                let (pos, len) = (rest.u64()?, rest.u32()?);
                (!self.one_piece).then_some(())?;
                self.piece_memory(ByteRange::new(pos, len.into()))?.fill(0);
            }
            (nbd::REPLY_TYPE_BLOCK_STATUS, Op::Status) if mode == ReplyMode::Structured => {
                self.take_extents(mode, &mut rest)?;
            }
            (nbd::REPLY_TYPE_BLOCK_STATUS_EXT, Op::Status) if mode == ReplyMode::Extended => {
                self.take_extents(mode, &mut rest)?;
            }
            _ => return None,
        }
        rest.is_empty().then_some(())
    }

    fn take_extents(&mut self, mode: ReplyMode, payload: &mut Fields<'_>) -> Option<()> {
        (payload.u32()? == self.context).then_some(())?;
        let extents = Extents::parse(mode, *payload)?;
        *payload = Fields(&[]);
        { extents }.try_for_each(|(len, flags)| self.extent(len, flags))
    }

    /// The memory for a piece of data, if the piece is allowed.
    fn piece_memory(&mut self, piece: ByteRange) -> Option<&mut [u8]> {
        let ByteRange { pos, len } = self.range;
        let apart = |other: &ByteRange| piece.end() <= other.pos || other.end() <= piece.pos;
        let inside = piece.len > 0 && piece.pos >= pos && piece.end() <= pos + len;
        let allowed = !self.one_piece || self.pieces.is_empty();
        (inside && allowed && self.pieces.iter().all(apart)).then_some(())?;
        self.pieces.push(piece);
        self.bytes.resize(len as usize, 0);
        self.bytes.get_mut((piece.pos - pos) as usize..(piece.end() - pos) as usize)
    }

    fn extent(&mut self, len: u64, flags: u64) -> Option<()> {
        let both = u64::from(nbd::STATE_HOLE | nbd::STATE_ZERO);
        (len > 0 && (flags == 0 || flags == both)).then_some(())?;
        (!self.one_piece || self.extents.is_empty()).then_some(())?;
        self.extents.push(ExtentStatus::top(len, flags == both));
        Some(())
    }

    /// Checks the answer after the last chunk: it must be complete, or an error.
    fn check_whole(&self) -> Result<(), Violation> {
        let data: u64 = self.pieces.iter().map(|piece| piece.len).sum();
        let whole = match self.op {
            Op::Read => data == self.range.len,
            Op::Status => !self.extents.is_empty(),
            _ => true,
        };
        match (whole, self.errno) {
            (true, None) => Ok(()),
            (false, Some(_)) if data == 0 => Ok(()),
            (true, Some(_)) if !matches!(self.op, Op::Read | Op::Status) => Ok(()),
            _ => Err(wrong("neither whole nor an error", self.so_far())),
        }
    }

    fn so_far(&self) -> impl std::fmt::Debug {
        (self.op, self.range, &self.pieces, &self.extents, self.errno)
    }
}
