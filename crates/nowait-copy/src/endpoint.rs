//! One endpoint of a copy: it accepts requests and returns them when they have completed.
//!
//! Invariant: each accepted request is returned exactly once, with its memory; no call blocks. A
//! request that fails ends the copy, so an error needs no tag. After
//! [`Endpoint::report_unreadable`], unreadable requests are returned instead.

use std::os::fd::BorrowedFd;

use nowait::{ByteRange, ExtentStatus, IoBuffer};
use rustix::event::PollFlags;

use crate::error::Error;
use crate::lost_ranges::Lost;
use crate::zero_detection::DataRun;

/// The operation of a request on its range.
#[derive(Debug)]
pub(crate) enum CopyOperation {
    /// Reads into the memory, from its first byte on.
    Read,
    /// Writes from the memory, where the range's bytes begin at the first byte. Each run is written
    /// as data or made zero; bytes outside the runs are left unchanged.
    Write(Vec<DataRun>),
    /// Makes all of the range read as zeros.
    Zero,
    /// Returns which extents read as zeros, from the start of the range on; the answer may end
    /// before the range.
    Status,
    /// Makes completed writes durable.
    Flush,
}

/// A request to an endpoint.
#[derive(Debug)]
pub(crate) struct CopyRequest {
    pub(crate) operation: CopyOperation,
    /// A range within the disk, at least 1 byte; empty for a flush.
    pub(crate) range: ByteRange,
    /// Returned with the completion.
    pub(crate) tag: u64,
    /// For a read or write: at least as long as the range.
    pub(crate) memory: Option<IoBuffer>,
}

/// A completed request.
#[derive(Debug)]
pub(crate) struct Completed {
    pub(crate) tag: u64,
    pub(crate) range: ByteRange,
    pub(crate) memory: Option<IoBuffer>,
    /// The answer to a status request: at least one extent.
    pub(crate) extents: Vec<ExtentStatus>,
    /// The storage could not be read: the memory of a read has undefined content, and there are no
    /// extents. Only after [`Endpoint::report_unreadable`].
    pub(crate) unreadable: bool,
}

impl Completed {
    /// A successful read.
    pub(crate) fn read(tag: u64, range: ByteRange, memory: IoBuffer) -> Self {
        Self { tag, range, memory: Some(memory), extents: Vec::new(), unreadable: false }
    }
}

/// The size of an endpoint and the requests that it supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Capabilities {
    /// Bytes of the disk.
    pub(crate) size: u64,
    /// Position and length of every request are multiples of this, a power of two.
    pub(crate) block: u64,
    /// The preferred alignment of requests in bytes, a power of two.
    pub(crate) alignment: u64,
    /// The longest read or write in bytes.
    pub(crate) max_bytes: u64,
    /// The longest [`CopyOperation::Zero`] in bytes; 0 where zeros must be written.
    pub(crate) max_zero_bytes: u64,
    /// Whether [`CopyOperation::Status`] is supported.
    pub(crate) has_status: bool,
    /// Whether [`CopyOperation::Flush`] is supported; if not, a write is durable when it completes,
    /// or cannot be made so.
    pub(crate) has_flush: bool,
}

/// A source or a target.
pub(crate) trait Endpoint {
    /// The size and the supported requests.
    fn capabilities(&self) -> Capabilities;

    /// Accepts a request; the next [`Endpoint::advance`] starts it.
    fn submit(&mut self, request: CopyRequest);

    /// Starts and completes requests as far as possible without waiting.
    ///
    /// # Errors
    /// Any request failed; the copy has failed.
    fn advance(&mut self) -> Result<(), Error>;

    /// The next completed request.
    fn next(&mut self) -> Option<Completed>;

    /// From now on a read or status request that fails because the storage cannot be read completes
    /// as unreadable instead of failing the copy.
    fn report_unreadable(&mut self);

    /// The ranges that could not be read so far, where that is not an error.
    fn lost(&self) -> Lost {
        Lost::default()
    }

    /// Writes the target's metadata after all data is durable; the last call on a target.
    ///
    /// # Errors
    /// The write failed; the copy has failed.
    fn finish(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// Drops what was written of a copy that has failed, where the target keeps that apart until
    /// [`Endpoint::finish`]; the last call on it then.
    ///
    /// # Errors
    /// A message that says what is left.
    fn abandon(&mut self) -> Result<(), String> {
        Ok(())
    }

    /// The descriptors, with the events, that are ready when `advance` can make progress.
    fn poll_fds<'a>(&'a self, poll_fds: &mut Vec<(BorrowedFd<'a>, PollFlags)>);
}
