//! Back-off: whether trying requests of a device without waiting is worth it (C39).
//!
//! Refusals come in bursts: one cause (a timestamp update that is due, a lock that is held) refuses
//! every request that is tried at that moment. So polls are counted, not refusals.
//!
//! Invariant: after a number of polls in a row in which nearly every request was refused, a bounded
//! number of requests goes to the workers without a try; then requests are tried again. The switch
//! [`crate::Config::back_off`] turns it off. One device's refusals concern no other device.

use crate::engine::per_device::PerDevice;

/// Refused polls in a row that start a back-off.
const REFUSED_POLLS_LIMIT: u32 = 24;
/// Requests that go to the workers without a try in one back-off.
const BACK_OFF_REQUESTS: u32 = 2048;

/// The back-off state of one device.
#[derive(Default)]
struct BackOff {
    /// Transfers that were reaped, but for the only ones of reads and writes that they served.
    reaped: u64,
    /// Of those, the ones that an evaluation has seen.
    observed: u64,
    /// Refusals since the device was attached.
    total: u64,
    /// Back-offs since the device was attached.
    begun: u64,
    /// Refusals since the last poll.
    refused: u32,
    /// Polls in a row in which nearly every request was refused.
    refused_polls: u32,
    /// Requests left in this back-off; 0 outside one.
    remaining: u32,
}

impl BackOff {
    /// Whether the next poll is to be evaluated.
    fn is_counting(&self) -> bool {
        self.refused | self.refused_polls != 0
    }

    /// Evaluates a poll that has reaped `whole` requests as a whole, and the transfers counted since the
    /// last one. True when it starts a back-off.
    fn observe_poll(&mut self, whole: usize) -> bool {
        let reaped = whole as u64 + self.reaped - self.observed;
        self.observed = self.reaped;
        let refused = u64::from(std::mem::take(&mut self.refused));
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
        self.refused_polls = 0;
        self.remaining = BACK_OFF_REQUESTS;
        self.begun += 1;
        true
    }
}

/// Counts of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BackOffCounts {
    /// Transfers that were refused.
    pub(crate) refused: u64,
    /// Back-offs.
    pub(crate) backed_off: u64,
}

/// The back-off state of the devices of an engine.
pub(crate) struct BackOffs {
    /// Whether refusals count.
    on: bool,
    devices: PerDevice<BackOff>,
    /// Devices with refusals that the next poll evaluates, each once.
    refusing: Vec<u32>,
}

impl BackOffs {
    /// A state that has seen no refusal; `on` is the switch.
    pub(crate) const fn new(on: bool) -> Self {
        Self { on, devices: PerDevice::new(), refusing: Vec::new() }
    }

    /// Counts a transfer of `device` that was reaped, but for the only one of a read or write that it
    /// served.
    #[inline]
    pub(crate) fn reaped(&mut self, device: u32) {
        self.devices.get_mut(device).reaped += 1;
    }

    /// Counts a transfer of `device` that was reaped and refused.
    pub(crate) fn refused(&mut self, device: u32) {
        let back_off = self.devices.get_mut(device);
        back_off.total += 1;
        back_off.reaped += 1;
        if !self.on {
            return;
        }
        if !back_off.is_counting() {
            back_off.observed = back_off.reaped - 1;
            self.refusing.push(device);
        }
        back_off.refused += 1;
    }

    /// Counts a request of `device` that was not tried. True when it was the last one of the back-off.
    pub(crate) fn count_down(&mut self, device: u32) -> bool {
        let back_off = self.devices.get_mut(device);
        back_off.remaining = back_off.remaining.saturating_sub(1);
        back_off.remaining == 0
    }

    /// Evaluates a poll for each device with refusals. `whole` says how many requests of a device the poll
    /// has completed by their only transfers; `begins` is called for those whose back-off begins.
    pub(crate) fn observe_poll(
        &mut self,
        whole: impl Fn(u32) -> usize,
        mut begins: impl FnMut(u32),
    ) {
        let Self { devices, refusing, .. } = self;
        refusing.retain(|&device| {
            let back_off = devices.get_mut(device);
            if back_off.observe_poll(whole(device)) {
                begins(device);
            }
            back_off.is_counting()
        });
    }

    /// Whether the next poll is to be evaluated.
    pub(crate) fn is_counting(&self) -> bool {
        !self.refusing.is_empty()
    }

    pub(crate) fn counts(&self, device: u32) -> BackOffCounts {
        self.devices.get(device).map(counts).unwrap_or_default()
    }

    /// Forgets a device of which nothing is in flight. Returns its counts.
    pub(crate) fn forget(&mut self, device: u32) -> BackOffCounts {
        self.refusing.retain(|&other| other != device);
        counts(&self.devices.take(device))
    }
}

fn counts(back_off: &BackOff) -> BackOffCounts {
    BackOffCounts { refused: back_off.total, backed_off: back_off.begun }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A poll that reaps `refused` refusals of device 0 and `served` requests as a whole. True when it
    /// starts a back-off.
    fn poll(back_offs: &mut BackOffs, refused: u32, served: usize) -> bool {
        (0..refused).for_each(|_| back_offs.refused(0));
        let mut begins = false;
        back_offs.observe_poll(|_| served, |_| begins = true);
        begins
    }

    /// Requests that are not tried until the back-off of `device` ends.
    fn untried(back_offs: &mut BackOffs, device: u32) -> u32 {
        (1..).find(|_| back_offs.count_down(device)).unwrap()
    }

    #[test]
    fn c39_a_file_that_always_refuses_is_left_alone_and_tried_again_later() {
        for depth in [1, 128] {
            let mut back_offs = BackOffs::new(true);
            for round in 1..=2 {
                for n in 1..=REFUSED_POLLS_LIMIT {
                    assert_eq!(poll(&mut back_offs, depth, 0), n == REFUSED_POLLS_LIMIT);
                    // A poll that reaps nothing does not count.
                    assert!(!poll(&mut back_offs, 0, 0));
                }
                assert_eq!(untried(&mut back_offs, 0), BACK_OFF_REQUESTS);
                assert_eq!(back_offs.counts(0).backed_off, round);
            }
        }
    }

    #[test]
    fn c39_with_the_switch_off_every_request_is_tried_and_refusals_are_counted() {
        let mut back_offs = BackOffs::new(false);
        for _ in 0..2 * REFUSED_POLLS_LIMIT {
            assert!(!poll(&mut back_offs, 128, 0) && !back_offs.is_counting());
        }
        let refused = u64::from(2 * REFUSED_POLLS_LIMIT * 128);
        assert_eq!(back_offs.counts(0), BackOffCounts { refused, backed_off: 0 });
    }

    #[test]
    fn c39_a_burst_of_refusals_now_and_then_changes_nothing() {
        let mut back_offs = BackOffs::new(true);
        for _ in 0..10_000 {
            assert!(!poll(&mut back_offs, 128, 0));
            assert!(!poll(&mut back_offs, 0, 5));
        }
    }

    #[test]
    fn c39_a_poll_counts_as_refused_from_seven_eighths_on() {
        for (served, wanted) in [(1, true), (2, false)] {
            let mut back_offs = BackOffs::new(true);
            let begins = (0..REFUSED_POLLS_LIMIT).any(|_| poll(&mut back_offs, 7, served));
            assert_eq!(begins, wanted, "{served}");
        }
    }

    #[test]
    fn c39_a_poll_that_ends_during_a_back_off_does_not_prolong_it() {
        let mut back_offs = BackOffs::new(true);
        assert!((0..REFUSED_POLLS_LIMIT).any(|_| poll(&mut back_offs, 1, 0)));
        assert!(!(0..2 * REFUSED_POLLS_LIMIT).any(|_| poll(&mut back_offs, 1, 0)));
        assert_eq!(untried(&mut back_offs, 0), BACK_OFF_REQUESTS);
    }

    #[test]
    fn c39_a_device_with_the_index_of_a_detached_one_that_refused_begins_without_refusals() {
        let mut back_offs = BackOffs::new(true);
        let mut begun = Vec::new();
        for _ in 1..REFUSED_POLLS_LIMIT {
            [0, 1].into_iter().for_each(|device| back_offs.refused(device));
            back_offs.observe_poll(|_| 0, |device| begun.push(device));
        }
        let refused = u64::from(REFUSED_POLLS_LIMIT) - 1;
        assert_eq!(back_offs.forget(1), BackOffCounts { refused, backed_off: 0 });
        [0, 1].into_iter().for_each(|device| back_offs.refused(device));
        back_offs.observe_poll(|_| 0, |device| begun.push(device));
        assert_eq!(begun, [0]);
        assert_eq!(back_offs.counts(1), BackOffCounts { refused: 1, backed_off: 0 });
        back_offs.forget(1);
        back_offs.forget(0);
        assert!(!back_offs.is_counting());
    }
}
