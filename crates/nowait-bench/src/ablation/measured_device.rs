//! What `--device` names: a local block device, or an image behind a network.
//!
//! Invariant: both get the same load; the first by a bare ring, the second by an engine, as there is no
//! other way to it.

use std::io;

use nowait_remote::Location;

use crate::ablation::bare_ring::BareRing;
use crate::ablation::claimed_device::ClaimedDevice;
use crate::ablation::closed_loop::{Interval, StopCondition};
use crate::ablation::remote_device::{RemoteDevice, RemoteLoop};
use crate::error::Error;
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

/// A device or an image to measure on.
pub(crate) enum MeasuredDevice {
    Claimed(ClaimedDevice),
    Remote(RemoteDevice),
}

impl MeasuredDevice {
    /// Opens `location`; with `overwrite` for writing.
    ///
    /// # Errors
    /// [`Error::File`]: it is neither, too small, in use, or this user may not open it.
    pub(crate) fn open(location: &Location, overwrite: bool) -> Result<Self, Error> {
        Ok(match location {
            Location::File(path) => Self::Claimed(ClaimedDevice::open(path, overwrite)?),
            _ => Self::Remote(RemoteDevice::open(location, overwrite)?),
        })
    }

    /// As it was given.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Claimed(device) => device.path.display().to_string(),
            Self::Remote(device) => device.location.to_string(),
        }
    }

    /// Bytes that can be measured on.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Claimed(device) => device.bytes,
            Self::Remote(device) => device.bytes,
        }
    }

    /// Makes all that was written durable.
    ///
    /// # Errors
    /// That of fsync(2) or of the storage.
    pub(crate) fn sync(&self) -> io::Result<()> {
        match self {
            Self::Claimed(device) => device.file.sync_all(),
            Self::Remote(device) => device.sync(),
        }
    }

    /// Gives back the storage of the first `bytes`, which are zeros then.
    ///
    /// # Errors
    /// `ErrorKind::Unsupported` if the device cannot do that.
    pub(crate) fn discard(&self, bytes: u64) -> io::Result<()> {
        match self {
            Self::Claimed(device) => device.discard(bytes),
            Self::Remote(device) => device.discard(bytes),
        }
    }

    /// Writes the first `bytes` once, so that each of them has storage.
    ///
    /// # Errors
    /// The error of a write.
    pub(crate) fn fill(&self, bytes: u64, stop_condition: StopCondition<'_>) -> io::Result<()> {
        let region = Region { start: 0, bytes, block: MIB };
        let mut offsets = Offsets::once(Order::Sequential, region, 0);
        self.job(&FILL)?.run(&mut offsets, stop_condition)?;
        self.sync()
    }

    /// What makes `load`, for the calling thread.
    ///
    /// # Errors
    /// There is no ring for it, or no memory.
    pub(crate) fn job(&self, load: &Workload) -> io::Result<Job> {
        Ok(match self {
            Self::Claimed(device) => Job::Ring(Box::new(BareRing::new(&device.file, load)?)),
            Self::Remote(device) => Job::Engine(Box::new(device.engine(load)?)),
        })
    }
}

/// A closed loop of one thread.
pub(crate) enum Job {
    Ring(Box<BareRing>),
    Engine(Box<RemoteLoop>),
}

impl Job {
    /// Keeps the load's requests in flight until `stop_condition` ends the loop or the offsets run out.
    ///
    /// # Errors
    /// That of a request.
    pub(crate) fn run(
        &mut self,
        offsets: &mut Offsets,
        stop_condition: StopCondition<'_>,
    ) -> io::Result<Interval> {
        match self {
            Self::Ring(ring) => ring.run(offsets, stop_condition),
            Self::Engine(engine) => engine.run(offsets, stop_condition),
        }
    }
}
