//! The neighbours of a reader: other clients of its server, and what their disks are like.
//!
//! Invariant: a neighbour makes as many requests as it may, whatever is answered, until it is stopped.

use std::os::fd::OwnedFd;
use std::thread::{self, JoinHandle};
use std::time::Duration;
use std::{fmt, io};

use rustix::net::{Shutdown, shutdown};

use crate::cancel::CancelFlag;
use crate::client::{Client, ConnectOptions, Load, latency_histogram};
use crate::isolation::held_disk::Answer;
use crate::workload::{Direction, Order, Workload};

/// How long each request of a slow disk takes.
const SLOW: Duration = Duration::from_millis(100);

/// The reader, whose latencies are measured.
pub(super) const READER: Workload = Workload {
    direction: Direction::Read,
    order: Order::Random,
    block_bytes: 4 << 10,
    depth: 1,
    durable: false,
    beside: None,
};

/// The neighbour of the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Neighbour {
    /// Nothing: what the others are compared with.
    None,
    /// A disk that stops answering.
    Stops,
    /// A disk of which each request takes [`SLOW`].
    Slow,
    /// A disk that fails each request.
    Fails,
    /// A client that reads as much as it can, from a disk like the reader's.
    Floods,
}

impl Neighbour {
    /// All, the reader alone first.
    pub(super) const ALL: [Self; 5] =
        [Self::None, Self::Stops, Self::Slow, Self::Fails, Self::Floods];

    /// Its name for programs.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Stops => "stops",
            Self::Slow => "slow",
            Self::Fails => "fails",
            Self::Floods => "floods",
        }
    }

    /// How its disk answers while it is measured; `None` if it has an ordinary one.
    pub(super) fn answer(self) -> Option<Answer> {
        match self {
            Self::None | Self::Floods => None,
            Self::Stops => Some(Answer::Never),
            Self::Slow => Some(Answer::Late(SLOW)),
            Self::Fails => Some(Answer::Error),
        }
    }

    /// Its reads; `None` if there is no neighbour.
    pub(super) fn load(self) -> Option<Workload> {
        let (block_bytes, depth) = match self {
            Self::None => return None,
            Self::Stops | Self::Slow | Self::Fails => (4 << 10, 64),
            Self::Floods => (1 << 20, 32),
        };
        Some(Workload { order: Order::Sequential, block_bytes, depth, ..READER })
    }
}

/// The title of its row.
impl fmt::Display for Neighbour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "alone",
            Self::Stops => "beside a disk that stops answering",
            Self::Slow => "beside a disk that takes 100 ms a request",
            Self::Fails => "beside a disk that fails every request",
            Self::Floods => "beside a client that floods",
        })
    }
}

/// A client with reads in flight on a thread of its own.
pub(super) struct NeighbourClient {
    thread: JoinHandle<u64>,
    socket: OwnedFd,
}

impl NeighbourClient {
    /// Connects with `options` to an export of `bytes` bytes, and keeps the reads of `load` in flight.
    pub(super) fn start(
        options: &ConnectOptions<'_>,
        load: &Workload,
        bytes: u64,
    ) -> io::Result<Self> {
        let mut client = Client::connect(options, load, 1, bytes)?;
        let (socket, mut unused) = (client.socket()?, latency_histogram()?);
        let read = move || {
            let (mut answers, goes_on) = (0, CancelFlag::default());
            // The loop is over when the socket is shut down, or when no answer has come for SILENCE_MAX.
            while let Ok(interval) = client.run_for(Duration::ZERO, &mut unused, &goes_on) {
                answers += interval.requests;
            }
            answers
        };
        Ok(Self { thread: thread::Builder::new().spawn(read)?, socket })
    }

    /// Disconnects. Returns how many requests were answered, errors included.
    pub(super) fn stop(self) -> u64 {
        // The server may have closed the connection already.
        let _ = shutdown(&self.socket, Shutdown::Both);
        self.thread.join().unwrap_or_default()
    }
}
