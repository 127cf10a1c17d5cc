//! Memory of the caller for many requests: allocated together, handed out in parts, and registered with each
//! engine that meets it.
//!
//! Invariant: parts never share a byte.

use std::fmt;
use std::sync::Arc;

use crate::memory::arena_memory::ArenaMemory;
use crate::memory::io_buffer::IoBuffer;
use crate::types::error::Error;

/// Page-aligned memory for many requests, as [`IoBuffer`]s: cheaper than memory for each of them, and known to the kernel.
///
/// An engine whose first request with a part of an arena comes from [`AsyncFile`](crate::AsyncFile) or
/// [`LocalAsyncFile`](crate::LocalAsyncFile), or that is told of it ([`Engine::register`](crate::Engine::register)),
/// registers all of it with its queue where that is possible; requests of every file of the engine then save the
/// kernel the look-up of its pages. The engine keeps the memory of the arena until it ends.
///
/// ```
/// # fn main() -> Result<(), nowait::Error> {
/// let arena = nowait::IoArena::new(1 << 20)?;
/// let (one, other) = (arena.buffer(8192), arena.buffer(100));
/// assert_eq!(one.as_deref().map(<[u8]>::len), Some(8192));
/// assert!(arena.buffer(1 << 20).is_none(), "what is left is less");
/// drop((one, other));
/// assert!(arena.buffer(1 << 20).is_some());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct IoArena(Arc<ArenaMemory>);

impl IoArena {
    /// An arena of `bytes`, rounded up to whole pages of 4096 bytes, all of them zero.
    ///
    /// # Errors
    /// `ENOMEM` when the allocator has no such memory; `EINVAL` for 0 bytes.
    pub fn new(bytes: usize) -> Result<Self, Error> {
        ArenaMemory::new(bytes).map(|memory| Self(Arc::new(memory)))
    }

    /// Bytes of the arena.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.segment().len
    }

    /// A buffer of `len` bytes of the arena, which begins at a page; `None` if it has no room for that in one
    /// piece. It may hold the bytes of an earlier buffer. Its memory is free again when it is dropped.
    #[must_use]
    pub fn buffer(&self, len: usize) -> Option<IoBuffer> {
        if len == 0 { Some(IoBuffer::default()) } else { self.0.part(len).map(IoBuffer::from) }
    }

    pub(crate) fn memory(&self) -> &Arc<ArenaMemory> {
        &self.0
    }
}

impl fmt::Debug for IoArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IoArena").field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}
