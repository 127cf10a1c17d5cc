//! A connection's TLS session: encrypts what is sent and decrypts what is received.
//!
//! Invariant: once a session exists, all bytes to and from the socket go through it; ciphertext
//! that is not yet sent is bounded, and is sent in order.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::ops::Range;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustls::ClientConnection;

use crate::nbd::credentials::Credentials;
use crate::nbd::handshake_error::is_closed;
use crate::nbd::tls_error;

/// The limit of buffered ciphertext in bytes.
const CIPHERTEXT_BUFFER_BYTES: usize = 256 << 10;
/// The receive buffer in bytes: it takes as many records as have arrived.
const RECEIVED_BYTES: usize = 256 << 10;

/// One TLS session.
pub(crate) struct TlsSession {
    tls: ClientConnection,
    received: Vec<u8>,
    /// The part of `received` that was not decrypted yet.
    ciphertext: Range<usize>,
}

impl TlsSession {
    /// Performs the TLS handshake on a blocking stream.
    ///
    /// # Errors
    /// A message that says why the client rejected the server, or the server the client.
    pub(crate) fn begin(
        stream: &mut (impl Read + Write),
        credentials: &Credentials,
    ) -> Result<Self, String> {
        let mut tls = credentials.connection().map_err(|error| tls_error::of_tls(&error))?;
        tls.set_buffer_limit(Some(CIPHERTEXT_BUFFER_BYTES));
        while tls.is_handshaking() {
            let moved = tls.complete_io(stream);
            moved.map_err(|error| failed(&error_after_alert(&mut tls, stream, error)))?;
        }
        Ok(Self { tls, received: vec![0; RECEIVED_BYTES], ciphertext: 0..0 })
    }

    /// The session as a blocking stream, for the NBD handshake.
    pub(crate) fn over<'a, S: Read + Write>(&'a mut self, stream: &'a mut S) -> Waiting<'a, S> {
        Waiting { tls: &mut self.tls, stream }
    }

    /// Encrypts as much of `slices` as the buffer has room for, and sends what the socket accepts.
    ///
    /// # Errors
    /// `EAGAIN` if no byte was encrypted because the socket accepts none; errors of the socket.
    pub(crate) fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        slices: &[IoSlice<'_>],
    ) -> Result<usize, Errno> {
        self.flush(socket)?;
        let taken = self.tls.writer().write_vectored(slices).map_err(|_| Errno::IO)?;
        match self.flush(socket) {
            Ok(()) | Err(Errno::AGAIN) if taken > 0 => Ok(taken),
            Ok(()) => Err(Errno::AGAIN),
            Err(errno) => Err(errno),
        }
    }

    /// Sends the buffered ciphertext.
    ///
    /// # Errors
    /// `EAGAIN` if the socket did not accept all of it; other errors of the socket.
    pub(crate) fn flush(&mut self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut Socket(socket)) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
            }
        }
        Ok(())
    }

    /// Whether ciphertext was not sent yet.
    pub(crate) fn has_unsent(&self) -> bool {
        self.tls.wants_write()
    }

    /// Decrypts as much as `memory` has room for: 0 bytes at the end of the stream, `None` if no
    /// byte has arrived.
    ///
    /// # Errors
    /// A message for an error of the socket or of TLS.
    pub(crate) fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        memory: &mut [u8],
    ) -> Result<Option<usize>, String> {
        loop {
            match self.tls.reader().read(memory) {
                Ok(count) => return Ok(Some(count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(failed(&error)),
            }
            if self.ciphertext.is_empty() {
                match rustix::io::read(socket, self.received.as_mut_slice()) {
                    Ok(0) => return Ok(Some(0)),
                    Ok(count) => self.ciphertext = 0..count,
                    Err(Errno::INTR) => continue,
                    Err(Errno::AGAIN) => return Ok(None),
                    Err(errno) => return Err(failed(&errno.into())),
                }
            }
            let mut ciphertext = self.received.get(self.ciphertext.clone()).unwrap_or_default();
            self.ciphertext.start +=
                self.tls.read_tls(&mut ciphertext).map_err(|error| failed(&error))?;
            self.tls.process_new_packets().map_err(|error| tls_error::of_tls(&error))?;
        }
    }

    /// Sends `last` and close_notify, if the socket has room; neither is required.
    pub(crate) fn end(&mut self, socket: BorrowedFd<'_>, last: &[u8]) {
        if self.tls.writer().write_all(last).is_ok() {
            self.tls.send_close_notify();
            let _ = self.flush(socket);
        }
    }
}

/// A session on a blocking stream.
pub(crate) struct Waiting<'a, S> {
    tls: &'a mut ClientConnection,
    stream: &'a mut S,
}

impl<S: Read + Write> Read for Waiting<'_, S> {
    fn read(&mut self, memory: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.tls.reader().read(memory) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                outcome => return outcome,
            }
            if self.tls.read_tls(self.stream)? == 0 {
                return Ok(0);
            }
            self.tls.process_new_packets().map_err(io::Error::other)?;
        }
    }
}

impl<S: Read + Write> Write for Waiting<'_, S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.tls.writer().write(bytes)?;
        while self.tls.wants_write() {
            match self.tls.write_tls(self.stream) {
                Ok(_) => {}
                // EINTR is handled here: a caller that retries would have the bytes encrypted
                // twice.
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error_after_alert(self.tls, self.stream, error)),
            }
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The alert that a server sent before it closed the connection, if a write failed; else `error`.
fn error_after_alert(
    tls: &mut ClientConnection,
    stream: &mut (impl Read + Write),
    error: io::Error,
) -> io::Error {
    if !matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) {
        return error;
    }
    while tls.read_tls(stream).is_ok_and(|count| count > 0) {
        if let Err(alert) = tls.process_new_packets() {
            return io::Error::other(alert);
        }
    }
    error
}

/// A socket as the writer of records.
struct Socket<'a>(BorrowedFd<'a>);

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(self.0, bytes)?)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(rustix::io::writev(self.0, slices)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn failed(error: &io::Error) -> String {
    match tls_error::of_io(error) {
        Some(words) => words,
        None if is_closed(error.kind()) => {
            "the server closed the connection in the TLS handshake".into()
        }
        None => format!("the connection is lost: {}", crate::error::os_message(error)),
    }
}
