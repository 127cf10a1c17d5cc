//! Whether trying without waiting is worth it (C39).
//!
//! Invariant: after a number of looks in a row in which nearly every try was refused, trying rests
//! for a bounded number of requests, then begins again. Refusals come in bursts: one cause (a
//! timestamp that is due, a lock that is held) refuses everything that is tried at that moment. So
//! it is looks that are counted, not refusals.
//! Knows: nothing. Known by: core.

/// Looks at the queue in a row that make it rest.
const BAD_LOOKS: u32 = 24;
/// Requests that go to the workers at once before the next try.
const REST: u32 = 2048;

/// The judge of one engine.
#[derive(Default)]
pub(crate) struct Qualify {
    /// Refusals in this look.
    refused: u32,
    bad_looks: u32,
    resting: u32,
}

impl Qualify {
    /// Whether it rests now.
    #[inline]
    pub(crate) fn rests(&self) -> bool {
        self.resting > 0
    }

    /// A request came while it rests.
    pub(crate) fn count_rest(&mut self) {
        self.resting = self.resting.saturating_sub(1);
    }

    /// A try came back with `EAGAIN`.
    pub(crate) fn refused(&mut self) {
        self.refused += 1;
    }

    /// A look at the queue has ended, which brought `reaped` transfers. True when that makes it
    /// rest.
    #[inline]
    pub(crate) fn judge(&mut self, reaped: usize) -> bool {
        if self.refused | self.bad_looks == 0 {
            return false;
        }
        self.judge_refusals(reaped)
    }

    #[cold]
    fn judge_refusals(&mut self, reaped: usize) -> bool {
        let refused = std::mem::take(&mut self.refused) as usize;
        if self.resting > 0 {
            // A try from before the rest tells nothing new.
            return false;
        }
        if refused * 8 < reaped * 7 {
            self.bad_looks = 0;
        } else if refused > 0 {
            self.bad_looks += 1;
        }
        if self.bad_looks < BAD_LOOKS {
            return false;
        }
        *self = Self { resting: REST, ..Self::default() };
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(qualify: &mut Qualify, refused: u32, reaped: usize) -> bool {
        (0..refused).for_each(|_| qualify.refused());
        qualify.judge(reaped)
    }

    #[test]
    fn c39_a_file_that_always_refuses_is_left_alone_and_tried_again_later() {
        for depth in [1, 128] {
            let mut qualify = Qualify::default();
            for n in 1..=BAD_LOOKS {
                assert!(!qualify.rests());
                assert_eq!(look(&mut qualify, depth, depth as usize), n == BAD_LOOKS);
                // A look that brings nothing tells nothing.
                look(&mut qualify, 0, 0);
            }
            for _ in 0..REST {
                assert!(qualify.rests());
                qualify.count_rest();
            }
            assert!(!qualify.rests());
        }
    }

    #[test]
    fn c39_a_burst_of_refusals_now_and_then_changes_nothing() {
        let mut qualify = Qualify::default();
        for _ in 0..10_000 {
            assert!(!look(&mut qualify, 128, 128));
            assert!(!look(&mut qualify, 0, 5));
        }
    }
}
