//! The crate's error: an errno, the operation that failed, and the range that it concerns.
//!
//! Invariant: the errno is recorded where it is first seen and never translated after that; only a
//! frontend maps it to numbers of its own protocol.

use std::{fmt, io};

use crate::types::byte_range::ByteRange;

/// The operation that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Opening the image.
    Open,
    /// Querying the alignment of direct I/O.
    Align,
    /// Setting up a queue, a worker or a buffer.
    SetUp,
    /// Checking a request before any transfer is submitted.
    Validate,
    /// Reading.
    Read,
    /// Writing.
    Write,
    /// Making completed writes durable.
    Flush,
    /// Deallocating storage.
    Discard,
    /// Writing zeros.
    Zero,
    /// Querying which ranges are mapped.
    Status,
    /// Waiting for completions.
    Wait,
    /// Locking a log, which another handle or process has open.
    Lock,
}

impl Operation {
    const fn words(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Align => "query of the direct I/O alignment",
            Self::SetUp => "set-up",
            Self::Validate => "request",
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Discard => "discard",
            Self::Zero => "zero",
            Self::Status => "query of the mapping",
            Self::Wait => "wait",
            Self::Lock => "lock of the log, which another handle or process has open,",
        }
    }
}

/// Why a request, or the set-up of an engine, failed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Error {
    errno: i32,
    operation: Operation,
    range: ByteRange,
}

impl Error {
    /// An error without a range. `errno` is a positive Linux error number.
    #[must_use]
    pub const fn new(errno: i32, operation: Operation) -> Self {
        Self { errno, operation, range: ByteRange::new(0, 0) }
    }

    /// This error, concerning `range`.
    #[must_use]
    pub const fn at(self, range: ByteRange) -> Self {
        Self { range, ..self }
    }

    /// The Linux error number, positive, as in errno(3).
    #[must_use]
    pub const fn errno(self) -> i32 {
        self.errno
    }

    /// The operation that failed.
    #[must_use]
    pub const fn operation(self) -> Operation {
        self.operation
    }

    /// The bytes concerned; empty when the error is not about a range.
    #[must_use]
    pub const fn range(self) -> ByteRange {
        self.range
    }

    pub(crate) fn from_os(error: rustix::io::Errno, operation: Operation) -> Self {
        Self::new(error.raw_os_error(), operation)
    }

    /// The error that `error` was made from; else one without a range, with the errno of `error`, and
    /// `EIO` where that has none.
    #[must_use]
    pub fn from_io(error: &io::Error, operation: Operation) -> Self {
        let kept = error.get_ref().and_then(|source| source.downcast_ref::<Self>());
        let errno = || error.raw_os_error().unwrap_or(libc::EIO);
        kept.copied().unwrap_or_else(|| Self::new(errno(), operation))
    }
}

/// Whether a system call that failed with `errno` may have failed because a filter (seccomp(2)) forbids it, or because
/// the kernel does not have it.
pub(crate) const fn is_of_a_filter(errno: i32) -> bool {
    matches!(errno, libc::EPERM | libc::EACCES | libc::ENOSYS)
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reason = io::Error::from_raw_os_error(self.errno);
        write!(f, "{} failed", self.operation.words())?;
        if self.range.len > 0 {
            write!(f, " at byte {} (+{})", self.range.pos, self.range.len)?;
        }
        write!(f, ": {reason}")
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}

impl From<Error> for io::Error {
    /// An error of the same kind whose source ([`io::Error::get_ref`]) is the error itself, so that the
    /// operation and the range are kept. `raw_os_error` is then `None`; [`Error::from_io`] gives the errno.
    fn from(error: Error) -> Self {
        Self::new(Self::from_raw_os_error(error.errno).kind(), error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_io_error_keeps_errno_operation_and_range() {
        let error = Error::new(libc::ENOSPC, Operation::Write).at(ByteRange::new(4096, 512));
        let kept = io::Error::from(error);
        assert_eq!(kept.kind(), io::ErrorKind::StorageFull);
        assert_eq!(kept.to_string(), error.to_string());
        assert_eq!(Error::from_io(&kept, Operation::Status), error);
    }

    #[test]
    fn an_io_error_of_the_system_has_its_errno_and_one_of_a_program_is_eio() {
        let of_io = |error: io::Error| Error::from_io(&error, Operation::Read);
        let of_system = io::Error::from_raw_os_error(libc::ESTALE);
        assert_eq!(of_io(of_system), Error::new(libc::ESTALE, Operation::Read));
        assert_eq!(of_io(io::Error::other("no errno")), Error::new(libc::EIO, Operation::Read));
    }
}
