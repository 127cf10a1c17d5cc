//! Finds requests that take longer than a threshold, without reading the clock for each.
//!
//! Invariant: time is cut into epochs of a quarter of the threshold, and the tag of a request names
//! the one in which it was submitted. One that ends in its epoch is not slow; of another one at least
//! the time since the end of its epoch has passed. The label of an epoch is used again only when none
//! of its requests is in flight.

use std::time::{Duration, Instant};

/// Where a tag has the label of its epoch: above the frontend's key.
const SHIFT: u32 = 27;
const LABELS: usize = 16;
/// The bits of a tag that a frontend may choose as a key.
pub(crate) const KEY_MASK: u64 = (1 << SHIFT) - 1;
/// The shortest epoch.
const SHORTEST: Duration = Duration::from_millis(1);

/// An epoch that has ended, or is running.
#[derive(Clone, Copy)]
struct Epoch {
    in_flight: u32,
    ended: Instant,
    reported: bool,
}

/// Requests that were found to be in flight for long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overdue {
    /// The labels of their epochs, one bit each.
    labels: u16,
    count: u32,
}

impl Overdue {
    /// Whether the request of `tag` is one of them.
    pub(crate) fn has(self, tag: u64) -> bool {
        self.labels >> ((tag >> SHIFT) as usize % LABELS) & 1 == 1
    }
}

/// The requests of one thread.
pub(crate) struct SlowRequests {
    threshold: Option<Duration>,
    current: usize,
    /// When the current epoch ends.
    due: Instant,
    epochs: [Epoch; LABELS],
}

impl SlowRequests {
    /// Without a `threshold` no request is slow.
    pub(crate) fn new(threshold: Option<Duration>) -> Self {
        let now = Instant::now();
        let epochs = [Epoch { in_flight: 0, ended: now, reported: false }; LABELS];
        Self { threshold, current: 0, due: now, epochs }
    }

    /// The label for a request that is submitted now, to be put into its tag.
    #[inline]
    pub(crate) fn begin(&mut self) -> u64 {
        self.epochs[self.current].in_flight += 1;
        (self.current as u64) << SHIFT
    }

    /// The request for which [`SlowRequests::begin`] was called last was not submitted.
    #[cold]
    pub(crate) fn undo(&mut self) {
        self.epochs[self.current].in_flight -= 1;
    }

    /// The request of `tag` has ended. If it is slow: the time that it took, or a little less.
    #[inline]
    pub(crate) fn end(&mut self, tag: u64) -> Option<Duration> {
        let label = (tag >> SHIFT) as usize % LABELS;
        self.epochs[label].in_flight -= 1;
        if label == self.current { None } else { self.age_if_slow(label) }
    }

    #[cold]
    fn age_if_slow(&self, label: usize) -> Option<Duration> {
        let age = self.epochs[label].ended.elapsed();
        self.threshold.filter(|threshold| age >= *threshold).map(|_| age)
    }

    /// The time until [`SlowRequests::advance`] is due; `None` without a threshold.
    #[inline]
    pub(crate) fn time_until_due(&self, now: Instant) -> Option<Duration> {
        self.threshold.map(|_| self.due.saturating_duration_since(now))
    }

    /// Goes on to the next epoch if the current one is over at `now`. Returns which requests have been
    /// found to be in flight for longer than the threshold, and the threshold.
    #[inline]
    pub(crate) fn advance(&mut self, now: Instant) -> Option<(Overdue, Duration)> {
        let threshold = self.threshold.filter(|_| now >= self.due)?;
        self.next_epoch(now, threshold)
    }

    #[cold]
    fn next_epoch(&mut self, now: Instant, threshold: Duration) -> Option<(Overdue, Duration)> {
        self.due = now + (threshold / 4).max(SHORTEST);
        if self.epochs[self.current].in_flight > 0
            && let Some(free) = self.epochs.iter().position(|epoch| epoch.in_flight == 0)
        {
            let ended = &mut self.epochs[self.current];
            (ended.ended, ended.reported) = (now, false);
            self.current = free;
        }
        let current = self.current;
        let is_overdue = |(label, epoch): &(usize, &mut Epoch)| {
            let age = now.saturating_duration_since(epoch.ended);
            *label != current && epoch.in_flight > 0 && !epoch.reported && age >= threshold
        };
        let mut overdue = Overdue { labels: 0, count: 0 };
        for (label, epoch) in self.epochs.iter_mut().enumerate().filter(is_overdue) {
            epoch.reported = true;
            overdue.labels |= 1 << label;
            overdue.count += epoch.in_flight;
        }
        (overdue.count > 0).then_some((overdue, threshold))
    }

    /// Requests in flight.
    pub(crate) fn in_flight(&self) -> u32 {
        self.epochs.iter().map(|epoch| epoch.in_flight).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const THRESHOLD: Duration = Duration::from_secs(4);

    fn after(begin: Instant, seconds: u64) -> Instant {
        begin + Duration::from_secs(seconds)
    }

    #[test]
    fn a_request_that_stays_is_overdue_once_and_its_label_is_not_used_again() {
        let mut slow = SlowRequests::new(Some(THRESHOLD));
        let begin = Instant::now();
        assert_eq!(slow.advance(begin), None);
        let stuck = slow.begin();
        let mut overdue = Vec::new();
        for second in 1..100 {
            let found = slow.advance(after(begin, second));
            overdue.extend(found.map(|(found, _)| (second, found.count, found.has(stuck))));
            // Others come and go in each epoch, and some stay into the next.
            let quick = slow.begin();
            assert_ne!(quick & !KEY_MASK, stuck);
            assert_eq!(slow.end(quick), None);
        }
        // Its epoch ended after one second.
        assert_eq!(overdue, [(5, 1, true)]);
        assert_eq!(slow.in_flight(), 1);
        slow.end(stuck);
        assert_eq!(slow.in_flight(), 0);
    }

    #[test]
    fn a_request_is_slow_by_the_time_since_the_end_of_its_epoch() {
        let mut slow = SlowRequests::new(Some(THRESHOLD));
        let now = Instant::now();
        let ages = [Duration::from_secs(60), Duration::from_secs(1)];
        let tags = ages.map(|age| {
            slow.due = now - age;
            let tag = slow.begin();
            slow.advance(now - age);
            tag
        });
        assert!(slow.end(tags[0]).is_some_and(|age| age >= ages[0]));
        assert_eq!(slow.end(tags[1]), None);
    }

    #[test]
    fn with_every_label_in_use_the_epoch_goes_on_and_nothing_is_lost() {
        let mut slow = SlowRequests::new(Some(THRESHOLD));
        let begin = Instant::now();
        let tags: Vec<_> = (0..100)
            .map(|second| {
                slow.advance(after(begin, second));
                slow.begin()
            })
            .collect();
        assert_eq!(slow.in_flight(), 100);
        for tag in tags {
            slow.end(tag);
        }
        assert_eq!(slow.in_flight(), 0);
    }

    #[test]
    fn without_a_threshold_nothing_is_slow() {
        let mut slow = SlowRequests::new(None);
        let tag = slow.begin();
        assert_eq!(slow.advance(Instant::now() + THRESHOLD), None);
        assert_eq!(slow.time_until_due(Instant::now()), None);
        assert_eq!(slow.end(tag), None);
    }

    #[test]
    fn a_request_that_was_not_submitted_is_not_in_flight() {
        let mut slow = SlowRequests::new(Some(THRESHOLD));
        slow.begin();
        slow.undo();
        assert_eq!(slow.in_flight(), 0);
    }
}
