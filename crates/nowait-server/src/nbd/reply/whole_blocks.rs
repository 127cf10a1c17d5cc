//! Extents in whole blocks, as clients expect them that were told of a smallest block.
//!
//! Invariant: a block that is a hole in a part only is data. Together the extents cover what they did, up to the last
//! block that is known in whole.

use nowait::ExtentStatus;

/// The extents of `extents`, which begin at a block, in whole blocks of `block` bytes. There are no more than before, and
/// one at least if there was one.
pub(crate) fn whole_blocks(extents: &[ExtentStatus], block: u64) -> Vec<ExtentStatus> {
    let mut whole: Vec<ExtentStatus> = Vec::with_capacity(extents.len());
    let mut part: Option<ExtentStatus> = None;
    for extent in extents {
        let mut left = extent.len;
        if let Some(mut begun) = part.take() {
            let taken = left.min(block - begun.len);
            left -= taken;
            begun = both(begun, *extent, begun.len + taken);
            match begun.len == block {
                true => push(&mut whole, begun),
                false => part = Some(begun),
            }
        }
        let rest = left % block;
        if left > rest {
            push(&mut whole, ExtentStatus { len: left - rest, ..*extent });
        }
        if rest > 0 {
            part = Some(ExtentStatus { len: rest, ..*extent });
        }
    }
    if let (true, Some(part)) = (whole.is_empty(), part) {
        whole.push(ExtentStatus { len: block, hole: false, ..part });
    }
    whole
}

/// An extent of `len` bytes that is `one` in a part and `other` in another part.
fn both(one: ExtentStatus, other: ExtentStatus, len: u64) -> ExtentStatus {
    let depth = match (one.depth, other.depth) {
        (0, depth) | (depth, 0) => depth,
        (one, other) => one.min(other),
    };
    ExtentStatus { len, hole: one.hole && other.hole, depth }
}

fn push(whole: &mut Vec<ExtentStatus>, next: ExtentStatus) {
    match whole.last_mut() {
        Some(last) if (last.hole, last.depth) == (next.hole, next.depth) => last.len += next.len,
        _ => whole.push(next),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extents(list: &[(u64, bool, u8)]) -> Vec<ExtentStatus> {
        list.iter().map(|&(len, hole, depth)| ExtentStatus { len, hole, depth }).collect()
    }

    #[test]
    fn a_block_that_is_data_in_a_part_is_data() {
        for (given, whole) in [
            (&[][..], &[][..]),
            (&[(4096, true, 0), (8192, false, 1)], &[(4096, true, 0), (8192, false, 1)]),
            (&[(512, true, 0), (3584, false, 2)], &[(4096, false, 2)]),
            (&[(3584, false, 2), (512, false, 1)], &[(4096, false, 1)]),
            (&[(512, true, 0), (3584, true, 0)], &[(4096, true, 0)]),
            (
                &[(5000, true, 0), (5000, false, 1), (6384, true, 0)],
                &[(4096, true, 0), (8192, false, 1), (4096, true, 0)],
            ),
            (
                &[(4608, false, 1), (512, true, 0), (512, false, 1), (2560, true, 0)],
                &[(8192, false, 1)],
            ),
            // The extents after the last ones are not known.
            (&[(4096, true, 0), (512, false, 1)], &[(4096, true, 0)]),
            (&[(512, true, 0)], &[(4096, false, 0)]),
        ] {
            assert_eq!(whole_blocks(&extents(given), 4096), extents(whole), "{given:?}");
        }
    }

    #[test]
    fn there_are_no_more_extents_than_before() {
        for step in [512, 1536, 5000 - 5000 % 512, 4608, 12_800] {
            let list: Vec<_> = (0..64).map(|n| (step, n % 2 == 0, 1)).collect();
            let whole = whole_blocks(&extents(&list), 4096);
            assert!(whole.len() <= list.len(), "{step}: {}", whole.len());
            assert!(whole.iter().all(|extent| extent.len % 4096 == 0), "{step}");
            let bytes: u64 = whole.iter().map(|extent| extent.len).sum();
            assert_eq!(bytes, step * 64, "{step}");
        }
    }
}
