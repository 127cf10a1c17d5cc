//! The channel from any thread to the driver: a bounded list of requests and a descriptor that
//! wakes the driver.
//!
//! Invariant: a task that found the list full is woken when the driver has drained it or has ended.
//! A request is held by the list, by the driver, or again by its sender.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use rustix::event::{EventfdFlags, eventfd};

use crate::api::async_file::oneshot::Sender;
use crate::memory::io_buffer::IoBuffer;
use crate::types::error::{Error, Operation};
use crate::types::request::{Flags, Request};

/// The result of a request: bytes done or an error, and its memory.
pub(crate) type Answer = (Result<usize, Error>, IoBuffer);

/// A request on its way to the driver.
pub(crate) struct AsyncRequest {
    pub(crate) io: Request,
    pub(crate) buffer: IoBuffer,
    pub(crate) sender: Sender<Answer>,
}

impl AsyncRequest {
    /// Ends a request that was not submitted.
    pub(crate) fn refuse(self, error: Error) {
        self.sender.complete((Err(error), self.buffer));
    }
}

/// Whether requests are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChannelState {
    Open,
    /// The last handle is gone: no request can come any more.
    Closed,
    /// The driver has ended because of an error.
    Failed(Error),
}

struct ChannelContents {
    requests: VecDeque<AsyncRequest>,
    /// The wakers of tasks that found the list full, by waiter ID.
    waiting: HashMap<u64, Waker>,
    next_waiter_id: u64,
    phase: ChannelState,
}

pub(crate) struct Channel {
    contents: Mutex<ChannelContents>,
    wake: OwnedFd,
    limit: usize,
}

impl Channel {
    /// A channel for at most `limit` requests that the driver has not taken.
    pub(crate) fn new(limit: usize) -> Result<Self, Error> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::from_os(e, Operation::SetUp))?;
        let contents = ChannelContents {
            requests: VecDeque::new(),
            waiting: HashMap::new(),
            next_waiter_id: 0,
            phase: ChannelState::Open,
        };
        Ok(Self { contents: Mutex::new(contents), wake, limit })
    }

    fn lock(&self) -> MutexGuard<'_, ChannelContents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // A full counter (EAGAIN) is readable already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Appends a request to the list. If the list is full, a request with `NOWAIT` is refused with
    /// `EAGAIN` (C32); any other is returned, and `waker`, kept under `waiter_id`, is woken when the
    /// list is drained. After [`Channel::fail`] every request is refused with the driver's error.
    pub(crate) fn try_send(
        &self,
        request: AsyncRequest,
        waiter_id: &mut Option<u64>,
        waker: &Waker,
    ) -> Option<AsyncRequest> {
        let mut contents = self.lock();
        if let ChannelState::Failed(error) = contents.phase {
            drop(contents);
            request.refuse(error);
            return None;
        }
        if contents.requests.len() < self.limit {
            let was_empty = contents.requests.is_empty();
            contents.requests.push_back(request);
            drop(contents);
            if was_empty {
                self.wake();
            }
            return None;
        }
        if request.io.flags.has(Flags::NOWAIT) {
            drop(contents);
            let error = Error::new(libc::EAGAIN, Operation::Validate).at(request.io.range);
            request.refuse(error);
            return None;
        }
        let waiter_id = *waiter_id.get_or_insert_with(|| {
            contents.next_waiter_id += 1;
            contents.next_waiter_id
        });
        contents.waiting.insert(waiter_id, waker.clone());
        Some(request)
    }

    /// Removes the waker of `waiter_id`.
    pub(crate) fn cancel_wait(&self, waiter_id: u64) {
        // Dropping a waker runs an executor's code: it is dropped outside the lock.
        let _waker = self.lock().waiting.remove(&waiter_id);
    }

    /// Moves all of the list to `requests`, which is empty, and wakes the tasks that wait for room:
    /// all of them, because a task that is woken may have dropped its request.
    pub(crate) fn drain(&self, requests: &mut VecDeque<AsyncRequest>) -> ChannelState {
        debug_assert!(requests.is_empty());
        let mut contents = self.lock();
        std::mem::swap(&mut contents.requests, requests);
        let (waiting, phase) = (std::mem::take(&mut contents.waiting), contents.phase);
        drop(contents);
        waiting.into_values().for_each(Waker::wake);
        phase
    }

    /// Closes the channel: the driver ends when the requests that it has have ended.
    pub(crate) fn close(&self) {
        let mut contents = self.lock();
        if contents.phase == ChannelState::Open {
            contents.phase = ChannelState::Closed;
        }
        drop(contents);
        self.wake();
    }

    /// Refuses the requests in the list, and all later ones, with `error`: the driver ends.
    pub(crate) fn fail(&self, error: Error) {
        let mut contents = self.lock();
        contents.phase = ChannelState::Failed(error);
        let requests = std::mem::take(&mut contents.requests);
        let waiting = std::mem::take(&mut contents.waiting);
        drop(contents);
        requests.into_iter().for_each(|request| request.refuse(error));
        waiting.into_values().for_each(Waker::wake);
    }

    /// Readable after a request was appended to an empty list, or a close.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::async_file::oneshot::{Receiver, oneshot};
    use crate::types::byte_range::ByteRange;
    use crate::types::request::Op;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Poll, Wake};

    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn request(flags: Flags) -> (AsyncRequest, Receiver<Answer>) {
        let (sender, receiver) = oneshot();
        let io = Request { op: Op::Flush, flags, range: ByteRange::default() };
        (AsyncRequest { io, buffer: IoBuffer::default(), sender }, receiver)
    }

    fn errno(mut receiver: Receiver<Answer>) -> Option<i32> {
        match receiver.poll(Waker::noop()) {
            Poll::Ready(Some((Err(error), _))) => Some(error.errno()),
            _ => None,
        }
    }

    #[test]
    fn a_task_that_finds_the_list_full_is_woken_once_when_it_is_drained() {
        let channel = Channel::new(1).unwrap();
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(count.clone());
        let mut waiter_id = None;
        assert!(channel.try_send(request(Flags::NONE).0, &mut waiter_id, &waker).is_none());
        let back = channel.try_send(request(Flags::NONE).0, &mut waiter_id, &waker).unwrap();
        let back = channel.try_send(back, &mut waiter_id, &waker).unwrap();
        let mut taken = VecDeque::new();
        assert_eq!(channel.drain(&mut taken), ChannelState::Open);
        assert_eq!((taken.len(), count.0.load(Ordering::SeqCst)), (1, 1));
        assert!(channel.try_send(back, &mut waiter_id, &waker).is_none());
    }

    #[test]
    fn a_task_that_has_cancelled_its_wait_is_not_woken() {
        let channel = Channel::new(0).unwrap();
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let mut waiter_id = None;
        assert!(
            channel
                .try_send(request(Flags::NONE).0, &mut waiter_id, &Waker::from(count.clone()))
                .is_some()
        );
        channel.cancel_wait(waiter_id.unwrap());
        channel.drain(&mut VecDeque::new());
        assert_eq!(count.0.load(Ordering::SeqCst), 0);
        assert_eq!(Arc::strong_count(&count), 1);
    }

    #[test]
    fn c32_a_request_that_is_not_to_wait_is_eagain_when_the_list_is_full() {
        let channel = Channel::new(0).unwrap();
        let (request, receiver) = request(Flags::NOWAIT);
        assert!(channel.try_send(request, &mut None, Waker::noop()).is_none());
        assert_eq!(errno(receiver), Some(libc::EAGAIN));
    }

    #[test]
    fn c46_requests_in_the_list_and_later_ones_are_refused_when_the_driver_has_failed() {
        let channel = Channel::new(1).unwrap();
        let ((early, before), (late, after)) = (request(Flags::NONE), request(Flags::NONE));
        assert!(channel.try_send(early, &mut None, Waker::noop()).is_none());
        channel.fail(Error::new(libc::ENXIO, Operation::Wait));
        assert!(channel.try_send(late, &mut None, Waker::noop()).is_none());
        assert_eq!((errno(before), errno(after)), (Some(libc::ENXIO), Some(libc::ENXIO)));
    }
}
