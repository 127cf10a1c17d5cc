//! The edges of the code that an input has reached, if the compiler was told to count them.
//!
//! Invariant: without `-C passes=sancov-module` nothing is counted and no input counts as new. With
//! it, an edge is new when its count reaches a new order of magnitude: once, twice, a few times,
//! many times.
#![allow(unsafe_code)]

use std::slice;
use std::sync::{Mutex, PoisonError};

/// The counters of one unit of compiled code.
struct Unit {
    counters: *mut u8,
    len: usize,
    /// For each counter the orders of magnitude that it has had, one bit for each.
    seen: Vec<u8>,
}

// SAFETY: the counters are statics of this program, and only single bytes of them are read and
// written.
unsafe impl Send for Unit {}

static UNITS: Mutex<Vec<Unit>> = Mutex::new(Vec::new());

/// Called by every instrumented unit when the program starts.
///
/// # Safety
/// The counters are between `start` and `end` for the lifetime of the program, as the compiler
/// guarantees.
// SAFETY: the name is reserved for the program that collects these counters.
#[unsafe(no_mangle)]
unsafe extern "C" fn __sanitizer_cov_8bit_counters_init(start: *mut u8, end: *mut u8) {
    let len = (end as usize).saturating_sub(start as usize);
    let mut units = UNITS.lock().unwrap_or_else(PoisonError::into_inner);
    if units.iter().all(|unit| unit.counters != start) {
        units.push(Unit { counters: start, len, seen: vec![0; len] });
    }
}

/// Whether anything is counted in this build.
pub fn is_measured() -> bool {
    !UNITS.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
}

/// Resets the counters. Returns the number of edges that were taken in a new order of magnitude.
pub(crate) fn take_new() -> usize {
    let mut new = 0;
    for unit in UNITS.lock().unwrap_or_else(PoisonError::into_inner).iter_mut() {
        // SAFETY: the compiler has placed this many counters there. Other threads may count at the
        // same time, which at worst loses a count.
        let counters = unsafe { slice::from_raw_parts_mut(unit.counters, unit.len) };
        for (counter, seen) in counters.iter_mut().zip(&mut unit.seen) {
            if *counter != 0 {
                let magnitude = 1u8 << counter.ilog2();
                new += usize::from(*seen & magnitude == 0);
                *seen |= magnitude;
                *counter = 0;
            }
        }
    }
    new
}
