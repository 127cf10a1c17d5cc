//! Events in a second: a limit, and the most that there was.
//!
//! Invariant: what a limit lets pass in a time is at most its rate times that time, and its burst.

use super::timeline::Time;

/// Refusing a request costs a store this part of what answering one does.
const REFUSAL_COST: f64 = 0.1;

/// A token bucket that holds what one second brings. A store that refuses much has less time to
/// answer: that costs tokens, too.
#[derive(Debug)]
pub(super) struct RequestLimit {
    rate: f64,
    tokens: f64,
    last: Time,
}

impl RequestLimit {
    /// A limit of `rate` requests a second.
    pub(super) fn new(rate: f64) -> Self {
        Self { rate, tokens: rate, last: 0 }
    }

    /// Whether a request that comes now is answered.
    pub(super) fn admits(&mut self, now: Time) -> bool {
        let since = (now - self.last) as f64 / 1e9;
        self.last = now;
        self.tokens = (self.tokens + since * self.rate).min(self.rate);
        let admitted = self.tokens >= 1.0;
        let cost = if admitted { 1.0 } else { REFUSAL_COST };
        self.tokens = (self.tokens - cost).max(-self.rate);
        admitted
    }
}

/// The sum of all values, and the largest of any second.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Peak {
    second: u64,
    in_second: u64,
    /// The largest sum of a second.
    pub(super) peak: u64,
    /// The sum of all.
    pub(super) all: u64,
}

impl Peak {
    /// Adds `value` at `now`.
    pub(super) fn add(&mut self, now: Time, value: u64) {
        let second = now / 1_000_000_000;
        if second != self.second {
            self.second = second;
            self.in_second = 0;
        }
        self.in_second += value;
        self.all += value;
        self.peak = self.peak.max(self.in_second);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admitted(rate: f64, asked_a_second: u64, seconds: u64) -> usize {
        let mut limit = RequestLimit::new(rate);
        let times = 0..asked_a_second * seconds;
        times.filter(|n| limit.admits(n * 1_000_000_000 / asked_a_second)).count()
    }

    #[test]
    fn a_limit_admits_its_rate_and_less_the_more_it_has_to_refuse() {
        assert_eq!(admitted(100.0, 50, 10), 500);
        let loaded = admitted(100.0, 300, 10);
        assert!((800..=1000).contains(&loaded), "{loaded}");
        assert!(admitted(100.0, 2000, 10) < 150);
    }

    #[test]
    fn the_peak_is_that_of_the_fullest_second() {
        let mut peak = Peak::default();
        let times = [0, 1, 1_000_000_000, 1_500_000_000, 1_900_000_000];
        times.into_iter().for_each(|now| peak.add(now, 2));
        assert_eq!((peak.peak, peak.all), (6, 10));
    }
}
