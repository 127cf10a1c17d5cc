//! Idle timeout: when a thread without connections retires.
//!
//! Invariant: the clock is read only when a thread has no connection, so that no request pays for
//! it.

use std::time::{Duration, Instant};

/// The idle timeout of one thread.
pub(crate) struct IdleTimeout {
    after: Duration,
    /// When it became idle; `None` while it has a connection.
    since: Option<Instant>,
    /// The timeout is zero now.
    hurried: bool,
}

impl IdleTimeout {
    /// A new thread without connections, which retires when it has been idle for `after`.
    pub(crate) fn new(after: Duration) -> Self {
        Self { after, since: Some(Instant::now()), hurried: false }
    }

    /// The thread has a connection.
    pub(crate) fn on_connection_added(&mut self) {
        (self.since, self.hurried) = (None, false);
    }

    /// The last connection has left.
    pub(crate) fn on_idle(&mut self) {
        self.since = Some(Instant::now());
    }

    /// Makes the thread retire as soon as it is idle.
    pub(crate) fn hurry(&mut self) {
        self.hurried = true;
    }

    /// Time until it retires; `None` while it has a connection.
    pub(crate) fn remaining(&self) -> Option<Duration> {
        let since = self.since?;
        let due = if self.hurried { Duration::ZERO } else { self.after };
        Some(due.saturating_sub(since.elapsed()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(1000);

    #[test]
    fn a_thread_retires_after_the_idle_timeout_and_at_once_if_hurried() {
        let mut idle = IdleTimeout::new(LONG);
        assert!(idle.remaining().is_some_and(|left| left > LONG / 2));
        idle.hurry();
        assert_eq!(idle.remaining(), Some(Duration::ZERO));
        idle.on_connection_added();
        assert_eq!(idle.remaining(), None);
        idle.on_idle();
        assert!(idle.remaining().is_some_and(|left| left > LONG / 2), "it was used since");
        assert_eq!(IdleTimeout::new(Duration::ZERO).remaining(), Some(Duration::ZERO));
    }
}
