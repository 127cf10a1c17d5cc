//! Zeroed memory for tables of which little is used.
//!
//! Invariant: a page of a large table costs no memory before it is written to.
#![allow(unsafe_code)]

use std::sync::atomic::AtomicU32;

/// `count` atomics that are 0.
pub(crate) fn zeroed_atomics(count: usize) -> Box<[AtomicU32]> {
    // The allocator has pages of zeros, which an initialization one by one would write to.
    let zeros = Box::into_raw(vec![0u32; count].into_boxed_slice());
    // SAFETY: the slice is owned, and an atomic has the size, the alignment and the values of its integer.
    unsafe { Box::from_raw(zeros as *mut [AtomicU32]) }
}
