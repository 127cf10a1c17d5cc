//! The ranges of a map that are allocated ahead: they have storage, and no write has reached them.
//!
//! Invariant: a range is marked only from a known hole, and the mark goes before a write to the range
//! begins, or when it is invalidated. Under an exclusive range lock a marked range was never written.

use crate::types::byte_range::ByteRange;

/// A map as [`crate::OpenOptions::allocate_ahead`] needs it. A range that is allocated ahead reads as
/// a hole and takes writes as data.
pub trait AheadMap {
    /// Whether the first byte of `range` is known to be a hole without storage.
    fn begins_in_hole(&self, range: ByteRange) -> bool;

    /// The bytes directly before `pos` that are not known to be holes without storage, at most
    /// about `limit`.
    fn written_before(&self, pos: u64, limit: u64) -> u64;

    /// Marks the known holes in `range` as allocated ahead.
    fn mark_ahead(&self, range: ByteRange);

    /// Forgets the known holes in `range`: nothing is known about them then.
    fn forget_holes(&self, range: ByteRange);

    /// The first part of `range` that is allocated ahead.
    fn next_ahead(&self, range: ByteRange) -> Option<ByteRange>;

    /// Makes what is allocated ahead in `range` known holes again.
    fn unmark_ahead(&self, range: ByteRange);

    /// Forgets what is allocated ahead in `range`: nothing is known about it then.
    fn forget_ahead(&self, range: ByteRange);

    /// The bytes that are allocated ahead.
    fn ahead_bytes(&self) -> u64;
}
