//! The extents of a file that have storage and were never written, by `FS_IOC_FIEMAP`.
//!
//! Invariant: the kernel is told of no more room than the request has.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};

use crate::types::byte_range::ByteRange;
use crate::types::error::{Error, Operation};

/// Extents that one call lists.
const EXTENTS: usize = 128;
const FS_IOC_FIEMAP: libc::c_ulong = 0xc020_660b;
/// Bytes in the page cache are written first; else their storage would count as unwritten.
const FIEMAP_FLAG_SYNC: u32 = 1;
const FIEMAP_EXTENT_UNWRITTEN: u32 = 0x800;

/// `struct fiemap_extent` of linux/fiemap.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct FiemapExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// `struct fiemap` of linux/fiemap.h, with room for extents.
#[repr(C)]
struct Fiemap {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [FiemapExtent; EXTENTS],
}

/// Appends the unwritten extents of `file` that touch `range`.
///
/// # Errors
/// The errno of ioctl(2), `EOPNOTSUPP` or `ENOTTY` where the file system cannot tell; `EFBIG` if
/// more than 127 extents of any kind touch `range`.
pub(crate) fn unwritten(
    file: BorrowedFd<'_>,
    range: ByteRange,
    ranges: &mut Vec<ByteRange>,
) -> Result<(), Error> {
    let mut map = Fiemap {
        start: range.pos,
        length: range.len,
        flags: FIEMAP_FLAG_SYNC,
        mapped_extents: 0,
        extent_count: EXTENTS as u32,
        reserved: 0,
        extents: [FiemapExtent::default(); EXTENTS],
    };
    // SAFETY: the kernel writes the header and at most `extent_count` extents, which `map` holds.
    if unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FIEMAP, &raw mut map) } != 0 {
        return Err(Error::from_io(&std::io::Error::last_os_error(), Operation::Status).at(range));
    }
    let found = map.mapped_extents as usize;
    if found >= EXTENTS {
        return Err(Error::new(libc::EFBIG, Operation::Status).at(range));
    }
    let unwritten = |extent: &&FiemapExtent| extent.flags & FIEMAP_EXTENT_UNWRITTEN != 0;
    let extents = map.extents.iter().take(found).filter(unwritten);
    ranges.extend(extents.map(|extent| ByteRange::new(extent.logical, extent.length)));
    Ok(())
}
