//! The rendezvous of a request's completer and the task that polls for its answer (C41).
//!
//! Invariant: `state` says who may touch what. `SUBMITTING`: the poller owns the waker. `QUEUED`:
//! whoever moves the state on owns it. `DONE`: the completer owns the waker, the poller the value.
//! Until then the completer owns the value; it is the only one that moves to `DONE`, and does so
//! once.
//! Knows: sync. Known by: inbox, driver, future. Kernel counterpart: the waiter of
//! struct iomap_dio (fs/iomap/direct-io.c).
#![allow(unsafe_code)]

use std::task::{Poll, Waker};

use crate::sync::{Arc, AtomicU8, Ordering, UnsafeCell};

/// Nobody waits: no poll has ended yet, or one is just exchanging the waker.
const SUBMITTING: u8 = 0;
/// The poller has left its waker.
const QUEUED: u8 = 1;
/// The completer is through; the value is there unless it gave up.
const DONE: u8 = 2;

struct Shared<T> {
    state: AtomicU8,
    waker: UnsafeCell<Option<Waker>>,
    value: UnsafeCell<Option<T>>,
}

// SAFETY: a cell is touched by one side at a time, as the invariant says, and the value goes from
// one thread to another, which `T: Send` allows.
unsafe impl<T: Send> Sync for Shared<T> {}
// SAFETY: as above; nothing in it belongs to a thread.
unsafe impl<T: Send> Send for Shared<T> {}

/// Both sides of a new rendezvous.
pub(crate) fn rendezvous<T>() -> (Completer<T>, Poller<T>) {
    let shared = Arc::new(Shared {
        state: AtomicU8::new(SUBMITTING),
        waker: UnsafeCell::new(None),
        value: UnsafeCell::new(None),
    });
    (Completer(shared.clone()), Poller(shared))
}

/// The side that has the answer one day. Dropped without one it still wakes the other side.
pub(crate) struct Completer<T>(Arc<Shared<T>>);

impl<T> Completer<T> {
    /// Gives the answer, and wakes who waits for it.
    pub(crate) fn complete(self, value: T) {
        // SAFETY: the state is not `DONE`, so the value is ours. The drop that follows moves on.
        self.0.value.with_mut(|slot| unsafe { *slot = Some(value) });
    }
}

impl<T> Drop for Completer<T> {
    fn drop(&mut self) {
        // Releases the value; acquires the waker.
        if self.0.state.swap(DONE, Ordering::AcqRel) == QUEUED {
            // SAFETY: this moved the state on from `QUEUED`, so the waker is ours.
            let waker = self.0.waker.with_mut(|slot| unsafe { (*slot).take() });
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }
}

/// The side that waits. It may be dropped at any time: the answer is then dropped with the
/// completer's side.
pub(crate) struct Poller<T>(Arc<Shared<T>>);

impl<T> Poller<T> {
    /// The answer; `None` if the completer gave up, or the answer was taken before. While there is
    /// none, `waker` is woken when that changes, and no waker of an earlier poll.
    pub(crate) fn poll(&mut self, waker: &Waker) -> Poll<Option<T>> {
        let Shared { state, waker: cell, .. } = &*self.0;
        let moved = |from, to, success| {
            state.compare_exchange(from, to, success, Ordering::Acquire).map_err(|now| now == DONE)
        };
        // Takes back the waker of an earlier poll. It was left by this side: nothing to acquire.
        if moved(QUEUED, SUBMITTING, Ordering::Relaxed) == Err(true) {
            return Poll::Ready(self.take());
        }
        // SAFETY: the state is `SUBMITTING`, so the waker is ours.
        cell.with_mut(|slot| match unsafe { &mut *slot } {
            Some(old) => old.clone_from(waker),
            none => *none = Some(waker.clone()),
        });
        match moved(SUBMITTING, QUEUED, Ordering::Release) {
            Ok(_) => Poll::Pending,
            // The completer came between, and has not touched the waker.
            Err(_) => Poll::Ready(self.take()),
        }
    }

    fn take(&mut self) -> Option<T> {
        // SAFETY: the state is `DONE`, so the value is ours.
        self.0.value.with_mut(|slot| unsafe { (*slot).take() })
    }
}

/// One thread, in each order. What two threads can do to each other is below.
#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn c41_an_answer_after_the_poll_wakes_once_and_one_before_it_wakes_nobody() {
        for polls_before in 0..3 {
            let (completer, mut poller) = rendezvous();
            let count = Arc::new(Count::default());
            let waker = Waker::from(count.clone());
            for _ in 0..polls_before {
                assert_eq!(poller.poll(&waker), Poll::Pending);
            }
            assert_eq!(count.0.load(Ordering::SeqCst), 0);
            completer.complete(7);
            assert_eq!(count.0.load(Ordering::SeqCst), polls_before.min(1));
            assert_eq!(poller.poll(&waker), Poll::Ready(Some(7)));
            assert_eq!(poller.poll(&waker), Poll::Ready(None), "it was taken before");
        }
    }

    #[test]
    fn c45_an_answer_nobody_takes_is_dropped_and_a_poll_after_the_end_leaves_no_waker() {
        let (completer, mut poller) = rendezvous();
        let (value, count) = (Arc::new(()), Arc::new(Count::default()));
        completer.complete(value.clone());
        let waker = Waker::from(count.clone());
        assert!(poller.poll(&waker).is_ready());
        drop(waker);
        assert_eq!(Arc::strong_count(&count), 1);
        assert_eq!(Arc::strong_count(&value), 1);

        let (completer, poller) = rendezvous();
        drop(poller);
        completer.complete(value.clone());
        assert_eq!(Arc::strong_count(&value), 1);
    }
}

/// `cargo test` with `--cfg loom`: every order in which the two sides can meet.
#[cfg(test)]
#[cfg(loom)]
mod loom_tests {
    use super::*;
    use loom::thread;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::task::Wake;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }

    fn counting() -> (std::sync::Arc<Count>, Waker) {
        let count = std::sync::Arc::new(Count::default());
        (count.clone(), count.into())
    }

    /// Waits for the completer's thread, and polls once more.
    fn after<T>(thread: thread::JoinHandle<()>, poller: &mut Poller<T>) -> Poll<Option<T>> {
        assert!(thread.join().is_ok());
        poller.poll(Waker::noop())
    }

    #[test]
    fn c41_an_answer_is_seen_or_wakes_whether_it_comes_before_or_after_the_poll() {
        loom::model(|| {
            let (completer, mut poller) = rendezvous();
            let (woken, waker) = counting();
            let thread = thread::spawn(move || completer.complete(Box::new(7)));
            let first = poller.poll(&waker);
            if first == Poll::Ready(Some(Box::new(7))) {
                assert!(thread.join().is_ok());
                assert_eq!(woken.0.load(SeqCst), 0);
                return;
            }
            assert_eq!(first, Poll::Pending);
            assert_eq!(after(thread, &mut poller), Poll::Ready(Some(Box::new(7))));
            assert_eq!(woken.0.load(SeqCst), 1);
        });
    }

    #[test]
    fn c41_of_two_wakers_the_one_left_last_is_woken() {
        loom::model(|| {
            let (completer, mut poller) = rendezvous();
            let ((early, first), (late, second)) = (counting(), counting());
            let thread = thread::spawn(move || completer.complete(Box::new(7)));
            let pending = poller.poll(&first).is_pending();
            let still_pending = pending && poller.poll(&second).is_pending();
            if !pending {
                assert!(thread.join().is_ok());
            } else if still_pending {
                assert_eq!(after(thread, &mut poller), Poll::Ready(Some(Box::new(7))));
            } else {
                assert_eq!(after(thread, &mut poller), Poll::Ready(None));
            }
            assert_eq!(late.0.load(SeqCst), usize::from(still_pending));
            // While the wakers are exchanged nobody waits: then the second poll has the answer.
            assert!(early.0.load(SeqCst) <= usize::from(pending && !still_pending));
        });
    }

    #[test]
    fn c45_an_answer_to_a_dropped_poller_is_dropped_once() {
        loom::model(|| {
            let (completer, mut poller) = rendezvous();
            let (_, waker) = counting();
            let value = std::sync::Arc::new(());
            let answer = value.clone();
            let thread = thread::spawn(move || completer.complete(answer));
            let taken = poller.poll(&waker).is_ready();
            drop(poller);
            assert!(thread.join().is_ok());
            assert_eq!(std::sync::Arc::strong_count(&value), 1, "taken: {taken}");
        });
    }

    #[test]
    fn c46_a_completer_that_gives_up_does_not_leave_its_poller_waiting() {
        loom::model(|| {
            let (completer, mut poller) = rendezvous::<Box<u8>>();
            let (woken, waker) = counting();
            let thread = thread::spawn(move || drop(completer));
            let pending = poller.poll(&waker).is_pending();
            assert_eq!(after(thread, &mut poller), Poll::Ready(None));
            assert_eq!(woken.0.load(SeqCst), usize::from(pending));
        });
    }
}
