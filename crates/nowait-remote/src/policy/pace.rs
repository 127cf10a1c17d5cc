//! How often a client asks a store that has told it to slow down.
//!
//! Invariant: a client that is not told to slow down is not held up.

use std::time::Duration;

/// The lowest rate in requests a second, and the one above which there is no limit any more.
const LOWEST: f64 = 0.5;
/// The least rate after the first refusal: one that comes alone costs little.
const FIRST: f64 = 8.0;
const HIGHEST: f64 = 500.0;
/// The rate grows by this part of itself in the first second without a refusal, by twice as much in
/// the next one, and so on, but not more than by the second part.
const GROWTH: [f64; 2] = [0.05, 0.5];
/// The time over which requests are counted, and within which refusals are one.
const SECOND: Duration = Duration::from_secs(1);

/// A rate that halves when the store refuses requests and grows when it does not. Times are those
/// since any moment that stays the same.
#[derive(Clone, Debug, Default)]
pub struct Pace {
    /// Requests a second; `None`: as many as there are.
    rate: Option<f64>,
    /// Since when requests are counted, how many there were, and in the second before.
    counted_since: Duration,
    counted: u32,
    counted_before: u32,
    next: Duration,
    changed: Duration,
    /// Times that the rate has grown since the last refusal.
    grown: u32,
}

impl Pace {
    /// When a request may be sent that is there at `now`, if no other one takes that time.
    pub fn free_at(&self, now: Duration) -> Duration {
        if self.rate.is_some() { self.next.max(now) } else { now }
    }

    /// The time at which a request that arrives at `now` may be sent: no other request has it.
    pub fn slot(&mut self, now: Duration) -> Duration {
        let Some(rate) = self.rate else {
            self.count(now);
            return now;
        };
        let at = self.next.max(now);
        self.next = at + Duration::from_secs_f64(1.0 / rate);
        at
    }

    fn count(&mut self, now: Duration) {
        let since = now.saturating_sub(self.counted_since);
        if since >= SECOND {
            self.counted_before = if since < 2 * SECOND { self.counted } else { 0 };
            (self.counted_since, self.counted) = (now, 0);
        }
        self.counted = self.counted.saturating_add(1);
    }

    /// The store has refused a request because there are too many.
    pub fn refused(&mut self, now: Duration) {
        let rate = match self.rate {
            // Half of what was too much.
            None => (f64::from(self.counted.max(self.counted_before)) / 2.0).max(FIRST),
            Some(rate) if now >= self.changed + SECOND => (rate / 2.0).max(LOWEST),
            Some(_) => return,
        };
        (self.rate, self.changed, self.grown) = (Some(rate), now, 0);
    }

    /// The store has answered a request.
    pub fn answered(&mut self, now: Duration) {
        if let Some(rate) = self.rate
            && now >= self.changed + SECOND
        {
            self.grown = self.grown.saturating_add(1);
            let rate = rate * (1.0 + (GROWTH[0] * f64::from(self.grown)).min(GROWTH[1]));
            (self.rate, self.changed) = ((rate < HIGHEST).then_some(rate), now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn requests_of_a_client_that_was_not_refused_wait_for_nothing() {
        let mut pace = Pace::default();
        pace.answered(at(5));
        assert!((0..1000).all(|_| pace.slot(at(7)) == at(7)));
    }

    #[test]
    fn a_refusal_halves_the_rate_and_many_at_once_are_one() {
        let mut pace = Pace::default();
        (0..40).for_each(|n| _ = pace.slot(at(n * 20)));
        (0..50).for_each(|n| pace.refused(at(800 + n)));
        let slots = [0; 3].map(|_| pace.slot(at(900)));
        assert_eq!(slots, [at(900), at(950), at(1000)]);
        pace.refused(at(1900));
        let slots = [0; 3].map(|_| pace.slot(at(1900)));
        assert_eq!(slots, [at(1900), at(2000), at(2100)]);
    }

    #[test]
    fn a_store_that_has_room_again_is_soon_asked_without_a_limit() {
        let mut pace = Pace::default();
        (0..100).for_each(|n| pace.refused(at(n * 1000)));
        assert_eq!(pace.rate, Some(LOWEST));
        (100..160).for_each(|n| pace.answered(at(n * 1000)));
        assert_eq!(pace.rate, None);
    }
}
