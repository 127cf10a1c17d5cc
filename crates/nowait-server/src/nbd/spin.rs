//! Looking again before sleeping: worth it only while the next event comes soon.
//!
//! Invariant: nobody spins before several short gaps in a row have been seen, and each time that
//! spinning was in vain doubles how many it takes; so an idle server sleeps at once, and stays
//! asleep.
//! Knows: nothing. Known by: turn.

use std::time::{Duration, Instant};

/// How long it is worth to spin. A sleep and a wake-up cost about as much.
const SPIN: Duration = Duration::from_micros(50);
/// A gap that was slept through and is likely to be spun through the next time: it has the
/// wake-up in it, which spinning saves.
const SHORT_ASLEEP: Duration = Duration::from_micros(100);
/// Short gaps in a row that make spinning worth a try, at first and at most.
const STREAK_MIN: u32 = 3;
const STREAK_MAX: u32 = 192;

/// What the last gaps were like.
pub(crate) struct Spin {
    streak: u32,
    /// The streak that it takes.
    needed: u32,
}

impl Default for Spin {
    fn default() -> Self {
        Self { streak: 0, needed: STREAK_MIN }
    }
}

impl Spin {
    /// Waits for something to do by asking `pending` for a short time, if that has paid lately.
    /// Returns whether there is something. The gap began at `began`.
    pub(crate) fn wait(&mut self, began: Instant, mut pending: impl FnMut() -> bool) -> bool {
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
            if began.elapsed() > SPIN {
                self.streak = 0;
                self.needed = (self.needed * 2).min(STREAK_MAX);
                return false;
            }
        }
    }

    /// Something came after a gap that began at `began` and was slept through.
    pub(crate) fn slept(&mut self, began: Instant) {
        self.streak = if began.elapsed() <= SHORT_ASLEEP { self.streak + 1 } else { 0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A gap of `length`, as far as it can be told without waiting.
    fn since(length: Duration) -> Instant {
        Instant::now() - length
    }

    #[test]
    fn an_idle_server_does_not_look_again() {
        let mut spin = Spin::default();
        for _ in 0..10 {
            assert!(!spin.wait(Instant::now(), || panic!("looked")));
            spin.slept(since(2 * SHORT_ASLEEP));
        }
    }

    #[test]
    fn short_gaps_make_it_look_and_a_long_one_ends_it() {
        let mut spin = Spin { streak: STREAK_MIN, needed: STREAK_MIN };
        assert!(spin.wait(Instant::now(), || true));
        assert!(!spin.wait(since(2 * SPIN), || false));
        assert!(!spin.wait(Instant::now(), || panic!("looked")));
    }

    #[test]
    fn spinning_in_vain_becomes_rare_and_success_makes_it_common_again() {
        let mut spin = Spin { streak: STREAK_MIN, needed: STREAK_MIN };
        for _ in 0..20 {
            spin.streak = spin.needed;
            assert!(!spin.wait(since(2 * SPIN), || false));
        }
        assert_eq!(spin.needed, STREAK_MAX);
        spin.streak = STREAK_MAX;
        assert!(spin.wait(Instant::now(), || true));
        assert_eq!(spin.needed, STREAK_MIN);
    }
}
