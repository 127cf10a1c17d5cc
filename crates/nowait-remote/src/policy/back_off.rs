//! The pauses between the attempts of a request that a store refuses or does not answer.
//!
//! Invariant: clients that are refused at the same moment ask again at different moments, over a
//! time that doubles with each attempt up to a limit.

use std::time::Duration;

/// Exponential back-off with full jitter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackOff {
    /// The longest pause before the second attempt.
    pub first: Duration,
    /// The longest pause before any attempt.
    pub longest: Duration,
}

impl BackOff {
    /// Pauses of requests to an object store.
    pub const STORE: Self =
        Self { first: Duration::from_millis(100), longest: Duration::from_secs(10) };

    /// The pause after `failed` attempts: `random`, a number that is uniform over all of `u64`,
    /// chooses between 0 and `first * 2^(failed - 1)`, at most `longest`.
    #[must_use]
    pub fn pause(self, failed: u32, random: u64) -> Duration {
        let doublings = failed.saturating_sub(1).min(20);
        let limit = self.first.saturating_mul(1 << doublings).min(self.longest);
        let nanoseconds = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let chosen = (u128::from(random) * u128::from(nanoseconds)) >> 64;
        Duration::from_nanos(u64::try_from(chosen).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_the_pause_doubles_until_it_is_the_longest() {
        let longest = |failed| BackOff::STORE.pause(failed, u64::MAX).as_millis();
        assert_eq!([1, 2, 3].map(longest), [99, 199, 399]);
        assert_eq!([8, 60, u32::MAX].map(longest), [9999; 3]);
    }

    #[test]
    fn pauses_are_spread_over_the_whole_time() {
        let chosen = |part: u64| BackOff::STORE.pause(3, part << 62).as_millis();
        assert_eq!([0, 1, 2, 3].map(chosen), [0, 100, 200, 300]);
    }
}
