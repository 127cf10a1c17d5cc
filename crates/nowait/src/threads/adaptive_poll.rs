//! Adaptive polling: busy-polls before sleeping, but only while events follow each other quickly.
//!
//! Invariant: polling starts only after several short gaps in a row. A poll in vain is paid for by those that succeeded
//! before it, or doubles how many short gaps it takes; so an idle thread sleeps, and stays asleep.

use std::time::{Duration, Instant};

/// How long to poll. A sleep and a wake-up cost about as much.
const POLL_TIME: Duration = Duration::from_micros(50);
/// A slept gap after which polling would probably have succeeded: it includes the wake-up, which
/// polling saves.
const SHORT_GAP: Duration = Duration::from_micros(100);
/// Short gaps in a row that enable polling, at first and at most.
const STREAK_MIN: u32 = 3;
const STREAK_MAX: u32 = 192;
/// Polls with success that pay for one in vain: each saves a sleep and a wake-up, some 10 µs.
const PRICE: u32 = 5;
/// Polls with success that count. Then this many polls in vain in a row are paid for, times [`PRICE`].
const PAID_MAX: u32 = 4 * PRICE;

/// The history of the last gaps between events of one thread: whether to poll before it sleeps.
pub struct AdaptivePoll {
    streak: u32,
    /// The streak that enables polling.
    needed: u32,
    /// Polls with success that have not paid for one in vain.
    paid: u32,
}

impl Default for AdaptivePoll {
    fn default() -> Self {
        Self { streak: 0, needed: STREAK_MIN, paid: 0 }
    }
}

impl AdaptivePoll {
    /// Polls `pending` for at most 50 µs since `began`, the start of the gap, if enough short
    /// gaps came in a row, or polling has saved more lately than it costs. Returns whether an event is pending.
    pub fn wait(&mut self, began: Instant, mut pending: impl FnMut() -> bool) -> bool {
        if self.streak < self.needed && self.paid < PRICE {
            return false;
        }
        loop {
            // A thread that is out of time may have been without a processor: it looks once more.
            let is_late = began.elapsed() > POLL_TIME;
            for _ in 0..16 {
                if pending() {
                    self.needed = STREAK_MIN;
                    self.paid = (self.paid + 1).min(PAID_MAX);
                    return true;
                }
                std::hint::spin_loop();
            }
            if is_late {
                self.count_in_vain();
                return false;
            }
        }
    }

    fn count_in_vain(&mut self) {
        match self.paid.checked_sub(PRICE) {
            Some(left) => self.paid = left,
            None => {
                self.paid = 0;
                self.streak = 0;
                self.needed = (self.needed * 2).min(STREAK_MAX);
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
        let mut poll = AdaptivePoll::default();
        for _ in 0..STREAK_MIN {
            assert!(!poll.wait(Instant::now(), || panic!("polled")));
            poll.slept(Instant::now());
        }
        assert!(poll.wait(Instant::now(), || true));
        assert!(!poll.wait(since(2 * POLL_TIME), || false));
        assert!(!poll.wait(Instant::now(), || panic!("polled")));
    }

    #[test]
    fn polls_with_success_pay_for_those_in_vain_up_to_four() {
        let mut poll = AdaptivePoll { streak: STREAK_MIN, ..AdaptivePoll::default() };
        for _ in 0..10 * PAID_MAX {
            assert!(poll.wait(Instant::now(), || true));
        }
        for _ in 0..4 {
            assert!(!poll.wait(since(2 * POLL_TIME), || false));
            poll.slept(since(2 * SHORT_GAP));
        }
        assert!(!poll.wait(Instant::now(), || panic!("polled")));
        assert_eq!(poll.needed, STREAK_MIN);
    }

    #[test]
    fn a_thread_that_was_without_a_processor_looks_once_more() {
        let mut poll = AdaptivePoll { streak: STREAK_MIN, ..AdaptivePoll::default() };
        let mut looked = 0;
        assert!(poll.wait(since(2 * POLL_TIME), || {
            looked += 1;
            looked == 16
        }));
        assert_eq!((poll.needed, poll.paid), (STREAK_MIN, 1));
    }

    #[test]
    fn polling_in_vain_becomes_rare_and_success_makes_it_common_again() {
        let mut poll = AdaptivePoll { streak: STREAK_MIN, ..AdaptivePoll::default() };
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
