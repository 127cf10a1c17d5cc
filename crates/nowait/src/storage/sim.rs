//! A file of a simulated device.
//!
//! Invariant: each call but [`Storage::size`] is an operation of the device, which the simulation
//! may make fail; a read is none before the file is served. Behind direct I/O the page cache is used
//! for the block in which the file ends, and for nothing else.
#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::sim::SimDevice;
use crate::storage::open_options::{Direct, OpenOptions};
use crate::storage::{Storage, StorageProperties, StorageSpace, Wanted, extents_by_seek};
use crate::types::alignment::Alignment;
use crate::types::byte_range::ByteRange;
use crate::types::error::{Error, Operation};
use crate::types::request::{ExtentStatus, Flags};
use crate::types::transfer::Transfer;

/// An open file of a simulated device. It has no descriptor: its queue is [`crate::sim::SimQueue`].
pub struct SimStorage {
    device: Arc<SimDevice>,
    /// The number of the file on the device; 0 is the writable one.
    file: u16,
    properties: StorageProperties,
    served: AtomicBool,
    /// Power cuts before it was opened. After another one its process is gone: every call is `EIO`.
    power_cuts: u64,
}

impl SimStorage {
    /// Opens a file of `device`: 0 is the device itself, all others are read-only. It is served.
    #[must_use]
    pub fn open(device: &Arc<SimDevice>, file: u16, options: OpenOptions) -> Self {
        let like = device.options();
        let properties = StorageProperties {
            align: if options.direct == Direct::Off { Alignment::NONE } else { like.align },
            read_only: options.read_only,
            nowait: like.nowait,
            waits_in_queue: !like.nowait,
            punch_hole: !options.read_only && like.punches,
            device: false,
            zeroing_block: 1,
            shares_syncs: like.shares_syncs,
        };
        Self {
            device: device.clone(),
            file,
            properties,
            served: AtomicBool::new(true),
            power_cuts: device.power_cuts(),
        }
    }

    /// Like [`SimStorage::open`], through the page cache, for an inspection of the file before it is
    /// served: until then a read is not an operation of the device.
    #[must_use]
    pub fn inspect(device: &Arc<SimDevice>, file: u16) -> Self {
        let options = OpenOptions::new().read_only(true).direct(Direct::Off);
        Self { served: AtomicBool::new(false), ..Self::open(device, file, options) }
    }

    /// Makes all further reads operations of the device.
    pub fn serve(&self) {
        self.served.store(true, Ordering::Relaxed);
    }

    /// Opens the file again.
    #[must_use]
    pub fn reopen(&self, options: OpenOptions) -> Self {
        Self::open(&self.device, self.file, options)
    }

    /// One transfer of the slices at `bufs`.
    ///
    /// # Safety
    /// `bufs` points to `count` slices, whose memory is valid for the transfer.
    unsafe fn transfer(
        &self,
        bufs: *const u8,
        count: usize,
        range: ByteRange,
        rw_flags: i32,
        write: bool,
    ) -> Result<usize, Error> {
        let transfer = Transfer {
            base: bufs.cast_mut(),
            pos: range.pos,
            len: range.len as u32,
            segments: count as u16,
            file: self.file.into(),
            rw_flags,
            write,
            ..Transfer::NONE
        };
        let direct = self.properties.align != Alignment::NONE;
        let operation = if write { Operation::Write } else { Operation::Read };
        if self.device.power_cuts() != self.power_cuts {
            return Err(Error::new(libc::EIO, operation).at(range));
        }
        loop {
            // SAFETY: as promised by the caller; a slice is laid out as a segment.
            let outcome = unsafe { self.device.transfer(&transfer, direct) };
            match usize::try_from(outcome) {
                Ok(bytes) => return Ok(bytes),
                Err(_) if outcome == -libc::EINTR => {}
                Err(_) => return Err(Error::new(-outcome, operation).at(range)),
            }
        }
    }

    /// Calls the device until it is not interrupted.
    fn call<T>(
        &self,
        operation: Operation,
        call: impl Fn(&SimDevice) -> Result<T, i32>,
    ) -> Result<T, Error> {
        if self.device.power_cuts() != self.power_cuts {
            return Err(Error::new(libc::EIO, operation));
        }
        loop {
            match call(&self.device) {
                Err(libc::EINTR) => {}
                done => return done.map_err(|errno| Error::new(errno, operation)),
            }
        }
    }

    /// Like `call`, for a change, which only the device itself takes.
    fn change(
        &self,
        operation: Operation,
        call: impl Fn(&SimDevice) -> Result<(), i32>,
    ) -> Result<(), Error> {
        match self.file {
            0 => self.call(operation, call),
            _ => Err(Error::new(libc::EBADF, operation)),
        }
    }
}

impl Storage for SimStorage {
    fn properties(&self) -> StorageProperties {
        self.properties
    }

    fn size(&self) -> Result<u64, Error> {
        Ok(self.device.bytes_of(self.file))
    }

    fn read(&self, bufs: &mut [IoSliceMut<'_>], pos: u64) -> Result<usize, Error> {
        let len: u64 = bufs.iter().map(|buf| buf.len() as u64).sum();
        if !self.served.load(Ordering::Relaxed) {
            let mut at = pos;
            for buf in bufs {
                self.device.peek(self.file, at, buf);
                at += buf.len() as u64;
            }
            let inside = self.device.bytes_of(self.file).saturating_sub(pos);
            return Ok(len.min(inside) as usize);
        }
        let range = ByteRange::new(pos, len);
        // SAFETY: the slices are borrowed for the call.
        unsafe { self.transfer(bufs.as_ptr().cast(), bufs.len(), range, 0, false) }
    }

    fn write(&self, bufs: &[IoSlice<'_>], pos: u64, flags: Flags) -> Result<usize, Error> {
        let len = bufs.iter().map(|buf| buf.len() as u64).sum();
        let range = ByteRange::new(pos, len);
        if !self.served.load(Ordering::Relaxed) && range.end() > self.size()? {
            // A file grows, like by pwrite(2).
            self.set_len(range.end())?;
        }
        // SAFETY: as above; a write only reads the memory.
        unsafe {
            self.transfer(
                bufs.as_ptr().cast(),
                bufs.len(),
                range,
                flags.rw_flags(Flags::OF_TRANSFERS),
                true,
            )
        }
    }

    fn sync(&self) -> Result<(), Error> {
        self.call(Operation::Flush, SimDevice::sync)
    }

    fn punch(&self, range: ByteRange) -> Result<(), Error> {
        self.change(Operation::Discard, |device| device.allocate(range, false))
            .map_err(|error| error.at(range))
    }

    fn zero(&self, range: ByteRange) -> Result<(), Error> {
        self.change(Operation::Zero, |device| device.allocate(range, true))
            .map_err(|error| error.at(range))
    }

    fn preallocate(&self, range: ByteRange) -> Result<(), Error> {
        self.change(Operation::Write, |device| device.preallocate(range))
            .map_err(|error| error.at(range))
    }

    fn unwritten(&self, range: ByteRange, ranges: &mut Vec<ByteRange>) -> Result<(), Error> {
        self.call(Operation::Status, |device| device.unwritten(range))
            .map(|found| ranges.extend(found))
    }

    fn space(&self) -> Result<StorageSpace, Error> {
        // The free space is that of a large file system, so that allocating ahead meets the end of
        // the device's capacity.
        Ok(StorageSpace { allocated: self.device.allocated(), free: 1 << 40 })
    }

    fn set_len(&self, bytes: u64) -> Result<(), Error> {
        self.change(Operation::Write, |device| device.resize(bytes))
    }

    fn extents(
        &self,
        range: ByteRange,
        limit: usize,
        extents: &mut Vec<ExtentStatus>,
    ) -> Result<(), Error> {
        extents_by_seek(range, limit, extents, |pos, wanted| {
            let data = wanted == Wanted::Data;
            let found = self.call(Operation::Status, |device| device.seek(self.file, pos, data));
            match found {
                Err(error) if error.errno() == libc::ENXIO => Ok(None),
                found => found.map(Some),
            }
        })
    }

    fn simulated(&self) -> Option<(Arc<SimDevice>, u16)> {
        Some((self.device.clone(), self.file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::SimOptions;

    #[test]
    fn a_file_that_was_open_at_a_power_cut_changes_nothing_after_it() {
        let device = Arc::new(SimDevice::new(SimOptions::able(8192)));
        let options = OpenOptions::default();
        let before = SimStorage::open(&device, 0, options);
        let range = ByteRange::new(0, 4096);
        before.preallocate(range).unwrap();
        device.cut_power();
        device.power_on();
        let allocated = device.allocated();
        assert_eq!(before.punch(range).unwrap_err().errno(), libc::EIO);
        assert_eq!(device.allocated(), allocated);
        assert!(SimStorage::open(&device, 0, options).punch(range).is_ok());
    }
}
