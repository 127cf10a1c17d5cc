//! A fragment: a part of a request that is served separately.
//!
//! Invariant: the fragments of a request cover it exactly, in order, without overlap.

use crate::block::block_map::Extent;

/// How a fragment is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FragmentKind {
    /// Zero-filled in place, no transfer (C14).
    Zero,
    /// One transfer between the request's own memory and storage.
    Direct,
    /// A read of the enclosing blocks into the request's own buffer, which has room around the
    /// requested bytes.
    PaddedRead {
        /// Bytes of the blocks before the first requested one.
        skip: u32,
    },
    /// A transfer of the enclosing blocks to or from a pooled buffer, with a copy.
    Bounce {
        /// Bytes of the blocks before the first requested one.
        skip: u32,
    },
}

/// A part of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fragment {
    /// First byte, counted from the start of the request.
    pub(crate) start: u64,
    /// Length in bytes.
    pub(crate) len: u64,
    /// Position of its first byte in `file`.
    pub(crate) pos: u64,
    /// Like [`crate::Extent::file`].
    pub(crate) file: u16,
    pub(crate) kind: FragmentKind,
}

impl Fragment {
    pub(crate) const NONE: Self =
        Self { start: 0, len: 0, pos: 0, file: 0, kind: FragmentKind::Zero };

    /// The fragment that begins at byte `start` of the request and is all of `extent`.
    pub(crate) const fn of(extent: Extent, start: u64, kind: FragmentKind) -> Self {
        Self { start, len: extent.len, pos: extent.pos, file: extent.file, kind }
    }
}
