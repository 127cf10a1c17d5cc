//! How the mutexes of this crate are locked.
//!
//! Invariant: no critical section of this crate can panic half-way through a change, so what a
//! poisoned mutex protects is whole.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, poisoned or not.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
