//! The connection limit of a server.
//!
//! Invariant: a connection holds one permit from its acceptance until its socket is closed,
//! whichever thread it is on; at most `limit` permits exist at any time.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

/// The permits of a server.
pub(crate) struct ConnectionLimit {
    limit: u32,
    taken: AtomicU32,
    /// A client has chosen an export, now or before.
    had_client: AtomicBool,
    /// Called when no connection is left after that.
    on_empty: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// The permit of one connection; dropping it frees the permit.
pub(crate) struct ConnectionPermit(Arc<ConnectionLimit>);

impl ConnectionLimit {
    pub(crate) fn new(limit: u32) -> Self {
        Self {
            limit,
            taken: AtomicU32::new(0),
            had_client: AtomicBool::new(false),
            on_empty: OnceLock::new(),
        }
    }

    pub(crate) fn limit(&self) -> u32 {
        self.limit
    }

    /// Permits in use.
    #[inline]
    pub(crate) fn taken(&self) -> u32 {
        self.taken.load(Ordering::Acquire)
    }

    /// Takes a permit, if one is free.
    pub(crate) fn take(self: &Arc<Self>) -> Option<ConnectionPermit> {
        let next = |taken| (taken < self.limit).then_some(taken + 1);
        let taken = self.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
        taken.is_ok().then(|| ConnectionPermit(self.clone()))
    }
}

impl ConnectionLimit {
    /// Calls `act` each time the last connection is closed, provided a client has ever chosen an
    /// export; at once, if that has happened already. Only the first callback is kept.
    pub(crate) fn on_empty(&self, act: impl Fn() + Send + Sync + 'static) {
        let _ = self.on_empty.set(Box::new(act));
        if self.taken.load(Ordering::Acquire) == 0 {
            self.notify_empty();
        }
    }

    fn notify_empty(&self) {
        if self.had_client.load(Ordering::Acquire)
            && let Some(act) = self.on_empty.get()
        {
            act();
        }
    }
}

impl ConnectionPermit {
    /// Notes that the client has chosen an export, so it did more than list them.
    pub(crate) fn mark_transmission(&self) {
        self.0.had_client.store(true, Ordering::Release);
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        if self.0.taken.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.notify_empty();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_limit_permits_and_a_dropped_one_is_free_again() {
        let limit = Arc::new(ConnectionLimit::new(2));
        let first = limit.take().unwrap();
        let _second = limit.take().unwrap();
        assert!(limit.take().is_none());
        drop(first);
        assert!(limit.take().is_some_and(|_third| limit.take().is_none()));
    }

    #[test]
    fn the_last_disconnect_is_reported_if_a_client_has_chosen_an_export() {
        let limit = Arc::new(ConnectionLimit::new(4));
        let left = Arc::new(AtomicU32::new(0));
        let count = left.clone();
        limit.on_empty(move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        let counted = || left.load(Ordering::Relaxed);
        drop(limit.take().unwrap());
        assert_eq!(counted(), 0, "it has chosen no export");
        let (first, second) = (limit.take().unwrap(), limit.take().unwrap());
        first.mark_transmission();
        drop(first);
        assert_eq!(counted(), 0, "another is there");
        drop(second);
        assert_eq!(counted(), 1);
    }

    #[test]
    fn a_disconnect_before_the_callback_was_set_is_reported_too() {
        let limit = Arc::new(ConnectionLimit::new(1));
        limit.take().unwrap().mark_transmission();
        let left = Arc::new(AtomicU32::new(0));
        let count = left.clone();
        limit.on_empty(move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(left.load(Ordering::Relaxed), 1);
    }
}
