//! A one-shot channel from the thread that completes a request to the task that polls for its
//! result (C41).
//!
//! Invariant: `state` decides the ownership of the cells. `SUBMITTING`: the receiver owns the
//! waker. `QUEUED`: the side that changes the state owns the waker from then on. `DONE`: the sender
//! owns the waker, the receiver the value. Before `DONE` the sender owns the value; only the sender
//! sets `DONE`, once.
#![allow(unsafe_code)]

use std::task::{Poll, Waker};

use crate::loom_shim::{Arc, AtomicU8, Ordering, UnsafeCell};

/// No waker is left: no poll has ended yet, or one is just exchanging the waker.
const SUBMITTING: u8 = 0;
/// The receiver has left its waker.
const QUEUED: u8 = 1;
/// The sender is dropped; the value is there if it was sent.
const DONE: u8 = 2;

struct Shared<T> {
    state: AtomicU8,
    waker: UnsafeCell<Option<Waker>>,
    value: UnsafeCell<Option<T>>,
}

// SAFETY: only the side that owns a cell by the invariant accesses it, and the value goes from one
// thread to another, which `T: Send` allows.
unsafe impl<T: Send> Sync for Shared<T> {}
// SAFETY: as above; no field is bound to a thread.
unsafe impl<T: Send> Send for Shared<T> {}

/// Both sides of a new channel.
pub(crate) fn oneshot<T>() -> (Sender<T>, Receiver<T>) {
    let shared = Arc::new(Shared {
        state: AtomicU8::new(SUBMITTING),
        waker: UnsafeCell::new(None),
        value: UnsafeCell::new(None),
    });
    (Sender(shared.clone()), Receiver(shared))
}

/// The sending side. Dropped without a value it still wakes the receiver.
pub(crate) struct Sender<T>(Arc<Shared<T>>);

impl<T> Sender<T> {
    /// Sends the value and wakes the receiver's task.
    pub(crate) fn complete(self, value: T) {
        // SAFETY: the state is not `DONE`, so this side owns the value. The drop that follows sets
        // `DONE`.
        self.0.value.with_mut(|slot| unsafe { *slot = Some(value) });
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        // Releases the value; acquires the waker.
        if self.0.state.swap(DONE, Ordering::AcqRel) == QUEUED {
            // SAFETY: this side has changed the state from `QUEUED`, so it owns the waker.
            let waker = self.0.waker.with_mut(|slot| unsafe { (*slot).take() });
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }
}

/// The receiving side. It may be dropped at any time: the value is then dropped with the sender.
pub(crate) struct Receiver<T>(Arc<Shared<T>>);

impl<T> Receiver<T> {
    /// The value; `None` if the sender was dropped without one, or the value was taken before.
    /// While it is pending, the end of the sender wakes `waker`, and no waker of an earlier poll.
    pub(crate) fn poll(&mut self, waker: &Waker) -> Poll<Option<T>> {
        let Shared { state, waker: cell, .. } = &*self.0;
        let moved = |from, to, success| {
            state.compare_exchange(from, to, success, Ordering::Acquire).map_err(|now| now == DONE)
        };
        // Takes back the waker of an earlier poll. This side has left it: there is nothing to
        // acquire.
        if moved(QUEUED, SUBMITTING, Ordering::Relaxed) == Err(true) {
            return Poll::Ready(self.take());
        }
        // SAFETY: the state is `SUBMITTING`, so this side owns the waker.
        cell.with_mut(|slot| match unsafe { &mut *slot } {
            Some(old) => old.clone_from(waker),
            none => *none = Some(waker.clone()),
        });
        match moved(SUBMITTING, QUEUED, Ordering::Release) {
            Ok(_) => Poll::Pending,
            // The sender was dropped meanwhile, and has not accessed the waker.
            Err(_) => Poll::Ready(self.take()),
        }
    }

    /// Whether the sender is gone, so that a poll is ready.
    pub(crate) fn has_ended(&self) -> bool {
        self.0.state.load(Ordering::Acquire) == DONE
    }

    fn take(&mut self) -> Option<T> {
        // SAFETY: the state is `DONE`, so this side owns the value.
        self.0.value.with_mut(|slot| unsafe { (*slot).take() })
    }
}

/// Tests on one thread, in each order; `loom_tests` has those of two threads.
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
    fn c41_a_value_sent_after_the_poll_wakes_once_and_one_sent_before_it_wakes_no_task() {
        for polls_before in 0..3 {
            let (sender, mut receiver) = oneshot();
            let count = Arc::new(Count::default());
            let waker = Waker::from(count.clone());
            for _ in 0..polls_before {
                assert_eq!(receiver.poll(&waker), Poll::Pending);
            }
            assert_eq!(count.0.load(Ordering::SeqCst), 0);
            sender.complete(7);
            assert_eq!(count.0.load(Ordering::SeqCst), polls_before.min(1));
            assert_eq!(receiver.poll(&waker), Poll::Ready(Some(7)));
            assert_eq!(receiver.poll(&waker), Poll::Ready(None), "it was taken before");
        }
    }

    #[test]
    fn c45_a_value_that_is_not_taken_is_dropped_and_a_poll_after_the_end_leaves_no_waker() {
        let (sender, mut receiver) = oneshot();
        let (value, count) = (Arc::new(()), Arc::new(Count::default()));
        sender.complete(value.clone());
        let waker = Waker::from(count.clone());
        assert!(receiver.poll(&waker).is_ready());
        drop(waker);
        assert_eq!(Arc::strong_count(&count), 1);
        assert_eq!(Arc::strong_count(&value), 1);

        let (sender, receiver) = oneshot();
        drop(receiver);
        sender.complete(value.clone());
        assert_eq!(Arc::strong_count(&value), 1);
    }
}

/// Tests under `--cfg loom`: every order of the two sides' steps.
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

    /// Waits for the sender's thread, then polls once more.
    fn after<T>(thread: thread::JoinHandle<()>, receiver: &mut Receiver<T>) -> Poll<Option<T>> {
        assert!(thread.join().is_ok());
        receiver.poll(Waker::noop())
    }

    #[test]
    fn c41_a_value_is_seen_or_wakes_whether_it_is_sent_before_or_after_the_poll() {
        loom::model(|| {
            let (sender, mut receiver) = oneshot();
            let (woken, waker) = counting();
            let thread = thread::spawn(move || sender.complete(Box::new(7)));
            let first = receiver.poll(&waker);
            if first == Poll::Ready(Some(Box::new(7))) {
                assert!(thread.join().is_ok());
                assert_eq!(woken.0.load(SeqCst), 0);
                return;
            }
            assert_eq!(first, Poll::Pending);
            assert_eq!(after(thread, &mut receiver), Poll::Ready(Some(Box::new(7))));
            assert_eq!(woken.0.load(SeqCst), 1);
        });
    }

    #[test]
    fn c41_of_two_wakers_the_one_left_last_is_woken() {
        loom::model(|| {
            let (sender, mut receiver) = oneshot();
            let ((early, first), (late, second)) = (counting(), counting());
            let thread = thread::spawn(move || sender.complete(Box::new(7)));
            let pending = receiver.poll(&first).is_pending();
            let still_pending = pending && receiver.poll(&second).is_pending();
            if !pending {
                assert!(thread.join().is_ok());
            } else if still_pending {
                assert_eq!(after(thread, &mut receiver), Poll::Ready(Some(Box::new(7))));
            } else {
                assert_eq!(after(thread, &mut receiver), Poll::Ready(None));
            }
            assert_eq!(late.0.load(SeqCst), usize::from(still_pending));
            // While the wakers are exchanged none is left: then the second poll has the value.
            assert!(early.0.load(SeqCst) <= usize::from(pending && !still_pending));
        });
    }

    #[test]
    fn c45_a_value_sent_to_a_dropped_receiver_is_dropped_once() {
        loom::model(|| {
            let (sender, mut receiver) = oneshot();
            let (_, waker) = counting();
            let value = std::sync::Arc::new(());
            let answer = value.clone();
            let thread = thread::spawn(move || sender.complete(answer));
            let taken = receiver.poll(&waker).is_ready();
            drop(receiver);
            assert!(thread.join().is_ok());
            assert_eq!(std::sync::Arc::strong_count(&value), 1, "taken: {taken}");
        });
    }

    #[test]
    fn c46_a_sender_dropped_without_a_value_does_not_leave_its_receiver_waiting() {
        loom::model(|| {
            let (sender, mut receiver) = oneshot::<Box<u8>>();
            let (woken, waker) = counting();
            let thread = thread::spawn(move || drop(sender));
            let pending = receiver.poll(&waker).is_pending();
            assert_eq!(after(thread, &mut receiver), Poll::Ready(None));
            assert_eq!(woken.0.load(SeqCst), usize::from(pending));
        });
    }
}
