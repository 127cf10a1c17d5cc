//! Bytes in pieces, cut where the bytes themselves say.
//!
//! Invariant: the pieces together are the bytes; the same bytes are cut in the same places.
//! Knows: nothing here. Known by: the targets.

use std::hash::{DefaultHasher, Hash, Hasher};

use nowait::sim::Random;

/// A number that follows from `bytes`.
pub(crate) fn seed_of(bytes: &[u8]) -> u64 {
    // Without keys of its own: the same in every process of this build.
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

/// `bytes` in pieces of at least one byte and mostly at most `longest`.
pub(crate) fn cut(bytes: &[u8], longest: u64) -> Vec<&[u8]> {
    let mut random = Random::new(seed_of(bytes));
    let (mut pieces, mut rest) = (Vec::new(), bytes);
    while !rest.is_empty() {
        let long = if random.chance(6000) { 64 * longest } else { longest };
        let (piece, behind) = rest.split_at((1 + random.below(long) as usize).min(rest.len()));
        pieces.push(piece);
        rest = behind;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_together_are_the_bytes_and_each_cut_is_the_same() {
        let bytes: Vec<u8> = (0..=255).cycle().take(3000).collect();
        assert_eq!(cut(&bytes, 9).concat(), bytes);
        assert_eq!(cut(&bytes, 9), cut(&bytes, 9));
        assert!(cut(&bytes, 9).len() > 100 && cut(&[], 9).is_empty());
    }
}
