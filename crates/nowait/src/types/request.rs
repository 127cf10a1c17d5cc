//! A request: its operation, flags and byte range, and the extents that a status request reports.
//!
//! Invariant: a `Request` refers to no memory; its segments are passed beside it.

use std::ops::{BitOr, BitOrAssign};

use crate::types::byte_range::ByteRange;
use crate::types::error::Operation;
use crate::types::io_priority::IoPriority;

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    /// Device to memory.
    Read,
    /// Memory to device.
    Write,
    /// Makes the writes durable that were completed before it (C49).
    Flush,
    /// Deallocates the range's storage; the range may then read as zeros or as before (C52).
    Discard,
    /// Makes the range read as zeros (C52).
    Zero,
    /// Reports which parts of the range are mapped.
    Status,
}

impl Op {
    pub(crate) const fn operation(self) -> Operation {
        match self {
            Self::Read => Operation::Read,
            Self::Write => Operation::Write,
            Self::Flush => Operation::Flush,
            Self::Discard => Operation::Discard,
            Self::Zero => Operation::Zero,
            Self::Status => Operation::Status,
        }
    }

    /// Whether the operation changes the device's bytes.
    #[must_use]
    pub const fn changes(self) -> bool {
        matches!(self, Self::Write | Self::Discard | Self::Zero)
    }
}

/// The flags of a request: a set of the constants, and a priority ([`Flags::with_priority`]).
///
/// The lower eight bits are those of `RWF_*` (preadv2(2)), the upper sixteen the priority (ioprio_set(2)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(u32);

/// Bits below those of the priority.
const PRIORITY_SHIFT: u32 = 16;

impl Flags {
    /// No flag.
    pub const NONE: Self = Self(0);
    /// The completion is polled for where the device has polled queues; a hint (C48).
    pub const HIPRI: Self = Self(1);
    /// Success means durable (C28); on the wire of a block protocol this is FUA.
    pub const DSYNC: Self = Self(2);
    /// Like [`Flags::DSYNC`], which it contains, and the other metadata of a file, such as its times, is
    /// durable as well (C30).
    pub const SYNC: Self = Self(2 | 4);
    /// `EAGAIN` instead of a wait for anything but the device (C32).
    pub const NOWAIT: Self = Self(8);
    /// A write goes to its position, although the file was opened to append
    /// ([`crate::OpenOptions::append`]).
    pub const NO_APPEND: Self = Self(0x20);
    /// A write reaches storage in one piece or not at all, also at a loss of power (`RWF_ATOMIC`, Linux
    /// 6.11, C27). It has one segment, and keeps to [`crate::BlockDevice::untorn_limits`]: otherwise it is
    /// `EINVAL`, and `EOPNOTSUPP` where there are none.
    pub const UNTORN: Self = Self(0x40);
    /// Pages that the request leaves in the page cache are dropped when it has completed (`RWF_DONTCACHE`, Linux
    /// 6.14); a hint, which does nothing for direct I/O and where the file system does not have it.
    pub const DONT_CACHE: Self = Self(0x80);
    /// A zeroed range keeps its storage (C52).
    pub const NO_UNMAP: Self = Self(0x100);
    /// `EOPNOTSUPP` instead of zeroing by writing zeros.
    pub const FAST_ZERO: Self = Self(0x200);
    /// If an error follows some moved bytes, the request's result is the error, not their count:
    /// for frontends that answer a request as a whole (C19, block frontends).
    pub const ALL_OR_ERROR: Self = Self(0x400);

    /// Flags that a transfer passes to the kernel wherever it goes.
    pub(crate) const OF_TRANSFERS: Self = Self(1 | 2 | 4 | 0x40);

    /// The `RWF_*` flags of pwritev2(2) of those that are also in `passed`.
    #[inline]
    pub(crate) const fn rw_flags(self, passed: Self) -> i32 {
        (self.0 & passed.0) as i32
    }

    /// These flags with a priority, in place of the one that they have.
    #[must_use]
    pub const fn with_priority(self, priority: IoPriority) -> Self {
        Self(self.without_priority().0 | (priority.number() as u32) << PRIORITY_SHIFT)
    }

    /// The priority of the request at the block layer; `None`: that of the thread which submits it.
    #[must_use]
    pub const fn priority(self) -> Option<IoPriority> {
        IoPriority::from_number(self.priority_number())
    }

    /// The priority as [`crate::Transfer::priority`].
    #[inline(always)]
    pub(crate) const fn priority_number(self) -> u16 {
        (self.0 >> PRIORITY_SHIFT) as u16
    }

    #[inline]
    pub(crate) const fn without_priority(self) -> Self {
        Self(self.0 & ((1 << PRIORITY_SHIFT) - 1))
    }

    /// Whether all of `other` are set.
    #[inline]
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// This set but for `other`.
    #[must_use]
    pub(crate) const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

impl BitOr for Flags {
    type Output = Self;

    /// The flags of both sets; of two priorities the first one.
    #[inline]
    fn bitor(self, other: Self) -> Self {
        let other = if self.priority_number() == 0 { other } else { other.without_priority() };
        Self(self.0 | other.0)
    }
}

impl BitOrAssign for Flags {
    #[inline]
    fn bitor_assign(&mut self, other: Self) {
        *self = *self | other;
    }
}

/// A request without its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The operation.
    pub op: Op,
    /// Its flags.
    pub flags: Flags,
    /// The bytes of the device concerned; ignored by [`Op::Flush`].
    pub range: ByteRange,
}

impl Request {
    /// Whether only the simple path or a worker serves it: it is to be one transfer, or needs a sync of all.
    pub(crate) const fn needs_one_call(self) -> bool {
        self.flags.contains(Flags::UNTORN) || self.flags.contains(Flags::SYNC)
    }
}

/// A run of bytes of one kind, mapped or hole, as [`Op::Status`] reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtentStatus {
    /// Length in bytes.
    pub len: u64,
    /// Not backed by storage; reads as zeros.
    pub hole: bool,
    /// The image of a backing chain that decides the bytes: 1 for the top one, 2 for the next, and
    /// so on; 0 where none does, so that they are zeros. Always 1 without a chain.
    pub depth: u8,
}

impl ExtentStatus {
    /// An extent that the top image, or the only one, decides.
    #[must_use]
    pub const fn top(len: u64, hole: bool) -> Self {
        Self { len, hole, depth: 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_have_one_priority_which_no_flag_changes() {
        let (low, idle) = (IoPriority::from_number(0x4007), IoPriority::IDLE);
        let flags = Flags::DSYNC.with_priority(idle) | Flags::NOWAIT;
        assert_eq!(flags.priority(), Some(idle));
        assert!(flags.contains(Flags::DSYNC | Flags::NOWAIT) && !flags.contains(Flags::HIPRI));
        assert_eq!(flags.without_priority(), Flags::DSYNC | Flags::NOWAIT);
        let other = low.map_or(Flags::NONE, |low| Flags::HIPRI.with_priority(low));
        assert_eq!((other | flags).priority(), low);
        assert_eq!((flags | other).priority(), Some(idle));
        assert_eq!((Flags::HIPRI | flags).priority(), Some(idle));
        assert_eq!(flags.with_priority(idle), flags);
        assert_eq!(flags.rw_flags(Flags::OF_TRANSFERS), 2);
        assert_eq!(Flags::NONE.priority(), None);
    }
}
