//! The waker of a thread that sleeps in its ring: any thread wakes it.
//!
//! Invariant: after a wake-up the owner's next `try_sleep` fails, or the descriptor is readable
//! while the owner sleeps; so a wake-up is never lost.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::task::Wake;

use rustix::event::{EventfdFlags, eventfd};

use crate::loom_shim::{AtomicU8, Ordering};
use crate::types::error::{Error, Operation};

const IDLE: u8 = 0;
const WOKEN: u8 = 1;
/// The owner sleeps, or is about to: a wake-up has to make the descriptor readable.
const SLEEPING: u8 = 2;

/// Whether there was a wake-up.
struct WakeState(AtomicU8);

impl WakeState {
    fn new() -> Self {
        Self(AtomicU8::new(IDLE))
    }

    /// Records a wake-up. True if the owner sleeps.
    fn wake(&self) -> bool {
        // Releases what the waking thread has done before.
        self.0.swap(WOKEN, Ordering::AcqRel) == SLEEPING
    }

    /// Forgets the wake-ups so far. True if there was one.
    fn take(&self) -> bool {
        self.0.swap(IDLE, Ordering::Acquire) == WOKEN
    }

    fn is_woken(&self) -> bool {
        self.0.load(Ordering::Relaxed) == WOKEN
    }

    /// False if there was a wake-up since the last `take`: the owner must not sleep then.
    fn try_sleep(&self) -> bool {
        self.0.compare_exchange(IDLE, SLEEPING, Ordering::Acquire, Ordering::Acquire).is_ok()
    }

    /// Ends a sleep. True if there was a wake-up meanwhile, which is kept.
    fn end_sleep(&self) -> bool {
        self.0.compare_exchange(SLEEPING, IDLE, Ordering::Acquire, Ordering::Acquire).is_err()
    }
}

/// The waker, and the descriptor that ends its owner's sleep.
pub(crate) struct WakeFlag {
    state: WakeState,
    fd: OwnedFd,
}

impl WakeFlag {
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: the descriptor could not be made.
    pub(crate) fn new() -> Result<Self, Error> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::from_os(e, Operation::SetUp))?;
        Ok(Self { state: WakeState::new(), fd })
    }

    /// Forgets the wake-ups so far. True if there was one.
    pub(crate) fn take(&self) -> bool {
        self.state.take()
    }

    /// Whether there was a wake-up since the last `take`.
    pub(crate) fn is_woken(&self) -> bool {
        self.state.is_woken()
    }

    /// To be called before a sleep, which ends when the descriptor is readable. False if there was
    /// a wake-up since the last `take`: the owner must not sleep then.
    pub(crate) fn try_sleep(&self) -> bool {
        self.state.try_sleep()
    }

    /// To be called after a sleep.
    pub(crate) fn end_sleep(&self) {
        if self.state.end_sleep() {
            // EAGAIN: the write of that wake-up is still to come. It ends a later sleep early.
            let _ = rustix::io::read(&self.fd, &mut [0u8; 8]);
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.state.wake() {
            // A full counter (EAGAIN) is readable already.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn only_a_wake_up_during_a_sleep_makes_the_descriptor_readable() {
        let flag = Arc::new(WakeFlag::new().unwrap());
        let written = || rustix::io::read(&flag.fd, &mut [0u8; 8]).is_ok();
        flag.wake_by_ref();
        assert!(flag.is_woken() && !flag.try_sleep() && !written());
        assert!(flag.take() && !flag.take());
        assert!(flag.try_sleep());
        flag.wake_by_ref();
        flag.wake_by_ref();
        assert!(written());
        flag.end_sleep();
        assert!(flag.take());
        assert!(flag.try_sleep());
        flag.end_sleep();
        assert!(!flag.take() && !written());
    }
}

/// Tests under `--cfg loom`: every order of the steps of the owner and of another thread.
#[cfg(test)]
#[cfg(loom)]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn c41_a_wake_up_prevents_a_sleep_or_ends_it_and_shows_what_was_done_before_it() {
        loom::model(|| {
            let [data, readable] = [(); 2].map(|()| Arc::new(AtomicU8::new(0)));
            let state = Arc::new(WakeState::new());
            let (other, done, written) = (state.clone(), data.clone(), readable.clone());
            let thread = thread::spawn(move || {
                done.store(1, Ordering::Relaxed);
                if other.wake() {
                    written.store(1, Ordering::Relaxed);
                }
            });
            if state.try_sleep() {
                // The sleep lasts until the descriptor is readable.
                assert!(thread.join().is_ok());
                assert_eq!(readable.load(Ordering::Relaxed), 1);
                assert!(state.end_sleep());
            } else {
                assert_eq!(data.load(Ordering::Relaxed), 1);
                assert!(thread.join().is_ok());
            }
            assert!(state.take());
        });
    }

    #[test]
    fn c41_a_wake_up_beside_the_end_of_a_sleep_is_kept() {
        loom::model(|| {
            let (state, data) = (Arc::new(WakeState::new()), Arc::new(AtomicU8::new(0)));
            assert!(state.try_sleep());
            let (other, done) = (state.clone(), data.clone());
            let thread = thread::spawn(move || {
                done.store(1, Ordering::Relaxed);
                other.wake();
            });
            // The sleep has ended for another reason.
            state.end_sleep();
            if state.take() {
                assert_eq!(data.load(Ordering::Relaxed), 1);
                assert!(thread.join().is_ok());
            } else {
                assert!(thread.join().is_ok());
                assert!(!state.try_sleep() && state.take());
            }
        });
    }
}
