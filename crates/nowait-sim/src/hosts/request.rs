//! A request of a host or a rack's server: its attempts, and what waits for it.

use super::timeline::Time;

/// The purpose of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The question whether the image is the one that is known, without data.
    Check,
    /// A part of the image, before the machines start.
    Download,
    /// Blocks ahead of the guest.
    Prefetch,
    /// A read of a guest.
    Guest,
}

impl Purpose {
    /// Whether no guest waits for it when it is made.
    pub(super) const fn is_ahead(self) -> bool {
        matches!(self, Self::Download | Self::Prefetch)
    }
}

/// Waiters for the end of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waiter {
    /// A process of a machine.
    Lane { machine: u32, lane: u8 },
    /// A request to a rack's server.
    Attempt(Attempt),
}

/// An attempt: the number of its request and its own, which is never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Attempt {
    pub(super) request: u32,
    pub(super) number: u32,
}

/// How an attempt ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Fate {
    /// With all bytes.
    Answered,
    /// Because there are too many requests.
    SlowDown,
    /// With an error of the server, or a connection that ends: it may be tried again.
    Failed,
    /// With an error that is the last word.
    Refused,
}

/// Events at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// A host starts.
    Start(u32),
    /// A process of a machine has computed enough and reads.
    Read { machine: u32, lane: u8 },
    /// A response has bytes to send.
    Ready(Attempt),
    /// An origin has sent a part of a response.
    Sent(u32),
    /// An attempt ends.
    Ended(Attempt),
    /// The pause before an attempt is over.
    Again(Attempt),
    /// An attempt may have been without a byte for long.
    Idle(Attempt),
}

/// A request that has not completed.
#[derive(Debug)]
pub(super) struct Request {
    /// The host or rack's server that asks.
    pub(super) site: u32,
    pub(super) purpose: Purpose,
    /// The range, in bytes.
    pub(super) pos: u64,
    pub(super) len: u64,
    pub(super) waiters: Vec<Waiter>,
    /// Attempts that have failed, and when the first one has, if refusals do not count without those.
    pub(super) failed: u32,
    pub(super) first_failure: Option<Time>,
    /// The number of the attempt that runs or is to come.
    pub(super) attempt: u32,
    /// Requests of the rack's server that the running attempt waits for.
    pub(super) waits: u32,
    /// Of the running attempt: bytes to be sent, when the last ones came, when its connection takes
    /// the next ones, what it is slower by, and its end.
    pub(super) left: u64,
    pub(super) last_byte: Time,
    pub(super) free: Time,
    pub(super) slower: f64,
    pub(super) fate: Fate,
}
