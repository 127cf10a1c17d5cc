//! Atomics and locks of what is shared between threads: the standard ones, or loom's in its own
//! tests.
//!
//! Invariant: both have the same face, so that the code loom tries in every order is the code that
//! runs.
//! Knows: nothing. Known by: flushes, remote, rendezvous.

#[cfg(all(test, loom))]
pub(crate) use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicI64, AtomicU8, AtomicU32, Ordering},
    sync::{Arc, Condvar, Mutex, MutexGuard},
};
pub(crate) use std::sync::PoisonError;
#[cfg(not(all(test, loom)))]
pub(crate) use std::sync::{
    Arc, Condvar, Mutex, MutexGuard,
    atomic::{AtomicI64, AtomicU8, AtomicU32, Ordering},
};

/// A cell that is only reached through a pointer, as loom's is.
#[cfg(not(all(test, loom)))]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(all(test, loom)))]
impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    /// Hands `run` a pointer to the value, which is good for as long as `run` runs and nobody else
    /// has one.
    pub(crate) fn with_mut<R>(&self, run: impl FnOnce(*mut T) -> R) -> R {
        run(self.0.get())
    }
}
