//! A counter with an upper limit that several threads take from.
//!
//! Invariant: a refused amount is not counted.

use std::sync::atomic::{AtomicUsize, Ordering};

/// An amount in use: bytes, or transfers.
#[derive(Debug, Default)]
pub(crate) struct BoundedCounter(AtomicUsize);

impl BoundedCounter {
    pub(crate) const fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// Whether `amount` more stays within `limit`; if so, it is counted until it is given back.
    pub(crate) fn take(&self, amount: usize, limit: usize) -> bool {
        let more = |now: usize| now.checked_add(amount).filter(|&then| then <= limit);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    pub(crate) fn give_back(&self, amount: usize) {
        self.0.fetch_sub(amount, Ordering::Relaxed);
    }

    /// The amount that is counted now.
    pub(crate) fn used(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_holds_and_a_refused_amount_is_not_counted() {
        let counter = BoundedCounter::new();
        assert!(counter.take(3, 8) && counter.take(5, 8));
        assert!(!counter.take(1, 8) && !counter.take(usize::MAX, usize::MAX));
        assert_eq!(counter.used(), 8);
        counter.give_back(5);
        assert_eq!(counter.used(), 3);
    }
}
