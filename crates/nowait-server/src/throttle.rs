//! The members of a thread that wait because their export has reached its limits.
//!
//! Invariant: a member that waits takes no request, but its answers leave; without limits nothing
//! waits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nowait::{Op, Request};

use crate::rate_limit::{Limiter, SharedLimits};

/// The state of a thread's limits.
#[derive(Default)]
pub(crate) struct Throttle {
    limiter: Option<Arc<Limiter>>,
    /// The changes of the limits that were seen.
    changes: u64,
    /// Members that wait for tokens, in the order of their arrival.
    waiting: Vec<usize>,
}

impl Throttle {
    /// Takes over changed limits.
    #[inline]
    pub(crate) fn update(&mut self, shared: &SharedLimits) {
        let changes = shared.changes();
        if changes != self.changes {
            self.changes = changes;
            self.limiter = shared.limiter();
        }
    }

    /// Has the limits of `shared` again.
    pub(crate) fn restore(&mut self, shared: &SharedLimits) {
        (self.changes, self.limiter) = (shared.changes(), shared.limiter());
    }

    /// Has no limits from now on, so that the thread can end.
    pub(crate) fn lift(&mut self, shared: &SharedLimits) {
        (self.changes, self.limiter) = (shared.changes(), None);
    }

    /// Whether `member` has to wait; then it is kept here.
    #[inline]
    pub(crate) fn holds(&mut self, member: usize, is_limited: impl FnOnce() -> bool) -> bool {
        let Some(limiter) = &self.limiter else { return false };
        let waits = is_limited() && limiter.wait_time(Instant::now()).is_some();
        if waits && !self.waiting.contains(&member) {
            self.waiting.push(member);
        }
        waits
    }

    /// Takes the tokens of a request that has ended.
    #[inline]
    pub(crate) fn charge(&self, io: Request) {
        if let Some(limiter) = &self.limiter {
            let moves = matches!(io.op, Op::Read | Op::Write);
            limiter.charge(if moves { io.range.len } else { 0 });
        }
    }

    /// The time until members that wait can go on.
    #[inline]
    pub(crate) fn wait_time(&self) -> Option<Duration> {
        if self.waiting.is_empty() {
            return None;
        }
        let limiter = self.limiter.as_ref();
        Some(limiter.and_then(|limiter| limiter.wait_time(Instant::now())).unwrap_or_default())
    }

    /// The members that can go on.
    pub(crate) fn released(&mut self) -> Vec<usize> {
        match self.wait_time() {
            Some(Duration::ZERO) => std::mem::take(&mut self.waiting),
            _ => Vec::new(),
        }
    }
}
