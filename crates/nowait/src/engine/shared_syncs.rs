//! Durable writes that share a sync: those of a device that are in flight at the same time are written
//! without `DSYNC`, and a worker syncs once for all of them. This saves a sync for each, on file systems
//! that sync a file for every durable write. The switch [`crate::Config::group_syncs`] turns it off.
//!
//! Invariant: a write counts from its acceptance until its completion, so that one which sees another one
//! in flight may leave its sync to a worker, and a lone one carries `DSYNC` itself.

use crate::engine::per_device::PerDevice;

/// Counts of the durable writes in flight that could share a sync.
pub(crate) struct SharedSyncs {
    in_flight: PerDevice<u32>,
    /// The sum over all devices.
    all: u32,
}

impl SharedSyncs {
    pub(crate) const fn new() -> Self {
        Self { in_flight: PerDevice::new(), all: 0 }
    }

    /// Counts a write of `device`.
    pub(crate) fn begin(&mut self, device: u32) {
        *self.in_flight.get_mut(device) += 1;
        self.all += 1;
    }

    /// Counts the completion of a write that [`SharedSyncs::begin`] has counted.
    pub(crate) fn end(&mut self, device: u32) {
        let in_flight = self.in_flight.get_mut(device);
        debug_assert!(*in_flight > 0);
        *in_flight -= 1;
        self.all -= 1;
    }

    /// Whether no such write of any device is in flight.
    #[inline(always)]
    pub(crate) fn is_idle(&self) -> bool {
        self.all == 0
    }

    /// Whether a write of `device`, which is counted itself, has others to share a sync with.
    pub(crate) fn has_others(&self, device: u32) -> bool {
        self.in_flight.get(device).is_some_and(|count| *count > 1)
    }

    /// Forgets a device of which nothing is in flight.
    pub(crate) fn forget(&mut self, device: u32) {
        let left = self.in_flight.take(device);
        debug_assert_eq!(left, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c29_a_lone_durable_write_has_no_others_and_two_have_each_other() {
        let mut syncs = SharedSyncs::new();
        assert!(syncs.is_idle());
        syncs.begin(0);
        assert!(!syncs.has_others(0) && !syncs.is_idle());
        syncs.begin(0);
        assert!(syncs.has_others(0));
        syncs.end(0);
        assert!(!syncs.has_others(0));
        syncs.end(0);
        assert!(syncs.is_idle());
    }

    #[test]
    fn durable_writes_of_two_devices_share_nothing_also_after_one_is_detached() {
        let mut syncs = SharedSyncs::new();
        syncs.begin(0);
        syncs.begin(1);
        assert!(!syncs.has_others(0) && !syncs.has_others(1) && !syncs.has_others(2));
        syncs.end(1);
        syncs.forget(1);
        assert!(!syncs.is_idle());
        syncs.begin(1);
        syncs.begin(1);
        assert!(syncs.has_others(1) && !syncs.has_others(0));
    }
}
