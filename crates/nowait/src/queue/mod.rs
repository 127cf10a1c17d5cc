//! The doors to storage: one thread places transfers and reaps what came of them.
//!
//! Invariant: each placed transfer is reaped exactly once, under the token it was placed with.
//! Knows: error, io, remote, crew. Known by: engine.
#![allow(unsafe_code)]

mod epoll;
mod null;
mod ring_entry;
mod polled;
mod syscall;
mod aio;
mod threads;
mod uring;

use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::error::Error;
use crate::io::{Outcome, Transfer};

#[cfg(feature = "sim")]
pub(crate) use epoll::Epoll;
pub use null::Null;
pub(crate) use syscall::transfer;
pub use threads::Threads;
pub use uring::Uring;

/// What a transfer or a watched descriptor is called: chosen by the one who places it.
///
/// Tokens of transfers are below 2³²; [`WATCHED`] marks those of descriptors.
pub type Token = u64;

/// Set in the token of a watched descriptor.
pub const WATCHED: Token = 1 << 63;

/// No room: hand over what is placed ([`Queue::kick`]) and try again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueFull;

/// What is waited for on a watched descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Each time something arrives, until it is unwatched.
    Readable,
    /// Once, as soon as there is room to send.
    Writable,
}

/// One thread's door to storage. Nothing here blocks, except `wait`.
pub trait Queue {
    /// Places one transfer; it may be done before this returns.
    ///
    /// # Errors
    /// [`QueueFull`] when nothing more fits before the next `kick`.
    ///
    /// # Safety
    /// The memory that `transfer` names stays valid, and is not touched by anyone else (written,
    /// for a transfer to the device), until the token was reaped.
    unsafe fn place(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull>;

    /// Hands over all that was placed: at most one system call.
    ///
    /// # Errors
    /// What io_uring_enter(2) said; what was placed stays placed.
    fn kick(&mut self) -> Result<(), Error>;

    /// Gives everything that ended to `sink`: transfers with their outcome, watched descriptors
    /// with the `POLL*` bits that are true. Returns how many.
    fn reap(&mut self, sink: impl FnMut(Token, Outcome)) -> usize;

    /// Hands over what was placed and sleeps until `reap` has something, or for `timeout`.
    ///
    /// # Errors
    /// As `kick`; `EINTR` and a timeout are no errors.
    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Error>;

    /// Whether `reap` or `kick` would find something to do: asked without a system call where
    /// the queue can, so that a caller may look again and again before it sleeps.
    fn pending(&mut self) -> bool;

    /// Reaps `token` whenever `fd` is ready. It must be unwatched before it is closed.
    ///
    /// # Errors
    /// What io_uring_enter(2) or epoll_ctl(2) said.
    fn watch(&mut self, fd: BorrowedFd<'_>, token: Token, interest: Interest) -> Result<(), Error>;

    /// Ends the watch on `fd` under `token`; a last report of it may still be reaped.
    fn unwatch(&mut self, fd: BorrowedFd<'_>, token: Token);

    /// Makes memory known, so that transfers to it cost less. `None` where that is not possible.
    ///
    /// # Safety
    /// The memory stays allocated for the life of the queue.
    unsafe fn register(&mut self, base: *mut u8, bytes: usize) -> Option<u16>;

    /// Transfers that were reaped after they were polled for (C48).
    fn polled(&self) -> u64 {
        0
    }

    /// Readable when `kick` and `reap` have something, for an event loop of the caller's own.
    /// Spurious reports may come.
    fn fd(&self) -> BorrowedFd<'_>;
}
