//! The changes in the frozen bitmap of a backup, for a copy of these.
//!
//! Invariant: nothing is forgotten here; a commit of the backup does that.

use std::sync::Arc;

use nowait::ByteRange;

use crate::dirty_bitmaps::dirty_bitmap::DirtyBitmap;
use crate::export::ExportId;
use crate::exports::Exports;
use crate::exports::changed_ranges::ChangedRanges;

/// The changes of a disk up to the instant of a backup, by its frozen bitmap.
pub struct FrozenChanges {
    bits: Arc<DirtyBitmap>,
    size: u64,
}

impl FrozenChanges {
    /// Bytes of the disk that are changed.
    #[must_use]
    pub fn changed_bytes(&self) -> u64 {
        self.bits.dirty_bytes(self.size)
    }

    /// Whether a part of `range` is changed.
    #[must_use]
    pub fn are_in(&self, range: ByteRange) -> bool {
        self.bits.extents(range, 1, 2, u64::MAX).iter().any(|extent| extent.is_dirty)
    }
}

impl ChangedRanges for FrozenChanges {
    fn take(&self, from: u64, most: usize) -> Vec<ByteRange> {
        let mut at = from.min(self.size);
        let rest = ByteRange::new(at, self.size - at);
        // Dirty and clean ones in turn.
        let extents = self.bits.extents(rest, 1, most.saturating_mul(2), u64::MAX);
        let mut ranges = Vec::new();
        for extent in extents {
            if extent.is_dirty && ranges.len() < most {
                ranges.push(ByteRange::new(at, extent.len));
            }
            at += extent.len;
        }
        ranges
    }

    fn put_back(&self, _: &[ByteRange]) {}
}

impl Exports {
    /// The changes in the bitmap that is frozen for `backup`, the export of a running one; `None` if there is none.
    #[must_use]
    pub fn frozen_changes(&self, backup: ExportId) -> Option<FrozenChanges> {
        let of = self.0.registry.get(backup)?.backup_of()?;
        let running = self.0.registry.get(of)?.backup()?;
        let bits = running.frozen.clone().filter(|_| running.id == backup)?;
        Some(FrozenChanges { bits, size: running.point.size() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dirty_bitmaps::DirtyBitmaps;

    #[test]
    fn all_changes_are_told_in_order_and_stay() {
        let bits = DirtyBitmaps::default().add_tracker(16 << 20).expect("memory");
        let granule = bits.granularity();
        for number in [0, 1, 4, 9] {
            bits.set(ByteRange::new(number * granule, 1));
        }
        // The last granule is short.
        let changes = FrozenChanges { bits, size: 9 * granule + 100 };
        let all = [(0, 2 * granule), (4 * granule, granule), (9 * granule, 100)];
        let all = all.map(|(pos, len)| ByteRange::new(pos, len));
        for _ in 0..2 {
            assert_eq!(changes.take(0, 9), all);
        }
        let mut found = Vec::new();
        while let [range] =
            changes.take(found.last().map_or(0, |last: &ByteRange| last.end()), 1)[..]
        {
            found.push(range);
        }
        assert_eq!(found, all);
        assert_eq!(changes.changed_bytes(), 3 * granule + 100);
        assert!(changes.are_in(ByteRange::new(3 * granule, granule + 1)));
        assert!(!changes.are_in(ByteRange::new(2 * granule, 2 * granule)));
    }
}
