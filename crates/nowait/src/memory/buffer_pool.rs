//! Aligned buffers for direct I/O that are reused without the allocator, and registered with the
//! queue where that succeeds.
//!
//! Invariant: a part of an arena is aligned to its size, and either in one free list or owned by one `PooledBuffer`; an
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
    /// `None` when the allocator has no such memory. `align` is a power of two.
    fn zeroed(bytes: usize, align: usize) -> Option<Self> {
        let layout = Layout::from_size_align(bytes.max(1), align).ok()?;
        // SAFETY: the layout's size is not 0.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { base, layout })
    }

    fn free(&self) {
        // SAFETY: `base` came from `alloc_zeroed` with this layout, and the callers, which own the allocation, call
        // this once.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

/// Zeroed, page-aligned memory outside any pool.
pub(crate) struct AlignedBox(Allocation);

impl AlignedBox {
    /// `None` when the allocator has no such memory.
    pub(crate) fn zeroed(bytes: usize) -> Option<Self> {
        Allocation::zeroed(bytes, BUFFER_ALIGN).map(Self)
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
    /// The memory of buffers that have an allocation of their own.
    large: RefCell<Vec<Allocation>>,
    budget: Budget,
}

impl BufferPoolInner {
    /// Calls `found` with the allocations of large buffers and the place of the one that contains `base`.
    #[cold]
    fn with_large<T>(
        &self,
        base: NonNull<u8>,
        found: impl FnOnce(&mut Vec<Allocation>, usize) -> T,
    ) -> Option<T> {
        let mut large = self.large.borrow_mut();
        let holds = |it: &Allocation| {
            let inside = base.addr().get().checked_sub(it.base.addr().get());
            inside.is_some_and(|inside| inside < it.layout.size())
        };
        let at = large.iter().position(holds);
        debug_assert!(at.is_some(), "a large buffer is in the list until it is dropped");
        at.map(|at| found(&mut large, at))
    }
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
        let (free, arenas, large) = Default::default();
        Self(Rc::new(BufferPoolInner { free, arenas, large, budget }))
    }

    /// A buffer of `len` bytes, which begin at byte `offset` of memory of at least `room` bytes; or `None` when the
    /// limit is reached or memory is short. `offset` and `len` fit in `room`. An arena keeps its class. If the arenas of other classes have used up the limit, the buffer
    /// gets an allocation of its own, up to twice the limit.
    /// `register` gets each new arena and returns its number in the queue, if it has one.
    #[inline]
    pub(crate) fn get(
        &self,
        (room, offset, len): (usize, usize, u32),
        register: impl FnOnce(*mut u8, usize) -> Option<u16>,
    ) -> Option<PooledBuffer> {
        debug_assert!(offset + len as usize <= room);
        if room > ARENA_BYTES {
            return self.get_large(room, offset, len);
        }
        let class = class_of(room);
        let free = self.0.free.borrow_mut()[class].pop();
        let free = match free {
            Some(free) => free,
            None => match self.refill(class, register) {
                Some(free) => free,
                None => return self.get_large(room, offset, len),
            },
        };
        Some(PooledBuffer {
            // SAFETY: the memory has `room` bytes, and `offset` is not above it.
            base: unsafe { free.base.add(offset) },
            len,
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
        let Some(arena) = Allocation::zeroed(bytes, ARENA_BYTES) else {
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
    fn get_large(&self, room: usize, offset: usize, len: u32) -> Option<PooledBuffer> {
        let room = room.max(1).checked_next_multiple_of(BUFFER_ALIGN)?;
        let budget = &self.0.budget;
        budget.take(room, budget.limit.saturating_mul(2))?;
        let Some(memory) = Allocation::zeroed(room, BUFFER_ALIGN) else {
            budget.give_back(room);
            return None;
        };
        // SAFETY: the memory has `room` bytes, and `offset` is not above it.
        let base = unsafe { memory.base.add(offset) };
        self.0.large.borrow_mut().push(memory);
        let pool = ManuallyDrop::new(self.0.clone());
        Some(PooledBuffer { base, pool, len, registered: UNREGISTERED, class: LARGE })
    }
}

#[inline]
fn class_of(len: usize) -> usize {
    let pages = len.max(1).div_ceil(MIN_CLASS_BYTES);
    pages.next_power_of_two().trailing_zeros() as usize
}

/// The bytes of one request, in memory of its engine: as many as the request has. The memory returns to its pool when the
/// buffer is dropped.
///
/// A read that has ended with fewer bytes leaves the rest of the buffer as it was.
pub struct PooledBuffer {
    /// The first byte of the request.
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

    /// Bytes of memory that the buffer takes: at least its length.
    #[inline]
    #[must_use]
    pub fn capacity(&self) -> usize {
        match self.class {
            LARGE => self.segment().len,
            class => MIN_CLASS_BYTES << class,
        }
    }

    /// All of its memory, with the room around its bytes.
    pub(crate) fn segment(&self) -> IoSegment {
        if self.class == LARGE {
            let all = |memory: &Allocation| IoSegment {
                base: memory.base.as_ptr(),
                len: memory.layout.size(),
            };
            let found = self.pool.with_large(self.base, |large, at| large.get(at).map(all));
            return found.flatten().unwrap_or(IoSegment { base: self.base(), len: self.len() });
        }
        let len = MIN_CLASS_BYTES << self.class;
        IoSegment { base: part_of(self.base, len).as_ptr(), len }
    }

    /// The first byte of its request.
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
        give_back(pool, free, self.class);
    }
}

/// Arguments by value: a reference would force every buffer that might be dropped into memory, and
/// make moving one cost a copy.
#[inline(never)]
fn give_back(pool: Rc<BufferPoolInner>, Free { base, registered }: Free, class: u8) {
    if class != LARGE {
        let base = part_of(base, MIN_CLASS_BYTES << class);
        pool.free.borrow_mut()[usize::from(class)].push(Free { base, registered });
        return;
    }
    if let Some(memory) = pool.with_large(base, |large, at| large.swap_remove(at)) {
        pool.budget.give_back(memory.layout.size());
        memory.free();
    }
}

/// The first byte of the part of an arena, of `bytes` bytes, that contains `base`.
#[inline]
fn part_of(base: NonNull<u8>, bytes: usize) -> NonNull<u8> {
    let inside = base.addr().get() & (bytes - 1);
    // SAFETY: parts are aligned to their size, so that this byte belongs to the same one.
    unsafe { base.sub(inside) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(len: usize) -> (usize, usize, u32) {
        (len, 0, len as u32)
    }

    #[test]
    fn a_buffer_has_as_many_bytes_as_its_request_and_gives_all_of_its_memory_back() {
        let pool = BufferPool::new(Budget::new(2 * ARENA_BYTES));
        for (room, offset, len) in [(8192, 700, 5000), (3 * ARENA_BYTES, 65_535, 1 << 20)] {
            let mut buf = pool.get((room, offset, len), |_, _| Some(7)).unwrap();
            let IoSegment { base, len: capacity } = buf.segment();
            assert_eq!((buf.len(), buf.capacity()), (len as usize, capacity));
            assert!(capacity >= room && (base as usize).is_multiple_of(BUFFER_ALIGN));
            assert_eq!(buf.base() as usize - base as usize, offset);
            buf.fill(1);
            drop(buf);
            let again = pool.get((room, 0, len), |_, _| None).unwrap();
            assert!(room > ARENA_BYTES || again.base() == base);
        }
        assert_eq!(pool.0.budget.used(), ARENA_BYTES, "the arena; what is large is freed");
    }

    #[test]
    fn a_dropped_buffer_is_the_next_one_allocated() {
        let pool = BufferPool::new(Budget::new(ARENA_BYTES));
        let first = pool.get(whole(4096), |_, _| Some(7)).unwrap();
        let base = first.base();
        assert_eq!(first.registered(), 7);
        drop(first);
        assert_eq!(pool.get(whole(1), |_, _| None).unwrap().base(), base);
    }

    #[test]
    fn the_limit_holds_for_pooled_and_for_large_buffers() {
        let pool = BufferPool::new(Budget::new(ARENA_BYTES));
        let _small = pool.get(whole(4096), |_, _| None).unwrap();
        let large = pool.get(whole(ARENA_BYTES), |_, _| None).unwrap();
        assert!(pool.get(whole(8192), |_, _| None).is_none());
        drop(large);
        assert!(pool.get(whole(8192), |_, _| None).is_some());
    }

    #[test]
    fn a_buffer_outlives_its_pool() {
        let pool = BufferPool::new(Budget::new(ARENA_BYTES));
        let mut buf = pool.get(whole(5000), |_, _| None).unwrap();
        drop(pool);
        buf[4999] = 1;
        assert_eq!((buf.len(), buf[4999], buf.capacity()), (5000, 1, 8192));
        assert_eq!(buf.base() as usize % BUFFER_ALIGN, 0);
    }

    #[test]
    fn pools_share_a_budget_and_a_dropped_pool_returns_its_part() {
        let budget = Budget::new(2 * ARENA_BYTES);
        let (one, other) = (BufferPool::new(budget.clone()), BufferPool::new(budget.clone()));
        let held: Vec<_> =
            (0..2).map(|_| one.get(whole(ARENA_BYTES), |_, _| None).unwrap()).collect();
        let _large: Vec<_> =
            (0..2).map(|_| other.get(whole(ARENA_BYTES), |_, _| None).unwrap()).collect();
        assert!(other.get(whole(4096), |_, _| None).is_none());
        assert_eq!(budget.used(), 4 * ARENA_BYTES);
        drop((one, held));
        assert_eq!(budget.used(), 2 * ARENA_BYTES);
        assert!(other.get(whole(4096), |_, _| None).is_some());
    }
}
