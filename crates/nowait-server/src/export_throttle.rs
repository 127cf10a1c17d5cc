//! The limits of one export, as one thread applies them to its members.
//!
//! Invariant: a request is charged once, to the limits that hold when its service ends.

use std::sync::Arc;

use crate::fairness::Quantum;
use crate::rate_limit::{ClientBuckets, CurrentLimits, Limiter, SharedLimits, Tokens};

/// The limits of one export on one thread.
#[derive(Default)]
pub(crate) struct ExportThrottle {
    limits: CurrentLimits,
    /// There is a limit.
    is_on: bool,
    /// The changes of the limits that were seen.
    changes: u64,
    /// Members that wait.
    pub(crate) waiting: u64,
    /// How many members have waited together: each gets an equal share of what has come meanwhile.
    pub(crate) contenders: u64,
    /// The round of releases that `contenders` is of.
    round: u64,
}

impl ExportThrottle {
    /// Takes over changed limits. Returns whether there are some.
    pub(crate) fn update(&mut self, shared: &SharedLimits) -> bool {
        let changes = shared.changes();
        changes != self.changes && self.change(changes, shared.current())
    }

    /// Has the limits of `shared` again.
    pub(crate) fn restore(&mut self, shared: &SharedLimits) -> bool {
        self.change(shared.changes(), shared.current())
    }

    /// Has no limits from now on, so that the members can leave.
    pub(crate) fn lift(&mut self) -> bool {
        self.change(self.changes, CurrentLimits::default())
    }

    #[cold]
    fn change(&mut self, changes: u64, limits: CurrentLimits) -> bool {
        self.is_on = limits.export.is_some() || limits.of_clients.is_some();
        (self.changes, self.limits) = (changes, limits);
        true
    }

    /// Whether there is a limit.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.is_on
    }

    /// The limiters that hold for a member of `client`.
    pub(crate) fn limiters(&self, client: &ClientBuckets) -> [Option<Arc<Limiter>>; 2] {
        let of_client = self.limits.of_clients.map(|under| client.limiter(under));
        [self.limits.export.clone(), of_client]
    }

    /// Takes the tokens of the requests that a member of `client` has submitted in `quantum`.
    pub(crate) fn charge(&self, quantum: &mut Quantum, client: &ClientBuckets) {
        let taken = quantum.take_debt();
        if taken != Tokens::NONE {
            self.limiters(client).into_iter().flatten().for_each(|limiter| limiter.charge(taken));
        }
    }

    /// A member that waited is looked at again, in `round`, or has left.
    pub(crate) fn on_released(&mut self, round: u64) {
        if self.round != round {
            (self.round, self.contenders) = (round, self.waiting);
        }
        self.waiting = self.waiting.saturating_sub(1);
    }
}
