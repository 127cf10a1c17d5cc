//! Watched descriptors and commands to drivers: the events that reach a thread through its queue,
//! beside its completions.
//!
//! Invariant: no event is reported under the token of a transfer.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;

use crate::types::error::{Error, Operation};
use crate::types::token::{self, Token};

/// The event that is waited for on a watched descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Each arrival of data, until the descriptor is unwatched.
    Readable,
    /// Room to send; reported once.
    Writable,
}

/// The descriptors that a queue watches for its thread. Their events come from
/// [`IoQueue::drain_completions`](super::IoQueue::drain_completions) and end its `wait`.
pub trait EventSource {
    /// Reports `token` whenever `fd` is ready. The caller unwatches `fd` before closing it.
    ///
    /// # Errors
    /// `EINVAL` for a token without [`FD_TOKEN`](crate::FD_TOKEN); the errno of io_uring_enter(2) or epoll_ctl(2).
    fn watch(&mut self, fd: BorrowedFd<'_>, token: Token, interest: Interest) -> Result<(), Error>;

    /// Ends the watch on `fd` under `token`, of which one last event may be reported.
    fn unwatch(&mut self, fd: BorrowedFd<'_>, token: Token);

    /// Submits the command `op` of the driver behind `fd` (`IORING_OP_URING_CMD`) with its 16 bytes
    /// of arguments and the entry's `address`, whose meaning is the driver's. Its result is reported
    /// once under `token`: 0 or more, or a negative errno.
    ///
    /// # Errors
    /// `EOPNOTSUPP` where the queue is not a ring; `EINVAL` for a token without [`FD_TOKEN`](crate::FD_TOKEN); the errno
    /// of io_uring_enter(2).
    ///
    /// # Safety
    /// Memory whose address is in `arguments` or is `address` stays valid, and is not accessed
    /// otherwise, for as long as the driver may use it.
    unsafe fn command(
        &mut self,
        _fd: BorrowedFd<'_>,
        _op: u32,
        _address: u64,
        _arguments: [u8; 16],
        _token: Token,
    ) -> Result<(), Error> {
        Err(Error::new(libc::EOPNOTSUPP, Operation::SetUp))
    }

    /// A descriptor for the caller's own event loop, readable when the queue's `submit` or
    /// `drain_completions` has work to do. Spurious events are possible.
    fn fd(&self) -> BorrowedFd<'_>;
}

/// `EINVAL` for a token without [`FD_TOKEN`](crate::FD_TOKEN): the events of its descriptor would be taken for the
/// completions of transfers.
pub(crate) fn check_fd_token(token: Token) -> Result<(), Error> {
    if token::is_event(token) { Ok(()) } else { Err(Error::new(libc::EINVAL, Operation::SetUp)) }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::os::fd::AsFd;
    use std::time::Duration;

    use crate::queue::{AioThreadQueue, IoQueue, Uring};
    use crate::types::token::FD_TOKEN;

    #[test]
    fn a_command_is_answered_under_its_token_by_a_ring_and_refused_by_other_queues() {
        let file = tempfile::tempfile().unwrap();
        let token = FD_TOKEN | 5;
        let mut threads = AioThreadQueue::new(8).unwrap();
        // SAFETY: the commands name no memory.
        let refused = unsafe { threads.events_mut().command(file.as_fd(), 1, 0, [0; 16], token) };
        assert_eq!(refused.unwrap_err().errno(), libc::EOPNOTSUPP);
        let Ok(mut ring) = Uring::new() else {
            nowait_testkit::skip("no io_uring");
            return;
        };
        // SAFETY: as above.
        let refused = unsafe { ring.events_mut().command(file.as_fd(), 1, 0, [0; 16], 5) };
        assert_eq!(refused.unwrap_err().errno(), libc::EINVAL);
        // SAFETY: as above.
        unsafe { ring.events_mut().command(file.as_fd(), 1, 0, [0; 16], token) }.unwrap();
        let mut answers = Vec::new();
        while answers.is_empty() {
            ring.wait(Some(Duration::from_secs(60))).unwrap();
            ring.drain_completions(|token, outcome| answers.push((token, outcome)));
        }
        // A file has no driver with commands (before Linux 5.19 there are none at all).
        let errno = answers[0].1;
        assert!([-libc::EOPNOTSUPP, -libc::EINVAL].contains(&errno), "{errno}");
        assert_eq!((answers.len(), answers[0].0), (1, token));
    }
}
