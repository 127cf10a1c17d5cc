//! The crate's error: an errno, the operation that failed, and the range that it concerns.
//!
//! Invariant: the errno is recorded where it is first seen and never translated after that; only a
//! frontend maps it to numbers of its own protocol.

use std::fmt;

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

    /// The same error, concerning `range`.
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
    pub const fn doing(self) -> Operation {
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

    /// An error without a range, with the errno of `error`; `EIO` where that has none.
    #[must_use]
    pub fn from_io(error: &std::io::Error, operation: Operation) -> Self {
        Self::new(error.raw_os_error().unwrap_or(libc::EIO), operation)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reason = std::io::Error::from_raw_os_error(self.errno);
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

impl From<Error> for std::io::Error {
    fn from(error: Error) -> Self {
        Self::from_raw_os_error(error.errno)
    }
}
