//! I/O queues: one thread submits transfers to storage and drains their completions.
//!
//! Invariant: each pushed transfer completes exactly once, under the token it was pushed with. A queue
//! moves bytes only to and from files that are attached to it.
#![allow(unsafe_code)]

mod event_source;
pub(crate) mod pending_transfer;
pub(crate) mod queue_files;
mod epoll;
mod null;
pub(crate) mod preadv2;
pub(crate) mod linux_aio;
mod aio_threads;
mod uring;
pub(crate) mod remote;
pub(crate) mod auto;

use std::time::Duration;

use crate::types::error::Error;
use crate::types::token::Token;
use crate::types::transfer::{Outcome, Transfer};

pub use aio_threads::AioThreadQueue;
#[cfg(feature = "sim")]
pub(crate) use epoll::Epoll;
#[cfg(feature = "sim")]
pub(crate) use event_source::check_fd_token;
pub use event_source::{EventSource, Interest};
pub use null::Null;
pub use queue_files::QueueFile;
pub use uring::Uring;
pub use uring::locked_memory::RegisteredMemory;

/// The queue has no room: call [`IoQueue::submit`] and try again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueFull;

/// A queue of transfers to storage, for one thread. No call blocks except `wait`.
///
/// # Safety
/// When `drain_completions` returns a token, the engine frees the memory of its transfer and reuses
/// the slot. So each token without [`FD_TOKEN`](crate::FD_TOKEN) that `drain_completions` returns was pushed before,
/// its transfer does not access the memory any more, and the token is returned once for each push.
/// The queue's [`EventSource`] therefore refuses tokens without [`FD_TOKEN`](crate::FD_TOKEN).
pub unsafe trait IoQueue {
    /// Makes `files` known, at least one, and returns the number of the first for
    /// [`Transfer::file`]; the others follow. Transfers may be in flight.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: the queue does not reach one of them. `EMFILE`, `ENFILE`, `ENOMEM`: a descriptor
    /// could not be duplicated or registered. No file is attached then.
    fn attach(&mut self, files: &[QueueFile<'_>]) -> Result<u32, Error>;

    /// Forgets `count` files from number `first` on, of which no transfer is in flight.
    fn detach(&mut self, first: u32, count: u32);

    /// Why transfers of the file with this number cannot be polled for (C48); `None` if they can.
    fn polling_refusal(&self, _file: u32) -> Option<&'static str> {
        Some("this queue does not poll")
    }

    /// Pushes one transfer; it may end before this returns.
    ///
    /// # Errors
    /// [`QueueFull`] when there is no room before the next `submit`.
    ///
    /// # Safety
    /// Until `drain_completions` has returned the token, the memory that `transfer` names stays
    /// valid and is not accessed otherwise (not written, for a transfer to the device).
    unsafe fn push(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull>;

    /// Ends the transfer under `token`, which was pushed and not drained, early if that is possible. It completes
    /// once, as every other one: with `-ECANCELED` or 0 if nothing was moved, otherwise with its outcome. A queue that
    /// cannot do that does nothing.
    fn cancel(&mut self, _token: Token) {}

    /// Submits all pushed transfers with at most one system call.
    ///
    /// # Errors
    /// The errno of io_uring_enter(2); the transfers stay pushed.
    fn submit(&mut self) -> Result<(), Error>;

    /// Passes all completions to `sink`: transfers with their outcome, watched descriptors with the
    /// `POLL*` bits that are set. Returns the number of calls of `sink`.
    fn drain_completions(&mut self, sink: impl FnMut(Token, Outcome)) -> usize;

    /// Submits all pushed transfers, and sleeps until there is a completion or `timeout` has
    /// passed.
    ///
    /// # Errors
    /// As `submit`; `EINTR` and a timeout are not errors.
    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Error>;

    /// Whether `drain_completions` or `submit` has work to do. Makes no system call where the queue
    /// can avoid it, so that a caller may poll it before it sleeps.
    fn has_completions(&mut self) -> bool;

    /// The descriptors that are watched.
    fn events(&self) -> &dyn EventSource;

    /// Sources, to watch and unwatch.
    fn events_mut(&mut self) -> &mut dyn EventSource;

    /// Registers memory with the kernel, so that transfers to it cost less. Returns its number for
    /// [`Transfer::buffer`], or `None` where that is not possible, as in most queues.
    ///
    /// # Safety
    /// The memory stays allocated for the life of the queue.
    unsafe fn register(&mut self, _base: *mut u8, _bytes: usize) -> Option<u16> {
        None
    }

    /// Reserves `count` successive numbers of registered buffers for a driver that registers the
    /// memory of its requests with this queue by itself, and returns the first of them. They are
    /// for [`crate::Engine::submit_registered`]. `None` where that is not possible, as in most
    /// queues, and where not so many are left.
    fn reserve_buffers(&mut self, _count: u16) -> Option<u16> {
        None
    }

    /// Gives the numbers back that [`IoQueue::reserve_buffers`] has reserved from `first` on. The driver
    /// has no memory registered under them.
    fn release_buffers(&mut self, _first: u16) {}

    /// Completions that were polled for so far (C48).
    fn polled(&self) -> u64 {
        0
    }

    /// Whether the device has refused to be polled, although it could be when the queue was made.
    /// Its transfers complete by interrupt then.
    fn has_stopped_polling(&self) -> bool {
        false
    }
}
