//! Returns the memory of closed connections to the system.
//!
//! The allocator keeps freed memory below a block that is still in use, so a server would stay as
//! large as a flood of clients had made it.
//!
//! Invariant: a thread returns memory at most once in `RELEASE_AFTER`, before it sleeps, and only
//! if a connection has been closed since.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

/// Delay from the first closed connection to the release, which covers all that close meanwhile.
const RELEASE_AFTER: Duration = Duration::from_secs(1);

/// Whether a thread has memory of closed connections to return.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) enum DelayedRelease {
    #[default]
    None,
    /// Connections have been closed, and the clock has not been read since.
    New,
    Since(Instant),
}

impl DelayedRelease {
    /// A connection has been closed.
    pub(crate) fn on_closed(&mut self) {
        if *self == Self::None {
            *self = Self::New;
        }
    }

    /// Returns the memory if it is time at `now`; otherwise returns the time that is left.
    pub(crate) fn release_if_due(&mut self, now: Instant) -> Option<Duration> {
        let since = match *self {
            Self::None => return None,
            Self::New => now,
            Self::Since(since) => since,
        };
        let left = RELEASE_AFTER.saturating_sub(now.saturating_duration_since(since));
        if left == Duration::ZERO {
            release_memory();
            *self = Self::None;
            return None;
        }
        *self = Self::Since(since);
        Some(left)
    }
}

/// Makes the allocator return free pages, if it is one that keeps them (glibc).
fn release_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim(3) may be called at any time, from any thread; it frees only what is free.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_released_once_some_time_after_the_first_of_several_closed_connections() {
        let now = Instant::now();
        let mut release = DelayedRelease::default();
        assert_eq!(release.release_if_due(now), None);
        release.on_closed();
        assert_eq!(release.release_if_due(now), Some(RELEASE_AFTER));
        release.on_closed();
        assert_eq!(release.release_if_due(now + RELEASE_AFTER / 4), Some(RELEASE_AFTER * 3 / 4));
        assert_eq!(release.release_if_due(now + RELEASE_AFTER), None);
        assert_eq!(release, DelayedRelease::None);
    }
}
