//! One side of a copy: requests go in, and come back when they have ended.
//!
//! Invariant: each accepted request is given back exactly once, with its memory; nothing blocks.
//! A request that fails ends the copy, so that an error needs no tag.
//! Knows: error, zeros. Known by: file_port, nbd, pair and all that copies.

use std::os::fd::BorrowedFd;

use nowait::{Buffer, Range, Span};
use rustix::event::PollFlags;

use crate::error::Error;
use crate::zeros::Run;

/// What a request does with its range.
#[derive(Debug)]
pub(crate) enum What {
    /// Into the memory, from its first byte on.
    Read,
    /// From the memory: the bytes of the range are at its start; each run is written as data or
    /// made zero. What no run covers is left alone.
    Write(Vec<Run>),
    /// Makes all of the range read as zeros.
    Zero,
    /// Tells what reads as zeros, from the start of the range on, maybe not to its end.
    Status,
    /// Makes durable what has ended.
    Flush,
}

/// What is asked of a side.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) what: What,
    /// Bytes of the disk, inside it, at least 1; empty for a flush.
    pub(crate) range: Range,
    /// Comes back with the answer.
    pub(crate) tag: u64,
    /// For a read or write: at least as long as the range.
    pub(crate) memory: Option<Buffer>,
}

/// A request that has ended well.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) tag: u64,
    pub(crate) range: Range,
    pub(crate) memory: Option<Buffer>,
    /// The answer to a status request: at least one span.
    pub(crate) spans: Vec<Span>,
}

/// What a side is and can, asked once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    /// Bytes of the disk.
    pub(crate) size: u64,
    /// Position and length of every request are multiples of this, a power of two.
    pub(crate) block: u64,
    /// What is told apart in units of this many bytes, a power of two, is served best.
    pub(crate) granule: u64,
    /// The longest read or write in bytes.
    pub(crate) max_bytes: u64,
    /// The longest [`What::Zero`] in bytes; 0 where zeros must be written.
    pub(crate) max_zero_bytes: u64,
    /// Whether [`What::Status`] is understood.
    pub(crate) tells_status: bool,
    /// Whether a flush is understood; where not, what is written is durable or nothing can be done.
    pub(crate) flushes: bool,
}

/// One side.
pub(crate) trait Port {
    /// What it is and can.
    fn facts(&self) -> Facts;

    /// Takes a request; it moves with the next [`Port::advance`].
    fn submit(&mut self, request: Request);

    /// Moves what can be moved without waiting.
    ///
    /// # Errors
    /// What went wrong with any request; the copy has failed.
    fn advance(&mut self) -> Result<(), Error>;

    /// The next request that has ended.
    fn next(&mut self) -> Option<Done>;

    /// Writes what is left to write when all data is there and durable; nothing else comes after it.
    ///
    /// # Errors
    /// What went wrong; the copy has failed.
    fn finish(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// The descriptors that are ready when `advance` would move something, and for what.
    fn watched<'a>(&'a self, watched: &mut Vec<(BorrowedFd<'a>, PollFlags)>);
}
