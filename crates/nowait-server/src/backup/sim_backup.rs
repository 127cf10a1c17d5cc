//! A backup without a server, for simulations.
//!
//! Invariant: it is made of the parts of a real one.

use std::sync::Arc;

use nowait::{BlockDevice, BlockMap, Error, Operation, Storage};

use crate::backup::backup_device;
use crate::backup::point_in_time::PointInTime;
use crate::backup::scratch::Scratch;

type Disk = Arc<BlockDevice<dyn BlockMap>>;

/// A backup of a disk as it was when this was made.
pub struct SimBackup {
    /// The disk, for its writers from now on.
    pub disk: Disk,
    /// The disk as it was, which takes discards.
    pub backup: Disk,
    point: Arc<PointInTime>,
}

impl SimBackup {
    /// A backup of `disk`, of which nothing is in flight, in blocks of `block_bytes`; at most `scratch_bytes` of
    /// `scratch` are used.
    ///
    /// # Errors
    /// Like [`Storage::size`] and [`BlockDevice::guarded`].
    pub fn new(
        disk: &Disk,
        scratch: Arc<dyn Storage>,
        scratch_bytes: u64,
        block_bytes: u64,
    ) -> Result<Self, Error> {
        let scratch = Scratch::new(scratch, scratch_bytes)?;
        let point = PointInTime::new(String::new(), disk.size(), block_bytes, scratch, None);
        let point = Arc::new(point.ok_or(Error::new(libc::ENOMEM, Operation::SetUp))?);
        let disk: Disk = Arc::new(disk.guarded(point.clone())?);
        let backup = backup_device::device(&point, disk.clone(), true);
        Ok(Self { disk, backup, point })
    }

    /// Why it has failed.
    #[must_use]
    pub fn failure(&self) -> Option<&str> {
        self.point.failure()
    }

    /// It has ended: nothing is copied any more, and reads of it fail.
    pub fn finish(&self) {
        self.point.finish();
    }
}
