//! Injected death: a simulation has the server die between two of its steps that others can see.
//!
//! Invariant: without the feature `sim` nothing dies and no check is made at run time; with it only
//! what runs on the thread that has injected the death.

#[cfg(feature = "sim")]
thread_local! {
    static STEPS_LEFT: std::cell::Cell<Option<u32>> = const { std::cell::Cell::new(None) };
}

/// Has the server die after `steps` steps from now on, or not at all.
#[cfg(feature = "sim")]
pub fn die_after(steps: Option<u32>) {
    STEPS_LEFT.set(steps);
}

/// Whether the server dies at this step.
#[cfg(feature = "sim")]
pub(crate) fn dies() -> bool {
    let left = STEPS_LEFT.get();
    STEPS_LEFT.set(left.map(|steps| steps.saturating_sub(1)));
    left == Some(0)
}

/// Always false.
#[cfg(not(feature = "sim"))]
#[inline(always)]
pub(crate) const fn dies() -> bool {
    false
}
