//! Splits bytes into pieces, at positions derived from the bytes.
//!
//! Invariant: the concatenated pieces are the bytes; equal bytes are split at equal positions.

use std::hash::{DefaultHasher, Hash, Hasher};

use nowait::sim::Random;

/// A number derived from `bytes`.
pub(crate) fn seed_of(bytes: &[u8]) -> u64 {
    // Without random keys: the same in every process of this build.
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

/// Splits `bytes` into pieces of at least one byte and mostly at most `longest`.
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
    fn the_pieces_concatenate_to_the_bytes_and_the_split_is_reproducible() {
        let bytes: Vec<u8> = (0..=255).cycle().take(3000).collect();
        assert_eq!(cut(&bytes, 9).concat(), bytes);
        assert_eq!(cut(&bytes, 9), cut(&bytes, 9));
        assert!(cut(&bytes, 9).len() > 100 && cut(&[], 9).is_empty());
    }
}
