//! A connection's TLS session: what is sent is sealed, what was received is opened.
//!
//! Invariant: once a session is there, nothing goes to the socket or comes from it but through it; what
//! is sealed and not sent is bounded, and sent in order.
//! Knows: tls_words, credentials. Known by: connection.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::ops::Range;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustls::ClientConnection;

use super::credentials::Credentials;
use super::tls_words;

/// Bytes of requests that are sealed together.
const SEALED_BYTES: usize = 256 << 10;
/// Bytes that are received together: as many records as there are.
const RECEIVED_BYTES: usize = 256 << 10;

/// One TLS session.
pub(super) struct Session {
    tls: ClientConnection,
    received: Vec<u8>,
    /// What of `received` was not opened yet.
    sealed: Range<usize>,
}

impl Session {
    /// Goes through the TLS handshake on a stream that waits.
    ///
    /// # Errors
    /// Words that say why the server is not believed, or why it does not believe us.
    pub(super) fn begin(
        stream: &mut (impl Read + Write),
        credentials: &Credentials,
    ) -> Result<Self, String> {
        let mut tls = credentials.connection().map_err(|error| tls_words::of_tls(&error))?;
        tls.set_buffer_limit(Some(SEALED_BYTES));
        while tls.is_handshaking() {
            let moved = tls.complete_io(stream);
            moved.map_err(|error| failed(&last_words(&mut tls, stream, error)))?;
        }
        Ok(Self { tls, received: vec![0; RECEIVED_BYTES], sealed: 0..0 })
    }

    /// The session as a stream that waits, for what comes before the first request.
    pub(super) fn over<'a, S: Read + Write>(&'a mut self, stream: &'a mut S) -> Waiting<'a, S> {
        Waiting { tls: &mut self.tls, stream }
    }

    /// Seals as much of `slices` as there is room for, and sends what the socket takes.
    ///
    /// # Errors
    /// `EAGAIN` if nothing was sealed, as the socket takes nothing; what the socket said.
    pub(super) fn send(
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

    /// Sends what is sealed.
    ///
    /// # Errors
    /// `EAGAIN` if the socket did not take all of it; what else it said.
    pub(super) fn flush(&mut self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut Socket(socket)) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
            }
        }
        Ok(())
    }

    /// Whether something is sealed that was not sent.
    pub(super) fn has_unsent(&self) -> bool {
        self.tls.wants_write()
    }

    /// Opens as much as `memory` has room for: 0 bytes at the end, `None` if nothing has come.
    ///
    /// # Errors
    /// Words for what the socket said, or for what is no TLS.
    pub(super) fn receive(
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
            if self.sealed.is_empty() {
                match rustix::io::read(socket, self.received.as_mut_slice()) {
                    Ok(0) => return Ok(Some(0)),
                    Ok(count) => self.sealed = 0..count,
                    Err(Errno::INTR) => continue,
                    Err(Errno::AGAIN) => return Ok(None),
                    Err(errno) => return Err(failed(&errno.into())),
                }
            }
            let mut sealed = self.received.get(self.sealed.clone()).unwrap_or_default();
            self.sealed.start += self.tls.read_tls(&mut sealed).map_err(|error| failed(&error))?;
            self.tls.process_new_packets().map_err(|error| tls_words::of_tls(&error))?;
        }
    }

    /// Sends `last` and says goodbye, if the socket has room for it: it is a courtesy.
    pub(super) fn end(&mut self, socket: BorrowedFd<'_>, last: &[u8]) {
        if self.tls.writer().write_all(last).is_ok() {
            self.tls.send_close_notify();
            let _ = self.flush(socket);
        }
    }
}

/// A session on a stream that waits.
pub(super) struct Waiting<'a, S> {
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
                // Whoever tries again would have the bytes sealed twice.
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(last_words(self.tls, self.stream, error)),
            }
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a server said before it closed the connection that nothing could be written to.
fn last_words(
    tls: &mut ClientConnection,
    stream: &mut (impl Read + Write),
    error: io::Error,
) -> io::Error {
    if !matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) {
        return error;
    }
    while tls.read_tls(stream).is_ok_and(|count| count > 0) {
        if let Err(said) = tls.process_new_packets() {
            return io::Error::other(said);
        }
    }
    error
}

/// A socket to write records to.
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
    match tls_words::of_io(error) {
        Some(words) => words,
        None if error.kind() == ErrorKind::UnexpectedEof => {
            "the server closed the connection in the TLS handshake".into()
        }
        None => format!("the connection is lost: {}", crate::error::words(error)),
    }
}
