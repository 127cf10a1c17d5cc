//! How requests of any thread reach the driver: a bounded list and a descriptor that wakes it.
//!
//! Invariant: whoever found the list full is woken when it was taken, or the driver has ended; a
//! job is in the list, with the driver, or back with who offered it.
//! Knows: error, io, memory, rendezvous. Known by: driver, future.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use rustix::event::{EventfdFlags, eventfd};

use crate::error::{Doing, Error};
use crate::io::{Flags, Io};
use crate::memory::Buffer;
use crate::rendezvous::Completer;

/// What a request came to, in bytes, and its memory.
pub(crate) type Answer = (Result<usize, Error>, Buffer);

/// A request on its way to the driver.
pub(crate) struct Job {
    pub(crate) io: Io,
    pub(crate) buffer: Buffer,
    pub(crate) completer: Completer<Answer>,
}

impl Job {
    /// Ends a request that nobody has begun.
    pub(crate) fn refuse(self, error: Error) {
        self.completer.complete((Err(error), self.buffer));
    }
}

/// Whether requests are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Open,
    /// The last handle is gone: nothing comes any more.
    Closed,
    /// The driver has ended before its time.
    Failed(Error),
}

struct Contents {
    jobs: VecDeque<Job>,
    /// Tasks that found the list full, by their seat.
    waiting: HashMap<u64, Waker>,
    next_seat: u64,
    phase: Phase,
}

pub(crate) struct Inbox {
    contents: Mutex<Contents>,
    wake: OwnedFd,
    limit: usize,
}

impl Inbox {
    /// For at most `limit` requests that the driver has not taken.
    pub(crate) fn new(limit: usize) -> Result<Self, Error> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::from_os(e, Doing::SetUp))?;
        let contents = Contents {
            jobs: VecDeque::new(),
            waiting: HashMap::new(),
            next_seat: 0,
            phase: Phase::Open,
        };
        Ok(Self { contents: Mutex::new(contents), wake, limit })
    }

    fn lock(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // A full counter (EAGAIN) is readable already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Offers a job. It comes back if the list is full; then `waker` is woken when it is not any
    /// more, and `seat` says where it waits until then. A job that is not to wait (C32), or that
    /// comes too late, is refused.
    pub(crate) fn offer(&self, job: Job, seat: &mut Option<u64>, waker: &Waker) -> Option<Job> {
        let mut contents = self.lock();
        if let Phase::Failed(error) = contents.phase {
            drop(contents);
            job.refuse(error);
            return None;
        }
        if contents.jobs.len() < self.limit {
            let was_empty = contents.jobs.is_empty();
            contents.jobs.push_back(job);
            drop(contents);
            if was_empty {
                self.wake();
            }
            return None;
        }
        if job.io.flags.has(Flags::NOWAIT) {
            drop(contents);
            let error = Error::new(libc::EAGAIN, Doing::Validate).at(job.io.range);
            job.refuse(error);
            return None;
        }
        let seat = *seat.get_or_insert_with(|| {
            contents.next_seat += 1;
            contents.next_seat
        });
        contents.waiting.insert(seat, waker.clone());
        Some(job)
    }

    /// Nobody waits in `seat` any more.
    pub(crate) fn leave(&self, seat: u64) {
        // The waker belongs to others: it is dropped outside the lock.
        let _waker = self.lock().waiting.remove(&seat);
    }

    /// Takes the whole list into `jobs`, which is empty, and wakes who waits for room: all of
    /// them, because one that was woken may have gone away.
    pub(crate) fn take(&self, jobs: &mut VecDeque<Job>) -> Phase {
        debug_assert!(jobs.is_empty());
        let mut contents = self.lock();
        std::mem::swap(&mut contents.jobs, jobs);
        let (waiting, phase) = (std::mem::take(&mut contents.waiting), contents.phase);
        drop(contents);
        waiting.into_values().for_each(Waker::wake);
        phase
    }

    /// Nothing comes any more: the driver is to end when it is through.
    pub(crate) fn close(&self) {
        let mut contents = self.lock();
        if contents.phase == Phase::Open {
            contents.phase = Phase::Closed;
        }
        drop(contents);
        self.wake();
    }

    /// The driver ends: what is in the list, and whatever comes later, is refused with `error`.
    pub(crate) fn fail(&self, error: Error) {
        let mut contents = self.lock();
        contents.phase = Phase::Failed(error);
        let jobs = std::mem::take(&mut contents.jobs);
        let waiting = std::mem::take(&mut contents.waiting);
        drop(contents);
        jobs.into_iter().for_each(|job| job.refuse(error));
        waiting.into_values().for_each(Waker::wake);
    }

    /// Readable after an offer to an empty list, or a close.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Range;
    use crate::io::Op;
    use crate::rendezvous::{Poller, rendezvous};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Poll, Wake};

    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn job(flags: Flags) -> (Job, Poller<Answer>) {
        let (completer, poller) = rendezvous();
        let io = Io { op: Op::Flush, flags, range: Range::default() };
        (Job { io, buffer: Buffer::default(), completer }, poller)
    }

    fn errno(mut poller: Poller<Answer>) -> Option<i32> {
        match poller.poll(Waker::noop()) {
            Poll::Ready(Some((Err(error), _))) => Some(error.errno()),
            _ => None,
        }
    }

    #[test]
    fn who_finds_the_list_full_is_woken_once_when_it_is_taken() {
        let inbox = Inbox::new(1).unwrap();
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(count.clone());
        let mut seat = None;
        assert!(inbox.offer(job(Flags::NONE).0, &mut seat, &waker).is_none());
        let back = inbox.offer(job(Flags::NONE).0, &mut seat, &waker).unwrap();
        let back = inbox.offer(back, &mut seat, &waker).unwrap();
        let mut taken = VecDeque::new();
        assert_eq!(inbox.take(&mut taken), Phase::Open);
        assert_eq!((taken.len(), count.0.load(Ordering::SeqCst)), (1, 1));
        assert!(inbox.offer(back, &mut seat, &waker).is_none());
    }

    #[test]
    fn who_has_left_its_seat_is_not_woken() {
        let inbox = Inbox::new(0).unwrap();
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let mut seat = None;
        assert!(inbox.offer(job(Flags::NONE).0, &mut seat, &Waker::from(count.clone())).is_some());
        inbox.leave(seat.unwrap());
        inbox.take(&mut VecDeque::new());
        assert_eq!(count.0.load(Ordering::SeqCst), 0);
        assert_eq!(Arc::strong_count(&count), 1);
    }

    #[test]
    fn c32_a_job_that_is_not_to_wait_is_eagain_when_the_list_is_full() {
        let inbox = Inbox::new(0).unwrap();
        let (job, poller) = job(Flags::NOWAIT);
        assert!(inbox.offer(job, &mut None, Waker::noop()).is_none());
        assert_eq!(errno(poller), Some(libc::EAGAIN));
    }

    #[test]
    fn c46_what_is_in_the_list_or_comes_later_is_refused_when_the_driver_has_failed() {
        let inbox = Inbox::new(1).unwrap();
        let ((early, before), (late, after)) = (job(Flags::NONE), job(Flags::NONE));
        assert!(inbox.offer(early, &mut None, Waker::noop()).is_none());
        inbox.fail(Error::new(libc::ENXIO, Doing::Wait));
        assert!(inbox.offer(late, &mut None, Waker::noop()).is_none());
        assert_eq!((errno(before), errno(after)), (Some(libc::ENXIO), Some(libc::ENXIO)));
    }
}
