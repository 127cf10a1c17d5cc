//! Memory for a request that goes from thread to thread.
//!
//! Invariant: a buffer owns its bytes alone; whoever has it may read and write them.
//! Knows: buffer, error. Known by: inbox, driver, future.
#![allow(unsafe_code)]

use std::fmt;
use std::ops::{Deref, DerefMut};

use crate::buffer::Aligned;
use crate::error::{Doing, Error};

/// Page-aligned memory for the requests of an [`crate::AsyncFile`]: `Send`, at first zeros.
///
/// A request takes it and gives it back when it has ended, to be used again. Position and length
/// may be anything; at the alignment of direct I/O nothing is copied.
#[derive(Default)]
pub struct Buffer(Option<Aligned>);

// SAFETY: the buffer is the only owner of its memory, which the allocator takes back on any
// thread; it has no interior mutability.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `len` bytes of zeros.
    ///
    /// # Errors
    /// `ENOMEM` when there is not as much memory.
    pub fn zeroed(len: usize) -> Result<Self, Error> {
        if len == 0 {
            return Ok(Self::default());
        }
        let memory = Aligned::zeroed(len).ok_or(Error::new(libc::ENOMEM, Doing::SetUp))?;
        Ok(Self(Some(memory)))
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.as_deref_mut().unwrap_or_default()
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len()).finish_non_exhaustive()
    }
}
