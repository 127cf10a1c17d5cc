//! A read of a boot.
//!
//! Invariant: both places of a read are within the image.

use super::timeline::Time;

/// The unit of reads, in bytes.
pub(super) const PAGE: u64 = 4096;

/// A read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Read {
    /// Where it is in most boots, and in some others, in bytes.
    pub(super) places: [u64; 2],
    /// Bytes.
    pub(super) len: u64,
    /// The time between the end of the read before it and this one.
    pub(super) think: Time,
}
