//! One connection to an NBD server: sends requests and receives replies without waiting.
//!
//! Invariant: requests are sent whole and in order; the data of a write is sent from the request's
//! memory, the data of a read is received into it.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nowait_nbd::client::{self, Export, Wanted};
use rustix::event::PollFlags;
use rustix::io::Errno;
use slab::Slab;

use super::credentials::Credentials;
use super::handshake_error::{CONTEXT, failure};
use super::wire::{self, REQUEST_BYTES, RequestHeader};
use crate::error::os_message;
use crate::location::Address;
use crate::nbd::reply_parser::{Pending, ReplyParser};
use crate::nbd::tls_session::TlsSession;

/// The timeout for the connection and for each answer of the handshake.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);
/// Requests that one system call sends: each has a header and data.
const BATCH: usize = 16;
/// The receive buffer in bytes, for what follows the data of a read.
const SCRATCH_BYTES: usize = 4096;
/// The requested size of the socket's send and receive buffers in bytes. The kernel may grant less.
const SOCKET_BYTES: usize = 2 << 20;

/// What is asked for in the handshake.
pub(crate) const WANTED: Wanted<'static> = Wanted { structured: true, context: Some(CONTEXT) };

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
    socket: OwnedFd,
    /// The TLS session, if the connection has one: all bytes go through it.
    session: Option<TlsSession>,
    receiver: ReplyParser,
    outgoing: VecDeque<Outgoing>,
    /// Bytes of the first outgoing request that the socket has taken.
    sent: usize,
    scratch: Vec<u8>,
    /// Bytes of the requests that are not answered.
    pub(crate) in_flight: u64,
}

impl Connection {
    /// Connects to `address` and opens `export`, with TLS if there are `credentials`. `number` is
    /// the connection's index.
    ///
    /// # Errors
    /// A message that says why the connection failed.
    pub(crate) fn open(
        address: &Address,
        credentials: Option<&Credentials>,
        export: &str,
        number: usize,
    ) -> Result<(Self, Export), String> {
        let (socket, session, export) = match address {
            Address::Unix(path) => {
                let stream = UnixStream::connect(path).map_err(|error| cannot_connect(&error))?;
                let timeouts = stream
                    .set_read_timeout(Some(REPLY_TIMEOUT))
                    .and_then(|()| stream.set_write_timeout(Some(REPLY_TIMEOUT)));
                timeouts.map_err(|error| os_message(&error))?;
                negotiate(stream, credentials, export)?
            }
            Address::Tcp { host, port } => negotiate(tcp(host, *port)?, credentials, export)?,
        };
        // Errors are ignored: the default buffer sizes work, too.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&socket, SOCKET_BYTES);
        let _ = rustix::net::sockopt::set_socket_recv_buffer_size(&socket, SOCKET_BYTES);
        rustix::io::ioctl_fionbio(&socket, true).map_err(|errno| os_message(&errno.into()))?;
        let receiver = ReplyParser::new(number, export.context);
        let (outgoing, scratch) = (VecDeque::new(), vec![0; SCRATCH_BYTES]);
        let connection =
            Self { socket, session, receiver, outgoing, sent: 0, scratch, in_flight: 0 };
        Ok((connection, export))
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
            let written = match &mut self.session {
                None => rustix::io::writev(&self.socket, rest),
                Some(session) => session.send(self.socket.as_fd(), rest),
            };
            match written {
                Ok(count) => self.on_sent(count),
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(lost(errno)),
            }
        }
        match self.session.as_mut().map(|session| session.flush(self.socket.as_fd())) {
            None | Some(Ok(()) | Err(Errno::AGAIN)) => Ok(()),
            Some(Err(errno)) => Err(lost(errno)),
        }
    }

    fn on_sent(&mut self, count: usize) {
        self.sent += count;
        while let Some(first) = self.outgoing.front().map(Outgoing::len).filter(|&n| n <= self.sent)
        {
            self.sent -= first;
            self.outgoing.pop_front();
        }
    }

    /// Receives all available bytes; `on_completed` gets the index of each completed request.
    ///
    /// # Errors
    /// A message for the socket's or the server's error.
    pub(crate) fn receive(
        &mut self,
        pending: &mut Slab<Pending>,
        on_completed: &mut dyn FnMut(usize),
    ) -> Result<(), String> {
        loop {
            let target = self.receiver.data_target(pending);
            let room = target.as_ref().map_or(0, |target| target.len());
            let got = match (&mut self.session, target) {
                (None, target) => received(&self.socket, target, &mut self.scratch)?,
                (Some(session), target) => {
                    let memory = target.unwrap_or(&mut self.scratch);
                    session.receive(self.socket.as_fd(), memory)?
                }
            };
            let got = match got {
                None => return Ok(()),
                Some(0) => return Err("the server closed the connection".into()),
                Some(got) => got,
            };
            let direct = got.min(room);
            if direct > 0 {
                self.receiver.data_received(direct, pending, on_completed)?;
            }
            let rest = self.scratch.get(..got - direct).unwrap_or_default();
            self.receiver.feed(rest, pending, on_completed)?;
            // A TLS session may hold decrypted bytes although the socket is empty.
            if self.session.is_none() && got < room + SCRATCH_BYTES {
                return Ok(());
            }
        }
    }

    /// The socket and the events to poll it for.
    pub(crate) fn poll_fd(&self) -> (BorrowedFd<'_>, PollFlags) {
        let tls_unsent = self.session.as_ref().is_some_and(TlsSession::has_unsent);
        let unsent = tls_unsent || !self.outgoing.is_empty();
        let writable = if unsent { PollFlags::OUT } else { PollFlags::empty() };
        (self.socket.as_fd(), PollFlags::IN | writable)
    }
}

impl Drop for Connection {
    /// Sends NBD_CMD_DISC, if that needs no waiting ("Terminating the transmission phase").
    fn drop(&mut self) {
        if self.outgoing.is_empty() {
            let (flags, command) = (0, wire::CMD_DISC);
            let disconnect = RequestHeader { flags, command, cookie: 0, offset: 0, length: 0 };
            let disconnect = disconnect.compact();
            match &mut self.session {
                None => drop(rustix::io::write(&self.socket, &disconnect)),
                Some(session) => session.end(self.socket.as_fd(), &disconnect),
            }
        }
    }
}

/// Receives into `target` and then into `scratch`. Returns the number of bytes, 0 at the end of the
/// stream, `None` if no byte has arrived.
fn received(
    socket: &OwnedFd,
    target: Option<&mut [u8]>,
    scratch: &mut [u8],
) -> Result<Option<usize>, String> {
    let mut slices = [IoSliceMut::new(target.unwrap_or_default()), IoSliceMut::new(scratch)];
    loop {
        match rustix::io::readv(socket, &mut slices) {
            Ok(got) => return Ok(Some(got)),
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(lost(errno)),
        }
    }
}

fn negotiate<S: Read + Write + Into<OwnedFd>>(
    mut stream: S,
    credentials: Option<&Credentials>,
    export: &str,
) -> Result<(OwnedFd, Option<TlsSession>, Export), String> {
    let failed = |error| failure(error, export);
    client::greet(&mut stream).map_err(failed)?;
    let (session, found) = match credentials {
        None => (None, client::choose(&mut stream, export, WANTED)),
        Some(credentials) => {
            client::start_tls(&mut stream).map_err(failed)?;
            let mut session = TlsSession::begin(&mut stream, credentials)?;
            let found = client::choose(&mut session.over(&mut stream), export, WANTED);
            (Some(session), found)
        }
    };
    Ok((stream.into(), session, found.map_err(failed)?))
}

fn tcp(host: &str, port: u16) -> Result<TcpStream, String> {
    let addresses = (host, port).to_socket_addrs().map_err(|error| cannot_connect(&error))?;
    let mut refused = "cannot connect: the name has no address".to_owned();
    for address in addresses {
        match TcpStream::connect_timeout(&address, REPLY_TIMEOUT) {
            Ok(stream) => {
                let set_up = stream
                    .set_nodelay(true)
                    .and_then(|()| stream.set_read_timeout(Some(REPLY_TIMEOUT)))
                    .and_then(|()| stream.set_write_timeout(Some(REPLY_TIMEOUT)));
                return set_up.map(|()| stream).map_err(|error| os_message(&error));
            }
            Err(error) => refused = cannot_connect(&error),
        }
    }
    Err(refused)
}

fn cannot_connect(error: &std::io::Error) -> String {
    format!("cannot connect: {} (is the server running?)", os_message(error))
}

fn lost(errno: Errno) -> String {
    match errno {
        Errno::PIPE | Errno::CONNRESET => "the server closed the connection".into(),
        other => format!("the connection is lost: {}", os_message(&other.into())),
    }
}
