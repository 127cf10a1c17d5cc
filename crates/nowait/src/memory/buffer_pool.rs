//! Aligned buffers for direct I/O that are reused without the allocator, and registered with the
//! queue where that succeeds.
//!
//! Invariant: a part of an arena is either in one free list or owned by one `PooledBuffer`; an
//! arena lives until its pool and every `PooledBuffer` of the pool are gone. All memory was zeroed
//! when it was allocated, so it may be read at any time.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use crate::memory::bounded_counter::BoundedCounter;
use crate::types::iovec::IoSegment;
use crate::types::transfer::UNREGISTERED;

/// Alignment of every buffer's first byte, in bytes: a page, enough for any device's memory
/// alignment.
pub const BUFFER_ALIGN: usize = 4096;
/// The smallest buffer, in bytes; the buffers of each class are twice as large as those before.
const MIN_CLASS_BYTES: usize = 4096;
const CLASSES: usize = 9;
/// Bytes of an arena, which is allocated and registered together; also the largest pooled buffer.
const ARENA_BYTES: usize = MIN_CLASS_BYTES << (CLASSES - 1);
/// `PooledBuffer::class` of a buffer with an allocation of its own, because it is larger than an
/// arena or no arena of its class could be added.
const LARGE: u8 = u8::MAX;

struct Allocation {
    base: NonNull<u8>,
    layout: Layout,
}

impl Allocation {
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

/// Zeroed, page-aligned memory outside any pool.
pub(crate) struct AlignedBox(Allocation);

impl AlignedBox {
    /// `None` when the allocator has no such memory.
    pub(crate) fn zeroed(bytes: usize) -> Option<Self> {
        Allocation::zeroed(bytes).map(Self)
    }
}

impl Deref for AlignedBox {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the allocation has this size, is initialised, and is borrowed with `self`.
        unsafe { std::slice::from_raw_parts(self.0.base.as_ptr(), self.0.layout.size()) }
    }
}

impl DerefMut for AlignedBox {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.0.base.as_ptr(), self.0.layout.size()) }
    }
}

impl Drop for AlignedBox {
    fn drop(&mut self) {
        self.0.free();
    }
}

#[derive(Clone, Copy)]
struct Free {
    base: NonNull<u8>,
    registered: u16,
}

/// A limit on the memory that the buffers of several engines take together. It is charged when
/// memory is allocated, not when a pooled buffer is taken.
#[derive(Clone, Debug)]
pub struct Budget {
    limit: usize,
    used: Arc<BoundedCounter>,
}

impl Budget {
    /// At most `bytes` for pooled buffers, and as much again for buffers that fit no arena.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self { limit: bytes, used: Arc::default() }
    }

    /// Bytes that are allocated now.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used.used()
    }

    /// Takes `bytes`, unless the sum would exceed `limit`.
    fn take(&self, bytes: usize, limit: usize) -> Option<usize> {
        self.used.take(bytes, limit).then_some(bytes)
    }

    fn give_back(&self, bytes: usize) {
        self.used.give_back(bytes);
    }
}

struct BufferPoolInner {
    free: RefCell<[Vec<Free>; CLASSES]>,
    arenas: RefCell<Vec<Allocation>>,
    budget: Budget,
}

impl Drop for BufferPoolInner {
    fn drop(&mut self) {
        for arena in self.arenas.get_mut() {
            arena.free();
            self.budget.give_back(arena.layout.size());
        }
    }
}

/// The buffers of one engine.
pub(crate) struct BufferPool(Rc<BufferPoolInner>);

impl BufferPool {
    /// A pool whose memory is taken from `budget`.
    pub(crate) fn new(budget: Budget) -> Self {
        let (free, arenas) = (RefCell::default(), RefCell::default());
        Self(Rc::new(BufferPoolInner { free, arenas, budget }))
    }

    /// A buffer of at least `len` bytes, or `None` when the limit is reached or memory is short.
    /// An arena keeps its class. If the arenas of other classes have used up the limit, the buffer
    /// gets an allocation of its own, up to twice the limit.
    /// `register` gets each new arena and returns its number in the queue, if it has one.
    #[inline]
    pub(crate) fn get(
        &self,
        len: usize,
        register: impl FnOnce(*mut u8, usize) -> Option<u16>,
    ) -> Option<PooledBuffer> {
        if len > ARENA_BYTES {
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
        Some(PooledBuffer {
            base: free.base,
            len: (MIN_CLASS_BYTES << class) as u32,
            registered: free.registered,
            class: class as u8,
            pool: ManuallyDrop::new(self.0.clone()),
        })
    }

    #[cold]
    fn refill(
        &self,
        class: usize,
        register: impl FnOnce(*mut u8, usize) -> Option<u16>,
    ) -> Option<Free> {
        let budget = &self.0.budget;
        let bytes = budget.take(ARENA_BYTES, budget.limit)?;
        let Some(arena) = Allocation::zeroed(bytes) else {
            budget.give_back(bytes);
            return None;
        };
        let registered = register(arena.base.as_ptr(), bytes).unwrap_or(UNREGISTERED);
        let mut lists = self.0.free.borrow_mut();
        let step = MIN_CLASS_BYTES << class;
        for start in (0..bytes).step_by(step).rev() {
            // SAFETY: `start` is below the arena's size.
            let base = unsafe { arena.base.add(start) };
            lists[class].push(Free { base, registered });
        }
        self.0.arenas.borrow_mut().push(arena);
        lists[class].pop()
    }

    #[cold]
    fn get_large(&self, len: usize) -> Option<PooledBuffer> {
        let len = len.checked_next_multiple_of(BUFFER_ALIGN)?;
        let short_len = u32::try_from(len).ok()?;
        let budget = &self.0.budget;
        budget.take(len, budget.limit.saturating_mul(2))?;
        let Some(memory) = Allocation::zeroed(len) else {
            budget.give_back(len);
            return None;
        };
        let base = memory.base;
        let pool = ManuallyDrop::new(self.0.clone());
        Some(PooledBuffer { base, pool, len: short_len, registered: UNREGISTERED, class: LARGE })
    }
}

#[inline]
fn class_of(len: usize) -> usize {
    let pages = len.max(1).div_ceil(MIN_CLASS_BYTES);
    pages.next_power_of_two().trailing_zeros() as usize
}

/// Page-aligned memory for a request; returns to its pool when dropped.
pub struct PooledBuffer {
    base: NonNull<u8>,
    pool: ManuallyDrop<Rc<BufferPoolInner>>,
    len: u32,
    registered: u16,
    class: u8,
}

impl PooledBuffer {
    /// The number of the registered buffer it lies in, or [`UNREGISTERED`].
    #[inline]
    pub(crate) fn registered(&self) -> u16 {
        self.registered
    }

    /// All of its memory.
    #[inline]
    pub(crate) fn segment(&self) -> IoSegment {
        IoSegment { base: self.base(), len: self.len as usize }
    }

    /// Its first byte.
    #[inline]
    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }
}

impl Deref for PooledBuffer {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: `base` has `len` initialised bytes, and only this `PooledBuffer` owns them.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len as usize) }
    }
}

impl DerefMut for PooledBuffer {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len as usize) }
    }
}

impl Drop for PooledBuffer {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the field is not used again.
        let pool = unsafe { ManuallyDrop::take(&mut self.pool) };
        let free = Free { base: self.base, registered: self.registered };
        give_back(pool, free, self.len, self.class);
    }
}

/// Arguments by value: a reference would force every buffer that might be dropped into memory, and
/// make moving one cost a copy.
#[inline(never)]
fn give_back(pool: Rc<BufferPoolInner>, free: Free, len: u32, class: u8) {
    if class != LARGE {
        pool.free.borrow_mut()[usize::from(class)].push(free);
        return;
    }
    pool.budget.give_back(len as usize);
    if let Ok(layout) = Layout::from_size_align(len as usize, BUFFER_ALIGN) {
        Allocation { base: free.base, layout }.free();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_buffer_is_the_next_one_allocated() {
        let pool = BufferPool::new(Budget::new(ARENA_BYTES));
        let first = pool.get(4096, |_, _| Some(7)).unwrap();
        let base = first.base();
        assert_eq!(first.registered(), 7);
        drop(first);
        assert_eq!(pool.get(1, |_, _| None).unwrap().base(), base);
    }

    #[test]
    fn the_limit_holds_for_pooled_and_for_large_buffers() {
        let pool = BufferPool::new(Budget::new(ARENA_BYTES));
        let _small = pool.get(4096, |_, _| None).unwrap();
        let large = pool.get(ARENA_BYTES, |_, _| None).unwrap();
        assert!(pool.get(8192, |_, _| None).is_none());
        drop(large);
        assert!(pool.get(8192, |_, _| None).is_some());
    }

    #[test]
    fn a_buffer_outlives_its_pool() {
        let pool = BufferPool::new(Budget::new(ARENA_BYTES));
        let mut buf = pool.get(5000, |_, _| None).unwrap();
        drop(pool);
        buf[4999] = 1;
        assert_eq!((buf.len(), buf[4999], buf.base() as usize % BUFFER_ALIGN), (8192, 1, 0));
    }

    #[test]
    fn pools_share_a_budget_and_a_dropped_pool_returns_its_part() {
        let budget = Budget::new(2 * ARENA_BYTES);
        let (one, other) = (BufferPool::new(budget.clone()), BufferPool::new(budget.clone()));
        let held: Vec<_> = (0..2).map(|_| one.get(ARENA_BYTES, |_, _| None).unwrap()).collect();
        let _large: Vec<_> = (0..2).map(|_| other.get(ARENA_BYTES, |_, _| None).unwrap()).collect();
        assert!(other.get(4096, |_, _| None).is_none());
        assert_eq!(budget.used(), 4 * ARENA_BYTES);
        drop((one, held));
        assert_eq!(budget.used(), 2 * ARENA_BYTES);
        assert!(other.get(4096, |_, _| None).is_some());
    }
}
