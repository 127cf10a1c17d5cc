//! Zeroed memory for tables of which little is used.
//!
//! Invariant: a page of a large table costs no memory before it is written to.
#![allow(unsafe_code)]

use std::sync::atomic::AtomicU32;

/// Rows of atomics that are 0.
pub(crate) fn zeroed_atomics<const ROW: usize, const ROWS: usize>() -> Box<[[AtomicU32; ROW]; ROWS]>
{
    // The allocator has pages of zeros, which an initialization one by one would write to.
    let zeros = Box::into_raw(vec![0u32; ROW * ROWS].into_boxed_slice());
    // SAFETY: the slice is owned and has as many numbers as the rows together, and an atomic has the size, the
    // alignment and the values of its integer.
    unsafe { Box::from_raw(zeros.cast()) }
}
