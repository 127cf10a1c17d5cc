//! A cursor over the memory of a request, which is moved piece by piece from its beginning.
//!
//! Invariant: no two cursors with access at the same time share a byte that one of them may write.
#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::marker::PhantomData;

use crate::types::iovec::{IoSegment, MAX_SEGMENTS, aligned, slice_segments};

/// Slices of a write that are listed without an allocation.
const FEW_SLICES: usize = 64;

/// The memory is filled by a read.
#[derive(Clone, Copy, Debug)]
pub enum Filled {}

/// The memory has the data of a write.
#[derive(Clone, Copy, Debug)]
pub enum Data {}

/// A cursor over memory in several segments: the next byte, and the number of bytes left.
#[derive(Debug)]
pub struct IoCursor<'a, D> {
    /// The segment with the next byte, from that byte on.
    first: IoSegment,
    rest: &'a [IoSegment],
    len: u64,
    memory: PhantomData<(&'a mut [u8], D)>,
}

/// The memory of a read, which is filled.
pub type ReadCursor<'a> = IoCursor<'a, Filled>;

/// The memory of a write, which has its data.
pub type WriteCursor<'a> = IoCursor<'a, Data>;

impl<'a, D> IoCursor<'a, D> {
    /// A cursor over the bytes `start..start + len` of `segments`, which have as many.
    ///
    /// # Safety
    /// As long as the cursor lives, this memory is valid, initialised and not accessed otherwise
    /// (not written, for a write).
    pub(crate) unsafe fn new(segments: &'a [IoSegment], start: u64, len: u64) -> Self {
        let len = start.saturating_add(len);
        let mut cursor = Self { first: IoSegment::EMPTY, rest: segments, len, memory: PhantomData };
        cursor.advance(start);
        cursor
    }

    const fn of(first: IoSegment) -> Self {
        Self { first, rest: &[], len: first.len as u64, memory: PhantomData }
    }

    /// Bytes left.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether no byte is left.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Skips `count` bytes, at most all that are left.
    pub fn advance(&mut self, count: u64) {
        let mut count = count.min(self.len);
        self.len -= count;
        while count > 0 {
            let now = count.min(self.first.len as u64) as usize;
            self.first.base = self.first.base.wrapping_add(now);
            self.first.len -= now;
            count -= now as u64;
            if self.first.len == 0 {
                let Some((next, rest)) = self.rest.split_first() else { return };
                (self.first, self.rest) = (*next, rest);
            }
        }
    }

    /// Takes the next `count` bytes, at most all that are left.
    #[must_use]
    pub fn take(&mut self, count: u64) -> Self {
        let taken = Self { len: count.min(self.len), ..*self };
        self.advance(count);
        taken
    }

    /// The next `count` bytes, at most all that are left, without taking them.
    #[must_use]
    pub fn peek(&mut self, count: u64) -> IoCursor<'_, D> {
        IoCursor { len: count.min(self.len), ..*self }
    }

    /// Calls `each` for the parts of the memory that is left; none is empty.
    pub(crate) fn each(&self, mut each: impl FnMut(IoSegment)) {
        let now = self.first.len.min(self.len as usize);
        if now > 0 {
            each(IoSegment { len: now, ..self.first });
        }
        slice_segments(self.rest, 0, self.len - now as u64, each);
    }

    /// The memory that is left, if it is one part.
    fn only_part(&self) -> Option<IoSegment> {
        let first = if self.first.len > 0 { self.first } else { *self.rest.first()? };
        let is_all = self.len > 0 && self.len <= first.len as u64;
        is_all.then_some(IoSegment { len: self.len as usize, ..first })
    }

    /// Whether all addresses are multiples of `memory` and all lengths of `offset`, powers of two.
    pub(crate) fn is_aligned(&self, memory: u32, offset: u32) -> bool {
        let mut all = true;
        self.each(|part| all &= aligned(&[part], memory, offset));
        all
    }
}

impl ReadCursor<'_> {
    /// The memory that is left, if it is one slice. This spares the list of [`Self::slices`].
    pub(crate) fn only_slice(&mut self) -> Option<IoSliceMut<'_>> {
        let part = self.only_part()?;
        // SAFETY: as promised to `new`.
        let bytes = unsafe { std::slice::from_raw_parts_mut(part.base, part.len) };
        Some(IoSliceMut::new(bytes))
    }

    /// The memory that is left as slices: at most [`MAX_SEGMENTS`] of them, so that one system call
    /// takes them.
    pub(crate) fn slices(&mut self) -> Vec<IoSliceMut<'_>> {
        let mut slices = Vec::with_capacity(1);
        self.each(|part| {
            if slices.len() < MAX_SEGMENTS {
                // SAFETY: as promised to `new`; the parts do not overlap.
                let bytes = unsafe { std::slice::from_raw_parts_mut(part.base, part.len) };
                slices.push(IoSliceMut::new(bytes));
            }
        });
        slices
    }

    /// Fills the memory that is left with `byte`.
    pub fn fill(&mut self, byte: u8) {
        // SAFETY: as promised to `new`.
        self.each(|part| unsafe { part.base.write_bytes(byte, part.len) });
        self.advance(self.len);
    }

    /// Copies the bytes of `from` to the next memory, as many as both have.
    pub fn copy_from(&mut self, from: &[u8]) {
        let mut rest = from;
        self.take(from.len() as u64).each(|part| {
            let (now, later) = rest.split_at(part.len.min(rest.len()));
            // SAFETY: as promised to `new`; `from` is borrowed, so it is other memory.
            unsafe { part.base.copy_from_nonoverlapping(now.as_ptr(), now.len()) };
            rest = later;
        });
    }
}

impl WriteCursor<'_> {
    /// The memory that is left, if it is one slice. This spares the list of [`Self::with_slices`].
    pub(crate) fn only_slice(&self) -> Option<IoSlice<'_>> {
        let part = self.only_part()?;
        // SAFETY: as promised to `new`.
        Some(IoSlice::new(unsafe { std::slice::from_raw_parts(part.base, part.len) }))
    }

    /// Calls `run` with the memory that is left as slices: at most [`MAX_SEGMENTS`] of them, so that
    /// one system call takes them. For [`FEW_SLICES`] nothing is allocated.
    pub(crate) fn with_slices<T>(&self, run: impl FnOnce(&[IoSlice<'_>]) -> T) -> T {
        let (mut few, mut many, mut count) = ([IoSlice::new(&[]); FEW_SLICES], Vec::new(), 0);
        self.each(|part| {
            // SAFETY: as promised to `new`.
            let slice = IoSlice::new(unsafe { std::slice::from_raw_parts(part.base, part.len) });
            match few.get_mut(count) {
                Some(place) => *place = slice,
                None if count < MAX_SEGMENTS => many.push(slice),
                None => return,
            }
            count += 1;
        });
        if many.is_empty() {
            return run(&few[..count]);
        }
        many.splice(..0, few);
        run(&many)
    }

    /// Copies the next bytes to `to`, as many as both have.
    pub fn copy_to(&mut self, to: &mut [u8]) {
        let len = to.len() as u64;
        let mut rest = to;
        self.take(len).each(|part| {
            let part_len = part.len.min(rest.len());
            let (now, later) = std::mem::take(&mut rest).split_at_mut(part_len);
            // SAFETY: as promised to `new`; `to` is borrowed mutably, so it is other memory.
            unsafe { part.base.copy_to_nonoverlapping(now.as_mut_ptr(), now.len()) };
            rest = later;
        });
    }
}

impl<'a> From<&'a mut [u8]> for ReadCursor<'a> {
    fn from(memory: &'a mut [u8]) -> Self {
        Self::of(IoSegment { base: memory.as_mut_ptr(), len: memory.len() })
    }
}

impl<'a> From<&'a [u8]> for WriteCursor<'a> {
    fn from(data: &'a [u8]) -> Self {
        Self::of(IoSegment { base: data.as_ptr().cast_mut(), len: data.len() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments(memory: &mut [&mut [u8]]) -> Vec<IoSegment> {
        memory.iter_mut().map(|m| IoSegment { base: m.as_mut_ptr(), len: m.len() }).collect()
    }

    #[test]
    fn bytes_are_taken_once_and_in_order_across_segments() {
        let (mut a, mut b, mut c) = ([0; 3], [0; 0], [0; 5]);
        let all = segments(&mut [&mut a, &mut b, &mut c]);
        // SAFETY: the arrays outlive the cursor.
        let mut cursor = unsafe { ReadCursor::new(&all, 1, 6) };
        assert!(cursor.only_slice().is_none());
        let mut first = cursor.take(3);
        assert_eq!((first.len(), cursor.len()), (3, 3));
        first.copy_from(&[1, 2, 3, 4]);
        assert!(first.is_empty());
        cursor.peek(1).fill(9);
        cursor.advance(1);
        assert_eq!(cursor.slices().iter().map(|slice| slice.len()).collect::<Vec<_>>(), [2]);
        assert_eq!(cursor.only_slice().map(|slice| slice.len()), Some(2));
        cursor.copy_from(&[5]);
        cursor.take(7).fill(6);
        assert!(cursor.is_empty() && cursor.slices().is_empty() && cursor.only_slice().is_none());
        assert_eq!((a, c), ([0, 1, 2], [3, 9, 5, 6, 0]));
    }

    #[test]
    fn data_is_gathered_as_far_as_there_is_room() {
        let (mut a, mut b) = ([1, 2], [3, 4, 5]);
        let all = segments(&mut [&mut a, &mut b]);
        // SAFETY: the arrays outlive the cursor.
        let mut cursor = unsafe { WriteCursor::new(&all, 0, 5) };
        let mut to = [0; 4];
        cursor.copy_to(&mut to[..3]);
        assert_eq!((to, cursor.len()), ([1, 2, 3, 0], 2));
        cursor.copy_to(&mut to);
        assert_eq!((to, cursor.len()), ([4, 5, 3, 0], 0));
    }

    #[test]
    fn a_system_call_gets_all_slices_in_order_and_no_more_than_it_takes() {
        let mut memory = [0; 7];
        let base = memory.as_mut_ptr();
        let many: Vec<_> = (0..1100).map(|n| IoSegment { base, len: 1 + n % 7 }).collect();
        for (count, taken) in [(2, 2), (64, 64), (65, 65), (1100, 1024)] {
            let lengths: Vec<_> = many[..count].iter().map(|one| one.len).collect();
            let len = lengths.iter().sum::<usize>() as u64;
            // SAFETY: the array outlives the cursor, which only reads it.
            let cursor = unsafe { WriteCursor::new(&many[..count], 0, len) };
            let all = |slices: &[IoSlice<'_>]| slices.iter().map(|it| it.len()).collect::<Vec<_>>();
            assert_eq!(cursor.with_slices(all), lengths[..taken]);
        }
    }
}
