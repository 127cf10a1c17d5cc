//! How long a client may take to begin: from its connection to its first request.
//!
//! Invariant: there is a time to wake up at only as long as a handshake is under way, so that a
//! server whose clients are all past theirs sleeps as long as they do.
//! Knows: nothing. Known by: conn, turn.

use std::time::{Duration, Instant};

/// From connecting to the end of the handshake, encryption included.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(10);

/// The handshakes under way on a thread.
#[derive(Default)]
pub(crate) struct Handshakes {
    count: usize,
    /// When the first of them is late, or an earlier one that has ended would have been.
    first_due: Option<Instant>,
}

impl Handshakes {
    /// One has begun, which is late at `due`.
    pub(crate) fn begun(&mut self, due: Instant) {
        self.count += 1;
        self.first_due = Some(self.first_due.map_or(due, |first| first.min(due)));
    }

    /// One of them has ended, well or not.
    pub(crate) fn ended(&mut self) {
        self.count -= 1;
        if self.count == 0 {
            self.first_due = None;
        }
    }

    /// When to look for late ones, if there is anything to look for.
    #[inline]
    pub(crate) fn due(&self) -> Option<Instant> {
        self.first_due
    }

    /// Those that are late were looked for and ended; these are when the others will be.
    pub(crate) fn looked(&mut self, others: impl Iterator<Item = Instant>) {
        self.first_due = others.min();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_due_unless_a_handshake_is_under_way() {
        let mut handshakes = Handshakes::default();
        let now = Instant::now();
        assert_eq!(handshakes.due(), None);
        handshakes.begun(now + HANDSHAKE);
        handshakes.begun(now);
        assert_eq!(handshakes.due(), Some(now));
        handshakes.ended();
        handshakes.looked([now + HANDSHAKE].into_iter());
        assert_eq!(handshakes.due(), Some(now + HANDSHAKE));
        handshakes.ended();
        assert_eq!(handshakes.due(), None);
    }
}
