//! The encrypted half of a connection: what comes from the socket is opened, what goes to it sealed.
//!
//! Invariant: after the client's STARTTLS not a byte from the socket is taken for anything but TLS,
//! whenever it came; sealed bytes are sent in order and once; of replies, at most `SEALED_BYTES`
//! are sealed and not sent, and their budget is given back when they have left.
//! Knows: credentials, socket, reply. Known by: conn, turn.

use std::io::{self, BufRead, IoSlice, Write};

use rustls::ServerConnection;

use super::credentials::Credentials;
use super::reply::{Out, PIECES, Sent};
use super::socket::Socket;

/// Bytes of replies that are sealed together: most of what one send takes.
const SEALED_BYTES: usize = 256 << 10;

/// How a connection's bytes travel.
pub(crate) enum Channel {
    /// As they are.
    Plain,
    /// By TLS.
    Tls(Box<Session>),
}

impl Channel {
    /// Whether the client has said, by TLS, that nothing more comes.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(self, Self::Tls(session) if session.ended)
    }
}

/// One TLS session.
pub(crate) struct Session {
    tls: ServerConnection,
    /// What was to be sent before TLS began, and was not sent yet.
    clear: Vec<u8>,
    /// Budget of the replies that are sealed and not sent.
    budget: u64,
    /// The client's goodbye has come.
    ended: bool,
}

impl Session {
    /// A session that begins with the client's next byte, after what `out` holds was sent.
    ///
    /// # Errors
    /// What rustls said; it has no reason to.
    pub(crate) fn new(credentials: &Credentials, out: &mut Out) -> Result<Self, rustls::Error> {
        let mut tls = ServerConnection::new(credentials.config().clone())?;
        tls.set_buffer_limit(Some(SEALED_BYTES));
        Ok(Self { tls, clear: out.take_unsent(), budget: 0, ended: false })
    }

    /// Takes bytes of the socket, and gives what was in them to `sink`, piece by piece.
    ///
    /// # Errors
    /// What is no TLS, or was not meant for us. Then nothing more can be opened, and
    /// [`Session::send`] tells the client why.
    pub(crate) fn open(
        &mut self,
        mut sealed: &[u8],
        mut sink: impl FnMut(&[u8]),
    ) -> Result<(), rustls::Error> {
        while !sealed.is_empty() {
            let taken = self.tls.read_tls(&mut sealed);
            taken.map_err(|error| rustls::Error::General(error.to_string()))?;
            let state = self.tls.process_new_packets()?;
            let mut left = state.plaintext_bytes_to_read();
            let mut reader = self.tls.reader();
            while left > 0
                && let Ok(piece) = reader.fill_buf()
            {
                let count = piece.len();
                sink(piece);
                reader.consume(count);
                left = left.saturating_sub(count);
            }
            self.ended = state.peer_has_closed();
            if self.ended {
                break;
            }
        }
        Ok(())
    }

    /// Whether something is still to be sent before, or beside, any reply.
    pub(crate) fn has_unsent(&self) -> bool {
        !self.clear.is_empty() || self.tls.wants_write()
    }

    /// Seals and sends as much as the socket takes, and no more than `most` bytes of replies, which
    /// become fewer by that. Adds up the budget of what was sent.
    pub(crate) fn send(
        &mut self,
        out: &mut Out,
        socket: &Socket,
        most: &mut u64,
        budget: &mut u64,
    ) -> Sent {
        loop {
            match self.send_sealed(socket) {
                Sent::All => *budget += std::mem::take(&mut self.budget),
                sent => return sent,
            }
            // Replies follow what came through TLS, so none is there before TLS is.
            if out.is_empty() || self.tls.is_handshaking() {
                return Sent::All;
            }
            if *most == 0 {
                return Sent::Enough;
            }
            if !self.seal(out, most) {
                return Sent::Broken;
            }
        }
    }

    /// Says goodbye, if the socket has room for it now: it is a courtesy.
    pub(crate) fn say_goodbye(&mut self, socket: &Socket) {
        self.tls.send_close_notify();
        self.send_sealed(socket);
    }

    fn send_sealed(&mut self, socket: &Socket) -> Sent {
        while !self.clear.is_empty() {
            match socket.send(&[IoSlice::new(&self.clear)]) {
                Ok(taken) => drop(self.clear.drain(..taken)),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Sent::Full,
                Err(_) => return Sent::Broken,
            }
        }
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut Records(socket)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Sent::Full,
                Err(_) => return Sent::Broken,
            }
        }
        Sent::All
    }

    /// Seals the next replies, in records as large as they may be. False if that leads nowhere.
    fn seal(&mut self, out: &mut Out, most: &mut u64) -> bool {
        let mut pieces = [IoSlice::new(&[]); PIECES];
        let used = out.pieces(&mut pieces, *most);
        let taken = self.tls.writer().write_vectored(&pieces[..used]).unwrap_or(0);
        *most -= taken as u64;
        out.advance(taken, &mut self.budget);
        // New keys may have to be told of first.
        taken > 0 || self.tls.wants_write()
    }
}

/// A socket to write records to.
struct Records<'a>(&'a Socket);

impl Write for Records<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(self.0.send(pieces)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
#[path = "tls_tests.rs"]
pub(crate) mod tests;
