//! An image of a Ceph cluster as a storage: what an engine asks of it.
//!
//! Invariant: no thread waits for a transfer; a flush counts only when the cluster has all that was
//! written before.

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::Duration;

use nowait::{
    Alignment, AsyncTransfers, ByteRange, Error, ExtentStatus, Flags, Operation, Storage,
    StorageProperties,
};

use crate::rbd::librbd::{RbdImage, load, wait_until_closed};
use crate::rbd::rbd_location::RbdLocation;
use crate::rbd_options::RbdOptions;

/// The longest read or write of one call in bytes.
const CALL_BYTES: u64 = 4 << 20;
/// The longest range that one call zeroes in bytes.
const ZERO_BYTES: u64 = 128 << 20;

/// An image of a Ceph cluster.
pub struct RbdStorage {
    image: Arc<RbdImage>,
    read_only: bool,
}

impl RbdStorage {
    /// Loads Ceph's library, which a process that is confined later cannot load any more.
    ///
    /// # Errors
    /// One line: why it cannot be loaded, and what to install.
    pub fn load_library() -> Result<(), String> {
        load()
    }

    /// Waits until all images of this process are closed, at most `timeout`: its end would leave them in use for
    /// the cluster, which removes no such image for 30 s.
    pub fn wait_until_closed(timeout: Duration) {
        wait_until_closed(timeout);
    }

    /// Opens the image at `location`. One that is written to is locked, as far as it has the feature
    /// exclusive-lock.
    ///
    /// # Errors
    /// One line: Ceph's library is missing, the cluster cannot be reached or refuses the user, there is
    /// no such image or snapshot, or another client holds its lock.
    pub fn open(location: &RbdLocation, options: RbdOptions) -> Result<Self, String> {
        let RbdOptions { timeout, read_only } = options;
        if location.is_snapshot() && !read_only {
            return Err("a snapshot is only read (try --read-only)".into());
        }
        let image = RbdImage::open(location, read_only, timeout)?;
        Ok(Self { image: Arc::new(image), read_only })
    }

    /// Zeroes `range` in steps.
    fn zero_in_steps(
        &self,
        range: ByteRange,
        keep: bool,
        operation: Operation,
    ) -> Result<(), Error> {
        let mut pos = range.pos;
        while pos < range.end() {
            let step = ByteRange::new(pos, (range.end() - pos).min(ZERO_BYTES));
            let zeroed = self.image.zero(step, keep);
            zeroed.map_err(|errno| Error::new(errno, operation).at(step))?;
            pos = step.end();
        }
        Ok(())
    }
}

impl Storage for RbdStorage {
    fn properties(&self) -> StorageProperties {
        StorageProperties {
            read_only: self.read_only,
            punch_hole: !self.read_only,
            // Its bytes may be a guest's, and its size is not ours to change.
            device: true,
            // A durable write is a write and a flush.
            shares_syncs: true,
            ..StorageProperties::new(Alignment { memory: 1, offset: 1, read_offset: 1 })
        }
    }

    fn size(&self) -> Result<u64, Error> {
        self.image.size().map_err(|errno| Error::new(errno, Operation::SetUp))
    }

    fn read(&self, bufs: &mut [IoSliceMut<'_>], pos: u64) -> Result<usize, Error> {
        let mut done = 0;
        for buf in bufs {
            let at = pos + done as u64;
            let range = ByteRange::new(at, buf.len() as u64);
            let count = self.image.read(buf, at);
            let count = count.map_err(|errno| Error::new(errno, Operation::Read).at(range))?;
            done += count;
            if count < buf.len() || done as u64 >= CALL_BYTES {
                break;
            }
        }
        Ok(done)
    }

    fn write(&self, bufs: &[IoSlice<'_>], pos: u64, flags: Flags) -> Result<usize, Error> {
        let room = self.size()?.saturating_sub(pos);
        if room == 0 && bufs.iter().any(|buf| !buf.is_empty()) {
            return Err(Error::new(libc::ENOSPC, Operation::Write).at(ByteRange::new(pos, 0)));
        }
        let mut done = 0;
        for buf in bufs {
            let at = pos + done as u64;
            let left = (room - done as u64).min(buf.len() as u64) as usize;
            let part = buf.get(..left).unwrap_or(buf);
            let range = ByteRange::new(at, part.len() as u64);
            let written = self.image.write(part, at);
            written.map_err(|errno| Error::new(errno, Operation::Write).at(range))?;
            done += part.len();
            if part.len() < buf.len() || done as u64 >= CALL_BYTES {
                break;
            }
        }
        if flags.contains(Flags::DSYNC) {
            self.sync()?;
        }
        Ok(done)
    }

    fn sync(&self) -> Result<(), Error> {
        self.image.flush().map_err(|errno| Error::new(errno, Operation::Flush))
    }

    fn punch(&self, range: ByteRange) -> Result<(), Error> {
        self.zero_in_steps(range, false, Operation::Discard)
    }

    fn zero(&self, range: ByteRange) -> Result<(), Error> {
        self.zero_in_steps(range, true, Operation::Zero)
    }

    fn set_len(&self, bytes: u64) -> Result<(), Error> {
        match self.size()? == bytes {
            true => Ok(()),
            false => Err(Error::new(libc::EINVAL, Operation::Write)),
        }
    }

    /// By the objects that there are, and those of the image below a clone: whole objects count.
    fn extents(
        &self,
        range: ByteRange,
        limit: usize,
        extents: &mut Vec<ExtentStatus>,
    ) -> Result<(), Error> {
        let (mut pos, mut has_room) = (range.pos, true);
        let mut push = |to: u64, hole: bool| {
            let len = to.min(range.end()).saturating_sub(pos);
            let is_full = extents.len() >= limit;
            match extents.last_mut().filter(|last| last.hole == hole) {
                _ if len == 0 || !has_room => {}
                Some(last) => last.len += len,
                None if is_full => has_room = false,
                None => extents.push(ExtentStatus::top(len, hole)),
            }
            pos += len;
            has_room && pos < range.end()
        };
        let mut each = |data: ByteRange| push(data.pos, true) && push(data.end(), false);
        let found = self.image.data_in(range, &mut each);
        found.map_err(|errno| Error::new(errno, Operation::Status).at(range))?;
        push(range.end(), true);
        Ok(())
    }

    fn transfers(&self) -> Option<Arc<dyn AsyncTransfers>> {
        Some(self.image.clone())
    }
}
