//! The handshake timeout, from a client's connection to the end of its handshake.
//!
//! Invariant: a deadline exists only while a handshake is in progress, so that a server whose
//! clients have all ended theirs is not woken up.

use std::time::{Duration, Instant};

/// How long the handshake may take from the connection to its end, TLS included.
/// Beyond it: the connection is closed.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// The handshakes in progress on a thread.
#[derive(Default)]
pub(crate) struct HandshakeDeadlines {
    count: usize,
    /// The earliest deadline; may be that of a handshake that has ended since.
    first_due: Option<Instant>,
}

impl HandshakeDeadlines {
    /// Adds a handshake with the deadline `due`.
    pub(crate) fn begin(&mut self, due: Instant) {
        self.count += 1;
        self.first_due = Some(self.first_due.map_or(due, |first| first.min(due)));
    }

    /// Removes a handshake that has ended, with success or not.
    pub(crate) fn end(&mut self) {
        self.count -= 1;
        if self.count == 0 {
            self.first_due = None;
        }
    }

    /// When to check for timed-out handshakes; `None` if there are no handshakes.
    #[inline]
    pub(crate) fn due(&self) -> Option<Instant> {
        self.first_due
    }

    /// Records a check that ended the timed-out handshakes; `others` are the remaining deadlines.
    pub(crate) fn reset(&mut self, others: impl Iterator<Item = Instant>) {
        self.first_due = others.min();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_deadline_exists_unless_a_handshake_is_in_progress() {
        let mut handshakes = HandshakeDeadlines::default();
        let now = Instant::now();
        assert_eq!(handshakes.due(), None);
        handshakes.begin(now + HANDSHAKE_TIMEOUT);
        handshakes.begin(now);
        assert_eq!(handshakes.due(), Some(now));
        handshakes.end();
        handshakes.reset([now + HANDSHAKE_TIMEOUT].into_iter());
        assert_eq!(handshakes.due(), Some(now + HANDSHAKE_TIMEOUT));
        handshakes.end();
        assert_eq!(handshakes.due(), None);
    }
}
