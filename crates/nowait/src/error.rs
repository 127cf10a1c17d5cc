//! The one error: an errno, what was being done, and the range it concerns.
//!
//! Invariant: the errno is taken where it was first seen and never translated on the way; only a
//! frontend turns it into numbers of its own protocol.
//! Knows: nothing. Known by: everyone.

use std::fmt;

/// A byte range of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Range {
    /// First byte, counted from the start of the device.
    pub pos: u64,
    /// Length in bytes.
    pub len: u64,
}

impl Range {
    /// `len` bytes from `pos` on.
    #[must_use]
    pub const fn new(pos: u64, len: u64) -> Self {
        Self { pos, len }
    }

    /// The first byte after the range, in bytes; saturates at `u64::MAX`.
    #[must_use]
    pub const fn end(self) -> u64 {
        self.pos.saturating_add(self.len)
    }
}

/// What was being done when an error was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    /// Opening the image.
    Open,
    /// Asking for the alignment of direct I/O.
    Align,
    /// Setting up a queue, a worker or a buffer.
    SetUp,
    /// Checking a request before anything is submitted.
    Validate,
    /// Reading.
    Read,
    /// Writing.
    Write,
    /// Making completed writes durable.
    Flush,
    /// Giving storage back.
    Discard,
    /// Writing zeros.
    Zero,
    /// Asking which ranges are mapped.
    Status,
    /// Waiting for completions.
    Wait,
}

impl Doing {
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
    doing: Doing,
    range: Range,
}

impl Error {
    /// An error without a range. `errno` is a positive Linux error number.
    #[must_use]
    pub const fn new(errno: i32, doing: Doing) -> Self {
        Self { errno, doing, range: Range::new(0, 0) }
    }

    /// The same error, said of `range`.
    #[must_use]
    pub const fn at(self, range: Range) -> Self {
        Self { range, ..self }
    }

    /// The Linux error number, positive, as in errno(3).
    #[must_use]
    pub const fn errno(self) -> i32 {
        self.errno
    }

    /// What was being done.
    #[must_use]
    pub const fn doing(self) -> Doing {
        self.doing
    }

    /// The bytes concerned; empty when the error is not about a range.
    #[must_use]
    pub const fn range(self) -> Range {
        self.range
    }

    pub(crate) fn from_os(error: rustix::io::Errno, doing: Doing) -> Self {
        Self::new(error.raw_os_error(), doing)
    }

    pub(crate) fn from_io(error: &std::io::Error, doing: Doing) -> Self {
        Self::new(error.raw_os_error().unwrap_or(libc::EIO), doing)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reason = std::io::Error::from_raw_os_error(self.errno);
        write!(f, "{} failed", self.doing.words())?;
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
