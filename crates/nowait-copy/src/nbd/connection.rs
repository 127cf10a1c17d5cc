//! One connection to an NBD server: requests out, replies in, neither ever waited for.
//!
//! Invariant: requests go out whole and in order; the data of a write is sent from where it is,
//! the data of a read is received to where it belongs.
//! Knows: wire, receiver, handshake, credentials, session. Known by: nbd_port.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;
use slab::Slab;

use super::credentials::Credentials;
use super::handshake::{self, Export};
use super::receiver::{Pending, Receiver};
use super::session::Session;
use super::wire::{self, REQUEST_BYTES};
use crate::error::words;
use crate::place::Address;

/// How long a server may take for the connection and for each answer of the handshake.
const PATIENCE: Duration = Duration::from_secs(30);
/// Requests that go out with one system call: each has a header and data.
const BATCH: usize = 16;
/// Replies are received in pieces of so many bytes, behind the data of a read.
const SCRATCH_BYTES: usize = 4096;
/// What the kernel is asked to hold for a socket each way, in bytes. It may give less.
const SOCKET_BYTES: usize = 2 << 20;

/// A request on its way out.
pub(super) struct Outgoing {
    pub(super) header: [u8; REQUEST_BYTES],
    /// Whose memory the data is in, where it begins there, and its bytes.
    pub(super) data: Option<(usize, usize, usize)>,
}

impl Outgoing {
    fn len(&self) -> usize {
        REQUEST_BYTES + self.data.map_or(0, |(_, _, len)| len)
    }
}

/// A connection that takes requests.
pub(super) struct Connection {
    socket: OwnedFd,
    /// Through which everything goes, where it is there.
    session: Option<Session>,
    receiver: Receiver,
    outgoing: VecDeque<Outgoing>,
    /// Bytes of the first outgoing request that the socket has taken.
    sent: usize,
    scratch: Vec<u8>,
    /// Bytes asked for or to be written that are not answered.
    pub(super) in_flight: u64,
}

impl Connection {
    /// Connects to `address` and asks for `export`, by TLS if there are `credentials`. `number` is the
    /// connection's own.
    ///
    /// # Errors
    /// Words that say why there is no connection.
    pub(super) fn open(
        address: &Address,
        credentials: Option<&Credentials>,
        export: &str,
        number: usize,
    ) -> Result<(Self, Export), String> {
        let (socket, session, export) = match address {
            Address::Unix(path) => {
                let stream = UnixStream::connect(path).map_err(|error| cannot_connect(&error))?;
                let timeouts = stream
                    .set_read_timeout(Some(PATIENCE))
                    .and_then(|()| stream.set_write_timeout(Some(PATIENCE)));
                timeouts.map_err(|error| words(&error))?;
                negotiated(stream, credentials, export)?
            }
            Address::Tcp { host, port } => negotiated(tcp(host, *port)?, credentials, export)?,
        };
        // A socket with the system's sizes works too.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&socket, SOCKET_BYTES);
        let _ = rustix::net::sockopt::set_socket_recv_buffer_size(&socket, SOCKET_BYTES);
        rustix::io::ioctl_fionbio(&socket, true).map_err(|errno| words(&errno.into()))?;
        let receiver = Receiver::new(number, export.context);
        let (outgoing, scratch) = (VecDeque::new(), vec![0; SCRATCH_BYTES]);
        let connection =
            Self { socket, session, receiver, outgoing, sent: 0, scratch, in_flight: 0 };
        Ok((connection, export))
    }

    /// Puts a request behind those that are on their way out.
    pub(super) fn push(&mut self, outgoing: Outgoing) {
        self.outgoing.push_back(outgoing);
    }

    /// Sends what the socket takes.
    ///
    /// # Errors
    /// Words for what the socket said.
    pub(super) fn send(&mut self, pending: &Slab<Pending>) -> Result<(), String> {
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
                Ok(count) => self.went_out(count),
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

    fn went_out(&mut self, count: usize) {
        self.sent += count;
        while let Some(first) = self.outgoing.front().map(Outgoing::len).filter(|&n| n <= self.sent)
        {
            self.sent -= first;
            self.outgoing.pop_front();
        }
    }

    /// Receives what there is; `ended` gets the place of each request that has ended.
    ///
    /// # Errors
    /// Words for what the socket or the server said.
    pub(super) fn receive(
        &mut self,
        pending: &mut Slab<Pending>,
        ended: &mut dyn FnMut(usize),
    ) -> Result<(), String> {
        loop {
            let place = self.receiver.place(pending);
            let room = place.as_ref().map_or(0, |place| place.len());
            let got = match (&mut self.session, place) {
                (None, place) => received(&self.socket, place, &mut self.scratch)?,
                (Some(session), place) => {
                    let memory = place.unwrap_or(&mut self.scratch);
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
                self.receiver.placed(direct, pending, ended)?;
            }
            let rest = self.scratch.get(..got - direct).unwrap_or_default();
            self.receiver.feed(rest, pending, ended)?;
            // A session may have more at hand than the socket tells of.
            if self.session.is_none() && got < room + SCRATCH_BYTES {
                return Ok(());
            }
        }
    }

    /// When the socket is to be looked at again.
    pub(super) fn watched(&self) -> (BorrowedFd<'_>, PollFlags) {
        let sealed = self.session.as_ref().is_some_and(Session::has_unsent);
        let unsent = sealed || !self.outgoing.is_empty();
        let writable = if unsent { PollFlags::OUT } else { PollFlags::empty() };
        (self.socket.as_fd(), PollFlags::IN | writable)
    }
}

impl Drop for Connection {
    /// Says goodbye, if that needs no waiting ("Terminating the transmission phase").
    fn drop(&mut self) {
        if self.outgoing.is_empty() {
            let goodbye = wire::request(wire::CMD_DISC, 0, 0, 0, 0);
            match &mut self.session {
                None => drop(rustix::io::write(&self.socket, &goodbye)),
                Some(session) => session.end(self.socket.as_fd(), &goodbye),
            }
        }
    }
}

/// What the socket has, to `place` and what is behind it to `scratch`: how many bytes, 0 at the end,
/// `None` if nothing has come.
fn received(
    socket: &OwnedFd,
    place: Option<&mut [u8]>,
    scratch: &mut [u8],
) -> Result<Option<usize>, String> {
    let mut slices = [IoSliceMut::new(place.unwrap_or_default()), IoSliceMut::new(scratch)];
    loop {
        match rustix::io::readv(socket, &mut slices) {
            Ok(got) => return Ok(Some(got)),
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(lost(errno)),
        }
    }
}

fn negotiated<S: Read + Write + Into<OwnedFd>>(
    mut stream: S,
    credentials: Option<&Credentials>,
    export: &str,
) -> Result<(OwnedFd, Option<Session>, Export), String> {
    let (session, export) = match credentials {
        None => (None, handshake::negotiate(&mut stream, export)?),
        Some(credentials) => {
            handshake::start_tls(&mut stream)?;
            let mut session = Session::begin(&mut stream, credentials)?;
            let export = handshake::choose(&mut session.over(&mut stream), export)?;
            (Some(session), export)
        }
    };
    Ok((stream.into(), session, export))
}

fn tcp(host: &str, port: u16) -> Result<TcpStream, String> {
    let addresses = (host, port).to_socket_addrs().map_err(|error| cannot_connect(&error))?;
    let mut refused = "cannot connect: the name has no address".to_owned();
    for address in addresses {
        match TcpStream::connect_timeout(&address, PATIENCE) {
            Ok(stream) => {
                let set_up = stream
                    .set_nodelay(true)
                    .and_then(|()| stream.set_read_timeout(Some(PATIENCE)))
                    .and_then(|()| stream.set_write_timeout(Some(PATIENCE)));
                return set_up.map(|()| stream).map_err(|error| words(&error));
            }
            Err(error) => refused = cannot_connect(&error),
        }
    }
    Err(refused)
}

fn cannot_connect(error: &std::io::Error) -> String {
    format!("cannot connect: {} (is the server running?)", words(error))
}

fn lost(errno: Errno) -> String {
    match errno {
        Errno::PIPE | Errno::CONNRESET => "the server closed the connection".into(),
        other => format!("the connection is lost: {}", words(&other.into())),
    }
}
