//! Reproducible random numbers from a seed.
//!
//! Invariant: the same seed gives the same numbers on every machine.

use std::time::{SystemTime, UNIX_EPOCH};

/// A generator good enough to choose operations and fill buffers (SplitMix64).
pub struct Random(u64);

impl Random {
    /// A generator with this seed.
    pub fn from_seed(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number in `0..bound`; `bound` is at least 1.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.word() % bound
    }

    /// True `percent` times in a hundred.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// `len` bytes, none of them zero, so that data differs from a hole.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.fill(&mut bytes);
        bytes
    }

    /// Fills `bytes`, as [`Random::bytes`].
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for piece in bytes.chunks_mut(8) {
            let word = (self.word() | 0x0101_0101_0101_0101).to_le_bytes();
            piece.copy_from_slice(&word[..piece.len()]);
        }
    }
}

/// `NOWAIT_SEED` where it is set (to repeat a failure), else a new seed. Printed, so that a failing test shows it.
pub fn seed() -> u64 {
    let seed = match std::env::var("NOWAIT_SEED") {
        Ok(text) => text.parse().expect("NOWAIT_SEED is a decimal number"),
        Err(_) => SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .expect("a clock after 1970")
            .subsec_nanos()
            .into(),
    };
    println!("seed: NOWAIT_SEED={seed}");
    seed
}
