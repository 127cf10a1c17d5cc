//! The memory of read-ahead, of all files of the process.
//!
//! Invariant: the memory that is in use and the memory that is kept for the next use are together never
//! more than [`MEMORY`] bytes.

use std::sync::{Mutex, PoisonError};

use crate::memory::bounded_counter::BoundedCounter;
use crate::memory::io_buffer::IoBuffer;

/// The most bytes that all files of the process read ahead together.
const MEMORY: usize = 64 << 20;
/// Bytes of a buffer that is kept for the next use.
pub(crate) const KEPT_BYTES: usize = 512 << 10;
/// How many of these are kept.
const KEPT: usize = 16;

static USED: BoundedCounter = BoundedCounter::new();
static FREE: Mutex<Vec<IoBuffer>> = Mutex::new(Vec::new());

fn free() -> std::sync::MutexGuard<'static, Vec<IoBuffer>> {
    FREE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Page-aligned memory for bytes that are read ahead; it may hold those of an earlier use.
pub(crate) struct AheadMemory(IoBuffer);

impl AheadMemory {
    /// At least `bytes`, at most [`KEPT_BYTES`]. `None` when the process uses all that it may, or the
    /// allocator has no such memory.
    pub(crate) fn new(bytes: usize) -> Option<Self> {
        if bytes == KEPT_BYTES
            && let Some(kept) = free().pop()
        {
            return Some(Self(kept));
        }
        if !USED.take(bytes, MEMORY) {
            return None;
        }
        let memory = IoBuffer::zeroed(bytes).ok();
        if memory.is_none() {
            USED.give_back(bytes);
        }
        memory.map(Self)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl Drop for AheadMemory {
    fn drop(&mut self) {
        let memory = std::mem::take(&mut self.0);
        let mut kept = free();
        if memory.len() == KEPT_BYTES && kept.len() < KEPT {
            return kept.push(memory);
        }
        drop(kept);
        USED.give_back(memory.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bounded_and_a_few_buffers_are_kept() {
        let held: Vec<_> = std::iter::from_fn(|| AheadMemory::new(KEPT_BYTES)).collect();
        // Other tests of this process may use some.
        assert!(held.len() <= MEMORY / KEPT_BYTES + KEPT && USED.used() <= MEMORY);
        assert!(AheadMemory::new(KEPT_BYTES / 2).is_none() || USED.used() <= MEMORY);
        drop(held);
        assert!(free().len() <= KEPT);
        let mut again = AheadMemory::new(4096).unwrap();
        again.bytes_mut().fill(1);
        assert_eq!(again.bytes(), [1; 4096]);
    }
}
