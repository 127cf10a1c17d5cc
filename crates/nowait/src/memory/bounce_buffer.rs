//! Bounce buffers of threads that may block: each thread keeps one for its next request.
//!
//! Invariant: a buffer has one owner. It may hold bytes of an earlier request: its user fills what
//! it passes on.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};

use crate::memory::io_buffer::IoBuffer;
use crate::types::error::Error;

/// The size in bytes up to which a thread keeps its buffer.
const KEPT_BYTES: usize = 256 << 10;

thread_local! {
    /// The buffer of the last request of this thread.
    static KEPT: Cell<Option<IoBuffer>> = const { Cell::new(None) };
}

/// Page-aligned memory for one request of a thread.
pub(crate) struct BounceBuffer {
    memory: IoBuffer,
    len: usize,
}

impl BounceBuffer {
    /// `len` bytes.
    ///
    /// # Errors
    /// `ENOMEM` when the allocator has no such memory.
    pub(crate) fn new(len: usize) -> Result<Self, Error> {
        let kept = KEPT.try_with(Cell::take).ok().flatten();
        let memory = match kept.filter(|memory| memory.len() >= len) {
            Some(memory) => memory,
            None => IoBuffer::zeroed(len.next_power_of_two())?,
        };
        Ok(Self { memory, len })
    }
}

impl Deref for BounceBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.memory[..self.len]
    }
}

impl DerefMut for BounceBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[..self.len]
    }
}

impl Drop for BounceBuffer {
    fn drop(&mut self) {
        if self.memory.len() <= KEPT_BYTES {
            let memory = std::mem::take(&mut self.memory);
            // An error means that the thread ends.
            let _ = KEPT.try_with(|kept| kept.set(Some(memory)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_keeps_one_buffer_of_at_most_256_kib_for_its_next_request() {
        let address = |len| BounceBuffer::new(len).unwrap().as_ptr() as usize;
        let (mut first, second) = (BounceBuffer::new(6000).unwrap(), BounceBuffer::new(1).unwrap());
        assert_eq!((first.len(), second.len()), (6000, 1));
        first.fill(7);
        let kept = first.as_ptr() as usize;
        drop((second, first));
        assert_eq!([address(8192), address(1), address(4096)], [kept; 3]);
        let large = BounceBuffer::new(KEPT_BYTES + 1).unwrap();
        assert_eq!(large.len(), KEPT_BYTES + 1);
        drop(large);
        assert!(KEPT.take().is_none(), "a buffer that was too small is not kept");
    }
}
