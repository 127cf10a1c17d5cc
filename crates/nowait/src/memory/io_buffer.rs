//! Memory for a request that moves between threads.
//!
//! Invariant: a buffer is the only owner of its bytes; the thread that owns it may read and write
//! them.
#![allow(unsafe_code)]

use std::fmt;
use std::ops::{Deref, DerefMut};

use crate::memory::buffer_pool::AlignedBox;
use crate::types::error::{Error, Operation};

/// Page-aligned memory for the requests of [`crate::AsyncFile`] and [`crate::LocalAsyncFile`]:
/// `Send`, initially zeros.
///
/// A request takes the buffer and returns it at its end. Position and length may be anything; a
/// request that is aligned for direct I/O copies nothing.
#[derive(Default)]
pub struct IoBuffer(Option<AlignedBox>);

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
        Ok(Self(Some(memory)))
    }
}

impl Deref for IoBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}

impl DerefMut for IoBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.as_deref_mut().unwrap_or_default()
    }
}

impl fmt::Debug for IoBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len()).finish_non_exhaustive()
    }
}
