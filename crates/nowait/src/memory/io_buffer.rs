//! Memory for a request that moves between threads.
//!
//! Invariant: a buffer is the only owner of its bytes; the thread that owns it may read and write
//! them.
#![allow(unsafe_code)]

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::memory::arena_memory::{ArenaMemory, ArenaPart};
use crate::memory::buffer_pool::AlignedBox;
use crate::types::error::{Error, Operation};
use crate::types::iovec::IoSegment;

/// Page-aligned memory for the requests of [`crate::AsyncFile`] and [`crate::LocalAsyncFile`]:
/// `Send`, initially zeros.
///
/// It has memory of its own ([`IoBuffer::zeroed`]), or a part of an arena ([`IoArena::buffer`](crate::IoArena::buffer)).
/// A request takes the buffer and returns it at its end. Position and length may be anything; a
/// request that is aligned for direct I/O copies nothing.
#[derive(Default)]
pub struct IoBuffer(Memory);

#[derive(Default)]
enum Memory {
    #[default]
    Empty,
    Own(AlignedBox),
    /// A part of an arena.
    Part(ArenaPart),
    /// The memory of a vectored request on its way; it has no bytes of its own.
    List(Vec<IoBuffer>),
}

impl From<ArenaPart> for IoBuffer {
    fn from(part: ArenaPart) -> Self {
        Self(Memory::Part(part))
    }
}

// SAFETY: the buffer is the only owner of its memory, which any thread may free; it has no
// interior mutability.
unsafe impl Send for IoBuffer {}
// SAFETY: as above.
unsafe impl Sync for IoBuffer {}

impl IoBuffer {
    /// `len` bytes of zeros.
    ///
    /// # Errors
    /// `ENOMEM` when the allocator has no such memory.
    pub fn zeroed(len: usize) -> Result<Self, Error> {
        if len == 0 {
            return Ok(Self::default());
        }
        let memory = AlignedBox::zeroed(len).ok_or(Error::new(libc::ENOMEM, Operation::SetUp))?;
        Ok(Self(Memory::Own(memory)))
    }

    /// The arena that the memory is of.
    pub(crate) fn arena(&self) -> Option<&Arc<ArenaMemory>> {
        match &self.0 {
            Memory::Part(part) => Some(part.memory()),
            Memory::Empty | Memory::Own(_) | Memory::List(_) => None,
        }
    }

    /// The memory of one request that has several buffers.
    pub(crate) const fn list(buffers: Vec<Self>) -> Self {
        Self(Memory::List(buffers))
    }

    /// The buffers of [`IoBuffer::list`]; none if it was lost.
    pub(crate) fn into_list(self) -> Vec<Self> {
        match self.0 {
            Memory::List(buffers) => buffers,
            Memory::Empty | Memory::Own(_) | Memory::Part(_) => Vec::new(),
        }
    }

    /// Passes the memory on as segments of a request of `len` bytes: that of several buffers as a whole, of one buffer its
    /// first bytes.
    pub(crate) fn with_segments<T>(&mut self, len: u64, run: impl FnOnce(&[IoSegment]) -> T) -> T {
        let segment =
            |buffer: &mut Self| IoSegment { base: buffer.as_mut_ptr(), len: buffer.len() };
        match &mut self.0 {
            Memory::List(buffers) => run(&buffers.iter_mut().map(segment).collect::<Vec<_>>()),
            Memory::Empty | Memory::Own(_) | Memory::Part(_) => {
                let whole = segment(self);
                run(&[IoSegment { len: whole.len.min(len as usize), ..whole }])
            }
        }
    }
}

impl Deref for IoBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.0 {
            Memory::Empty | Memory::List(_) => &[],
            Memory::Own(memory) => memory,
            Memory::Part(part) => part.bytes(),
        }
    }
}

impl DerefMut for IoBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Memory::Empty | Memory::List(_) => &mut [],
            Memory::Own(memory) => memory,
            Memory::Part(part) => part.bytes_mut(),
        }
    }
}

impl fmt::Debug for IoBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len()).finish_non_exhaustive()
    }
}
