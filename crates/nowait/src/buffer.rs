//! Aligned buffers with a home: memory for direct I/O that is handed out and taken back without
//! the allocator, and registered with the queue where that succeeds.
//!
//! Invariant: a piece of a chunk is either in one free list or owned by one `Buf`; a chunk lives
//! until its pool and every `Buf` of it are gone. All memory was zeroed when it was allocated, so
//! it may be read at any time.
//! Knows: io. Known by: request, blocking, engine. Kernel counterpart: registered buffers of
//! io_uring(7).
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::{Cell, RefCell};
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::rc::Rc;

use crate::io::UNREGISTERED;

/// Alignment of every buffer's first byte, in bytes: a page, enough for any device's memory
/// alignment.
pub const BUFFER_ALIGN: usize = 4096;
/// The smallest buffer, in bytes; each class is twice the one before.
const MIN_CLASS_BYTES: usize = 4096;
const CLASSES: usize = 9;
/// What is allocated and registered at once, in bytes; also the largest pooled buffer.
const CHUNK_BYTES: usize = MIN_CLASS_BYTES << (CLASSES - 1);
/// `Buf::class` of a buffer that is larger than a chunk and has an allocation of its own.
const LARGE: u8 = u8::MAX;

struct Memory {
    base: NonNull<u8>,
    layout: Layout,
}

impl Memory {
    fn zeroed(bytes: usize) -> Option<Self> {
        let layout = Layout::from_size_align(bytes.max(1), BUFFER_ALIGN).ok()?;
        // SAFETY: the layout's size is not 0.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { base, layout })
    }

    fn free(&self) {
        // SAFETY: `base` came from `alloc_zeroed` with this layout, and the callers (two `Drop`s)
        // call this once.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

/// A zeroed, page-aligned piece of memory outside any pool.
pub(crate) struct Aligned(Memory);

impl Aligned {
    /// `None` when the allocator has nothing left.
    pub(crate) fn zeroed(bytes: usize) -> Option<Self> {
        Memory::zeroed(bytes).map(Self)
    }
}

impl Deref for Aligned {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the allocation has this size, is initialised, and borrowed with `self`.
        unsafe { std::slice::from_raw_parts(self.0.base.as_ptr(), self.0.layout.size()) }
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.0.base.as_ptr(), self.0.layout.size()) }
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        self.0.free();
    }
}

#[derive(Clone, Copy)]
struct Free {
    base: NonNull<u8>,
    registered: u16,
}

struct Home {
    free: RefCell<[Vec<Free>; CLASSES]>,
    chunks: RefCell<Vec<Memory>>,
    bytes: Cell<usize>,
    limit: usize,
}

impl Drop for Home {
    fn drop(&mut self) {
        for chunk in self.chunks.get_mut() {
            chunk.free();
        }
    }
}

/// The buffers of one engine.
pub(crate) struct Buffers(Rc<Home>);

impl Buffers {
    /// A pool with chunks of at most `limit` bytes, and as much again for what fits no chunk.
    pub(crate) fn new(limit: usize) -> Self {
        Self(Rc::new(Home {
            free: RefCell::default(),
            chunks: RefCell::default(),
            bytes: Cell::new(0),
            limit,
        }))
    }

    /// A buffer of at least `len` bytes, or `None` when the limit is reached or memory is short.
    /// Chunks keep their class, so that what the classes leave unused may be as much again as the
    /// limit: a buffer of a class that came too late is allocated by itself.
    /// A new chunk is offered to `register` first, which answers with its number in the queue.
    #[inline]
    pub(crate) fn get(
        &self,
        len: usize,
        register: impl FnOnce(*mut u8, usize) -> Option<u16>,
    ) -> Option<Buf> {
        if len > CHUNK_BYTES {
            return self.get_large(len);
        }
        let class = class_of(len);
        let free = self.0.free.borrow_mut()[class].pop();
        let free = match free {
            Some(free) => free,
            None => match self.refill(class, register) {
                Some(free) => free,
                None => return self.get_large(len),
            },
        };
        Some(Buf {
            base: free.base,
            len: (MIN_CLASS_BYTES << class) as u32,
            registered: free.registered,
            class: class as u8,
            home: ManuallyDrop::new(self.0.clone()),
        })
    }

    #[cold]
    fn refill(
        &self,
        class: usize,
        register: impl FnOnce(*mut u8, usize) -> Option<u16>,
    ) -> Option<Free> {
        let bytes = self.reserve(CHUNK_BYTES, self.0.limit)?;
        let Some(chunk) = Memory::zeroed(bytes) else {
            self.0.bytes.set(self.0.bytes.get() - bytes);
            return None;
        };
        let registered = register(chunk.base.as_ptr(), bytes).unwrap_or(UNREGISTERED);
        let mut lists = self.0.free.borrow_mut();
        let step = MIN_CLASS_BYTES << class;
        for start in (0..bytes).step_by(step).rev() {
            // SAFETY: `start` is below the chunk's size.
            let base = unsafe { chunk.base.add(start) };
            lists[class].push(Free { base, registered });
        }
        self.0.chunks.borrow_mut().push(chunk);
        lists[class].pop()
    }

    #[cold]
    fn get_large(&self, len: usize) -> Option<Buf> {
        let len = len.checked_next_multiple_of(BUFFER_ALIGN)?;
        let short_len = u32::try_from(len).ok()?;
        self.reserve(len, self.0.limit.saturating_mul(2))?;
        let Some(memory) = Memory::zeroed(len) else {
            self.0.bytes.set(self.0.bytes.get() - len);
            return None;
        };
        let base = memory.base;
        let home = ManuallyDrop::new(self.0.clone());
        Some(Buf { base, home, len: short_len, registered: UNREGISTERED, class: LARGE })
    }

    fn reserve(&self, bytes: usize, limit: usize) -> Option<usize> {
        let all = self.0.bytes.get().checked_add(bytes)?;
        if all > limit {
            return None;
        }
        self.0.bytes.set(all);
        Some(bytes)
    }
}

#[inline]
fn class_of(len: usize) -> usize {
    let pages = len.max(1).div_ceil(MIN_CLASS_BYTES);
    pages.next_power_of_two().trailing_zeros() as usize
}

/// Memory for a request, page-aligned; goes back to its pool when dropped.
pub struct Buf {
    base: NonNull<u8>,
    home: ManuallyDrop<Rc<Home>>,
    len: u32,
    registered: u16,
    class: u8,
}

impl Buf {
    /// The registered buffer it lies in, or [`UNREGISTERED`].
    #[inline]
    pub(crate) fn registered(&self) -> u16 {
        self.registered
    }

    /// Its first byte.
    #[inline]
    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }
}

impl Deref for Buf {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the piece has `len` initialised bytes and only this `Buf` owns them.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len as usize) }
    }
}

impl DerefMut for Buf {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len as usize) }
    }
}

impl Drop for Buf {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the field is not used again.
        let home = unsafe { ManuallyDrop::take(&mut self.home) };
        let free = Free { base: self.base, registered: self.registered };
        give_back(home, free, self.len, self.class);
    }
}

/// Takes everything by value: no buffer needs an address of its own only because it could be
/// dropped, so that moving one costs nothing where it is not.
#[inline(never)]
fn give_back(home: Rc<Home>, free: Free, len: u32, class: u8) {
    if class != LARGE {
        home.free.borrow_mut()[usize::from(class)].push(free);
        return;
    }
    home.bytes.set(home.bytes.get() - len as usize);
    if let Ok(layout) = Layout::from_size_align(len as usize, BUFFER_ALIGN) {
        Memory { base: free.base, layout }.free();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_buffer_is_the_next_one_handed_out() {
        let pool = Buffers::new(CHUNK_BYTES);
        let first = pool.get(4096, |_, _| Some(7)).unwrap();
        let base = first.base();
        assert_eq!(first.registered(), 7);
        drop(first);
        assert_eq!(pool.get(1, |_, _| None).unwrap().base(), base);
    }

    #[test]
    fn the_limit_holds_for_pooled_and_for_large_buffers() {
        let pool = Buffers::new(CHUNK_BYTES);
        let _small = pool.get(4096, |_, _| None).unwrap();
        let large = pool.get(CHUNK_BYTES, |_, _| None).unwrap();
        assert!(pool.get(8192, |_, _| None).is_none());
        drop(large);
        assert!(pool.get(8192, |_, _| None).is_some());
    }

    #[test]
    fn a_buffer_outlives_its_pool() {
        let pool = Buffers::new(CHUNK_BYTES);
        let mut buf = pool.get(5000, |_, _| None).unwrap();
        drop(pool);
        buf[4999] = 1;
        assert_eq!((buf.len(), buf[4999], buf.base() as usize % BUFFER_ALIGN), (8192, 1, 0));
    }
}
