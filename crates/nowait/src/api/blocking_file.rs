//! The blocking API: each request is one call, from any thread.
//!
//! Invariant: a call returns when its request has ended; memory is borrowed for no longer.
#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::path::Path;
use std::sync::Arc;

use crate::block::allocation_cache::AllocationCache;
use crate::block::block_map::BlockMap;
use crate::block::device::BlockDevice;
use crate::block::range_lock::LockMode;
use crate::blocking::sync_io;
use crate::engine::simple_path::{SimplePath, Verdict};
use crate::storage::open_options::OpenOptions;
use crate::threads::thread_priority::ThreadPriority;
use crate::types::byte_range::ByteRange;
use crate::types::config::Config;
use crate::types::error::Error;
use crate::types::io_priority::IoPriority;
use crate::types::iovec;
use crate::types::iovec::IoSegment;
use crate::types::request::{ExtentStatus, Flags, Op, Request};

/// A file or disk with blocking calls: `Send + Sync`, reads and writes at any position and of any length,
/// whatever the alignment of direct I/O.
///
/// A child process after fork(2) may use a file that its parent has opened, if no other thread of the parent was in a
/// call to it (C85). A call waits for the device for as long as that takes: requests with
/// a time are those of [`AsyncFile`](crate::AsyncFile::with_timeout) and of engines.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("disk.img");
/// # std::fs::File::create(&path)?.set_len(1 << 20)?;
/// let file = nowait::BlockingFile::open(&path, nowait::OpenOptions::default())?;
/// file.write_at(b"unaligned is fine", 1000, nowait::Flags::NONE)?;
/// let mut back = [0; 17];
/// assert_eq!(file.read_at(&mut back, 1000)?, 17);
/// assert_eq!(&back, b"unaligned is fine");
/// file.flush()?;
/// # Ok(())
/// # }
/// ```
pub struct BlockingFile<M: BlockMap + ?Sized = AllocationCache> {
    disk: Arc<BlockDevice<M>>,
    simple_path: SimplePath,
    /// Of each read and write, beside its own.
    flags: Flags,
}

impl BlockingFile<AllocationCache> {
    /// Opens the file at `path`, or makes it, as one that grows ([`BlockDevice::open_file`]). A disk, of a
    /// fixed size, is opened by [`BlockDevice::open`].
    ///
    /// # Errors
    /// Like [`BlockDevice::open_file`].
    pub fn open(path: &Path, options: OpenOptions) -> Result<Self, Error> {
        Ok(Self::new(Arc::new(BlockDevice::open_file(path, options)?)))
    }
}

impl<M: BlockMap + ?Sized> BlockingFile<M> {
    /// The blocking API of `disk`, which engines may serve at the same time.
    pub fn new(disk: Arc<BlockDevice<M>>) -> Self {
        let simple_path = SimplePath::new(&disk, &Config::default());
        Self { disk, simple_path, flags: Flags::NONE }
    }

    /// Bytes of the file at present, as [`BlockDevice::size`].
    #[must_use]
    pub fn size(&self) -> u64 {
        self.disk.size()
    }

    /// The device of the file, which other APIs may use at the same time.
    #[must_use]
    pub fn disk(&self) -> &Arc<BlockDevice<M>> {
        &self.disk
    }

    /// The flags of each read and write.
    pub(super) fn flags(&self) -> Flags {
        self.flags
    }

    /// This file, of which each read and write has `flags` in addition to its own, such as
    /// [`Flags::HIPRI`]. The kernel ignores `HIPRI` in preadv2(2) from Linux 5.19 on (C48).
    #[must_use]
    pub fn with_flags(self, flags: Flags) -> Self {
        Self { flags: flags | self.flags, ..self }
    }

    /// This file, of which each read and write has `priority` at the block layer, unless its own flags have
    /// another one (C88). It costs three system calls for each
    /// request: a thread all of whose requests have one sets its own instead.
    #[must_use]
    pub fn with_priority(self, priority: IoPriority) -> Self {
        Self { flags: self.flags.with_priority(priority), ..self }
    }

    /// Reads into `buf` from byte `pos` on. Returns the bytes read: fewer than `buf.len()` only
    /// past the end of the file (C17).
    ///
    /// # Errors
    /// `EINVAL` for a range beyond `i64::MAX` (C08); the errno of preadv2(2).
    pub fn read_at(&self, buf: &mut [u8], pos: u64) -> Result<usize, Error> {
        self.run(
            Op::Read,
            Flags::NONE,
            pos,
            &[IoSegment { base: buf.as_mut_ptr(), len: buf.len() }],
        )
    }

    /// Reads into all of `bufs` in turn, in one transfer where the device allows it.
    ///
    /// # Errors
    /// Like [`BlockingFile::read_at`]; `EINVAL` for more than 1024 buffers (C04).
    pub fn read_vectored_at(&self, bufs: &mut [IoSliceMut<'_>], pos: u64) -> Result<usize, Error> {
        let segments = bufs.iter_mut().map(|b| IoSegment { base: b.as_mut_ptr(), len: b.len() });
        self.run(Op::Read, Flags::NONE, pos, &segments.collect::<Vec<_>>())
    }

    /// Writes `buf` from byte `pos` on; a file grows as needed (C57). Returns the bytes written: fewer
    /// than `buf.len()` only where the write crosses the end of a disk (C25), or where an error follows.
    /// With [`Flags::DSYNC`] they are durable (C28).
    ///
    /// # Errors
    /// `EROFS` on a read-only device, `ENOSPC` at or past the end of a disk and where no space is
    /// left, `EINVAL` for a range beyond `i64::MAX`; the errno of pwritev2(2) or fdatasync(2).
    pub fn write_at(&self, buf: &[u8], pos: u64, flags: Flags) -> Result<usize, Error> {
        let segment = IoSegment { base: buf.as_ptr().cast_mut(), len: buf.len() };
        self.run(Op::Write, flags, pos, &[segment])
    }

    /// Writes all of `bufs` in turn, in one transfer where the device allows it.
    ///
    /// # Errors
    /// Like [`BlockingFile::write_at`]; `EINVAL` for more than 1024 buffers (C04).
    pub fn write_vectored_at(
        &self,
        bufs: &[IoSlice<'_>],
        pos: u64,
        flags: Flags,
    ) -> Result<usize, Error> {
        let segments = bufs.iter().map(|b| IoSegment { base: b.as_ptr().cast_mut(), len: b.len() });
        self.run(Op::Write, flags, pos, &segments.collect::<Vec<_>>())
    }

    /// Makes every write durable that returned before (C49).
    ///
    /// # Errors
    /// The errno of fdatasync(2); after a failed flush always `EIO` (C51).
    pub fn flush(&self) -> Result<(), Error> {
        self.disk.flush()
    }

    /// Releases the storage of `range`, which then reads as zeros where the file system can punch
    /// holes.
    ///
    /// # Errors
    /// `EOPNOTSUPP` where it cannot; `EROFS`; the errno of fallocate(2).
    pub fn discard(&self, range: ByteRange) -> Result<(), Error> {
        self.run_no_data(Request { op: Op::Discard, flags: Flags::NONE, range })
    }

    /// Makes `range` read as zeros. With [`Flags::NO_UNMAP`] it keeps its storage; with
    /// [`Flags::FAST_ZERO`] the call fails unless zeroing is cheap.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for `FAST_ZERO` where zeroing is not cheap; `EROFS`; the errno of fallocate(2)
    /// or pwritev2(2).
    pub fn zero(&self, range: ByteRange, flags: Flags) -> Result<(), Error> {
        self.run_no_data(Request { op: Op::Zero, flags, range })
    }

    /// Puts what is known of `range` in place of `extents`: which parts of it are holes, in order, from its begin on.
    /// These are at most 4096; the caller asks again for the rest.
    ///
    /// # Errors
    /// `EINVAL` for a range beyond `i64::MAX`, `ENOSPC` for one behind the end of a disk; the errno of a read of an
    /// image's tables.
    pub fn status(&self, range: ByteRange, extents: &mut Vec<ExtentStatus>) -> Result<(), Error> {
        self.run_on_range(Request { op: Op::Status, flags: Flags::NONE, range }, extents)
    }

    fn run_no_data(&self, io: Request) -> Result<(), Error> {
        self.run_on_range(io, &mut Vec::new())
    }

    fn run_on_range(&self, io: Request, extents: &mut Vec<ExtentStatus>) -> Result<(), Error> {
        // SAFETY: there is no memory.
        let io = unsafe { sync_io::check(&self.disk, io, &[]) }?;
        // SAFETY: as above.
        unsafe { sync_io::run(&self.disk, io, &[], extents) }.map(|_| ())
    }

    fn run(&self, op: Op, flags: Flags, pos: u64, segments: &[IoSegment]) -> Result<usize, Error> {
        let flags = flags | self.flags;
        let io = |len| Request { op, flags, range: ByteRange::new(pos, len) };
        if let [one] = segments
            && let Some(done) = self.run_simple(io(one.len as u64), one.base)
        {
            return Ok(done);
        }
        sync_io::check_rights(&self.disk, op)?;
        let io = io(iovec::total(segments)?);
        // SAFETY: the callers borrow the memory until this returns.
        let io = unsafe { sync_io::check(&self.disk, io, segments) }?;
        if io.range.len == 0 {
            return Ok(0);
        }
        if op == Op::Read
            && let Some(ahead) = self.disk.read_ahead()
        {
            ahead.note(io.range, self.disk.limit());
        }
        let mut merged = Vec::new();
        let segments = match segments {
            [one] => &[IoSegment { len: io.range.len as usize, ..*one }],
            _ => {
                iovec::merge(segments, io.range.len, &mut merged);
                merged.as_slice()
            }
        };
        // SAFETY: as above.
        let done =
            unsafe { sync_io::run(&self.disk, io, segments, &mut Vec::<ExtentStatus>::new()) };
        done.map(|bytes| bytes as usize)
    }

    /// Serves a simple request by one system call. `None` if the request is not simple, or the call
    /// has failed or was short.
    #[inline]
    fn run_simple(&self, io: Request, base: *mut u8) -> Option<usize> {
        // Refused, the general path returns the error.
        let priority = ThreadPriority::set(io.flags.priority_number()).ok()?;
        let disk = &*self.disk;
        let Verdict::Simple(extent) = self.simple_path.map_for_simple_path(disk, io, base) else {
            return None;
        };
        let (storage, len) = (disk.storage(extent.file), io.range.len as usize);
        // SAFETY: the callers borrow the memory until `run` returns; a write only reads it.
        let done = unsafe {
            match io.op {
                Op::Write => {
                    let data = IoSlice::new(std::slice::from_raw_parts(base, len));
                    storage.write(&[data], extent.pos, io.flags)
                }
                _ => {
                    let memory = IoSliceMut::new(std::slice::from_raw_parts_mut(base, len));
                    storage.read_with(&mut [memory], extent.pos, io.flags)
                }
            }
        };
        drop(priority);
        if io.op == Op::Write {
            disk.map.mark_allocated(io.range);
        }
        if self.simple_path.needs_range_lock(io) {
            disk.ranges.unlock(io.range, LockMode::Shared);
        }
        // After an error or a short transfer the general path does the request again.
        done.ok().filter(|&bytes| bytes == len)
    }
}

impl<M: BlockMap + ?Sized> std::fmt::Debug for BlockingFile<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("File").field("size", &self.size()).finish_non_exhaustive()
    }
}

/// A file may be sent to and shared with other threads.
const _: () = {
    const fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<BlockingFile<AllocationCache>>();
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::IoBuffer;

    #[test]
    fn a_simple_request_is_one_call_and_a_written_range_is_mapped_afterwards() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let disk = BlockDevice::open(&path, OpenOptions::new().cache_holes(true)).unwrap();
        let file = BlockingFile::new(Arc::new(disk));
        let mut memory = IoBuffer::zeroed(4096).unwrap();
        let io = |op, pos| Request { op, flags: Flags::NONE, range: ByteRange::new(pos, 4096) };
        assert_eq!(file.run_simple(io(Op::Write, 4096), memory.as_mut_ptr()), Some(4096));
        assert_eq!(file.run_simple(io(Op::Read, 8192), memory.as_mut_ptr()), Some(4096));
        let mapped = |pos| file.disk.map.is_mapped(ByteRange::new(pos, 4096));
        assert!(mapped(4096) && !mapped(8192));
    }

    #[test]
    fn a_write_that_stores_only_forbidden_first_bytes_is_refused_whatever_its_shape() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![7; 1 << 20]).unwrap();
        let disk = BlockDevice::open(file.path(), OpenOptions::default()).unwrap();
        let file = BlockingFile::new(Arc::new(disk.with_forbidden_prefix(b"QFI")));
        let mut block = IoBuffer::zeroed(4096).unwrap();
        block[..3].copy_from_slice(b"QFI");
        let refused: [(&[&[u8]], u64); 6] = [
            (&[&block], 0),
            (&[b"QFI"], 0),
            (&[b"Q", b"FI", b"x"], 0),
            (&[b"Q"], 0),
            (&[b"I1"], 2),
            (&[b"", b"F"], 1),
        ];
        for (parts, pos) in refused {
            let bufs: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
            let error = file.write_vectored_at(&bufs, pos, Flags::NONE).unwrap_err();
            assert_eq!(error.errno(), libc::EPERM, "{pos}");
        }
        let allowed: [(&[&[u8]], u64); 5] =
            [(&[b"Q", b"FJ"], 0), (&[b"F"], 0), (&[b"QFI"], 3), (&[&block], 4096), (&[b""], 0)];
        for (parts, pos) in allowed {
            let bufs: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
            let len = parts.iter().map(|part| part.len()).sum();
            assert_eq!(file.write_vectored_at(&bufs, pos, Flags::NONE), Ok(len));
        }
        file.zero(ByteRange::new(0, 3), Flags::NONE).unwrap();
    }
}
