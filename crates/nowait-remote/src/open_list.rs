//! The storages of this process that are open, with what each counts.
//!
//! Invariant: a storage is listed as long as its counters are used.

use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The counters of the storages of one kind, by their locations.
pub(crate) struct OpenList<T>(Mutex<Vec<(String, Weak<T>)>>);

impl<T: Default> OpenList<T> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// New counters of the storage at `location`.
    pub(crate) fn add(&self, location: String) -> Arc<T> {
        let counters = Arc::new(T::default());
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|(_, counters)| counters.strong_count() > 0);
        open.push((location, Arc::downgrade(&counters)));
        counters
    }

    /// The counters of all, in the order in which they were opened.
    pub(crate) fn all(&self) -> Vec<(String, Arc<T>)> {
        let open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        open.iter().filter_map(|(at, counters)| Some((at.clone(), counters.upgrade()?))).collect()
    }
}
