//! Reproducible random numbers from a seed.
//!
//! Invariant: the same seed gives the same numbers on every machine.

use std::time::{SystemTime, UNIX_EPOCH};

/// A generator good enough to choose operations and fill buffers.
#[derive(Clone)]
pub struct Random(fastrand::Rng);

impl Random {
    /// A generator with this seed.
    pub fn from_seed(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    /// The next 64 bits.
    pub fn word(&mut self) -> u64 {
        self.0.u64(..)
    }

    /// A number in `0..bound`; `bound` is at least 1.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0.u64(..bound)
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
