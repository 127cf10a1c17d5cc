//! Locks and waits; in a simulation, a waiting thread yields until the others have gone on.
//!
//! Invariant: as with a condition variable, the waiting thread has released the mutex, and it may
//! wake up spuriously.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, also if it is poisoned.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Like [`lock`], for a mutex that is held during I/O.
pub(crate) fn lock_for_io<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    #[cfg(feature = "sim")]
    while nowait::sim::is_simulated() {
        if let Ok(guard) = mutex.try_lock() {
            return guard;
        }
        nowait::sim::yield_now();
    }
    lock(mutex)
}

/// Waits until `changed` is notified, or wakes up spuriously.
pub(crate) fn wait<'a, T>(
    mutex: &'a Mutex<T>,
    changed: &Condvar,
    guard: MutexGuard<'a, T>,
) -> MutexGuard<'a, T> {
    #[cfg(feature = "sim")]
    if nowait::sim::is_simulated() {
        drop(guard);
        nowait::sim::yield_now();
        return lock(mutex);
    }
    #[cfg(not(feature = "sim"))]
    let _ = mutex;
    changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
}
