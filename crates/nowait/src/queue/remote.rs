//! A queue for images some of whose storages make transfers themselves: their transfers go to the
//! storage and return through a list of completions, whose descriptor the queue below watches; the
//! others go to that queue of the kernel.
//!
//! Invariant: a transfer is in the queue below or in its storage, never in both; waiting on the queue
//! below ends when either has a completion.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::queue::aio_threads::AioThreadQueue;
use crate::queue::event_source::{EventSource, FD_TOKEN, Interest};
use crate::queue::pending_transfer::{AsyncTransfers, PendingTransfer};
use crate::queue::uring::Uring;
use crate::queue::{IoQueue, QueueFull, Token};
use crate::threads::completion_list::CompletionList;
use crate::types::error::Error;
use crate::types::transfer::{Outcome, Transfer};

/// The token of the completions' descriptor; an engine's own is the one before.
const REMOTE_EVENT: Token = FD_TOKEN | 1 << 60 | 1;

/// How transfers reach a storage.
pub(crate) enum Reach<'a> {
    /// By the kernel.
    Descriptor(BorrowedFd<'a>),
    /// By the storage itself.
    Transfers(Arc<dyn AsyncTransfers>),
}

/// The queue of the kernel.
#[expect(clippy::large_enum_variant, reason = "there is one for each thread")]
pub(crate) enum KernelQueue {
    Uring(Uring),
    Threads(AioThreadQueue),
}

/// Runs `$call` on the queue of the kernel that there is.
macro_rules! on {
    ($below:expr, $queue:ident => $call:expr) => {
        match $below {
            KernelQueue::Uring($queue) => $call,
            KernelQueue::Threads($queue) => $call,
        }
    };
}

enum Place {
    /// The number of the file in the queue of the kernel.
    Local(u16),
    Remote {
        transfers: Arc<dyn AsyncTransfers>,
        pushed: Vec<PendingTransfer>,
    },
}

/// A queue of the kernel, and storages that make transfers themselves.
pub struct RemoteQueue {
    below: KernelQueue,
    places: Vec<Place>,
    has_local: bool,
    has_pushed: bool,
    completions: Arc<CompletionList>,
}

impl RemoteQueue {
    /// A queue for storages that are reached as `reached` says, indexed by [`Transfer::file`], for
    /// tokens below `slots`. `below` was made for the descriptors among them, in order.
    ///
    /// # Errors
    /// The errno of pipe2(2); those of [`EventSource::watch`].
    pub(crate) fn new(
        mut below: KernelQueue,
        reached: Vec<Reach<'_>>,
        slots: u32,
    ) -> Result<Self, Error> {
        let completions = Arc::new(CompletionList::new(slots)?);
        on!(&mut below, queue => queue.events_mut().watch(completions.fd(), REMOTE_EVENT, Interest::Readable))?;
        let mut local = 0;
        let places = reached.into_iter().map(|reach| match reach {
            Reach::Descriptor(_) => {
                local += 1;
                Place::Local(local - 1)
            }
            Reach::Transfers(transfers) => Place::Remote { transfers, pushed: Vec::new() },
        });
        let places = places.collect();
        Ok(Self { below, places, has_local: local > 0, has_pushed: false, completions })
    }

    /// Begins the pushed transfers.
    fn begin(&mut self) {
        if std::mem::take(&mut self.has_pushed) {
            for place in &mut self.places {
                if let Place::Remote { transfers, pushed } = place
                    && !pushed.is_empty()
                {
                    transfers.begin(pushed);
                }
            }
        }
    }
}

// SAFETY: a transfer goes to one of two places: to the queue of the kernel, which keeps the rules, or
// into a `PendingTransfer`, which ends once and returns its token by the list then. The descriptor of
// the list has a token of its own, which is not passed on.
unsafe impl IoQueue for RemoteQueue {
    // SAFETY: as promised by the caller.
    unsafe fn push(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull> {
        let file = match self.places.get_mut(usize::from(transfer.file)) {
            Some(Place::Remote { pushed, .. }) => {
                let completions = self.completions.clone();
                // SAFETY: as promised by the caller.
                pushed.push(unsafe { PendingTransfer::new(*transfer, token as u32, completions) });
                self.has_pushed = true;
                return Ok(());
            }
            Some(Place::Local(file)) => *file,
            // The queue of the kernel refuses the number.
            None => u16::MAX,
        };
        let transfer = Transfer { file, ..*transfer };
        // SAFETY: as promised by the caller.
        on!(&mut self.below, queue => unsafe { queue.push(&transfer, token) })
    }

    fn submit(&mut self) -> Result<(), Error> {
        self.begin();
        on!(&mut self.below, queue => queue.submit())
    }

    fn drain_completions(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        let completions = &self.completions;
        let mut own = 0;
        let mut pass = |token, outcome| match token {
            REMOTE_EVENT => {
                own += 1;
                completions.clear_wake();
            }
            _ => sink(token, outcome),
        };
        let count = on!(&mut self.below, queue => queue.drain_completions(&mut pass));
        let ended = self.completions.take(|slot, outcome| {
            sink(Token::from(slot), outcome as Outcome);
        });
        count - own + ended
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        self.begin();
        let timeout = if self.completions.is_not_empty() { Some(Duration::ZERO) } else { timeout };
        on!(&mut self.below, queue => queue.wait(timeout))
    }

    fn has_completions(&mut self) -> bool {
        self.completions.is_not_empty() || on!(&mut self.below, queue => queue.has_completions())
    }

    fn events(&self) -> &dyn EventSource {
        on!(&self.below, queue => queue.events())
    }

    fn events_mut(&mut self) -> &mut dyn EventSource {
        on!(&mut self.below, queue => queue.events_mut())
    }

    // SAFETY: as promised by the caller.
    unsafe fn register(&mut self, base: *mut u8, bytes: usize) -> Option<u16> {
        match self.has_local {
            // SAFETY: as promised by the caller.
            true => on!(&mut self.below, queue => unsafe { queue.register(base, bytes) }),
            false => None,
        }
    }
}
