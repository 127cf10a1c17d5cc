//! Read-ahead: sequential and strided reads of a file or disk are found, and what they will read next is
//! read into memory before they ask for it.
//!
//! Invariant: a byte is served from memory only if no write, discard, zeroing or cut by a handle of this
//! process has ended since its read began, and if that is at most [`MAX_AGE`](ahead_chunk::MAX_AGE) ago.
//! Memory is bounded for the whole process.

mod ahead_memory;
mod access_pattern;
mod ahead_chunk;
mod ahead_stream;
pub(crate) mod ahead_reads;
pub(crate) mod shared_inode;
