//! The memory of a copy: a pool of reusable buffers.
//!
//! Invariant: the buffers in use have together at most `limit` bytes (a single larger one is
//! allowed when no other is in use); the free ones that are kept have at most `limit` bytes, too.

use nowait::IoBuffer;

use crate::error::{Error, reason};

/// The smallest buffer in bytes; each class is twice the one before.
const MIN_CLASS_BYTES: usize = 4096;

/// A pool of buffers whose sizes are powers of two.
pub(crate) struct BufferPool {
    /// Free buffers, indexed by the binary logarithm of their size.
    free: Vec<Vec<IoBuffer>>,
    free_bytes: usize,
    used_bytes: usize,
    limit: usize,
}

impl BufferPool {
    /// A pool of at most `limit` bytes in use.
    pub(crate) fn new(limit: usize) -> Self {
        Self { free: Vec::new(), free_bytes: 0, used_bytes: 0, limit }
    }

    /// A buffer of at least `len` bytes with any content, or `None` when the limit is reached. If
    /// no buffer is in use, one is returned even beyond the limit.
    ///
    /// # Errors
    /// ENOMEM: the system has no memory left.
    pub(crate) fn take(&mut self, len: usize) -> Result<Option<IoBuffer>, Error> {
        let bytes = len.max(MIN_CLASS_BYTES).next_power_of_two();
        if self.used_bytes > 0 && self.used_bytes + bytes > self.limit {
            return Ok(None);
        }
        self.used_bytes += bytes;
        let class = bytes.trailing_zeros() as usize;
        if let Some(buffer) = self.free.get_mut(class).and_then(Vec::pop) {
            self.free_bytes -= bytes;
            return Ok(Some(buffer));
        }
        let buffer =
            IoBuffer::zeroed(bytes).map_err(|error| Error::at(&"memory", reason(error.errno())))?;
        Ok(Some(buffer))
    }

    /// Returns a buffer to the pool.
    pub(crate) fn give(&mut self, buffer: IoBuffer) {
        let bytes = buffer.len();
        self.used_bytes = self.used_bytes.saturating_sub(bytes);
        if self.free_bytes + bytes > self.limit {
            return;
        }
        let class = bytes.trailing_zeros() as usize;
        if self.free.len() <= class {
            self.free.resize_with(class + 1, Vec::new);
        }
        if let Some(list) = self.free.get_mut(class) {
            list.push(buffer);
            self.free_bytes += bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_in_use_never_exceed_the_limit_and_are_reused() {
        let mut memory = BufferPool::new(64 << 10);
        let first = memory.take(40_000).unwrap().unwrap();
        assert_eq!(first.len(), 64 << 10);
        assert!(memory.take(1).unwrap().is_none());
        memory.give(first);
        let small: Vec<_> = (0..16).map(|_| memory.take(4096).unwrap().unwrap()).collect();
        assert!(memory.take(1).unwrap().is_none());
        small.into_iter().for_each(|buffer| memory.give(buffer));
        assert!(memory.take(64 << 10).unwrap().is_some());
    }

    #[test]
    fn a_buffer_larger_than_the_limit_is_returned_alone() {
        let mut memory = BufferPool::new(4096);
        let large = memory.take(1 << 20).unwrap().unwrap();
        assert!(memory.take(1).unwrap().is_none());
        memory.give(large);
        assert!(memory.take(1).unwrap().is_some());
    }
}
