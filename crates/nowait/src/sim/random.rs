//! Reproducible random numbers.
//!
//! Invariant: the same seed gives the same numbers on every machine.

/// A stream of random numbers (the generator SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

/// Steps of the state, 2⁶⁴ divided by the golden ratio.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

impl Random {
    /// The stream of `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The `n`th of the independent streams that are derived from `seed`.
    #[must_use]
    pub const fn part(seed: u64, n: u64) -> Self {
        Self(mix(seed ^ mix(n.wrapping_add(STEP))))
    }

    /// The next number.
    #[inline]
    #[allow(clippy::should_implement_trait, reason = "it never ends, so it is not an iterator")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// A number below `limit`; 0 when that is 0.
    #[inline]
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(limit)) >> 64) as u64
    }

    /// True with probability `of_65536` / 65536.
    #[inline]
    pub fn chance(&mut self, of_65536: u16) -> bool {
        of_65536 > 0 && self.next() & 0xffff < u64::from(of_65536)
    }

    /// One element of `all`, or `None` when it is empty.
    pub fn pick<T: Copy>(&mut self, all: &[T]) -> Option<T> {
        all.get(self.below(all.len() as u64) as usize).copied()
    }
}

const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_give_equal_numbers_and_different_seeds_different_ones() {
        let list = |seed| {
            let mut random = Random::new(seed);
            [random.next(), random.below(100), random.below(3)]
        };
        assert_eq!(list(7), list(7));
        assert_ne!(list(7), list(8));
        assert_ne!(Random::part(7, 0).next(), Random::part(7, 1).next());
    }

    #[test]
    fn numbers_below_a_limit_cover_all_values_below_it() {
        let mut random = Random::new(1);
        let mut seen = [0; 7];
        (0..1000).for_each(|_| seen[random.below(7) as usize] += 1);
        assert!(seen.iter().all(|&times| times > 50));
        assert_eq!(random.below(0), 0);
        assert!(!random.chance(0) && (0..20).any(|_| random.chance(u16::MAX)));
    }
}
