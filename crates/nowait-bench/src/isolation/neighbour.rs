//! The neighbours of a reader: other clients of its server, and what their disks are like.
//!
//! Invariant: a neighbour makes as many requests as it may, whatever is answered, until it is stopped.

use std::os::fd::{AsFd, OwnedFd};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use std::{fmt, io};

use nowait_nbd::client::{self, Connection, Outcome, Replies, Wanted};
use nowait_nbd::{Address, CMD_READ, RequestHeader};
use rustix::net::{Shutdown, shutdown};

use crate::address::SILENCE_MAX;
use crate::isolation::held_disk::Answer;

/// How long each request of a slow disk takes.
const SLOW: Duration = Duration::from_millis(100);
const RECEIVE_BYTES: usize = 256 << 10;

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

    /// Bytes of each of its reads, and how many are in flight; `None` if there is no neighbour.
    pub(super) fn load(self) -> Option<(u32, u64)> {
        match self {
            Self::None => None,
            Self::Stops | Self::Slow | Self::Fails => Some((4 << 10, 64)),
            Self::Floods => Some((1 << 20, 32)),
        }
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
    /// Connects to `export`, which has `bytes` bytes, and keeps `depth` reads of `length` bytes in flight.
    pub(super) fn start(
        address: &Address,
        export: &str,
        bytes: u64,
        (length, depth): (u32, u64),
    ) -> io::Result<Self> {
        let options = client::ConnectOptions {
            address,
            credentials: None,
            export,
            wanted: Wanted::default(),
            timeout: SILENCE_MAX,
            receive_bytes: RECEIVE_BYTES,
        };
        let (connection, _) = Connection::open(&options)?;
        let socket = connection.as_fd().try_clone_to_owned()?;
        let mut reads = Reads { free: (0..depth).collect(), length, answers: 0, next: 0 };
        let read = move || {
            let mut connection = connection;
            // The loop is over when the socket is shut down, or when no answer has come for SILENCE_MAX.
            while reads.send(&mut connection, bytes).is_ok()
                && connection.receive(&mut reads).is_ok()
            {}
            reads.answers
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

/// The reads of a neighbour.
struct Reads {
    /// Cookies without a request.
    free: Vec<u64>,
    length: u32,
    answers: u64,
    /// The position of the next one.
    next: u64,
}

impl Reads {
    /// Sends a read for each free cookie.
    fn send(&mut self, connection: &mut Connection, bytes: u64) -> io::Result<()> {
        let length = u64::from(self.length);
        let mut all = Vec::new();
        for cookie in self.free.drain(..) {
            let offset = if self.next + length > bytes { 0 } else { self.next };
            self.next = offset + length;
            let header = RequestHeader { flags: 0, command: CMD_READ, cookie, offset, length };
            all.extend(header.compact());
        }
        connection.send_all(&all)
    }
}

impl Replies for Reads {
    fn simple(&mut self, _: u64, error: u32) -> Outcome<Option<(u64, u64)>> {
        Ok((error == 0).then_some((0, self.length.into())))
    }

    fn done(&mut self, cookie: u64) -> Outcome<()> {
        self.answers += 1;
        self.free.push(cookie);
        Ok(())
    }

    /// The data are dropped where they were received.
    fn memory(&mut self, _: u64, _: u64) -> Option<&mut [u8]> {
        None
    }
}
