//! Read-ahead of a scan: which of the blocks that it will need are read together.
//!
//! Invariant: one read covers at most [`AHEAD_BYTES`], and always the block that is missing.

/// Most bytes of the file that one read of a scan covers.
pub(crate) const AHEAD_BYTES: u64 = 1 << 20;
/// The most bytes from one needed block of such a read to the next: reading these costs less than another
/// read. In an image with clusters of 512 bytes that was filled in order, the data of 32 KiB lie between two L2 tables.
/// Beyond it: another read fetches the next block.
const MAX_GAP_BYTES: u64 = 64 << 10;

/// The positions of `found` that one read is to cover, around `missing`. `found` is sorted and
/// contains `missing`; blocks have `block` bytes.
pub(crate) fn near(found: &[u64], missing: u64, block: u64) -> Vec<u64> {
    let at = found.partition_point(|&pos| pos < missing);
    let (before, behind) = found.split_at(at);
    let is_near = |last: &mut u64, pos: u64, from: u64| {
        let near =
            pos.abs_diff(*last) <= MAX_GAP_BYTES && pos.abs_diff(from) + block <= AHEAD_BYTES;
        *last = pos;
        near.then_some(pos)
    };
    let right = behind.iter().scan(missing, |last, &pos| is_near(last, pos, missing));
    let right: Vec<_> = right.collect();
    let end = right.last().copied().unwrap_or(missing);
    let left = before.iter().rev().scan(missing, |last, &pos| is_near(last, pos, end));
    let mut near: Vec<_> = left.collect();
    near.reverse();
    near.extend(right);
    near
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_read_covers_near_tables_on_both_sides_and_no_far_ones() {
        let kib = |list: &[u64]| list.iter().map(|pos| pos << 10).collect::<Vec<_>>();
        let found = kib(&[0, 8, 16, 200]);
        assert_eq!(near(&found, 8 << 10, 512), kib(&[0, 8, 16]));
        assert_eq!(near(&found, 200 << 10, 512), kib(&[200]));
        let many: Vec<_> = (0..9000).map(|n| n << 9).collect();
        assert_eq!(near(&many, 0, 512).len() as u64, AHEAD_BYTES / 512);
    }
}
