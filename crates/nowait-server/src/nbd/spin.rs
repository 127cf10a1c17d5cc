//! Looking again before sleeping: worth it only while the next event comes soon.
//!
//! Invariant: after one gap that was too long nobody spins until several short ones in a row have
//! been seen; so an idle server sleeps at once, and stays asleep.
//! Knows: nothing. Known by: turn.

use std::time::{Duration, Instant};

/// A gap that is worth spinning through. A sleep and a wake-up cost about as much.
const SHORT: Duration = Duration::from_micros(50);
/// Short gaps in a row that make spinning worth a try.
const STREAK: u32 = 3;

/// What the last gaps were like.
#[derive(Default)]
pub(crate) struct Spin {
    streak: u32,
}

impl Spin {
    /// Waits for something to do by asking `pending` for a short time, if that has paid lately.
    /// Returns whether there is something.
    pub(crate) fn wait(&mut self, began: Instant, mut pending: impl FnMut() -> bool) -> bool {
        if self.streak < STREAK {
            return false;
        }
        loop {
            for _ in 0..16 {
                if pending() {
                    return true;
                }
                std::hint::spin_loop();
            }
            if began.elapsed() > SHORT {
                self.streak = 0;
                return false;
            }
        }
    }

    /// Something came after a gap that began at `began`.
    pub(crate) fn learn(&mut self, began: Instant) {
        self.streak = if began.elapsed() <= SHORT { self.streak + 1 } else { 0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_server_does_not_look_again() {
        let mut spin = Spin::default();
        assert!(!spin.wait(Instant::now(), || panic!("looked")));
        spin.learn(Instant::now() - 2 * SHORT);
        assert!(!spin.wait(Instant::now(), || panic!("looked")));
    }

    #[test]
    fn short_gaps_make_it_look_and_one_long_one_ends_it() {
        let mut spin = Spin { streak: STREAK };
        assert!(spin.wait(Instant::now(), || true));
        assert!(!spin.wait(Instant::now() - 2 * SHORT, || false));
        assert!(!spin.wait(Instant::now(), || panic!("looked")));
    }
}
