//! The memory of an arena, and its parts.
//!
//! Invariant: a byte is in the free list or in one part; so parts never share one. The memory lives until the
//! arena, all of its parts and all engines that know it are gone.
#![allow(unsafe_code)]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::memory::buffer_pool::{AlignedBox, BUFFER_ALIGN};
use crate::types::error::{Error, Operation};
use crate::types::iovec::IoSegment;

/// A range of free bytes: its start and its end.
type Free = (usize, usize);

pub(crate) struct ArenaMemory {
    base: *mut u8,
    /// The free ranges, which do not touch, by their start.
    free: Mutex<Vec<Free>>,
    memory: AlignedBox,
}

// SAFETY: the memory is accessed through parts only, each of which has its own bytes.
unsafe impl Send for ArenaMemory {}
// SAFETY: as above.
unsafe impl Sync for ArenaMemory {}

impl ArenaMemory {
    /// Whole pages of zeros, at least `bytes`.
    ///
    /// # Errors
    /// `ENOMEM`; `EINVAL` for 0 bytes.
    pub(crate) fn new(bytes: usize) -> Result<Self, Error> {
        let failed = |errno| Error::new(errno, Operation::SetUp);
        if bytes == 0 {
            return Err(failed(libc::EINVAL));
        }
        let bytes = bytes.checked_next_multiple_of(BUFFER_ALIGN).ok_or(failed(libc::ENOMEM))?;
        let mut memory = AlignedBox::zeroed(bytes).ok_or(failed(libc::ENOMEM))?;
        let (base, free) = (memory.as_mut_ptr(), Mutex::new(vec![(0, bytes)]));
        Ok(Self { base, free, memory })
    }

    /// All of it.
    pub(crate) fn segment(&self) -> IoSegment {
        IoSegment { base: self.base, len: self.memory.len() }
    }

    /// A part of `len` bytes, at least one; `None` if there is no room for it in one piece.
    pub(crate) fn part(self: &Arc<Self>, len: usize) -> Option<ArenaPart> {
        let room = len.checked_next_multiple_of(BUFFER_ALIGN)?;
        let mut free = self.free();
        let at = free.iter().position(|(start, end)| end - start >= room)?;
        let start = free[at].0;
        free[at].0 += room;
        if free[at].0 == free[at].1 {
            free.remove(at);
        }
        Some(ArenaPart { memory: self.clone(), start, len })
    }

    fn free(&self) -> MutexGuard<'_, Vec<Free>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The bytes of one buffer.
pub(crate) struct ArenaPart {
    memory: Arc<ArenaMemory>,
    start: usize,
    len: usize,
}

impl ArenaPart {
    pub(crate) fn memory(&self) -> &Arc<ArenaMemory> {
        &self.memory
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the bytes are initialised, in the arena, and only this part has them.
        unsafe { std::slice::from_raw_parts(self.memory.base.add(self.start), self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the part is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.memory.base.add(self.start), self.len) }
    }
}

impl Drop for ArenaPart {
    /// Gives the pages back, joined with the free ones beside them.
    fn drop(&mut self) {
        let (start, end) = (self.start, (self.start + self.len).next_multiple_of(BUFFER_ALIGN));
        let mut free = self.memory.free();
        let at = free.partition_point(|range| range.0 < start);
        free.insert(at, (start, end));
        if free.get(at + 1).is_some_and(|next| next.0 == end) {
            free[at].1 = free.remove(at + 1).1;
        }
        if at > 0 && free[at - 1].1 == start {
            free[at - 1].1 = free.remove(at).1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = BUFFER_ALIGN;

    #[test]
    fn parts_are_disjoint_pages_and_what_is_dropped_is_joined_with_what_is_free() {
        let arena = Arc::new(ArenaMemory::new(8 * PAGE - 1).unwrap());
        assert_eq!(arena.segment().len, 8 * PAGE);
        let lens = [1, PAGE, PAGE + 1, 3 * PAGE, 7];
        let mut parts: Vec<_> = lens.iter().map(|len| arena.part(*len).unwrap()).collect();
        assert!(arena.part(1).is_none());
        for (n, part) in parts.iter_mut().enumerate() {
            assert_eq!(part.bytes().as_ptr() as usize % PAGE, 0);
            part.bytes_mut().fill(n as u8 + 1);
        }
        for (n, part) in parts.iter().enumerate() {
            assert_eq!(part.bytes().len(), lens[n]);
            assert!(part.bytes().iter().all(|byte| *byte == n as u8 + 1));
        }
        // In any order.
        for n in [3, 0, 2, 1, 0] {
            drop(parts.remove(n));
        }
        assert_eq!(*arena.free(), [(0, 8 * PAGE)]);
        assert!(arena.part(8 * PAGE).is_some() && arena.part(8 * PAGE + 1).is_none());
        assert!(arena.part(usize::MAX).is_none());
    }

    #[test]
    fn an_arena_has_at_least_one_byte_and_a_part_outlives_it() {
        assert_eq!(ArenaMemory::new(0).err().unwrap().errno(), libc::EINVAL);
        assert_eq!(ArenaMemory::new(usize::MAX).err().unwrap().errno(), libc::ENOMEM);
        let part = Arc::new(ArenaMemory::new(PAGE).unwrap()).part(100).unwrap();
        std::thread::spawn(move || assert_eq!(part.bytes(), [0; 100])).join().unwrap();
    }
}
