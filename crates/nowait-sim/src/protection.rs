//! Knowledge of the oracle about an export that an operator makes read-only and writable again.
//!
//! Invariant: a change that was sent while the export was read-only, and answered while it still was, is
//! refused; one that never met the protection is not.

use nowait_server::SimChange;

use crate::model::Time;

/// The protection of an export.
#[derive(Clone, Copy, Debug, Default)]
pub struct Protection {
    /// Since when the export is read-only.
    since: Option<Time>,
    /// When it was so last.
    until: Time,
}

impl Protection {
    /// The export is changed at the moment `now`.
    pub fn change(&mut self, change: SimChange, now: Time) {
        match change {
            SimChange::Protect => self.since = self.since.or(Some(now)),
            SimChange::Unprotect => self.lift(now),
            SimChange::LimitExport | SimChange::LimitClients | SimChange::LiftLimits => {}
        }
    }

    /// The export is writable from `now` on.
    pub fn lift(&mut self, now: Time) {
        if self.since.take().is_some() {
            self.until = now;
        }
    }

    /// Whether a change that was sent at `began` and is answered now must have been refused.
    pub fn refuses(&self, began: Time) -> bool {
        self.since.is_some_and(|since| began > since)
    }

    /// Whether it may have been refused.
    pub fn may_refuse(&self, began: Time) -> bool {
        self.since.is_some() || began < self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_change_within_the_protection_must_be_refused_and_one_outside_of_it_must_not() {
        let mut protection = Protection::default();
        assert!(!protection.may_refuse(0));
        protection.change(SimChange::Protect, 10);
        protection.change(SimChange::Protect, 15);
        assert!(!protection.refuses(9) && protection.may_refuse(9));
        assert!(protection.refuses(11));
        protection.change(SimChange::Unprotect, 20);
        assert!(!protection.refuses(11) && protection.may_refuse(11));
        assert!(!protection.may_refuse(21));
    }
}
