//! Adaptive polling: busy-polls before sleeping, but only while events follow each other quickly.
//!
//! Invariant: polling starts only after several short gaps in a row, and each poll in vain doubles
//! how many it takes; so an idle thread sleeps immediately, and stays asleep.

use std::time::{Duration, Instant};

/// How long to poll. A sleep and a wake-up cost about as much.
const POLL_TIME: Duration = Duration::from_micros(50);
/// A slept gap after which polling would probably have succeeded: it includes the wake-up, which
/// polling saves.
const SHORT_GAP: Duration = Duration::from_micros(100);
/// Short gaps in a row that enable polling, at first and at most.
const STREAK_MIN: u32 = 3;
const STREAK_MAX: u32 = 192;

/// The history of the last gaps between events of one thread: whether to poll before it sleeps.
pub struct AdaptivePoll {
    streak: u32,
    /// The streak that enables polling.
    needed: u32,
}

impl Default for AdaptivePoll {
    fn default() -> Self {
        Self { streak: 0, needed: STREAK_MIN }
    }
}

impl AdaptivePoll {
    /// Polls `pending` for at most 50 µs since `began`, the start of the gap, if enough short
    /// gaps came in a row. Returns whether an event is pending.
    pub fn wait(&mut self, began: Instant, mut pending: impl FnMut() -> bool) -> bool {
        if self.streak < self.needed {
            return false;
        }
        loop {
            for _ in 0..16 {
                if pending() {
                    self.needed = STREAK_MIN;
                    return true;
                }
                std::hint::spin_loop();
            }
            if began.elapsed() > POLL_TIME {
                self.streak = 0;
                self.needed = (self.needed * 2).min(STREAK_MAX);
                return false;
            }
        }
    }

    /// Records a gap that began at `began` and was slept through.
    pub fn slept(&mut self, began: Instant) {
        self.streak = if began.elapsed() <= SHORT_GAP { self.streak + 1 } else { 0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The start of a gap of `length` that ends now.
    fn since(length: Duration) -> Instant {
        Instant::now() - length
    }

    #[test]
    fn an_idle_thread_does_not_poll() {
        let mut poll = AdaptivePoll::default();
        for _ in 0..10 {
            assert!(!poll.wait(Instant::now(), || panic!("polled")));
            poll.slept(since(2 * SHORT_GAP));
        }
    }

    #[test]
    fn short_gaps_enable_polling_and_a_long_one_disables_it() {
        let mut poll = AdaptivePoll { streak: STREAK_MIN, needed: STREAK_MIN };
        assert!(poll.wait(Instant::now(), || true));
        assert!(!poll.wait(since(2 * POLL_TIME), || false));
        assert!(!poll.wait(Instant::now(), || panic!("polled")));
    }

    #[test]
    fn polling_in_vain_becomes_rare_and_success_makes_it_common_again() {
        let mut poll = AdaptivePoll { streak: STREAK_MIN, needed: STREAK_MIN };
        for _ in 0..20 {
            poll.streak = poll.needed;
            assert!(!poll.wait(since(2 * POLL_TIME), || false));
        }
        assert_eq!(poll.needed, STREAK_MAX);
        poll.streak = STREAK_MAX;
        assert!(poll.wait(Instant::now(), || true));
        assert_eq!(poll.needed, STREAK_MIN);
    }
}
