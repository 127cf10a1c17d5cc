//! A transfer as one system call.
//!
//! Invariant: an interrupted call is repeated; any other errno is returned unchanged.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};

use crate::threads::thread_priority::ThreadPriority;
use crate::types::transfer::{Outcome, Transfer};

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
    let flags = transfer.rw_flags;
    let _priority = match ThreadPriority::set(transfer.priority) {
        Ok(priority) => priority,
        Err(errno) => return -errno,
    };
    let (fd, pos) = (fd.as_raw_fd(), transfer.pos as libc::off_t);
    loop {
        // SAFETY: `iov` points to `count` entries, whose memory is valid as the caller promised.
        let moved = unsafe {
            if transfer.write {
                libc::pwritev2(fd, iov, count, pos, flags)
            } else {
                libc::preadv2(fd, iov, count, pos, flags)
            }
        };
        if moved >= 0 {
            return moved as Outcome;
        }
        let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        if errno != libc::EINTR {
            return -errno;
        }
    }
}
