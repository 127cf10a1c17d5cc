//! The data of writes: each byte that is read shows which write it came from.
//!
//! Invariant: the bytes of a value depend only on the value and their position; value 0 is zeros.

/// The content of a write: a number of its own, or [`ZERO`].
pub type Value = u64;

/// Zeros.
pub const ZERO: Value = 0;

/// The content before the first write.
pub const BASE: Value = u64::MAX;

/// The difference between adjacent words of a value: odd, so that no two words are equal.
const STEP: u64 = 0xd6e8_feb8_6659_fd93;

#[inline]
fn word(value: Value, index: u64) -> u64 {
    if value == ZERO {
        return 0;
    }
    // Every byte of the value affects every byte of the word.
    let spread = value.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (spread ^ (spread >> 29)).wrapping_add(index.wrapping_mul(STEP))
}

/// Calls `each` with the bytes of `value` from `pos` on, in parts, with the offset in `bytes`.
#[inline]
fn zip(bytes: &[u8], pos: u64, value: Value, mut each: impl FnMut(usize, &[u8]) -> bool) -> bool {
    let mut at = 0;
    while at < bytes.len() {
        let here = pos + at as u64;
        let (index, skip) = (here / 8, (here % 8) as usize);
        let len = (8 - skip).min(bytes.len() - at);
        let whole = word(value, index).to_le_bytes();
        if !each(at, whole.get(skip..skip + len).unwrap_or_default()) {
            return false;
        }
        at += len;
    }
    true
}

/// Fills `bytes`, which are at `pos`, with those of `value`.
pub fn fill(bytes: &mut [u8], pos: u64, value: Value) {
    if pos.is_multiple_of(8) {
        let mut index = pos / 8;
        let mut words = bytes.chunks_exact_mut(8);
        for chunk in &mut words {
            chunk.copy_from_slice(&word(value, index).to_le_bytes());
            index += 1;
        }
        let rest = words.into_remainder();
        let last = word(value, index).to_le_bytes();
        rest.copy_from_slice(last.get(..rest.len()).unwrap_or_default());
        return;
    }
    let mut rest: &mut [u8] = bytes;
    let mut here = pos;
    while !rest.is_empty() {
        let (skip, taken) = ((here % 8) as usize, rest);
        let (now, later) = taken.split_at_mut((8 - skip).min(taken.len()));
        let whole = word(value, here / 8).to_le_bytes();
        now.copy_from_slice(whole.get(skip..skip + now.len()).unwrap_or_default());
        here += now.len() as u64;
        rest = later;
    }
}

/// Whether `bytes`, which are at `pos`, are those of `value`.
pub fn matches(bytes: &[u8], pos: u64, value: Value) -> bool {
    if pos.is_multiple_of(8) && bytes.len().is_multiple_of(8) {
        // The first word of another value differs; if it is equal, all words are compared without a
        // branch.
        if bytes.first_chunk().is_some_and(|first| *first != word(value, pos / 8).to_le_bytes()) {
            return false;
        }
        let mut differs = 0;
        for (n, chunk) in bytes.as_chunks::<8>().0.iter().enumerate() {
            differs |= u64::from_le_bytes(*chunk) ^ word(value, pos / 8 + n as u64);
        }
        return differs == 0;
    }
    zip(bytes, pos, value, |at, part| bytes.get(at..at + part.len()) == Some(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filled_bytes_match_their_value_at_their_position_and_no_other() {
        for (pos, len) in [(0, 64), (13, 50), (8, 7), (4095, 1)] {
            let mut bytes = vec![0; len];
            fill(&mut bytes, pos, 77);
            assert!(matches(&bytes, pos, 77));
            assert!(len == 1 || !matches(&bytes, pos, 78) && !matches(&bytes, pos + 8, 77));
            assert!(!matches(&bytes, pos, ZERO));
            fill(&mut bytes, pos, ZERO);
            assert!(bytes.iter().all(|&byte| byte == 0) && matches(&bytes, pos, ZERO));
        }
    }

    #[test]
    fn a_part_of_a_value_matches_at_any_cut() {
        let mut whole = vec![0; 100];
        fill(&mut whole, 3, 5);
        for from in 0..100 {
            assert!(matches(&whole[from..], 3 + from as u64, 5));
        }
    }
}
