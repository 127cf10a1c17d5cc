//! A device that `--device` names: a local block device, or an image behind a network, by an engine of its own for each job.
//!
//! Invariant: a device is opened for writing only if that is asked for, and only if nothing has mounted, claimed or locked
//! it; it stays claimed as long as the value lives.

use std::io::{self, ErrorKind};
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::sync::Arc;

use nowait::{
    BlockDevice, BlockingFile, ByteRange, Config, Direct, Flags, LinearMap, OpenOptions, QueueKind,
    SingleDisk, WorkerPool,
};
use nowait_remote::{Location, RemoteOptions};

use crate::ablation::closed_loop::{Interval, StopCondition, drive};
use crate::error::Error;
use crate::offsets::{Offsets, Region};
use crate::test_file::BYTES_MIN;
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
pub(crate) struct MeasuredDevice {
    /// The device as it was given.
    pub(crate) name: String,
    /// Whole megabytes; the rest is not used.
    pub(crate) bytes: u64,
    disk: Arc<BlockDevice<LinearMap>>,
    workers: WorkerPool,
}

impl MeasuredDevice {
    /// Opens `location`; with `overwrite` for writing, and for this program alone.
    ///
    /// # Errors
    /// [`Error::File`]: it is neither, too small, in use, or this user may not open it.
    pub(crate) fn open(location: &Location, overwrite: bool) -> Result<Self, Error> {
        let name = location.to_string();
        let disk = open(location, overwrite)
            .and_then(|disk| match disk.size() {
                BYTES_MIN.. => Ok(disk),
                size => {
                    Err(format!("only {size} bytes (64 MiB is the least that can be measured on)"))
                }
            })
            .map_err(|problem| Error::File { path: PathBuf::from(&name), problem })?;
        let bytes = disk.size() / MIB * MIB;
        Ok(Self { name, bytes, disk: Arc::new(disk), workers: WorkerPool::default() })
    }

    /// Makes all that was written durable.
    ///
    /// # Errors
    /// The error of fdatasync(2) or of the storage.
    pub(crate) fn sync(&self) -> io::Result<()> {
        Ok(BlockingFile::new(self.disk.clone()).flush()?)
    }

    /// Gives back the storage of the first `bytes`, which are zeros then.
    ///
    /// # Errors
    /// `ErrorKind::Unsupported` if the device cannot do that.
    pub(crate) fn discard(&self, bytes: u64) -> io::Result<()> {
        let discarded = BlockingFile::new(self.disk.clone()).discard(ByteRange::new(0, bytes));
        discarded.map_err(|error| match error.errno() {
            libc::EOPNOTSUPP => {
                io::Error::new(ErrorKind::Unsupported, "the device gives no storage back")
            }
            _ => error.into(),
        })?;
        self.sync()
    }

    /// The loop of `load`, for the calling thread: it runs until a stop condition ends it or the offsets run out.
    ///
    /// # Errors
    /// There is no queue for it, or no memory.
    pub(crate) fn job(
        &self,
        load: &Workload,
    ) -> io::Result<impl FnMut(&mut Offsets, StopCondition<'_>) -> io::Result<Interval> + use<>>
    {
        let (load, config) = (*load, Config::default());
        let config = Config {
            slots: config.slots.max(load.depth as u32),
            buffer_bytes: config.buffer_bytes.max(load.depth * load.block_bytes),
            ..config
        };
        let queue = QueueKind::Auto.open(config.slots)?;
        let mut engine = SingleDisk::new(self.disk.clone(), self.workers.clone(), queue, config)?;
        Ok(move |offsets: &mut Offsets, stop_condition: StopCondition<'_>| {
            drive(&mut engine, &load, Flags::NONE, offsets, stop_condition)
        })
    }

    /// Writes the first `bytes` once, so that each of them has storage.
    ///
    /// # Errors
    /// The error of a write.
    pub(crate) fn fill(&self, bytes: u64, stop_condition: StopCondition<'_>) -> io::Result<()> {
        let region = Region { start: 0, bytes, block: MIB };
        let mut offsets = Offsets::once(Order::Sequential, region, 0);
        self.job(&FILL)?(&mut offsets, stop_condition)?;
        self.sync()
    }
}

/// Opens the disk at `location`. The error is a message for the user.
fn open(location: &Location, overwrite: bool) -> Result<BlockDevice<LinearMap>, String> {
    let Location::File(path) = location else {
        if overwrite && matches!(location, Location::Object(_)) {
            return Err("an object is only read: --overwrite is not for it".into());
        }
        let opened = nowait_remote::open_storage(location, !overwrite, &RemoteOptions::default());
        let storage = opened.map_err(|error| error.what().to_owned())?;
        let size = storage.size().map_err(|error| error.to_string())?;
        return Ok(BlockDevice::mapped(storage, Vec::new(), size, !overwrite, LinearMap));
    };
    let options = OpenOptions::new().read_only(!overwrite).direct(Direct::On);
    let is_device = path.metadata().map(|it| it.file_type().is_block_device());
    if !is_device.map_err(|error| format!("cannot open: {error}"))? {
        return Err("no block device (--file measures on a file)".to_owned());
    }
    BlockDevice::open_mapped(path, options).map_err(|error| match error.errno() {
        libc::EBUSY => {
            "cannot be overwritten: it is mounted, or another program has claimed it".to_owned()
        }
        _ if overwrite => format!("cannot be overwritten: {}", io::Error::from(error)),
        _ => format!("cannot open: {}", io::Error::from(error)),
    })
}
