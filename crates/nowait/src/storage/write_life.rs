//! How long the bytes of a file are expected to stay (fcntl(2), `F_SET_RW_HINT`).
//!
//! Invariant: it is a hint: a file system or device that does not have it changes nothing.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};

/// `F_SET_RW_HINT`, and the values of its argument.
const F_SET_RW_HINT: libc::c_int = 1024 + 12;

/// How long the bytes that are written to a file stay before they are written again or removed, as compared
/// with those of other files: a device may keep them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum WriteLife {
    /// A short time, such as those of a log that is truncated.
    Short = 2,
    /// Longer.
    Medium = 3,
    /// Long.
    Long = 4,
    /// For as long as the device, about.
    Extreme = 5,
}

impl WriteLife {
    /// Sets it for the file, as all of its handles have it.
    pub(crate) fn set(self, file: BorrowedFd<'_>) {
        let value = self as u64;
        // SAFETY: the call reads one number. An error means that the kernel has no such hint.
        unsafe { libc::fcntl(file.as_raw_fd(), F_SET_RW_HINT, &raw const value) };
    }
}
