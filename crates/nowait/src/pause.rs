//! Where a thread would sleep or wait for a device, a simulation goes on with something else.
//!
//! Invariant: without the feature `sim`, and on threads that no simulation runs on, nothing is ever
//! paused: whoever asks has to sleep by itself.
//! Knows: nothing. Known by: ranges, flushes, remote, sim.

#[cfg(feature = "sim")]
thread_local! {
    static PAUSE: std::cell::Cell<Option<fn()>> = const { std::cell::Cell::new(None) };
    static STIRRED: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// What is called on this thread instead of sleeping, or nothing.
#[cfg(feature = "sim")]
pub fn set(pause: Option<fn()>) {
    PAUSE.set(pause);
}

/// Whether there is anybody who could go on while this thread waits.
#[cfg(feature = "sim")]
#[must_use]
pub fn is_possible() -> bool {
    PAUSE.get().is_some()
}

/// Lets others run, if there are any.
#[cfg(feature = "sim")]
pub fn here() {
    if let Some(pause) = PAUSE.get() {
        pause();
    }
}

/// Says that something was left for a thread that may sleep: what would be a write to a descriptor
/// which it watches. False if nobody hears it but a descriptor's owner.
#[cfg(feature = "sim")]
pub(crate) fn stir() -> bool {
    STIRRED.set(STIRRED.get().wrapping_add(1));
    is_possible()
}

/// How often anything was stirred on this thread.
#[cfg(feature = "sim")]
pub(crate) fn stirred() -> u64 {
    STIRRED.get()
}

/// Nobody hears it.
#[cfg(not(feature = "sim"))]
#[inline(always)]
pub(crate) const fn stir() -> bool {
    false
}

/// There is nobody.
#[cfg(not(feature = "sim"))]
#[inline(always)]
pub(crate) const fn is_possible() -> bool {
    false
}

/// There is nobody.
#[cfg(not(feature = "sim"))]
#[inline(always)]
pub(crate) const fn here() {}
