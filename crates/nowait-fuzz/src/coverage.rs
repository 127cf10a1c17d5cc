//! Which edges of the code an input has taken, where the compiler was asked to count them.
//!
//! Invariant: without `-C passes=sancov-module` nothing is counted and every input is as new as
//! any other. With it, an edge is new the first time that it is taken about so often: once, twice,
//! a few times, many times.
//! Knows: nothing. Known by: run. Source: Clang, "SanitizerCoverage", inline-8bit-counters.
#![allow(unsafe_code)]

use std::slice;
use std::sync::Mutex;
use std::sync::PoisonError;

/// The counters of one unit of compiled code.
struct Unit {
    counters: *mut u8,
    len: usize,
    /// For each counter, the magnitudes that it has had, a bit for each.
    seen: Vec<u8>,
}

// SAFETY: the counters are statics of this program, of which single bytes are read and written.
unsafe impl Send for Unit {}

static UNITS: Mutex<Vec<Unit>> = Mutex::new(Vec::new());

/// Called by every instrumented unit when the program starts.
///
/// # Safety
/// The counters lie between `start` and `end` and stay there, as the compiler sees to.
// SAFETY: a name that is reserved for whoever collects these counters.
#[unsafe(no_mangle)]
unsafe extern "C" fn __sanitizer_cov_8bit_counters_init(start: *mut u8, end: *mut u8) {
    let len = (end as usize).saturating_sub(start as usize);
    let mut units = UNITS.lock().unwrap_or_else(PoisonError::into_inner);
    if units.iter().all(|unit| unit.counters != start) {
        units.push(Unit { counters: start, len, seen: vec![0; len] });
    }
}

/// Whether anything is counted in this build.
#[must_use]
pub fn is_measured() -> bool {
    !UNITS.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
}

/// Takes what was counted since the last call. How many edges were taken as often as never before.
pub(crate) fn take_new() -> usize {
    let mut new = 0;
    for unit in UNITS.lock().unwrap_or_else(PoisonError::into_inner).iter_mut() {
        // SAFETY: the compiler has put so many counters there. Other threads may count meanwhile,
        // which at worst loses a count.
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
