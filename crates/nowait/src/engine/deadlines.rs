//! When the time of requests is over.
//!
//! Invariant: a slot has at most one deadline, that of the request to which it was given last.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// The deadlines of an engine's slots.
#[derive(Default)]
pub(crate) struct Deadlines {
    by_time: BTreeSet<(Instant, u32)>,
    by_slot: HashMap<u32, Instant>,
}

impl Deadlines {
    pub(crate) fn is_empty(&self) -> bool {
        self.by_slot.is_empty()
    }

    /// Gives a slot a deadline, in place of the one that it has.
    pub(crate) fn set(&mut self, slot: u32, deadline: Instant) {
        if let Some(old) = self.by_slot.insert(slot, deadline) {
            self.by_time.remove(&(old, slot));
        }
        self.by_time.insert((deadline, slot));
    }

    /// Takes the slot whose deadline is the first one, if it is over at `now`.
    pub(crate) fn pop(&mut self, now: Instant) -> Option<u32> {
        let &(deadline, slot) = self.by_time.first()?;
        if deadline > now {
            return None;
        }
        self.by_time.pop_first();
        self.by_slot.remove(&slot);
        Some(slot)
    }

    /// How long a sleep of at most `timeout` may last: until the first deadline.
    pub(crate) fn until_first(&self, timeout: Option<Duration>) -> Option<Duration> {
        let first = self
            .by_time
            .first()
            .map(|(deadline, _)| deadline.saturating_duration_since(Instant::now()));
        match (first, timeout) {
            (Some(first), Some(timeout)) => Some(first.min(timeout)),
            (first, timeout) => first.or(timeout),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_over_in_the_order_of_their_last_deadlines() {
        let mut deadlines = Deadlines::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        for (slot, seconds) in [(1, 30), (2, 10), (3, 20), (1, 15)] {
            deadlines.set(slot, at(seconds));
        }
        assert!(deadlines.until_first(None) <= Some(Duration::from_secs(10)));
        assert_eq!(deadlines.until_first(Some(Duration::ZERO)), Some(Duration::ZERO));
        let mut over =
            |seconds| std::iter::from_fn(|| deadlines.pop(at(seconds))).collect::<Vec<_>>();
        assert_eq!((over(9), over(15), over(40)), (vec![], vec![2, 1], vec![3]));
        assert!(deadlines.is_empty() && deadlines.until_first(None).is_none());
    }
}
