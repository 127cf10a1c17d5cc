//! A local block device, opened for direct I/O, and what is done to it between measurements.
//!
//! Invariant: a device is opened for writing only if that is asked for, and only if nothing has
//! mounted or claimed it; it stays claimed as long as the value lives.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nowait::internal::retry_while_claimed;
use rustix::fs::{FallocateFlags, OFlags, fallocate};
use rustix::io::Errno;

use crate::ablation::bare_ring::BareRing;
use crate::ablation::measured_device::{Job, MeasuredDevice};
use crate::error::Error;
use crate::test_file::BYTES_MIN;
use crate::workload::Workload;

const MIB: u64 = 1 << 20;
/// A block device to measure on.
pub(crate) struct ClaimedDevice {
    /// The path as it was given.
    path: PathBuf,
    file: File,
    /// Whole megabytes; the rest is not used.
    bytes: u64,
}

impl ClaimedDevice {
    /// Opens `path`; with `overwrite` for writing, and for this program alone.
    ///
    /// # Errors
    /// [`Error::File`]: it is not a block device, too small, in use, or this user may not open it.
    pub(crate) fn open(path: &Path, overwrite: bool) -> Result<ClaimedDevice, Error> {
        let opened = Self::check(path, overwrite);
        opened.map_err(|problem| Error::File { path: path.to_owned(), problem })
    }

    fn check(path: &Path, overwrite: bool) -> Result<ClaimedDevice, String> {
        let cannot_open = |e: io::Error| format!("cannot open: {e}");
        let kind = path.metadata().map_err(cannot_open)?.file_type();
        if !kind.is_block_device() {
            return Err("no block device (--file measures on a file)".to_owned());
        }
        let claim = if overwrite { OFlags::EXCL } else { OFlags::empty() };
        let flags = OFlags::DIRECT.union(claim).bits().cast_signed();
        let mut options = OpenOptions::new();
        options.read(true).write(overwrite).custom_flags(flags);
        let open = || options.open(path).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO));
        let opened = retry_while_claimed(open).map_err(io::Error::from);
        let mut file = opened.map_err(|e| match e.raw_os_error() {
            Some(libc::EBUSY) => {
                "cannot be overwritten: it is mounted, or another program has claimed it".to_owned()
            }
            _ if overwrite => format!("cannot be overwritten: {e}"),
            _ => cannot_open(e),
        })?;
        let bytes =
            file.seek(SeekFrom::End(0)).map_err(|e| format!("cannot tell its size: {e}"))?;
        if bytes < BYTES_MIN {
            return Err(format!(
                "only {bytes} bytes (64 MiB is the least that can be measured on)"
            ));
        }
        Ok(ClaimedDevice { path: path.to_owned(), file, bytes: bytes / MIB * MIB })
    }
}

impl MeasuredDevice for ClaimedDevice {
    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_all()
    }

    fn discard(&self, bytes: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);
        fallocate(&self.file, flags, 0, bytes).map_err(|errno| match errno {
            Errno::OPNOTSUPP => {
                let problem = "the device gives no storage back";
                io::Error::new(io::ErrorKind::Unsupported, problem)
            }
            errno => errno.into(),
        })?;
        self.file.sync_all()
    }

    fn job(&self, load: &Workload) -> io::Result<Job> {
        let mut ring = BareRing::new(&self.file, load)?;
        Ok(Box::new(move |offsets, stop_condition| ring.run(offsets, stop_condition)))
    }
}
