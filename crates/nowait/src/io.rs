//! What is asked: the operation, its flags and its range, and the transfer that serves it.
//!
//! Invariant: a `Transfer` names memory that stays in place until its completion was reaped.
//! Knows: error, iov. Known by: queue, request, blocking, engine.

use crate::error::{Doing, Range};

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    /// Device to memory.
    Read,
    /// Memory to device.
    Write,
    /// Makes durable what was completed before (C49).
    Flush,
    /// Gives the range's storage back; it may read as zeros or as before (C52).
    Discard,
    /// Makes the range read as zeros (C52).
    Zero,
    /// Tells which parts of the range are mapped.
    Status,
}

impl Op {
    pub(crate) const fn doing(self) -> Doing {
        match self {
            Self::Read => Doing::Read,
            Self::Write => Doing::Write,
            Self::Flush => Doing::Flush,
            Self::Discard => Doing::Discard,
            Self::Zero => Doing::Zero,
            Self::Status => Doing::Status,
        }
    }

    /// Whether the operation changes the device's bytes.
    #[must_use]
    pub const fn changes(self) -> bool {
        matches!(self, Self::Write | Self::Discard | Self::Zero)
    }
}

/// How a request is done; a set of the constants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(u8);

impl Flags {
    /// No flag.
    pub const NONE: Self = Self(0);
    /// Success means durable (C28); on the wire of a block protocol this is FUA.
    pub const DSYNC: Self = Self(1);
    /// `EAGAIN` rather than waiting for anything but the device (C32).
    pub const NOWAIT: Self = Self(2);
    /// A zeroed range keeps its storage (C52).
    pub const NO_UNMAP: Self = Self(4);
    /// `EOPNOTSUPP` rather than zeroing by writing zeros.
    pub const FAST_ZERO: Self = Self(8);

    /// The completion is polled for where the device has polled queues; a hint (C48).
    pub const HIPRI: Self = Self(16);

    /// An error that comes after some bytes is what the request comes to, rather than those bytes:
    /// for whoever answers requests as a whole (C19, block doors).
    pub const WHOLE: Self = Self(32);

    /// Whether all of `other` are set.
    #[inline]
    #[must_use]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// This set but for `other`.
    #[must_use]
    pub(crate) const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// This set and `other`.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// A request without its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Io {
    /// What to do.
    pub op: Op,
    /// How to do it.
    pub flags: Flags,
    /// The bytes of the device concerned; ignored by [`Op::Flush`].
    pub range: Range,
}

/// A run of bytes of one kind, as [`Op::Status`] reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Length in bytes.
    pub len: u64,
    /// Not backed by storage; reads as zeros.
    pub hole: bool,
    /// In a chain of images, which one of them decides what the bytes are: 1 for the top one, and
    /// so on; 0 where none does, so that they are zeros. Without a chain always 1.
    pub depth: u8,
}

impl Span {
    /// A span that the top image decides, or the only one.
    #[must_use]
    pub const fn on_top(len: u64, hole: bool) -> Self {
        Self { len, hole, depth: 1 }
    }
}

/// What a transfer came to: bytes moved, or a negative errno.
pub type Outcome = i32;

/// `Transfer::buffer` of memory that is not registered with the queue.
pub const UNREGISTERED: u16 = u16::MAX;

/// One move between memory and storage, as a queue takes it.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// The memory itself, or an array of [`crate::Segment`] when `segments` is not 0.
    pub base: *mut u8,
    /// First byte in the file.
    pub pos: u64,
    /// Bytes to move.
    pub len: u32,
    /// `RWF_*` of preadv2(2).
    pub rw_flags: i32,
    /// Entries of the array at `base`; 0 when `base` is the memory itself.
    pub segments: u16,
    /// Which registered buffer `base` lies in, or [`UNREGISTERED`].
    pub buffer: u16,
    /// Which of the files that the queue was made for.
    pub file: u16,
    /// Whether memory goes to the device.
    pub write: bool,
    /// The caller itself asked for `RWF_NOWAIT` (C32): a queue that may wait elsewhere keeps it.
    pub must_not_wait: bool,
}

impl Transfer {
    pub(crate) const NONE: Self = Self {
        base: std::ptr::null_mut(),
        pos: 0,
        len: 0,
        rw_flags: 0,
        segments: 0,
        buffer: UNREGISTERED,
        file: 0,
        write: false,
        must_not_wait: false,
    };
}
