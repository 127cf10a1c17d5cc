//! The atomics and locks of state that threads share: the standard library's, or loom's in loom
//! tests.
//!
//! Invariant: both have the same API, so that the code that loom runs in every order is the code
//! that ships.

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

/// A cell that is accessed through a pointer only, as loom's is.
#[cfg(not(all(test, loom)))]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(all(test, loom)))]
impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    /// Calls `run` with a pointer to the value. The caller dereferences it only during the call,
    /// and only while no other access to the value is possible.
    pub(crate) fn with_mut<R>(&self, run: impl FnOnce(*mut T) -> R) -> R {
        run(self.0.get())
    }
}
