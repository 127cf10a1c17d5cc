//! The TLS layer of a connection: decrypts bytes from the socket and encrypts bytes to it.
//!
//! Invariant: after the client's STARTTLS every byte from the socket counts as TLS, even if it came
//! together with STARTTLS. Ciphertext is sent in order and once. At most `CIPHERTEXT_BUFFER_BYTES`
//! of replies are encrypted and unsent; their budget is released when they have been sent.

use std::io::{self, BufRead, IoSlice, Write};

use rustix::io::Errno;
use rustls::ServerConnection;
use x509_cert::Certificate;
use x509_cert::der::Decode;

use crate::nbd::reply::send_queue::{MAX_IOVECS, SendQueue, SendResult};
use crate::nbd::tls_config::Credentials;
use crate::net::socket::Socket;

/// The most bytes of replies that are encrypted together: most of what one send takes.
/// Beyond it: no more is encrypted before it has left.
const CIPHERTEXT_BUFFER_BYTES: usize = 256 << 10;

/// The transport of a connection.
pub(crate) enum Transport {
    /// Not encrypted.
    Plain,
    /// TLS.
    Tls(Box<TlsSession>),
}

impl Transport {
    /// Whether the client has sent close_notify.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(self, Self::Tls(session) if session.peer_closed)
    }
}

/// One TLS session.
pub(crate) struct TlsSession {
    tls: ServerConnection,
    /// Unsent bytes from before TLS.
    plaintext_pending: Vec<u8>,
    /// Budget of the replies that are encrypted and unsent.
    budget: u64,
    /// The client's close_notify has arrived.
    peer_closed: bool,
}

impl TlsSession {
    /// A session that begins with the client's next byte, after the contents of `out` were sent.
    ///
    /// # Errors
    /// The error of rustls; none is expected.
    pub(crate) fn new(
        credentials: &Credentials,
        out: &mut SendQueue,
    ) -> Result<Self, rustls::Error> {
        let mut tls = ServerConnection::new(credentials.config())?;
        tls.set_buffer_limit(Some(CIPHERTEXT_BUFFER_BYTES));
        Ok(Self { tls, plaintext_pending: out.take_unsent(), budget: 0, peer_closed: false })
    }

    /// Decrypts bytes of the socket, and passes the plaintext to `sink`, piece by piece.
    ///
    /// # Errors
    /// The bytes are not TLS, or the TLS handshake fails. Then nothing more can be decrypted, and
    /// [`TlsSession::send`] sends the alert.
    pub(crate) fn decrypt(
        &mut self,
        mut ciphertext: &[u8],
        mut sink: impl FnMut(&[u8]),
    ) -> Result<(), rustls::Error> {
        while !ciphertext.is_empty() {
            let taken = self.tls.read_tls(&mut ciphertext);
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
            self.peer_closed = state.peer_has_closed();
            if self.peer_closed {
                break;
            }
        }
        Ok(())
    }

    /// The subject of the client's certificate (RFC 4514), if it has sent one.
    pub(crate) fn subject(&self) -> Option<String> {
        let shown = self.tls.peer_certificates()?.first()?;
        let certificate = Certificate::from_der(shown).ok()?;
        Some(certificate.tbs_certificate().subject().to_string())
    }

    /// Whether bytes other than queued replies are still to be sent.
    pub(crate) fn has_unsent(&self) -> bool {
        !self.plaintext_pending.is_empty() || self.tls.wants_write()
    }

    /// Encrypts and sends as much as the socket takes, and at most `quota` bytes of replies, which
    /// it decreases. Adds the budget of what was sent to `budget`.
    pub(crate) fn send(
        &mut self,
        out: &mut SendQueue,
        socket: &Socket,
        quota: &mut u64,
        budget: &mut u64,
    ) -> SendResult {
        loop {
            match self.send_ciphertext(socket) {
                SendResult::Drained => *budget += std::mem::take(&mut self.budget),
                sent => return sent,
            }
            // The first reply follows the TLS handshake.
            if out.is_empty() || self.tls.is_handshaking() {
                return SendResult::Drained;
            }
            if *quota == 0 {
                return SendResult::QuotaUsed;
            }
            if !self.encrypt(out, quota) {
                return SendResult::Closed(Errno::IO);
            }
        }
    }

    /// The budget of what is encrypted and unsent is released elsewhere.
    pub(crate) fn forget_budget(&mut self) {
        self.budget = 0;
    }

    /// Sends close_notify, if the socket has room for it now.
    pub(crate) fn send_close_notify(&mut self, socket: &Socket) {
        self.tls.send_close_notify();
        self.send_ciphertext(socket);
    }

    fn send_ciphertext(&mut self, socket: &Socket) -> SendResult {
        while !self.plaintext_pending.is_empty() {
            match socket.send(&[IoSlice::new(&self.plaintext_pending)]) {
                Ok(taken) => drop(self.plaintext_pending.drain(..taken)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return SendResult::WouldBlock,
                Err(error) => return SendResult::Closed(error),
            }
        }
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut TlsWriter(socket)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return SendResult::WouldBlock;
                }
                Err(error) => {
                    return SendResult::Closed(Errno::from_io_error(&error).unwrap_or(Errno::IO));
                }
            }
        }
        SendResult::Drained
    }

    /// Encrypts the next replies, in records of the maximum size. False if no progress is possible.
    fn encrypt(&mut self, out: &mut SendQueue, quota: &mut u64) -> bool {
        let mut pieces = [IoSlice::new(&[]); MAX_IOVECS];
        let used = out.iovecs(&mut pieces, *quota);
        let taken = self.tls.writer().write_vectored(&pieces[..used]).unwrap_or(0);
        *quota -= taken as u64;
        out.advance(taken, &mut self.budget);
        // A key update may have to be sent first.
        taken > 0 || self.tls.wants_write()
    }
}

/// Adapter that writes TLS records to a socket.
struct TlsWriter<'a>(&'a Socket);

impl Write for TlsWriter<'_> {
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
pub(crate) mod tests;
