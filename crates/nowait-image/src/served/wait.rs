//! Waiting for another thread; in a simulation, until the others have gone on.
//!
//! Invariant: as with a condition variable, who waits holds nothing meanwhile, and may wake for
//! nothing.
//! Knows: nothing. Known by: store, busy.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The guard of `mutex`.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The guard of `mutex`, which is held during I/O.
pub(crate) fn lock_for_io<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    #[cfg(feature = "sim")]
    while nowait::sim::can_pause() {
        if let Ok(guard) = mutex.try_lock() {
            return guard;
        }
        nowait::sim::pause();
    }
    lock(mutex)
}

/// Waits until `changed` is notified.
pub(crate) fn wait<'a, T>(
    mutex: &'a Mutex<T>,
    changed: &Condvar,
    guard: MutexGuard<'a, T>,
) -> MutexGuard<'a, T> {
    #[cfg(feature = "sim")]
    if nowait::sim::can_pause() {
        drop(guard);
        nowait::sim::pause();
        return lock(mutex);
    }
    #[cfg(not(feature = "sim"))]
    let _ = mutex;
    changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
}
