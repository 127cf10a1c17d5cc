//! Injected panics, for tests of a process in which a thread panics.
//!
//! Invariant: without debug assertions nothing here has an effect, and no environment variable is
//! read.

/// The environment variable that names the point where a debug build panics.
#[cfg(debug_assertions)]
const VARIABLE: &str = "NOWAIT_TEST_PANIC";

/// In a debug build: panics if the environment variable names this point.
#[cfg(debug_assertions)]
pub fn panic_at(point: &str) {
    static REQUESTED: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    let requested = REQUESTED.get_or_init(|| std::env::var(VARIABLE).ok());
    assert!(requested.as_deref() != Some(point), "on purpose,\nat {point}");
}

/// Does nothing.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub const fn panic_at(_: &str) {}
