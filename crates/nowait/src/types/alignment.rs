//! The alignment that direct I/O requires, queried once at open (C15).
//!
//! Invariant: every field is a power of two; 1 means no requirement.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{AtFlags, OFlags, StatxFlags};
use rustix::io::Errno;

use crate::types::error::{Error, Operation};

/// The alignment that direct I/O requires of a transfer, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Of the address of each segment.
    pub memory: u32,
    /// Of position and length of a write.
    pub offset: u32,
    /// Of position and length of a read; never more than `offset`, and less than `memory` only if
    /// that is more than `offset`.
    pub read_offset: u32,
}

/// A device that reads whole pages may need memory of whole pages, whatever it says: zram says 512, and for memory that
/// is not at a page it reads and overwrites bytes beside it (Linux 6.18).
const PAGE: u32 = 4096;

/// Lengths to probe where neither statx(2) nor the device reports the alignment, smallest first.
const PROBED_BYTES: [usize; 4] = [512, 1024, 2048, 4096];

/// Probe reads go to memory of this alignment, so that only position and length are tested.
#[repr(align(4096))]
struct ProbeBuffer([u8; 4096]);

impl Alignment {
    /// No alignment: that of a file opened without `O_DIRECT`.
    pub const NONE: Self = Self { memory: 1, offset: 1, read_offset: 1 };

    /// The alignment of `fd`: from statx(2) with `STATX_DIOALIGN` and `STATX_DIO_READ_ALIGN`, else
    /// the logical block size of a block device, else from probe reads; a page where statx(2) is
    /// forbidden or missing.
    ///
    /// # Errors
    /// `EOPNOTSUPP` when the file system does no direct I/O on this file; otherwise the errno of
    /// statx(2) or pread(2).
    pub fn of(fd: BorrowedFd<'_>) -> Result<Self, Error> {
        let flags = rustix::fs::fcntl_getfl(fd).map_err(|e| Error::from_os(e, Operation::Align))?;
        let wanted = StatxFlags::BASIC_STATS
            | StatxFlags::DIOALIGN
            | StatxFlags::from_bits_retain(libc::STATX_DIO_READ_ALIGN);
        let stat = match rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, wanted) {
            Err(Errno::PERM | Errno::ACCESS | Errno::NOSYS) if flags.contains(OFlags::DIRECT) => {
                return Self::without_statx(fd);
            }
            asked => asked.map_err(|e| Error::from_os(e, Operation::Align))?,
        };
        if stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0 {
            return Self::from_statx(
                stat.stx_dio_mem_align,
                stat.stx_dio_offset_align,
                stat.stx_dio_read_offset_align,
            );
        }
        if !flags.contains(OFlags::DIRECT) {
            return Err(Error::new(libc::EOPNOTSUPP, Operation::Align));
        }
        if u32::from(stat.stx_mode) & libc::S_IFMT == libc::S_IFBLK
            && let Ok(block) = rustix::fs::ioctl_blksszget(fd)
            && block.is_power_of_two()
        {
            return Ok(Self { memory: block, offset: block, read_offset: block });
        }
        Self::probe(fd)
    }

    /// Like [`Alignment::of`] of a descriptor for direct I/O, where the process may not call statx(2). A file
    /// has that of its largest probe: a smaller one that succeeds, at the end of an empty file for example,
    /// proves nothing.
    fn without_statx(fd: BorrowedFd<'_>) -> Result<Self, Error> {
        let probed = Self::probe(fd)?;
        let largest = PROBED_BYTES.map(|bytes| bytes as u32)[PROBED_BYTES.len() - 1];
        let block = rustix::fs::ioctl_blksszget(fd).ok().filter(|block| block.is_power_of_two());
        let bytes = probed.offset.max(block.unwrap_or(largest));
        Ok(Self { memory: bytes, offset: bytes, read_offset: bytes })
    }

    /// The alignment that satisfies both; [`Alignment::NONE`] if one of them is that.
    pub(crate) fn strictest(self, other: Self) -> Self {
        if self == Self::NONE || other == Self::NONE {
            return Self::NONE;
        }
        let (memory, offset) = (self.memory.max(other.memory), self.offset.max(other.offset));
        Self::fitted(memory, offset, self.read_offset.max(other.read_offset))
    }

    /// A read is widened by the same bytes in memory as on the device, so `read_offset` has to
    /// satisfy `memory`, too.
    fn fitted(memory: u32, offset: u32, read_offset: u32) -> Self {
        Self { memory, offset, read_offset: read_offset.max(memory).min(offset) }
    }

    fn from_statx(memory: u32, offset: u32, read_offset: u32) -> Result<Self, Error> {
        if !memory.is_power_of_two() || !offset.is_power_of_two() {
            return Err(Error::new(libc::EOPNOTSUPP, Operation::Align));
        }
        let read_offset = if read_offset.is_power_of_two() { read_offset } else { offset };
        let memory = if read_offset >= PAGE { memory.max(PAGE) } else { memory };
        Ok(Self::fitted(memory, offset, read_offset))
    }

    fn probe(fd: BorrowedFd<'_>) -> Result<Self, Error> {
        let mut buffer = ProbeBuffer([0; 4096]);
        let mut last = Errno::OPNOTSUPP;
        for bytes in PROBED_BYTES {
            match rustix::io::pread(fd.as_fd(), &mut buffer.0[..bytes], 0) {
                Ok(_) => {
                    let bytes = bytes as u32;
                    return Ok(Self { memory: bytes, offset: bytes, read_offset: bytes });
                }
                Err(error) => last = error,
            }
        }
        let errno = if last == Errno::INVAL { libc::EOPNOTSUPP } else { last.raw_os_error() };
        Err(Error::new(errno, Operation::Align))
    }
}

/// `value` rounded down to a multiple of `align`, a power of two.
#[inline]
pub(crate) const fn round_down(value: u64, align: u32) -> u64 {
    value & !(align as u64 - 1)
}

/// `value` rounded up to a multiple of `align`, a power of two.
#[inline]
pub(crate) const fn round_up(value: u64, align: u32) -> u64 {
    (value + (align as u64 - 1)) & !(align as u64 - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c15_statx_without_direct_io_is_not_supported() {
        assert_eq!(Alignment::from_statx(0, 0, 0).unwrap_err().errno(), libc::EOPNOTSUPP);
    }

    #[test]
    fn c15_reads_may_be_finer_than_writes_never_coarser() {
        let alignment = Alignment::from_statx(4, 4096, 512).unwrap();
        assert_eq!((alignment.offset, alignment.read_offset), (4096, 512));
        assert_eq!(Alignment::from_statx(4, 512, 0).unwrap().read_offset, 512);
        assert_eq!(Alignment::from_statx(4096, 4096, 512).unwrap().read_offset, 4096);
    }

    #[test]
    fn c15_what_reads_whole_pages_gets_memory_of_whole_pages() {
        let memory = |reported| Alignment::from_statx(512, 4096, reported).unwrap().memory;
        assert_eq!([4096, 8192, 0].map(memory), [4096; 3]);
        assert_eq!([2048, 512].map(memory), [512; 2]);
        assert_eq!(Alignment::from_statx(4, 512, 0).unwrap().memory, 4);
    }

    #[test]
    fn rounding_keeps_multiples() {
        assert_eq!((round_down(4097, 4096), round_up(4097, 4096)), (4096, 8192));
        assert_eq!((round_down(8192, 4096), round_up(8192, 4096)), (8192, 8192));
    }
}
