//! Watched descriptors: the events that reach a thread through its queue, beside its completions.
//!
//! Invariant: no event is reported under the token of a transfer.

use std::os::fd::BorrowedFd;

use super::Token;
use crate::types::error::{Error, Operation};

/// Set in the token of a watched descriptor.
pub const FD_TOKEN: Token = 1 << 63;

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
    /// `EINVAL` for a token without [`FD_TOKEN`]; the errno of io_uring_enter(2) or epoll_ctl(2).
    fn watch(&mut self, fd: BorrowedFd<'_>, token: Token, interest: Interest) -> Result<(), Error>;

    /// Ends the watch on `fd` under `token`, of which one last event may be reported.
    fn unwatch(&mut self, fd: BorrowedFd<'_>, token: Token);

    /// A descriptor for the caller's own event loop, readable when the queue's `submit` or
    /// `drain_completions` has work to do. Spurious events are possible.
    fn fd(&self) -> BorrowedFd<'_>;
}

/// `EINVAL` for a token without [`FD_TOKEN`]: the events of its descriptor would be taken for the
/// completions of transfers.
pub(crate) fn check_fd_token(token: Token) -> Result<(), Error> {
    match token & FD_TOKEN {
        0 => Err(Error::new(libc::EINVAL, Operation::SetUp)),
        _ => Ok(()),
    }
}
