//! Yield points: where a thread would sleep or wait for a device, a simulation runs another task.
//!
//! Invariant: on threads without a simulation a yield point does nothing: the caller has to sleep by itself.

thread_local! {
    static YIELD: std::cell::Cell<Option<fn()>> = const { std::cell::Cell::new(None) };
    static WAKE_COUNT: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Sets the function that is called on this thread in place of sleeping; `None` ends the
/// simulation.
pub fn set(run_others: Option<fn()>) {
    YIELD.set(run_others);
}

/// Whether a simulation runs on this thread.
#[must_use]
pub fn is_simulated() -> bool {
    YIELD.get().is_some()
}

/// Runs other tasks of the simulation, if there is one.
pub fn yield_now() {
    if let Some(run_others) = YIELD.get() {
        run_others();
    }
}

/// Counts a wake-up, in place of a write to the descriptor that the sleeping thread watches. False
/// without a simulation: the caller has to write to the descriptor.
pub(crate) fn notify() -> bool {
    WAKE_COUNT.set(WAKE_COUNT.get().wrapping_add(1));
    is_simulated()
}

/// Wake-ups that were counted on this thread.
pub(crate) fn wake_count() -> u64 {
    WAKE_COUNT.get()
}
