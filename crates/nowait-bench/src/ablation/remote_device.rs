//! An image behind a network, opened through the storage that a server would use, and what is done to
//! it between measurements.
//!
//! Invariant: an image is opened for writing only if that is asked for, and then it stays locked as
//! long as the value lives, where its cluster has such locks.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use nowait::{
    BlockDevice, ByteRange, Config, Flags, LinearMap, QueueKind, SingleDisk, Storage, WorkerPool,
};
use nowait_remote::{Location, RemoteOptions};

use crate::ablation::closed_loop::drive;
use crate::ablation::measured_device::{Job, MeasuredDevice};
use crate::error::Error;
use crate::test_file::BYTES_MIN;
use crate::workload::Workload;

const MIB: u64 = 1 << 20;

/// An image to measure on.
pub(crate) struct RemoteDevice {
    location: Location,
    /// Whole megabytes; the rest is not used.
    bytes: u64,
    storage: Arc<dyn Storage>,
    disk: Arc<BlockDevice<LinearMap>>,
    workers: WorkerPool,
}

impl RemoteDevice {
    /// Opens the image at `location`, which is not a file; with `overwrite` for writing.
    ///
    /// # Errors
    /// [`Error::File`]: it is not there, too small, in use by another client, or only read.
    pub(crate) fn open(location: &Location, overwrite: bool) -> Result<Self, Error> {
        let failed = |problem| Error::File { path: PathBuf::from(location.to_string()), problem };
        if overwrite && matches!(location, Location::Object(_)) {
            return Err(failed("an object is only read: --overwrite is not for it".into()));
        }
        let opened = nowait_remote::open_storage(location, !overwrite, &RemoteOptions::default());
        let storage = opened.map_err(|error| failed(error.what().to_owned()))?;
        let size = storage.size().map_err(|error| failed(error.to_string()))?;
        if size < BYTES_MIN {
            let problem =
                format!("only {size} bytes (64 MiB is the least that can be measured on)");
            return Err(failed(problem));
        }
        let disk = BlockDevice::mapped(storage.clone(), Vec::new(), size, !overwrite, LinearMap);
        let disk = Arc::new(disk);
        let workers = WorkerPool::default();
        let location = location.clone();
        Ok(Self { location, bytes: size / MIB * MIB, storage, disk, workers })
    }
}

impl MeasuredDevice for RemoteDevice {
    fn name(&self) -> String {
        self.location.to_string()
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn sync(&self) -> io::Result<()> {
        Ok(self.storage.sync()?)
    }

    fn discard(&self, bytes: u64) -> io::Result<()> {
        if !self.storage.properties().punch_hole {
            let problem = "the server gives no storage back";
            return Err(io::Error::new(io::ErrorKind::Unsupported, problem));
        }
        self.storage.punch(ByteRange::new(0, bytes))?;
        self.sync()
    }

    fn job(&self, load: &Workload) -> io::Result<Job> {
        let (load, config) = (*load, Config::default());
        let config = Config {
            slots: config.slots.max(load.depth as u32),
            buffer_bytes: config.buffer_bytes.max(load.depth * load.block_bytes),
            ..config
        };
        let queue = QueueKind::Auto.open(config.slots)?;
        let mut engine = SingleDisk::new(self.disk.clone(), self.workers.clone(), queue, config)?;
        Ok(Box::new(move |offsets, stop_condition| {
            drive(&mut engine, &load, Flags::NONE, offsets, stop_condition)
        }))
    }
}
