//! A device that `--device` names: a local block device, or an image behind a network.
//!
//! Invariant: both get the same load; the first by a bare ring, the second by an engine, as there is no
//! other way to it.

use std::io;

use crate::ablation::closed_loop::{Interval, StopCondition};
use crate::offsets::{Offsets, Region};
use crate::workload::{Direction, Order, Workload};

const MIB: u64 = 1 << 20;
/// How a device is filled.
const FILL: Workload = Workload {
    direction: Direction::Write,
    order: Order::Sequential,
    block_bytes: MIB as usize,
    depth: 4,
    durable: false,
    beside: None,
};

/// A closed loop of one thread, which runs until a stop condition ends it or the offsets run out.
pub(crate) type Job = Box<dyn FnMut(&mut Offsets, StopCondition<'_>) -> io::Result<Interval>>;

/// A device or an image to measure on.
pub(crate) trait MeasuredDevice: Sync {
    /// The device as it was given.
    fn name(&self) -> String;
    /// Bytes that can be measured on.
    fn bytes(&self) -> u64;
    /// Makes all that was written durable.
    ///
    /// # Errors
    /// The error of fsync(2) or of the storage.
    fn sync(&self) -> io::Result<()>;
    /// Gives back the storage of the first `bytes`, which are zeros then.
    ///
    /// # Errors
    /// `ErrorKind::Unsupported` if the device cannot do that.
    fn discard(&self, bytes: u64) -> io::Result<()>;
    /// The loop of `load`, for the calling thread.
    ///
    /// # Errors
    /// There is no ring for it, or no memory.
    fn job(&self, load: &Workload) -> io::Result<Job>;
}

/// Writes the first `bytes` of `device` once, so that each of them has storage.
///
/// # Errors
/// The error of a write.
pub(crate) fn fill(
    device: &dyn MeasuredDevice,
    bytes: u64,
    stop_condition: StopCondition<'_>,
) -> io::Result<()> {
    let region = Region { start: 0, bytes, block: MIB };
    let mut offsets = Offsets::once(Order::Sequential, region, 0);
    device.job(&FILL)?(&mut offsets, stop_condition)?;
    device.sync()
}
