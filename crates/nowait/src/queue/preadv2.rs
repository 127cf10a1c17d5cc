//! Reads and writes with `RWF_*` flags, one system call each: preadv2(2) and pwritev2(2), and the calls that stand in for
//! them where a filter of system calls forbids them, or the kernel does not have them.
//!
//! Invariant: an interrupted call is repeated. A write with `RWF_DSYNC` that succeeds is durable, whichever call has made
//! it. A flag that is more than a hint, and for which no other call does, is an error.
#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::{Errno, ReadWriteFlags, retry_on_intr};

use crate::threads::thread_priority::ThreadPriority;
use crate::types::error::is_of_a_filter;
use crate::types::transfer::{Outcome, Transfer};

/// Flags that may be left out.
const HINTS: i32 = libc::RWF_HIPRI | libc::RWF_DONTCACHE;

/// Makes the transfer with preadv2(2) or pwritev2(2).
///
/// # Safety
/// As for `IoQueue::push`, until this returns.
pub(crate) unsafe fn transfer(fd: BorrowedFd<'_>, transfer: &Transfer) -> Outcome {
    let one = libc::iovec { iov_base: transfer.base.cast(), iov_len: transfer.len as usize };
    let (iov, count) = match transfer.segments {
        0 => (&raw const one, 1),
        // `IoSegment` is laid out as `struct iovec`.
        many => (transfer.base.cast_const().cast(), libc::c_int::from(many)),
    };
    let _priority = match ThreadPriority::set(transfer.priority) {
        Ok(priority) => priority,
        Err(errno) => return -errno,
    };
    let (flags, pos) = (transfer.rw_flags, transfer.pos as libc::off_t);
    let (flagged, plain) = match transfer.write {
        true => (libc::SYS_pwritev2, libc::SYS_pwritev),
        false => (libc::SYS_preadv2, libc::SYS_preadv),
    };
    // The libraries of C make another errno of `ENOSYS`. The high half of the position is not looked at, and a call
    // without flags ignores the last argument.
    let call = |number| {
        // SAFETY: `iov` points to `count` entries, whose memory is valid as the caller promised.
        match unsafe { libc::syscall(number, fd.as_raw_fd(), iov, count, pos, 0, flags) } {
            -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
            moved => Ok(moved as usize),
        }
    };
    let moved = with_or_without(fd, flags, || call(flagged), || call(plain));
    moved.map_or_else(|error| -error.raw_os_error(), |bytes| bytes as Outcome)
}

/// One read into `bufs`, of which the kernel takes the first 1024.
///
/// # Errors
/// The errno of preadv2(2), never `EINTR`; `EAGAIN` and `EOPNOTSUPP` for flags that the process may not use.
pub(crate) fn read(
    fd: BorrowedFd<'_>,
    bufs: &mut [IoSliceMut<'_>],
    pos: u64,
    flags: i32,
) -> Result<usize, Errno> {
    let bits = ReadWriteFlags::from_bits_retain(flags as u32);
    match retry_on_intr(|| rustix::io::preadv2(fd, bufs, pos, bits)) {
        Err(error) if is_forbidden(error) => {
            without_flags(fd, flags, || rustix::io::preadv(fd, bufs, pos))
        }
        done => done,
    }
}

/// One write of `bufs`, of which the kernel takes the first 1024.
///
/// # Errors
/// The errno of pwritev2(2), or of fdatasync(2) in its place, never `EINTR`; `EAGAIN` and `EOPNOTSUPP` for flags that the
/// process may not use.
pub(crate) fn write(
    fd: BorrowedFd<'_>,
    bufs: &[IoSlice<'_>],
    pos: u64,
    flags: i32,
) -> Result<usize, Errno> {
    let bits = ReadWriteFlags::from_bits_retain(flags as u32);
    let flagged = || rustix::io::pwritev2(fd, bufs, pos, bits);
    with_or_without(fd, flags, flagged, || rustix::io::pwritev(fd, bufs, pos))
}

/// Makes the call `flagged`; if the process may not, the call `plain`, and the sync that `flags` ask for.
#[inline]
fn with_or_without(
    fd: BorrowedFd<'_>,
    flags: i32,
    flagged: impl FnMut() -> Result<usize, Errno>,
    plain: impl FnMut() -> Result<usize, Errno>,
) -> Result<usize, Errno> {
    match retry_on_intr(flagged) {
        Err(error) if is_forbidden(error) => without_flags(fd, flags, plain),
        done => done,
    }
}

/// A sync on the descriptor of the write reports the lost writes that `RWF_DSYNC` would.
#[cold]
fn without_flags(
    fd: BorrowedFd<'_>,
    flags: i32,
    plain: impl FnMut() -> Result<usize, Errno>,
) -> Result<usize, Errno> {
    if flags & libc::RWF_NOWAIT != 0 {
        return Err(Errno::AGAIN);
    }
    if flags & !(HINTS | libc::RWF_DSYNC | libc::RWF_SYNC) != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    let moved = retry_on_intr(plain)?;
    if moved > 0 && flags & libc::RWF_SYNC != 0 {
        retry_on_intr(|| rustix::fs::fsync(fd))?;
    } else if moved > 0 && flags & libc::RWF_DSYNC != 0 {
        retry_on_intr(|| rustix::fs::fdatasync(fd))?;
    }
    Ok(moved)
}

/// Whether a filter may have forbidden the call, or the kernel may lack it.
pub(crate) fn is_forbidden(error: Errno) -> bool {
    is_of_a_filter(error.raw_os_error())
}

/// Whether pwritev2(2) is forbidden. Nothing is written, and no flag examined.
pub(crate) fn is_write_forbidden(fd: BorrowedFd<'_>) -> bool {
    rustix::io::pwritev2(fd, &[], 0, ReadWriteFlags::empty()).is_err_and(is_forbidden)
}
