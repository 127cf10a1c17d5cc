//! Whether trying without waiting is worth it (C39).
//!
//! Invariant: after a window in which nearly every try was refused, trying rests for a bounded
//! number of requests, then begins again. A try that was served costs nothing here.
//! Knows: nothing. Known by: core.

/// Refusals that are judged together.
const REFUSALS: u32 = 56;
/// Tries in which they make it rest.
const WINDOW: u64 = 64;
/// Requests that go to the workers at once before the next try.
const REST: u32 = 2048;

/// The judge of one engine.
#[derive(Default)]
pub(crate) struct Qualify {
    refused: u32,
    resting: u32,
    /// The count of tries when the first of the refusals came.
    since: u64,
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

    /// One of the tries, of which there were `tried` so far, came back with `EAGAIN`. True when
    /// that makes it rest.
    #[cold]
    pub(crate) fn refused(&mut self, tried: u64) -> bool {
        if self.refused == 0 || tried.saturating_sub(self.since) >= WINDOW {
            (self.refused, self.since) = (0, tried);
        }
        self.refused += 1;
        if self.refused < REFUSALS {
            return false;
        }
        *self = Self { resting: REST, ..Self::default() };
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c39_a_file_that_always_refuses_is_left_alone_and_tried_again_later() {
        let mut qualify = Qualify::default();
        for n in 1..=u64::from(REFUSALS) {
            assert!(!qualify.rests());
            assert_eq!(qualify.refused(n), n == u64::from(REFUSALS));
        }
        for _ in 0..REST {
            assert!(qualify.rests());
            qualify.count_rest();
        }
        assert!(!qualify.rests());
    }

    #[test]
    fn c39_a_file_that_refuses_now_and_then_is_always_tried() {
        let mut qualify = Qualify::default();
        for tried in (0..20_000).step_by(2) {
            assert!(!qualify.refused(tried) && !qualify.rests());
        }
    }
}
