//! One connection to an NBD server: sends requests and receives replies without waiting.
//!
//! Invariant: requests are sent whole and in order; the data of a write is sent from the request's
//! memory, the data of a read is received into it.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nowait_nbd::client::{self, ClientError, ConnectOptions, Credentials, Export, Wanted, failure};
use nowait_nbd::{Address, REQUEST_BYTES, ReplyMode};
use rustix::event::PollFlags;
use rustix::net::sockopt;
use slab::Slab;

use crate::nbd::pending_requests::{Pending, PendingReplies, StatusKind};

/// The timeout for the connection and for each answer of the handshake.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);
/// Requests that one system call sends: each has a header and data.
const BATCH: usize = 16;
/// The receive buffer in bytes, for what follows the data of a read.
const RECEIVE_BYTES: usize = 4096;
/// The requested size of the socket's send and receive buffers in bytes. The kernel may grant less.
const SOCKET_BYTES: usize = 2 << 20;

/// Settings to be negotiated in the handshake, with the metadata context of block status.
pub(crate) fn wanted(context: &str) -> Wanted<'_> {
    Wanted { mode: ReplyMode::Structured, context: Some(context) }
}

/// A request that is to be sent.
pub(crate) struct Outgoing {
    pub(crate) header: [u8; REQUEST_BYTES],
    /// The pending request in whose memory the data is, its offset there, and its bytes.
    pub(crate) data: Option<(usize, usize, usize)>,
}

impl Outgoing {
    fn len(&self) -> usize {
        REQUEST_BYTES + self.data.map_or(0, |(_, _, len)| len)
    }
}

/// A connection in the transmission phase.
pub(crate) struct Connection {
    nbd: client::Connection,
    /// Its index.
    number: usize,
    /// The id of its block status context.
    context: Option<u32>,
    /// The meaning of the flags in that context.
    kind: StatusKind,
    outgoing: VecDeque<Outgoing>,
    /// Bytes of the first outgoing request that the socket has taken.
    sent: usize,
    /// Bytes of the requests that are not answered.
    pub(crate) in_flight: u64,
}

impl Connection {
    /// Connects to `address` and opens `export`, with TLS if there are `credentials`. Block status is that of `bitmap`, or
    /// of holes and zeros where there is none. `number` is the connection's index.
    ///
    /// # Errors
    /// A message that says why the connection failed.
    pub(crate) fn open(
        address: &Address,
        credentials: Option<&Credentials>,
        export: &str,
        bitmap: Option<&str>,
        number: usize,
    ) -> Result<(Self, Export), String> {
        let (context, kind) = match bitmap {
            Some(name) => (format!("qemu:dirty-bitmap:{name}"), StatusKind::Clean),
            None => ("base:allocation".to_owned(), StatusKind::Zeros),
        };
        let (wanted, timeout, receive_bytes) = (wanted(&context), REPLY_TIMEOUT, RECEIVE_BYTES);
        let options =
            ConnectOptions { address, credentials, export, wanted, timeout, receive_bytes };
        let failed = |error: ClientError| failure(&error, export);
        let (nbd, found) = client::Connection::open(&options).map_err(failed)?;
        // Errors are ignored: the default buffer sizes work, too.
        let _ = sockopt::set_socket_send_buffer_size(&nbd, SOCKET_BYTES);
        let _ = sockopt::set_socket_recv_buffer_size(&nbd, SOCKET_BYTES);
        nbd.set_nonblocking().map_err(|error| failed(error.into()))?;
        let (context, outgoing) = (found.context, VecDeque::new());
        Ok((Self { nbd, number, context, kind, outgoing, sent: 0, in_flight: 0 }, found))
    }

    /// Appends a request to the send queue.
    pub(crate) fn push(&mut self, outgoing: Outgoing) {
        self.outgoing.push_back(outgoing);
    }

    /// Sends as much as the socket accepts.
    ///
    /// # Errors
    /// A message for the socket's error.
    pub(crate) fn send(&mut self, pending: &Slab<Pending>) -> Result<(), String> {
        while !self.outgoing.is_empty() {
            let mut slices = Vec::with_capacity(2 * BATCH);
            for outgoing in self.outgoing.iter().take(BATCH) {
                slices.push(IoSlice::new(&outgoing.header));
                if let Some((index, start, len)) = outgoing.data {
                    let memory = pending.get(index).and_then(|request| request.memory.as_ref());
                    let data = memory.and_then(|memory| memory.get(start..)?.get(..len));
                    slices.push(IoSlice::new(data.ok_or("a write without memory")?));
                }
            }
            let mut rest = slices.as_mut_slice();
            IoSlice::advance_slices(&mut rest, self.sent);
            match unless_blocked(self.nbd.send(rest))? {
                Some(count) => self.on_sent(count),
                None => return Ok(()),
            }
        }
        unless_blocked(self.nbd.flush()).map(drop)
    }

    fn on_sent(&mut self, count: usize) {
        self.sent += count;
        while let Some(first) = self.outgoing.front().map(Outgoing::len).filter(|&n| n <= self.sent)
        {
            self.sent -= first;
            self.outgoing.pop_front();
        }
    }

    /// Receives all available bytes; the indices of completed requests are added to `completed`.
    ///
    /// # Errors
    /// A message for the socket's or the server's error.
    pub(crate) fn receive(
        &mut self,
        pending: &mut Slab<Pending>,
        completed: &mut Vec<usize>,
    ) -> Result<(), String> {
        let (connection, context, kind) = (self.number, self.context, self.kind);
        let mut replies = PendingReplies { pending, connection, context, kind, completed };
        loop {
            match self.nbd.receive(&mut replies) {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(ClientError::Lost(error)) if error.kind() == ErrorKind::WouldBlock => {
                    return Ok(());
                }
                Err(error) => return Err(failure(&error, "")),
            }
        }
    }

    /// The socket and the events to poll it for.
    pub(crate) fn poll_fd(&self) -> (BorrowedFd<'_>, PollFlags) {
        let unsent = self.nbd.has_unsent() || !self.outgoing.is_empty();
        let writable = if unsent { PollFlags::OUT } else { PollFlags::empty() };
        (self.nbd.as_fd(), PollFlags::IN | writable)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.outgoing.is_empty() {
            self.nbd.disconnect();
        }
    }
}

/// `None` where the call would have had to wait.
fn unless_blocked<T>(outcome: io::Result<T>) -> Result<Option<T>, String> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(failure(&error.into(), "")),
    }
}
