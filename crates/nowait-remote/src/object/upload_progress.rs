//! Whether a part of an upload is sent fast enough.
//!
//! Invariant: a part is not sent again because the link is slow. It is late when all connections of the upload together have sent
//! too little for a while, or so much more than its bytes that it must have been its turn.

use std::time::{Duration, Instant};

/// The parts that are sent together have to send so many bytes a second, on average over the time of silence.
const MINIMUM_RATE: u64 = 1 << 10;
/// Of a part that is as fast as the others, these send at most so many times the bytes of all while it is sent.
const TURNS: u64 = 4;
/// Bytes in the buffers of the system that are not seen to leave, for each part that is sent at a time.
const BUFFERED: u64 = 1 << 20;
/// The longest time for that.
const LONGEST_DRAIN: Duration = Duration::from_secs(240);

/// The progress of one part.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartProgress {
    begun: Instant,
    /// Bytes that all connections had sent then.
    first: u64,
    /// The last moment at which they were fast enough, and the bytes then.
    since: Instant,
    bytes: u64,
    silence: Duration,
    bytes_at_once: u64,
}

impl PartProgress {
    /// Progress of a part that begins to be sent at `now`, when the upload has sent the bytes `sent`. The parts that are sent at a
    /// time have `bytes_at_once`; nothing may be heard of it for the time of `silence`.
    pub(super) const fn new(
        now: Instant,
        sent: u64,
        silence: Duration,
        bytes_at_once: u64,
    ) -> Self {
        Self { begun: now, first: sent, since: now, bytes: sent, silence, bytes_at_once }
    }

    /// Whether it is late at `now`, when the upload has sent the bytes `sent`.
    pub(super) fn is_late(&mut self, now: Instant, sent: u64) -> bool {
        let silent = now.duration_since(self.since);
        let needed = u128::from(MINIMUM_RATE) * self.silence.as_millis() / 1000;
        if u128::from(sent - self.bytes) >= needed {
            (self.since, self.bytes) = (now, sent);
            return self.had_its_turn(now, sent);
        }
        silent > self.silence + self.drain_time(sent) || self.had_its_turn(now, sent)
    }

    fn had_its_turn(&self, now: Instant, sent: u64) -> bool {
        now.duration_since(self.begun) > self.silence
            && sent - self.first > TURNS.saturating_mul(self.bytes_at_once)
    }

    /// How long what the system has buffered takes, by the rate so far.
    fn drain_time(&self, sent: u64) -> Duration {
        let moved = u128::from(sent - self.first);
        let taken = self.since.duration_since(self.begun);
        let time = u128::from(BUFFERED) * taken.as_millis() / moved.max(1);
        Duration::from_millis(u64::try_from(time).unwrap_or(u64::MAX)).min(LONGEST_DRAIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SILENCE: Duration = Duration::from_secs(20);
    const AT_ONCE: u64 = 32 << 20;

    /// The second in which a part is late, of a link that sends `rate` bytes a second until it has sent `all`.
    fn late_after(rate: u64, all: u64) -> Option<u64> {
        let begin = Instant::now();
        let mut progress = PartProgress::new(begin, 7, SILENCE, AT_ONCE);
        (1..200_000).find(|&second| {
            let sent = 7 + (rate * second).min(all);
            progress.is_late(begin + Duration::from_secs(second), sent)
        })
    }

    #[test]
    fn a_part_on_a_slow_link_is_late_only_when_the_link_stops() {
        assert_eq!(late_after(0, 0), Some(21));
        // All that was to be sent, and then no answer.
        for rate in [1 << 10, 8 << 10, 64 << 10, 127 << 10, 1 << 20] {
            let end = AT_ONCE / rate;
            let late = late_after(rate, AT_ONCE).unwrap();
            let drain = (BUFFERED / rate).min(LONGEST_DRAIN.as_secs());
            assert!((end + drain..=end + drain + 42).contains(&late), "{rate}: {late}");
        }
        assert!(late_after(1 << 10, u64::MAX).unwrap() > 4 * AT_ONCE / (1 << 10));
        assert_eq!(late_after(900, u64::MAX), Some(21));
    }

    #[test]
    fn a_part_that_does_not_get_its_turn_is_late_when_the_others_have_sent_much_more() {
        // Not before the time of silence, however fast the others are.
        assert_eq!(late_after(1 << 30, u64::MAX), Some(21));
        let rate = 1 << 20;
        assert_eq!(late_after(rate, u64::MAX), Some(TURNS * AT_ONCE / rate + 1));
    }
}
