//! How many connections a server has at once, and how many it may have.
//!
//! Invariant: a connection has one seat from the moment that it is taken in until its socket is
//! closed, whichever thread it is on; there are never more seats taken than there are.
//! Knows: nothing. Known by: conn, entrance, group.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The seats of a server.
pub(crate) struct Seats {
    limit: u32,
    taken: AtomicU32,
}

/// The seat of one connection, free again when it is dropped.
pub(crate) struct Seat(Arc<Seats>);

impl Seats {
    pub(crate) fn new(limit: u32) -> Self {
        Self { limit, taken: AtomicU32::new(0) }
    }

    pub(crate) fn limit(&self) -> u32 {
        self.limit
    }

    /// A seat, if one is free.
    pub(crate) fn take(self: &Arc<Self>) -> Option<Seat> {
        let next = |taken| (taken < self.limit).then_some(taken + 1);
        let taken = self.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
        taken.is_ok().then(|| Seat(self.clone()))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_as_many_seats_as_said_and_one_that_was_left_is_free() {
        let seats = Arc::new(Seats::new(2));
        let first = seats.take().unwrap();
        let _second = seats.take().unwrap();
        assert!(seats.take().is_none());
        drop(first);
        assert!(seats.take().is_some_and(|_third| seats.take().is_none()));
    }
}
