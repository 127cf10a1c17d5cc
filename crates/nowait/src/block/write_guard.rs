//! The interface of what is told of changes of a device before they are made.
//!
//! Invariant: a range that is open stays open.

use crate::types::byte_range::ByteRange;
use crate::types::error::Error;

/// Fills memory with the bytes of a device from a position on, as they are now.
pub type ReadDevice<'a> = &'a dyn Fn(u64, &mut [u8]) -> Result<(), Error>;

/// The receiver of the changes of a device that are about to be made.
pub trait WriteGuard: Send + Sync + 'static {
    /// Whether changes of `range` may be made without [`WriteGuard::before_change`]. Once they may, they always may.
    fn is_open(&self, range: ByteRange) -> bool;

    /// A change of `range` is made when this has returned, and not before. Called on a thread that may block, without a
    /// lock, and by several threads simultaneously.
    ///
    /// # Errors
    /// The change is not made, and fails with this.
    fn before_change(&self, range: ByteRange, read: ReadDevice<'_>) -> Result<(), Error>;
}
