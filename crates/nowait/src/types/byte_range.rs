//! A range of bytes of a device.
//!
//! Invariant: the end is never less than the start, because it saturates.

/// A byte range of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByteRange {
    /// First byte, counted from the start of the device.
    pub pos: u64,
    /// Length in bytes.
    pub len: u64,
}

impl ByteRange {
    /// `len` bytes from `pos` on.
    #[must_use]
    pub const fn new(pos: u64, len: u64) -> Self {
        Self { pos, len }
    }

    /// The first byte after the range; saturates at `u64::MAX`.
    #[must_use]
    pub const fn end(self) -> u64 {
        self.pos.saturating_add(self.len)
    }
}
