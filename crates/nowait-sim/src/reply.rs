//! Replies as a client reads them, chunk by chunk, from whatever has come.
//!
//! Invariant: what is taken is what NBD proto.md allows as an answer to what was asked; an answer
//! is whole, or an error, and never both.
//! Knows: model. Known by: client.

use std::ops::ControlFlow::{self, Break, Continue};

use nowait::{Op, Range, Span};
use nowait_nbd as nbd;

use crate::model::Wrong;

/// Which messages a connection uses after the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// Compact requests, one message for a reply.
    Simple,
    /// Compact requests, replies in chunks where they carry something.
    Structured,
    /// 64-bit requests, every reply in chunks.
    Extended,
}

/// The head of a simple reply or of a chunk.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    /// Which request it is about.
    pub cookie: u64,
    chunk: Option<Chunk>,
    /// The error of a simple reply.
    error: u32,
    bytes: usize,
}

#[derive(Clone, Copy, Debug)]
struct Chunk {
    flags: u16,
    kind: u16,
    len: usize,
}

/// What has come of an answer so far.
pub struct Answer {
    op: Op,
    range: Range,
    /// The id of the context that a status request is about.
    context: u32,
    /// Data must come in one piece.
    one_piece: bool,
    /// The bytes of the range, as far as they have come.
    pub bytes: Vec<u8>,
    pieces: Vec<Range>,
    /// The extents of a status request.
    pub spans: Vec<Span>,
    /// The error, if it is one.
    pub errno: Option<i32>,
}

/// A field at the start of `bytes`.
fn field<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*first)
}

fn u16_of(bytes: &mut &[u8]) -> Option<u16> {
    field(bytes).map(u16::from_be_bytes)
}

/// The next 32 bits.
pub fn u32_of(bytes: &mut &[u8]) -> Option<u32> {
    field(bytes).map(u32::from_be_bytes)
}

/// The next 64 bits.
pub fn u64_of(bytes: &mut &[u8]) -> Option<u64> {
    field(bytes).map(u64::from_be_bytes)
}

fn wrong(what: &str, about: impl std::fmt::Debug) -> Wrong {
    Wrong::new(format!("reply: {what}: {about:?}"))
}

impl Head {
    /// The head that `input` begins with; `None` when not all of it has come.
    ///
    /// # Errors
    /// What is none.
    pub fn read(dialect: Dialect, input: &[u8]) -> Result<Option<Self>, Wrong> {
        let mut rest = input;
        let Some(magic) = u32_of(&mut rest) else { return Ok(None) };
        let head = match (magic, dialect) {
            (nbd::SIMPLE_REPLY_MAGIC, Dialect::Simple | Dialect::Structured) => {
                Self::simple(&mut rest)
            }
            (nbd::STRUCTURED_REPLY_MAGIC, Dialect::Structured) => Self::chunk(&mut rest, false),
            (nbd::EXTENDED_REPLY_MAGIC, Dialect::Extended) => Self::chunk(&mut rest, true),
            _ => return Err(wrong("no head", (magic, dialect))),
        };
        Ok(head.map(|head| Self { bytes: input.len() - rest.len(), ..head }))
    }

    fn simple(rest: &mut &[u8]) -> Option<Self> {
        let (error, cookie) = (u32_of(rest)?, u64_of(rest)?);
        Some(Self { cookie, chunk: None, error, bytes: 0 })
    }

    fn chunk(rest: &mut &[u8], extended: bool) -> Option<Self> {
        let (flags, kind, cookie) = (u16_of(rest)?, u16_of(rest)?, u64_of(rest)?);
        if extended {
            u64_of(rest)?;
        }
        let len = if extended { u64_of(rest)? } else { u64::from(u32_of(rest)?) };
        let chunk = Some(Chunk { flags, kind, len: len as usize });
        Some(Self { cookie, chunk, error: 0, bytes: 0 })
    }
}

impl Answer {
    /// Nothing has come yet of the answer to `op` on `range`.
    #[must_use]
    pub fn to(op: Op, range: Range, context: u32, one_piece: bool) -> Self {
        let (bytes, pieces) = (Vec::new(), Vec::new());
        Self { op, range, context, one_piece, bytes, pieces, spans: Vec::new(), errno: None }
    }

    /// Takes the message that begins with `head` from `input`; returns its length, and whether the
    /// answer is complete with it. `Break`: not all of it has come.
    ///
    /// # Errors
    /// What may not be in it.
    pub fn take(
        &mut self,
        dialect: Dialect,
        head: &Head,
        input: &[u8],
    ) -> Result<ControlFlow<(), (usize, bool)>, Wrong> {
        let behind = input.get(head.bytes..).unwrap_or_default();
        let Some(chunk) = head.chunk else {
            let chunked =
                dialect == Dialect::Structured && matches!(self.op, Op::Read | Op::Status);
            if chunked || self.op == Op::Status {
                return Err(wrong("not in chunks", (self.op, head)));
            }
            let data = if self.op == Op::Read && head.error == 0 { self.range.len } else { 0 };
            let Some(bytes) = behind.get(..data as usize) else { return Ok(Break(())) };
            self.bytes.extend_from_slice(bytes);
            if data > 0 {
                self.pieces.push(self.range);
            }
            self.errno = (head.error > 0).then_some(head.error as i32);
            return Ok(Continue((head.bytes + bytes.len(), true)));
        };
        let Some(payload) = behind.get(..chunk.len) else { return Ok(Break(())) };
        if self.take_chunk(dialect, chunk, payload).is_none() {
            return Err(wrong("a chunk", (chunk, self.so_far())));
        }
        let last = chunk.flags & nbd::REPLY_FLAG_DONE != 0;
        if last {
            self.check_whole()?;
        }
        Ok(Continue((head.bytes + chunk.len, last)))
    }

    fn take_chunk(&mut self, dialect: Dialect, chunk: Chunk, mut payload: &[u8]) -> Option<()> {
        let rest = &mut payload;
        match (chunk.kind, self.op) {
            (nbd::REPLY_TYPE_NONE, _) => {}
            (nbd::REPLY_TYPE_ERROR, _) => {
                let (errno, words) = (u32_of(rest)?, u16_of(rest)?);
                (errno > 0 && self.errno.is_none()).then_some(())?;
                self.errno = Some(errno as i32);
                *rest = rest.get(usize::from(words)..)?;
            }
            (nbd::REPLY_TYPE_OFFSET_DATA, Op::Read) => {
                let pos = u64_of(rest)?;
                let bytes = std::mem::take(rest);
                self.place(Range::new(pos, bytes.len() as u64))?.copy_from_slice(bytes);
            }
            (nbd::REPLY_TYPE_OFFSET_HOLE, Op::Read) => {
                let (pos, len) = (u64_of(rest)?, u32_of(rest)?);
                (!self.one_piece).then_some(())?;
                self.place(Range::new(pos, len.into()))?.fill(0);
            }
            (nbd::REPLY_TYPE_BLOCK_STATUS, Op::Status) if dialect == Dialect::Structured => {
                (u32_of(rest)? == self.context).then_some(())?;
                while !rest.is_empty() {
                    let (len, flags) = (u32_of(rest)?, u32_of(rest)?);
                    self.extent(len.into(), flags.into())?;
                }
            }
            (nbd::REPLY_TYPE_BLOCK_STATUS_EXT, Op::Status) if dialect == Dialect::Extended => {
                let (context, count) = (u32_of(rest)?, u32_of(rest)?);
                (context == self.context).then_some(())?;
                for _ in 0..count {
                    let (len, flags) = (u64_of(rest)?, u64_of(rest)?);
                    self.extent(len, flags)?;
                }
            }
            _ => return None,
        }
        rest.is_empty().then_some(())
    }

    /// The place of a piece of data, if it may be the next one.
    fn place(&mut self, piece: Range) -> Option<&mut [u8]> {
        let Range { pos, len } = self.range;
        let apart = |other: &Range| piece.end() <= other.pos || other.end() <= piece.pos;
        let inside = piece.len > 0 && piece.pos >= pos && piece.end() <= pos + len;
        let once = !self.one_piece || self.pieces.is_empty();
        (inside && once && self.pieces.iter().all(apart)).then_some(())?;
        self.pieces.push(piece);
        self.bytes.resize(len as usize, 0);
        self.bytes.get_mut((piece.pos - pos) as usize..(piece.end() - pos) as usize)
    }

    fn extent(&mut self, len: u64, flags: u64) -> Option<()> {
        let both = u64::from(nbd::STATE_HOLE | nbd::STATE_ZERO);
        (len > 0 && (flags == 0 || flags == both)).then_some(())?;
        (!self.one_piece || self.spans.is_empty()).then_some(())?;
        self.spans.push(Span::on_top(len, flags == both));
        Some(())
    }

    /// The last chunk has come: either all was answered, or it is an error.
    fn check_whole(&self) -> Result<(), Wrong> {
        let data: u64 = self.pieces.iter().map(|piece| piece.len).sum();
        let whole = match self.op {
            Op::Read => data == self.range.len,
            Op::Status => !self.spans.is_empty(),
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
        (self.op, self.range, &self.pieces, &self.spans, self.errno)
    }
}
