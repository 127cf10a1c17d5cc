//! Back-off: whether trying requests without waiting is worth it (C39).
//!
//! Refusals come in bursts: one cause (a timestamp update that is due, a lock that is held) refuses
//! every request that is tried at that moment. So polls are counted, not refusals.
//!
//! Invariant: after a number of polls in a row in which nearly every request was refused, a bounded
//! number of requests goes to the workers without a try; then requests are tried again. The switch
//! [`crate::Config::back_off`] turns it off.

/// Refused polls in a row that start a back-off.
const REFUSED_POLLS_LIMIT: u32 = 24;
/// Requests that go to the workers without a try in one back-off.
const BACK_OFF_REQUESTS: u32 = 2048;

/// The back-off state of one device in an engine.
pub(crate) struct BackOff {
    /// Whether refusals count.
    on: bool,
    /// Refusals since the device was attached.
    total: u64,
    /// Refusals since the last poll.
    refused: u32,
    /// Polls in a row in which nearly every request was refused.
    refused_polls: u32,
    /// Requests left in this back-off; 0 outside one.
    remaining: u32,
}

impl BackOff {
    /// A state that has seen no refusal; `on` is the switch.
    pub(crate) fn new(on: bool) -> Self {
        Self { on, total: 0, refused: 0, refused_polls: 0, remaining: 0 }
    }

    /// Whether requests go to the workers without a try.
    #[inline]
    pub(crate) fn is_backing_off(&self) -> bool {
        self.remaining > 0
    }

    /// Counts a request that was not tried.
    pub(crate) fn count_down(&mut self) {
        self.remaining = self.remaining.saturating_sub(1);
    }

    /// Counts a transfer that was refused.
    pub(crate) fn refused(&mut self) {
        self.total += 1;
        self.refused += u32::from(self.on);
    }

    /// Transfers that were refused since the device was attached.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Whether the next poll is to be evaluated.
    #[inline]
    pub(crate) fn is_counting(&self) -> bool {
        self.refused | self.refused_polls != 0
    }

    /// Evaluates a poll that has reaped `reaped` transfers, the refused ones among them. True when it
    /// starts a back-off.
    #[cold]
    pub(crate) fn observe_poll(&mut self, reaped: usize) -> bool {
        let refused = std::mem::take(&mut self.refused) as usize;
        if self.remaining > 0 {
            // These requests were tried before the back-off began; they do not count.
            return false;
        }
        if refused * 8 < reaped * 7 {
            self.refused_polls = 0;
        } else if refused > 0 {
            self.refused_polls += 1;
        }
        if self.refused_polls < REFUSED_POLLS_LIMIT {
            return false;
        }
        *self = Self { remaining: BACK_OFF_REQUESTS, total: self.total, ..Self::new(self.on) };
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn poll(back_off: &mut BackOff, refused: u32, reaped: usize) -> bool {
        (0..refused).for_each(|_| back_off.refused());
        back_off.observe_poll(reaped)
    }

    #[test]
    fn c39_a_file_that_always_refuses_is_left_alone_and_tried_again_later() {
        for depth in [1, 128] {
            let mut back_off = BackOff::new(true);
            for n in 1..=REFUSED_POLLS_LIMIT {
                assert!(!back_off.is_backing_off());
                assert_eq!(poll(&mut back_off, depth, depth as usize), n == REFUSED_POLLS_LIMIT);
                // A poll that reaps nothing does not count.
                poll(&mut back_off, 0, 0);
            }
            for _ in 0..BACK_OFF_REQUESTS {
                assert!(back_off.is_backing_off());
                back_off.count_down();
            }
            assert!(!back_off.is_backing_off());
        }
    }

    #[test]
    fn c39_with_the_switch_off_every_request_is_tried() {
        let mut back_off = BackOff::new(false);
        for _ in 0..2 * REFUSED_POLLS_LIMIT {
            assert!(!poll(&mut back_off, 128, 128) && !back_off.is_backing_off());
        }
    }

    #[test]
    fn c39_a_burst_of_refusals_now_and_then_changes_nothing() {
        let mut back_off = BackOff::new(true);
        for _ in 0..10_000 {
            assert!(!poll(&mut back_off, 128, 128));
            assert!(!poll(&mut back_off, 0, 5));
        }
    }
}
