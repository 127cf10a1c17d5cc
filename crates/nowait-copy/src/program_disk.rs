//! Disks that a program keeps in its own way, as the source or the target of a copy.
//!
//! Invariant: a target gets whole blocks, each at most once; blocks that it does not get are as they were, or zero if the
//! target begins as zeros.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use nowait::{ByteRange, ExtentStatus};
use nowait_remote::Location;

use crate::endpoint::{Capabilities, CopyOperation, Endpoint};
use crate::error::Error;
use crate::worker_endpoint::{self, UNSUPPORTED, WorkerDisk};

/// The longest read or write in bytes, if blocks are not larger.
const MAX_BYTES: u64 = 1 << 20;

/// A disk that can be copied from. Threads that may wait call it, several simultaneously.
pub trait SourceDisk: Send + Sync + fmt::Debug {
    /// Bytes of the disk.
    fn size(&self) -> u64;

    /// Bytes of a block, a power of two: reads begin and end at multiples of it, or end with the disk.
    fn block_bytes(&self) -> u64;

    /// Fills `memory` with the bytes from `pos` on.
    ///
    /// # Errors
    /// A message of one line; the copy fails.
    fn read(&self, pos: u64, memory: &mut [u8]) -> Result<(), String>;

    /// Which extents from the start of `range` on read as zeros; the answer has at least one and may end before the
    /// range.
    fn extents(&self, range: ByteRange) -> Vec<ExtentStatus>;
}

/// A disk that can be copied to. Threads that may wait call it, several simultaneously.
pub trait TargetDisk: Send + Sync + fmt::Debug {
    /// Begins a copy of a disk of `size` bytes; the first call. Returns the bytes of a block, a power of two.
    ///
    /// # Errors
    /// A message of one line; the copy fails.
    fn begin(&self, size: u64) -> Result<u64, String>;

    /// Takes the blocks from `pos` on, of which `bytes` has the whole; behind the end of the disk there are zeros.
    ///
    /// # Errors
    /// A message of one line; the copy fails.
    fn write(&self, pos: u64, bytes: &[u8]) -> Result<(), String>;

    /// Makes whole blocks zero.
    ///
    /// # Errors
    /// A message of one line; the copy fails.
    fn zero(&self, range: ByteRange) -> Result<(), String>;

    /// Completes the copy, durably; the last call. Without it, the copy has failed.
    ///
    /// # Errors
    /// A message of one line; the copy fails.
    fn finish(&self) -> Result<(), String>;
}

/// The source or the target of a copy.
#[derive(Debug)]
pub enum CopySide<D: ?Sized> {
    /// An image, a block device, an export or an object.
    At(Location),
    /// A disk of the program, and its name in errors. As a target it is not read, so it cannot be verified.
    Disk(String, Arc<D>),
}

/// The source of a copy.
pub type CopySource = CopySide<dyn SourceDisk>;

/// The target of a copy.
pub type CopyTarget = CopySide<dyn TargetDisk>;

impl<D: ?Sized> CopySide<D> {
    /// The path, if it is one.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::At(location) => location.path(),
            Self::Disk(..) => None,
        }
    }
}

impl<D: ?Sized> Clone for CopySide<D> {
    fn clone(&self) -> Self {
        match self {
            Self::At(location) => Self::At(location.clone()),
            Self::Disk(name, disk) => Self::Disk(name.clone(), disk.clone()),
        }
    }
}

impl<D: ?Sized> fmt::Display for CopySide<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::At(location) => location.fmt(f),
            Self::Disk(name, _) => name.fmt(f),
        }
    }
}

/// The source `disk` as an endpoint.
pub(crate) fn source(name: &str, disk: Arc<dyn SourceDisk>) -> Result<Box<dyn Endpoint>, Error> {
    worker_endpoint::open(name.to_owned(), Source(disk))
}

/// The target `disk` as an endpoint, for a disk of `size` bytes.
pub(crate) fn target(
    name: &str,
    disk: &Arc<dyn TargetDisk>,
    size: u64,
) -> Result<Box<dyn Endpoint>, Error> {
    let block = disk.begin(size).map_err(|what| Error::at(&name, what))?;
    worker_endpoint::open(name.to_owned(), Target { disk: disk.clone(), size, block })
}

/// A disk of `size` bytes that takes whole blocks, and nothing but reads or writes.
fn capabilities(size: u64, block: u64) -> Capabilities {
    Capabilities {
        size,
        block,
        alignment: block,
        max_bytes: MAX_BYTES.max(block),
        max_zero_bytes: 0,
        has_status: false,
        has_flush: false,
    }
}

struct Source(Arc<dyn SourceDisk>);

struct Target {
    disk: Arc<dyn TargetDisk>,
    size: u64,
    block: u64,
}

impl WorkerDisk for Source {
    fn capabilities(&self) -> Capabilities {
        let block = self.0.block_bytes();
        Capabilities { block: 1, has_status: true, ..capabilities(self.0.size(), block) }
    }

    fn run(
        &self,
        operation: &CopyOperation,
        range: ByteRange,
        memory: &mut [u8],
    ) -> Result<Vec<ExtentStatus>, String> {
        match operation {
            CopyOperation::Read => {
                let memory = memory.get_mut(..range.len as usize).ok_or(UNSUPPORTED)?;
                self.0.read(range.pos, memory).map(|()| Vec::new())
            }
            CopyOperation::Status => Ok(self.0.extents(range)),
            CopyOperation::Write(_) | CopyOperation::Zero | CopyOperation::Flush => {
                Err(UNSUPPORTED.into())
            }
        }
    }

    fn finish(&self) -> Result<(), String> {
        Ok(())
    }
}

impl WorkerDisk for Target {
    fn capabilities(&self) -> Capabilities {
        capabilities(self.size, self.block)
    }

    fn run(
        &self,
        operation: &CopyOperation,
        range: ByteRange,
        memory: &mut [u8],
    ) -> Result<Vec<ExtentStatus>, String> {
        let CopyOperation::Write(runs) = operation else { return Err(UNSUPPORTED.into()) };
        for run in runs {
            let pos = range.pos + run.start as u64;
            match run.zero {
                true => self.disk.zero(ByteRange::new(pos, run.len as u64))?,
                false => self.disk.write(pos, run.of(memory).ok_or(UNSUPPORTED)?)?,
            }
        }
        Ok(Vec::new())
    }

    fn finish(&self) -> Result<(), String> {
        self.disk.finish()
    }
}
