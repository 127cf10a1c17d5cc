//! An allocator that counts allocated bytes.
//!
//! Invariant: `held` is the number of bytes that are allocated and not freed, `peak` its maximum
//! since the last reset. All calls are forwarded to the system allocator.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn grew(bytes: usize) {
    let held = HELD.fetch_add(bytes, Ordering::Relaxed) + bytes;
    PEAK.fetch_max(held, Ordering::Relaxed);
}

fn shrank(bytes: usize) {
    HELD.fetch_sub(bytes, Ordering::Relaxed);
}

// SAFETY: every call is forwarded unchanged to the system allocator.
unsafe impl GlobalAlloc for CountingAllocator {
    // SAFETY: as promised by the caller.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grew(layout.size());
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: as promised by the caller.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grew(layout.size());
        // SAFETY: as promised by the caller.
        unsafe { System.alloc_zeroed(layout) }
    }

    // SAFETY: as promised by the caller.
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        shrank(layout.size());
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(memory, layout) }
    }

    // SAFETY: as promised by the caller.
    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        grew(bytes);
        shrank(layout.size());
        // SAFETY: as promised by the caller.
        unsafe { System.realloc(memory, layout, bytes) }
    }
}

/// Resets the peak to the bytes held now, and returns them.
pub(crate) fn reset_peak() -> usize {
    let held = HELD.load(Ordering::Relaxed);
    PEAK.store(held, Ordering::Relaxed);
    held
}

/// The most bytes held simultaneously since [`reset_peak`].
pub(crate) fn peak() -> usize {
    PEAK.load(Ordering::Relaxed)
}
