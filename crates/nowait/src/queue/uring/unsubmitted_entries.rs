//! The entries of a ring that the kernel has not taken yet, so that a transfer can be cancelled before it reads them.
//!
//! Invariant: an entry is changed only between two calls that submit, by the thread that submits; the kernel has
//! copied what it has taken (`IORING_FEAT_SUBMIT_STABLE`), so changing such an entry has no effect.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};

use io_uring::IoUring;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::types::token::Token;

/// The place of the entries in a ring's file (io_uring_setup(2)).
const OFFSET_OF_ENTRIES: u64 = 0x1000_0000;

/// An entry (`struct io_uring_sqe`), of which only the token matters here. All zeros but for the token it does nothing.
#[repr(C)]
#[derive(Clone, Copy)]
struct Entry {
    operation: [u64; 4],
    token: Token,
    more: [u64; 3],
}

/// Has a transfer of `ring` do nothing that was pushed and not submitted: it completes with 0. Without memory for the
/// mapping the transfer is made.
pub(crate) fn clear(ring: &mut IoUring, token: Token) {
    if ring.submission().is_empty() {
        return;
    }
    // SAFETY: the ring has its descriptor while it is borrowed.
    let fd = unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) };
    if let Ok(mapping) = Mapping::new(fd, ring.params().sq_entries()) {
        mapping.clear(token);
    }
}

/// The entries of a ring, mapped a second time.
struct Mapping {
    entries: NonNull<Entry>,
    count: usize,
}

impl Mapping {
    fn new(ring: BorrowedFd<'_>, count: u32) -> rustix::io::Result<Self> {
        let count = count as usize;
        let (read_write, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a mapping at a new address.
        let base = unsafe {
            let len = count * size_of::<Entry>();
            mmap(ptr::null_mut(), len, read_write, shared, ring, OFFSET_OF_ENTRIES)?
        };
        let entries = NonNull::new(base.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        Ok(Self { entries, count })
    }

    /// Makes each entry under `token` one that does nothing. Among them may be those of earlier transfers, which the
    /// kernel does not read any more.
    fn clear(&self, token: Token) {
        for n in 0..self.count {
            let entry = self.entries.as_ptr().wrapping_add(n);
            // SAFETY: `n` is in the mapping. The library's other mapping is used by this thread only, and not now; the
            // kernel reads the entries only in a call of this thread.
            unsafe {
                if ptr::read_volatile(&raw const (*entry).token) == token {
                    let nothing = Entry { operation: [0; 4], token, more: [0; 3] };
                    ptr::write_volatile(entry, nothing);
                }
            }
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, which nothing else names.
        let _ = unsafe { munmap(self.entries.as_ptr().cast(), self.count * size_of::<Entry>()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_that_of_the_kernel() {
        assert_eq!(size_of::<Entry>(), 64);
        assert_eq!(std::mem::offset_of!(Entry, token), 32);
    }
}
