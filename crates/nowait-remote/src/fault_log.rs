//! The lines of the log about the faults of one server that pass.
//!
//! Invariant: however often they come, there are few lines a minute: the first faults have lines of
//! their own, the others are counted in one line. A fault that lasts has lines of its own.

use std::time::Duration;

/// The time in which faults beyond the first ones are counted.
const PERIOD: Duration = Duration::from_secs(60);
/// Faults of a period that have lines of their own.
const FIRST: u32 = 3;
/// A fault of this length has lines of its own.
pub(crate) const LONG: Duration = Duration::from_secs(5);

/// The faults of a server. All times count from any moment that stays the same.
pub(crate) struct FaultLog {
    /// The server in the log.
    place: String,
    /// When the period has begun.
    begun: Option<Duration>,
    told: u32,
    untold: u64,
    /// The last of those.
    last: String,
}

impl FaultLog {
    /// No fault of `place` so far.
    pub(crate) const fn new(place: String) -> Self {
        Self { place, begun: None, told: 0, untold: 0, last: String::new() }
    }

    /// A fault has begun at `now`, for the reason `why`. Returns whether lines are to tell of it;
    /// otherwise it is counted.
    pub(crate) fn begins(&mut self, why: &str, now: Duration) -> bool {
        self.pass(now);
        self.begun.get_or_insert(now);
        if self.told < FIRST {
            self.told += 1;
            return true;
        }
        self.untold += 1;
        why.clone_into(&mut self.last);
        false
    }

    /// It is `now`: tells how many faults were only counted, if their period has passed.
    pub(crate) fn pass(&mut self, now: Duration) {
        if self.begun.is_none_or(|begun| now.saturating_sub(begun) < PERIOD) {
            return;
        }
        self.tell();
        (self.begun, self.told) = (None, 0);
    }

    fn tell(&mut self) {
        if let Some(summary) = self.take_summary() {
            tracing::warn!("{}: {summary}", self.place);
        }
    }

    fn take_summary(&mut self) -> Option<String> {
        let untold = std::mem::take(&mut self.untold);
        let last = std::mem::take(&mut self.last);
        (untold > 0).then(|| format!("{untold} more faults like these, the last one: {last}"))
    }
}

impl Drop for FaultLog {
    fn drop(&mut self) {
        self.tell();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_faults_of_a_period_are_told_and_the_others_counted() {
        let mut log = FaultLog::new("place".into());
        let told = |log: &mut FaultLog, seconds: u64| {
            (0..300)
                .filter(|n| log.begins(&format!("why {n}"), Duration::from_secs(seconds)))
                .count()
        };
        assert_eq!(told(&mut log, 100), 3);
        assert_eq!(told(&mut log, 159), 0);
        log.pass(Duration::from_secs(159));
        let summary = log.take_summary().unwrap();
        assert_eq!(summary, "597 more faults like these, the last one: why 299");
        assert_eq!(log.take_summary(), None);
        // A later period.
        assert_eq!(told(&mut log, 160), 3);
        log.pass(Duration::from_secs(220));
        assert_eq!(log.take_summary(), None, "it was told when the period had passed");
    }
}
