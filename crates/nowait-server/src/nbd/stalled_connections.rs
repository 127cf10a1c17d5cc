//! Connections that keep memory which others wait for.
//!
//! Invariant: a connection is closed only if it has more memory than it is guaranteed, another one waits for memory, and
//! nothing but its own client holds it up, which sends and takes less than [`MIN_BYTES`] in a [`PERIOD`]. A thread whose
//! connections have no more than their guarantees is not woken up.

use std::time::{Duration, Instant};

use crate::buffer_budget::BufferBudget;
use crate::nbd::connection::Connection;

/// The time in which a client has to send or take [`MIN_BYTES`].
/// Beyond it: a connection that moved fewer, and holds more than it is guaranteed, is closed if another one waits for memory.
pub(crate) const PERIOD: Duration = Duration::from_secs(10);
/// Bytes that are some progress: 100 KiB a second.
/// Beyond it: the connection stays.
pub(crate) const MIN_BYTES: u64 = 1000 << 10;

/// When the connections of a thread are looked at.
#[derive(Default)]
pub(crate) struct StallCheck {
    due: Option<Instant>,
}

impl StallCheck {
    /// Has the connections looked at in a [`PERIOD`], if one of them may have more than `budget` guarantees it.
    pub(crate) fn watch(&mut self, budget: &BufferBudget, now: Instant) {
        if self.due.is_none() && budget.may_exceed_guarantee() {
            self.due = Some(now + PERIOD);
        }
    }

    /// When the connections are to be looked at.
    #[inline]
    pub(crate) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Looks at the `connections`, if it is time. Returns the numbers of those to close.
    pub(crate) fn stalled<'a>(
        &mut self,
        connections: impl Iterator<Item = &'a mut Connection>,
        budget: &BufferBudget,
        now: Instant,
    ) -> Vec<usize> {
        if self.due.is_none_or(|due| now < due) {
            return Vec::new();
        }
        self.due = None;
        self.watch(budget, now);
        let others_wait = budget.was_refused_since(now - PERIOD);
        let mut stalled = Vec::new();
        for connection in connections {
            let before = connection.moved_before.take();
            let is_waited_for = connection.session.in_flight > 0;
            if is_waited_for || !budget.exceeds_guarantee(connection.member.budget_used) {
                continue;
            }
            connection.moved_before = Some(connection.moved);
            if others_wait && before.is_some_and(|before| connection.moved - before < MIN_BYTES) {
                stalled.push(connection.number);
            }
        }
        stalled
    }
}
