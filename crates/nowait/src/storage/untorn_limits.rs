//! Writes that a loss of power does not tear: their limits (statx(2), `STATX_WRITE_ATOMIC`).
//!
//! Invariant: limits are powers of two, and what they admit is aligned for direct I/O.

use std::os::fd::BorrowedFd;

use rustix::fs::{AtFlags, StatxFlags};

use crate::types::alignment::Alignment;
use crate::types::byte_range::ByteRange;

/// `STATX_WRITE_ATOMIC`.
const WRITE_ATOMIC: u32 = 0x1_0000;

/// The limits of a write with [`Flags::UNTORN`](crate::Flags::UNTORN), in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UntornLimits {
    /// The least length; a power of two.
    pub min_bytes: u64,
    /// The greatest length; a power of two.
    pub max_bytes: u64,
    /// The greatest length that the storage has without help of the file system, at which such a write costs no more
    /// than another one; 0 where the kernel does not say.
    pub fast_bytes: u64,
}

impl UntornLimits {
    /// Limits of a file that is open for direct I/O; `None` if it has none.
    pub(crate) fn of(file: BorrowedFd<'_>, align: Alignment) -> Option<Self> {
        let wanted = StatxFlags::from_bits_retain(WRITE_ATOMIC);
        let stat = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, wanted).ok()?;
        if stat.stx_mask & WRITE_ATOMIC == 0 {
            return None;
        }
        let (min, max) = (stat.stx_atomic_write_unit_min, stat.stx_atomic_write_unit_max);
        Self::new(min.max(align.offset), max, stat.stx_atomic_write_unit_max_opt)
    }

    fn new(min: u32, max: u32, fast: u32) -> Option<Self> {
        let is_limit = min.is_power_of_two() && max.is_power_of_two() && min <= max;
        let [min_bytes, max_bytes, fast_bytes] = [min, max, fast].map(u64::from);
        is_limit.then_some(Self { min_bytes, max_bytes, fast_bytes })
    }

    /// Whether a write of `range` is within the limits: its length is a power of two from `min_bytes` to
    /// `max_bytes`, and its position a multiple of that.
    #[must_use]
    pub fn admit(&self, range: ByteRange) -> bool {
        let ByteRange { pos, len } = range;
        (self.min_bytes..=self.max_bytes).contains(&len)
            && len.is_power_of_two()
            && pos.is_multiple_of(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c27_only_whole_powers_of_two_within_the_limits_are_admitted() {
        let limits = UntornLimits::new(4096, 16_384, 4096).unwrap();
        for (pos, len, is_admitted) in [
            (0, 4096, true),
            (4096, 4096, true),
            (16_384, 16_384, true),
            (8192, 16_384, false),
            (0, 32_768, false),
            (0, 2048, false),
            (0, 12_288, false),
            (1, 4096, false),
            (0, 0, false),
        ] {
            assert_eq!(limits.admit(ByteRange::new(pos, len)), is_admitted, "{len} at {pos}");
        }
        assert_eq!(UntornLimits::new(0, 0, 0), None);
        assert_eq!(UntornLimits::new(8192, 4096, 0), None);
    }
}
