//! Events in virtual time.
//!
//! Invariant: time does not go back; of two events at the same time, the one that was planned first
//! happens first.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// A time in nanoseconds since the beginning.
pub(super) type Time = u64;

/// The time of `seconds`.
pub(super) fn seconds(seconds: f64) -> Time {
    (seconds * 1e9) as Time
}

/// The events that have not happened yet.
#[derive(Debug)]
pub(super) struct Timeline<E> {
    now: Time,
    planned: BinaryHeap<Reverse<(Time, u64, E)>>,
    /// The time of timers, and the events at their ends, which are in order by themselves.
    timer: Time,
    timers: VecDeque<(Time, u64, E)>,
    count: u64,
}

impl<E: Ord + Copy> Timeline<E> {
    /// Without events. A timer takes `timer`.
    pub(super) fn new(timer: Time) -> Self {
        Self { now: 0, planned: BinaryHeap::new(), timer, timers: VecDeque::new(), count: 0 }
    }

    /// The time of the last event.
    pub(super) fn now(&self) -> Time {
        self.now
    }

    /// Plans `event` for `time`, or for now if that is over.
    pub(super) fn at(&mut self, time: Time, event: E) {
        self.count += 1;
        self.planned.push(Reverse((time.max(self.now), self.count, event)));
    }

    /// Plans `event` for the end of a timer that begins now.
    pub(super) fn start_timer(&mut self, event: E) {
        self.count += 1;
        self.timers.push_back((self.now.saturating_add(self.timer), self.count, event));
    }

    /// The next event.
    pub(super) fn next(&mut self) -> Option<E> {
        let planned = self.planned.peek().map(|Reverse((time, count, _))| (*time, *count));
        let timer = self.timers.front().map(|&(time, count, _)| (time, count));
        let is_timer = planned.is_none() || timer.is_some_and(|timer| Some(timer) < planned);
        let (time, _, event) = match is_timer {
            true => self.timers.pop_front()?,
            false => self.planned.pop()?.0,
        };
        self.now = time;
        Some(event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_and_timers_happen_in_the_order_of_their_times() {
        let mut timeline = Timeline::new(10);
        timeline.at(10, 'b');
        timeline.start_timer('c');
        timeline.at(10, 'd');
        timeline.at(3, 'a');
        let order: String = std::iter::from_fn(|| timeline.next()).collect();
        assert_eq!((order.as_str(), timeline.now()), ("abcd", 10));
    }
}
