//! A connection to an export: from the address to the transmission phase.
//!
//! Invariant: requests are sent in order, as they are given; the data of a read are received into the
//! memory that its owner has for them, as far as the transport allows.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use crate::address::Address;
use crate::client::credentials::Credentials;
use crate::client::error::ClientError;
use crate::client::handshake::{self, Export, HandshakeError, Wanted};
use crate::client::reply_parser::{Replies, ReplyParser};
use crate::client::socket::{Received, Socket};
use crate::client::tls_session::TlsSession;
use crate::constants::CMD_DISC;
use crate::request_header::RequestHeader;

/// How to connect to an export.
#[derive(Clone, Copy, Debug)]
pub struct ConnectOptions<'a> {
    /// Where the server listens.
    pub address: &'a Address,
    /// The credentials, if the connection is to use TLS.
    pub credentials: Option<&'a Credentials>,
    /// The export's name; empty for the server's default.
    pub export: &'a str,
    /// Requests of the handshake.
    pub wanted: Wanted<'a>,
    /// The limit of the connection, of all of its handshake, and then of each read and write without
    /// progress.
    pub timeout: Duration,
    /// The receive buffer in bytes, at least 1, for what is not received into a request's memory.
    pub receive_bytes: usize,
}

/// A connection in the transmission phase. Its calls block, each until its timeout, unless
/// [`Connection::set_nonblocking`] was called.
pub struct Connection {
    socket: Socket,
    /// The TLS session, if the connection has one: all bytes go through it.
    session: Option<Box<TlsSession>>,
    parser: ReplyParser,
    received: Vec<u8>,
}

impl Connection {
    /// Connects and opens the export.
    ///
    /// # Errors
    /// The server cannot be reached, one side rejects the other, or the server refuses the export.
    pub fn open(options: &ConnectOptions<'_>) -> Result<(Self, Export), ClientError> {
        let ConnectOptions { address, credentials, export, wanted, timeout, receive_bytes } =
            *options;
        let socket = Socket::connect(address, timeout).map_err(ClientError::Connect)?;
        socket.set_deadline(Some(Instant::now() + timeout));
        handshake::greet(&mut &socket)?;
        let (session, export) = match credentials {
            None => (None, handshake::choose(&mut &socket, export, wanted)?),
            Some(credentials) => {
                handshake::start_tls(&mut &socket)?;
                let session = TlsSession::begin(&socket, credentials);
                let mut session = Box::new(session.map_err(HandshakeError::Io)?);
                let export = handshake::choose(&mut session.over(&socket), export, wanted)?;
                (Some(session), export)
            }
        };
        socket.set_deadline(None);
        let (parser, received) = (ReplyParser::new(export.mode), vec![0; receive_bytes.max(1)]);
        Ok((Self { socket, session, parser, received }, export))
    }

    /// From now on a call that would wait fails with [`io::ErrorKind::WouldBlock`] instead.
    ///
    /// # Errors
    /// That of ioctl(2).
    pub fn set_nonblocking(&self) -> io::Result<()> {
        Ok(rustix::io::ioctl_fionbio(self.socket.as_fd(), true)?)
    }

    /// Sends some of `slices`, at least a byte of them, and returns how many bytes. They may wait to
    /// be sent by [`Connection::flush`].
    ///
    /// # Errors
    /// Those of the socket, `WouldBlock` too.
    pub fn send(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match &mut self.session {
            None => self.socket.send(slices),
            Some(session) => session.send(&self.socket, slices),
        }
    }

    /// Sends what earlier calls have left to be sent.
    ///
    /// # Errors
    /// Those of the socket, `WouldBlock` if bytes are left.
    pub fn flush(&mut self) -> io::Result<()> {
        self.session.as_mut().map_or(Ok(()), |session| session.flush(&self.socket))
    }

    /// Whether bytes that [`Connection::send`] has taken are still to be sent.
    #[must_use]
    pub fn has_unsent(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.has_unsent())
    }

    /// Sends all of `bytes`.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn send_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let count = self.send(&[IoSlice::new(bytes)])?;
            bytes = bytes.get(count..).unwrap_or_default();
        }
        self.flush()
    }

    /// Receives once and parses what came. Returns whether more may have come already.
    ///
    /// # Errors
    /// The connection is closed, or an error of `replies`; [`ClientError::Lost`] with `WouldBlock` if
    /// nothing has come.
    #[inline]
    pub fn receive(&mut self, replies: &mut impl Replies) -> Result<bool, ClientError> {
        let Self { socket, session, parser, received } = self;
        let received = match session {
            None => receive_plain(socket, parser, received, replies)?,
            Some(session) => session
                .receive(socket, |bytes| parser.feed(bytes, replies).map_err(ClientError::Reply))?,
        };
        match received {
            Received::End => Err(ClientError::Closed),
            received => Ok(received == Received::All),
        }
    }

    /// Sends NBD_CMD_DISC, if that needs no waiting (NBD proto.md, "Terminating the transmission
    /// phase"). All requests have been sent whole.
    pub fn disconnect(&mut self) {
        let (flags, command) = (0, CMD_DISC);
        let header = RequestHeader { flags, command, cookie: 0, offset: 0, length: 0 };
        let (bytes, count) = header.encode(self.parser.mode());
        let bytes = bytes.get(..count).unwrap_or_default();
        match &mut self.session {
            None => drop(self.socket.send(&[IoSlice::new(bytes)])),
            Some(session) => session.end(&self.socket, bytes),
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Receives once, data into the memory of their request.
#[inline]
fn receive_plain(
    socket: &Socket,
    parser: &mut ReplyParser,
    received: &mut [u8],
    replies: &mut impl Replies,
) -> Result<Received, ClientError> {
    let target = parser.data_target(replies).unwrap_or_default();
    let (room, most) = (target.len(), target.len() + received.len());
    let got = socket.receive(&mut [IoSliceMut::new(target), IoSliceMut::new(received)])?;
    let direct = got.min(room);
    if direct > 0 {
        parser.data_received(direct, replies).map_err(ClientError::Reply)?;
    }
    let rest = received.get(..got - direct).unwrap_or_default();
    parser.feed(rest, replies).map_err(ClientError::Reply)?;
    Ok(match got {
        0 => Received::End,
        got if got == most => Received::All,
        _ => Received::Some,
    })
}

/// Whether a server listens at `address`: connects, and disconnects immediately.
///
/// # Errors
/// Those of connect(2).
pub fn probe(address: &Address, timeout: Duration) -> io::Result<()> {
    Socket::connect(address, timeout).map(drop)
}
