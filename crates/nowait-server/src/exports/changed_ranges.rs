//! Copying what has changed of a disk that is in use.
//!
//! Invariant: a range is no longer marked as changed before its bytes are read, so what is changed beside the copy is marked
//! again; a range that was not copied is marked again, too.

use nowait::ByteRange;

use crate::injected_bug::{ServerBug, injected};

/// The most changed ranges that are taken together.
const TAKEN_RANGES: usize = 4096;

/// The ranges of a disk that have changed.
pub trait ChangedRanges {
    /// Takes at most `most` of them, from byte `from` of the disk on: they are not marked any more.
    fn take(&self, from: u64, most: usize) -> Vec<ByteRange>;

    /// Marks ranges that were taken, and not copied.
    fn put_back(&self, ranges: &[ByteRange]);
}

/// Has `copy` copy what `changes` has, once over the disk, some ranges at a time, which are in order; it returns false if it
/// had to end before all of them were copied. Returns whether all were.
///
/// # Errors
/// That of `copy`: then nothing of what it got is taken for copied.
pub fn copy_changes<E>(
    changes: &impl ChangedRanges,
    mut copy: impl FnMut(&[ByteRange]) -> Result<bool, E>,
) -> Result<bool, E> {
    let mut from = 0;
    loop {
        let ranges = changes.take(from, TAKEN_RANGES);
        let (Some(first), Some(last)) = (ranges.first(), ranges.last()) else { return Ok(true) };
        from = last.end();
        let copied = copy(&ranges);
        if injected(ServerBug::TakeAfterCopy) {
            drop(changes.take(first.pos, ranges.len()));
        }
        if !matches!(copied, Ok(true)) {
            changes.put_back(&ranges);
            return copied;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    use super::*;

    /// Changed ranges of one byte each.
    #[derive(Default)]
    struct Bytes(RefCell<BTreeSet<u64>>);

    impl ChangedRanges for Bytes {
        fn take(&self, from: u64, most: usize) -> Vec<ByteRange> {
            let taken: Vec<_> = self.0.borrow().range(from..).take(most).copied().collect();
            self.0.borrow_mut().retain(|at| !taken.contains(at));
            taken.into_iter().map(|at| ByteRange::new(at, 1)).collect()
        }

        fn put_back(&self, ranges: &[ByteRange]) {
            self.0.borrow_mut().extend(ranges.iter().map(|range| range.pos));
        }
    }

    #[test]
    fn what_changes_beside_the_copy_and_what_is_not_copied_stays_marked() {
        let changes = Bytes::default();
        let mark = |at| changes.put_back(&[ByteRange::new(at, 1)]);
        (0..5).for_each(mark);
        let mut sizes = Vec::new();
        let copied = copy_changes(&changes, |ranges| {
            if sizes.is_empty() {
                [3, 9].into_iter().for_each(mark);
            }
            sizes.push(ranges.len());
            Ok::<_, ()>(true)
        });
        assert_eq!(sizes, [5, 1]);
        assert_eq!(copied, Ok(true), "9 is copied in the same round, 3 in the next one");
        assert_eq!(*changes.0.borrow(), [3].into());
        for ended in [Ok(false), Err("an error")] {
            assert_eq!(copy_changes(&changes, |_| ended), ended);
            assert_eq!(*changes.0.borrow(), [3].into());
        }
        assert_eq!(copy_changes(&changes, |_| Ok::<_, ()>(true)), Ok(true));
        assert!(changes.0.borrow().is_empty());
    }
}
