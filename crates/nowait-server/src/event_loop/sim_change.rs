//! Changes that an operator makes of an export while it is served, for simulations.
//!
//! Invariant: a change takes effect in the same iteration in every run: a limit here lets some requests
//! through immediately and the next ones a day later, so that no clock decides.

use nowait::IoQueue;

use crate::event_loop::EventLoop;
use crate::frontend::Frontend;
use crate::rate_limit::{Limits, TokenBucket};
use crate::registered_export::RegisteredExport;

/// A change of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimChange {
    /// All clients together may do no more than a little.
    LimitExport,
    /// Limits of each client.
    LimitClients,
    /// There are no limits.
    LiftLimits,
    /// Changes of the disk are refused.
    Protect,
    /// They are taken again.
    Unprotect,
}

/// A bucket for one request now, and the next ones a day later.
const LITTLE: TokenBucket =
    TokenBucket { size: 1, one_time_burst: 0, refill_time: TokenBucket::MAX_REFILL_TIME };

impl<F: Frontend<Q>, Q: IoQueue> EventLoop<F, Q> {
    /// Changes `export`, which this thread may serve.
    pub(super) fn change(&mut self, export: &RegisteredExport, change: SimChange) {
        let limits = &export.limits;
        let little = Limits { requests: Some(LITTLE), bytes: None };
        match change {
            SimChange::LimitExport => limits.set(little),
            SimChange::LimitClients => limits.set_of_clients(little),
            SimChange::LiftLimits => {
                limits.set(Limits::default());
                limits.set_of_clients(Limits::default());
            }
            // The images of a simulation are open for writing, or refuse changes anyway.
            SimChange::Protect => _ = export.export().set_read_only(true),
            SimChange::Unprotect => _ = export.export().set_read_only(false),
        }
        self.review_exports();
    }
}
