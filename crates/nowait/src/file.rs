//! The blocking face: one call, any thread.
//!
//! Invariant: a call returns when its request has ended; memory is borrowed for no longer.
//! Knows: everything above it but the engine: no ring is needed to wait for one request.
#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::path::Path;
use std::sync::Arc;

use crate::blocking;
use crate::disk::Disk;
use crate::error::{Error, Range};
use crate::io::{Flags, Io, Op, Span, UNREGISTERED};
use crate::iov::{self, Segment};
use crate::map::{Extents, Map};
use crate::ranges::Hold;
use crate::simple::Gate;
use crate::storage::OpenOptions;

/// An image for callers that wait: `Send + Sync`, reads and writes at any position and of any
/// length, whatever the alignment of direct I/O.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("disk.img");
/// # std::fs::File::create(&path)?.set_len(1 << 20)?;
/// let file = nowait::File::open(&path, nowait::OpenOptions::default())?;
/// file.write_at(b"unaligned is fine", 1000, nowait::Flags::NONE)?;
/// let mut back = [0; 17];
/// assert_eq!(file.read_at(&mut back, 1000)?, 17);
/// assert_eq!(&back, b"unaligned is fine");
/// file.flush()?;
/// # Ok(())
/// # }
/// ```
pub struct File<M: Map = Extents> {
    disk: Arc<Disk<M>>,
    gate: Gate,
}

impl File<Extents> {
    /// Opens the image at `path`, which nobody else writes to meanwhile: its holes are remembered.
    ///
    /// # Errors
    /// As [`Disk::open`].
    pub fn open(path: &Path, options: OpenOptions) -> Result<Self, Error> {
        let disk = Disk::open(path, options)?;
        disk.scan();
        Ok(Self::new(Arc::new(disk)))
    }
}

impl<M: Map> File<M> {
    /// The blocking face of `disk`, which engines may serve at the same time.
    pub fn new(disk: Arc<Disk<M>>) -> Self {
        let gate = Gate::new(&disk);
        Self { disk, gate }
    }

    /// Bytes of the device.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.disk.size()
    }

    /// Reads into `buf` from byte `pos` on. Returns the bytes read: fewer than `buf.len()` only
    /// past the end of the device (C17).
    ///
    /// # Errors
    /// `EINVAL` for a range beyond `i64::MAX` (C08); what preadv2(2) said.
    pub fn read_at(&self, buf: &mut [u8], pos: u64) -> Result<usize, Error> {
        self.run(Op::Read, Flags::NONE, pos, &[Segment { base: buf.as_mut_ptr(), len: buf.len() }])
    }

    /// Reads into all of `bufs` in turn, in one transfer where the device allows it.
    ///
    /// # Errors
    /// As [`File::read_at`]; `EINVAL` for more than 1024 buffers (C04).
    pub fn read_vectored_at(&self, bufs: &mut [IoSliceMut<'_>], pos: u64) -> Result<usize, Error> {
        let segments = bufs.iter_mut().map(|b| Segment { base: b.as_mut_ptr(), len: b.len() });
        self.run(Op::Read, Flags::NONE, pos, &segments.collect::<Vec<_>>())
    }

    /// Writes `buf` from byte `pos` on. Returns the bytes written: fewer than `buf.len()` only
    /// where the write crosses the end of the device (C25). With [`Flags::DSYNC`] they are durable
    /// (C28).
    ///
    /// # Errors
    /// `EROFS` on a read-only device, `ENOSPC` at or past its end, `EINVAL` for a range beyond
    /// `i64::MAX`; what pwritev2(2) or fdatasync(2) said.
    pub fn write_at(&self, buf: &[u8], pos: u64, flags: Flags) -> Result<usize, Error> {
        let segment = Segment { base: buf.as_ptr().cast_mut(), len: buf.len() };
        self.run(Op::Write, flags, pos, &[segment])
    }

    /// Writes all of `bufs` in turn, in one transfer where the device allows it.
    ///
    /// # Errors
    /// As [`File::write_at`]; `EINVAL` for more than 1024 buffers (C04).
    pub fn write_vectored_at(
        &self,
        bufs: &[IoSlice<'_>],
        pos: u64,
        flags: Flags,
    ) -> Result<usize, Error> {
        let segments = bufs.iter().map(|b| Segment { base: b.as_ptr().cast_mut(), len: b.len() });
        self.run(Op::Write, flags, pos, &segments.collect::<Vec<_>>())
    }

    /// Makes every write durable that returned before (C49).
    ///
    /// # Errors
    /// What fdatasync(2) said; `EIO` ever after a failed flush (C51).
    pub fn flush(&self) -> Result<(), Error> {
        self.disk.flush()
    }

    /// Gives the storage of `range` back; it then reads as zeros where the file system can punch
    /// holes.
    ///
    /// # Errors
    /// `EOPNOTSUPP` where it cannot; `EROFS`; what fallocate(2) said.
    pub fn discard(&self, range: Range) -> Result<(), Error> {
        self.run_bare(Io { op: Op::Discard, flags: Flags::NONE, range })
    }

    /// Makes `range` read as zeros; with [`Flags::NO_UNMAP`] it keeps its storage, with
    /// [`Flags::FAST_ZERO`] nothing is done unless it is cheap.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for `FAST_ZERO` where it is not cheap; `EROFS`; what fallocate(2) or
    /// pwritev2(2) said.
    pub fn zero(&self, range: Range, flags: Flags) -> Result<(), Error> {
        self.run_bare(Io { op: Op::Zero, flags, range })
    }

    fn run_bare(&self, io: Io) -> Result<(), Error> {
        let io = blocking::check(&self.disk, io)?;
        // SAFETY: there is no memory.
        unsafe { blocking::run(&self.disk, io, &[], &mut Vec::<Span>::new()) }.map(|_| ())
    }

    fn run(&self, op: Op, flags: Flags, pos: u64, segments: &[Segment]) -> Result<usize, Error> {
        let io = |len| Io { op, flags, range: Range::new(pos, len) };
        if let [one] = segments
            && let Some(done) = self.run_simple(io(one.len as u64), one.base)
        {
            return Ok(done);
        }
        blocking::check_rights(&self.disk, op)?;
        let io = blocking::check(&self.disk, io(iov::total(segments)?))?;
        let mut merged = Vec::new();
        iov::merge(segments, io.range.len, &mut merged);
        if merged.is_empty() {
            return Ok(0);
        }
        // SAFETY: the callers borrow the memory until this returns.
        let done = unsafe { blocking::run(&self.disk, io, &merged, &mut Vec::<Span>::new()) };
        done.map(|bytes| bytes as usize)
    }

    /// One plain system call, if the request is simple and the call does all of it.
    #[inline]
    fn run_simple(&self, io: Io, base: *mut u8) -> Option<usize> {
        let disk = &*self.disk;
        let extent = self.gate.admits(disk, io, base)?;
        // Here the call may wait.
        let mut transfer = self.gate.transfer(io, extent, base, 0, UNREGISTERED);
        transfer.rw_flags &= !libc::RWF_NOWAIT;
        // SAFETY: the callers borrow the memory until `run` returns.
        let outcome = unsafe { disk.storage(extent.file).transfer(&transfer) };
        if io.op == Op::Write {
            disk.map.written(io.range);
        }
        if self.gate.holds(io) {
            disk.ranges.free(io.range, Hold::Shared);
        }
        // An error or a short transfer is looked into by the generic way.
        (outcome > 0 && outcome as u64 == io.range.len).then_some(outcome as usize)
    }
}

impl<M: Map> std::fmt::Debug for File<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("File").field("size", &self.size()).finish_non_exhaustive()
    }
}

/// Nothing that a file holds belongs to a thread.
const _: () = {
    const fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<File<Extents>>();
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Buffer;

    #[test]
    fn a_simple_request_is_one_call_and_what_it_writes_is_known_to_be_mapped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let disk = Disk::open(&path, OpenOptions::default()).unwrap();
        let file = File::new(Arc::new(disk));
        let mut memory = Buffer::zeroed(4096).unwrap();
        let io = |op, pos| Io { op, flags: Flags::NONE, range: Range::new(pos, 4096) };
        assert_eq!(file.run_simple(io(Op::Write, 4096), memory.as_mut_ptr()), Some(4096));
        assert_eq!(file.run_simple(io(Op::Read, 8192), memory.as_mut_ptr()), Some(4096));
        let mapped = |pos| file.disk.map.is_mapped(Range::new(pos, 4096));
        assert!(mapped(4096) && !mapped(8192));
    }
}
