//! A hash of numbers that the process itself has chosen, for tables that each job looks into.
//!
//! Invariant: no client chooses what is hashed, so that none can make numbers that collide.

use std::hash::{BuildHasherDefault, Hasher};

/// Hashes a table's keys, which are numbers or tuples of them.
pub(super) type NumberHash = BuildHasherDefault<NumberHasher>;

#[derive(Default)]
pub(super) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }

    fn write_u64(&mut self, number: u64) {
        // An odd number without a pattern; both halves of the product together vary in all bits.
        let product = u128::from(self.0 ^ number) * 0xf135_7aea_2e62_a9c5;
        self.0 = product as u64 ^ (product >> 64) as u64;
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::hash::{BuildHasher, Hash};

    /// Values of the bits by which a table finds its places.
    fn places<T: Hash>(keys: impl Iterator<Item = T>) -> usize {
        let hash = NumberHash::default();
        keys.map(|key| hash.hash_one(key) % 4096).collect::<HashSet<_>>().len()
    }

    #[test]
    fn numbers_in_a_row_and_addresses_are_spread() {
        // By chance some 2600 of 4096 places have a key.
        assert!(places(0u64..4096) > 2000);
        assert!(places((0..4096u64).map(|n| (n % 64, n / 64))) > 2000);
        assert!(places((0..4096u64).map(|n| (3usize, (n * 192).rotate_left(32)))) > 2000);
        assert!(places((0..4096u64).map(|n| (n as usize, 0x7f00_0000_1000 + n * 64))) > 2000);
    }
}
