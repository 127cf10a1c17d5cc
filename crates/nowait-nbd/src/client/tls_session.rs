//! A connection's TLS session: encrypts what is sent and decrypts what is received.
//!
//! Invariant: once a session exists, all bytes to and from the socket go through it. Ciphertext that
//! is not yet sent is bounded, and is sent in order. Between two calls less than one record is not
//! decrypted. An I/O error holds that of TLS, if it is one.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::ops::Range;

use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncodeTlsData, EncryptError, UnbufferedStatus, WriteTraffic,
};

use crate::client::credentials::Credentials;
use crate::client::error::is_closed;
use crate::client::socket::{Received, Socket};

/// Plaintext that is encrypted before its ciphertext is sent, in bytes.
const PLAINTEXT_BYTES: usize = 256 << 10;
/// Bytes that are received together: as many records as have arrived.
const RECEIVED_BYTES: usize = 256 << 10;
/// The longest TLS record with its header, in bytes (RFC 8446, section 5.2).
/// Beyond it: the connection is given up.
const MAX_RECORD_BYTES: usize = 5 + (16 << 10) + 256;
/// The content of a full record, in bytes; shorter slices share records.
const FULL_RECORD_BYTES: usize = 16 << 10;

/// The state of a session after all possible progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TlsProgress {
    /// In the handshake, waiting for the server.
    Handshake,
    /// Data may be sent.
    Established,
    /// The server has closed the session.
    Closed,
}

/// Ciphertext on its way to the socket.
#[derive(Default)]
struct Ciphertext {
    /// Memory, which is used again.
    bytes: Vec<u8>,
    /// The part of it that is not sent yet.
    unsent: Range<usize>,
}

impl Ciphertext {
    /// Appends the bytes that `write` puts into the memory that it is given; it returns their
    /// number, or how many bytes it needs.
    fn push(
        &mut self,
        mut write: impl FnMut(&mut [u8]) -> io::Result<Result<usize, usize>>,
    ) -> io::Result<()> {
        loop {
            match write(self.bytes.get_mut(self.unsent.end..).unwrap_or_default())? {
                Ok(count) => {
                    self.unsent.end += count;
                    return Ok(());
                }
                Err(needed) => self.bytes.resize(self.unsent.end + needed, 0),
            }
        }
    }

    /// Appends a protocol message of TLS.
    fn push_message(
        &mut self,
        mut data: EncodeTlsData<'_, ClientConnectionData>,
    ) -> io::Result<()> {
        self.push(|room| match data.encode(room) {
            Err(EncodeError::InsufficientSize(size)) => Ok(Err(size.required_size)),
            encoded => encoded.map(Ok).map_err(io::Error::other),
        })
    }
}

/// One TLS session.
pub(super) struct TlsSession {
    tls: UnbufferedClientConnection,
    received: Vec<u8>,
    /// The part of `received` that is not decrypted yet.
    pending: Range<usize>,
    ciphertext: Ciphertext,
    /// Short slices, collected to be encrypted together.
    collected: Vec<u8>,
}

impl TlsSession {
    /// Performs the TLS handshake on a socket that blocks.
    ///
    /// # Errors
    /// Client or server has rejected the other; the socket failed.
    pub(super) fn begin(socket: &Socket, credentials: &Credentials) -> io::Result<Self> {
        let mut session = Self {
            tls: credentials.connection().map_err(io::Error::other)?,
            received: vec![0; RECEIVED_BYTES + MAX_RECORD_BYTES],
            pending: 0..0,
            ciphertext: Ciphertext::default(),
            collected: Vec::new(),
        };
        loop {
            let advanced = session.advance(|_| Ok::<(), io::Error>(()));
            // Also the alert to a server that is rejected.
            let flushed = session.flush_or_alert(socket);
            let progress = advanced?;
            flushed?;
            if progress == TlsProgress::Established {
                return Ok(session);
            }
            if progress == TlsProgress::Closed || session.fill(socket)? == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// The session as a blocking stream, for the NBD handshake.
    pub(super) fn over<'a>(&'a mut self, socket: &'a Socket) -> Blocking<'a> {
        Blocking { session: self, socket, plaintext: Vec::new(), read: 0 }
    }

    /// Encrypts some of `slices`, and sends what the socket accepts.
    ///
    /// # Errors
    /// `WouldBlock` if no byte was encrypted because the socket accepts none; errors of the socket.
    pub(super) fn send(&mut self, socket: &Socket, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.flush(socket)?;
        let mut taken = 0;
        for slice in slices {
            let slice = slice.get(..slice.len().min(PLAINTEXT_BYTES - taken)).unwrap_or_default();
            taken += slice.len();
            if slice.len() < FULL_RECORD_BYTES {
                self.collected.extend_from_slice(slice);
            } else {
                self.encrypt_collected()?;
                self.encrypt(slice)?;
            }
        }
        self.encrypt_collected()?;
        match self.flush(socket) {
            Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error),
            _ => Ok(taken),
        }
    }

    /// Sends the buffered ciphertext.
    ///
    /// # Errors
    /// `WouldBlock` if the socket did not accept all of it; other errors of the socket.
    pub(super) fn flush(&mut self, socket: &Socket) -> io::Result<()> {
        let Ciphertext { bytes, unsent } = &mut self.ciphertext;
        while unsent.start < unsent.end {
            let next = bytes.get(unsent.clone()).unwrap_or_default();
            unsent.start += socket.send(&[IoSlice::new(next)])?;
        }
        *unsent = 0..0;
        Ok(())
    }

    /// Like `flush`; the error is the alert that the server sent before it closed the connection, if
    /// there is one.
    fn flush_or_alert(&mut self, socket: &Socket) -> io::Result<()> {
        let flushed = self.flush(socket);
        if flushed.as_ref().is_err_and(|error| is_closed(error.kind())) {
            while self.fill(socket).is_ok_and(|count| count > 0) {
                self.advance(|_| Ok::<(), io::Error>(()))?;
            }
        }
        flushed
    }

    /// Whether ciphertext was not sent yet.
    pub(super) fn has_unsent(&self) -> bool {
        !self.ciphertext.unsent.is_empty()
    }

    /// Receives once, and passes the content of complete records to `sink`.
    ///
    /// # Errors
    /// `WouldBlock` if nothing has come; the errors of the socket, of TLS and of `sink`.
    pub(super) fn receive<E: From<io::Error>>(
        &mut self,
        socket: &Socket,
        sink: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<Received, E> {
        let room = self.received.len() - self.pending.len();
        let count = self.fill(socket)?;
        Ok(match count > 0 && self.advance(sink)? == TlsProgress::Established {
            true if count == room => Received::All,
            true => Received::Some,
            false => Received::End,
        })
    }

    /// Sends `last` and close_notify, if the socket has room; neither is required.
    pub(super) fn end(&mut self, socket: &Socket, last: &[u8]) {
        let notify = |session: &mut Self| {
            session.write_traffic(|traffic, room| traffic.queue_close_notify(room))
        };
        if self.encrypt(last).and_then(|()| notify(self)).is_ok() {
            let _ = self.flush(socket);
        }
    }

    /// Receives once; 0 at the end of the stream.
    fn fill(&mut self, socket: &Socket) -> io::Result<usize> {
        self.received.copy_within(self.pending.clone(), 0);
        self.pending = 0..self.pending.len();
        let room = self.received.get_mut(self.pending.end..).unwrap_or_default();
        let count = socket.receive(&mut [io::IoSliceMut::new(room)])?;
        self.pending.end += count;
        Ok(count)
    }

    /// Decrypts all complete records, and queues the protocol messages of TLS.
    fn advance<E: From<io::Error>>(
        &mut self,
        mut sink: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<TlsProgress, E> {
        loop {
            let pending = self.received.get_mut(self.pending.clone()).unwrap_or_default();
            let UnbufferedStatus { mut discard, state } = self.tls.process_tls_records(pending);
            let mut refused = None;
            let progress = match state {
                Ok(ConnectionState::ReadTraffic(mut traffic)) => {
                    while let Some(record) = traffic.next_record() {
                        let record = record.map_err(io::Error::other)?;
                        sink(record.payload)?;
                        discard += record.discard;
                    }
                    None
                }
                Ok(ConnectionState::EncodeTlsData(data)) => {
                    self.ciphertext.push_message(data)?;
                    None
                }
                Ok(ConnectionState::TransmitTlsData(data)) => {
                    data.done();
                    None
                }
                Ok(ConnectionState::BlockedHandshake) => Some(TlsProgress::Handshake),
                Ok(ConnectionState::WriteTraffic(_)) => Some(TlsProgress::Established),
                Ok(_) => Some(TlsProgress::Closed),
                Err(error) => {
                    refused = Some(error);
                    None
                }
            };
            self.pending.start += discard;
            if let Some(error) = refused {
                self.queue_alert();
                return Err(io::Error::other(error).into());
            }
            if let Some(progress) = progress {
                return Ok(progress);
            }
        }
    }

    /// Queues the alert that tells the server why it is rejected.
    fn queue_alert(&mut self) {
        let UnbufferedStatus { state, .. } = self.tls.process_tls_records(&mut []);
        if let Ok(ConnectionState::EncodeTlsData(data)) = state {
            // The error that led here is more important.
            let _ = self.ciphertext.push_message(data);
        }
    }

    fn encrypt_collected(&mut self) -> io::Result<()> {
        let mut collected = std::mem::take(&mut self.collected);
        let encrypted = if collected.is_empty() { Ok(()) } else { self.encrypt(&collected) };
        collected.clear();
        self.collected = collected;
        encrypted
    }

    /// Encrypts all of `plaintext`.
    fn encrypt(&mut self, plaintext: &[u8]) -> io::Result<()> {
        self.write_traffic(|traffic, room| traffic.encrypt(plaintext, room))
    }

    /// Appends the bytes that `write` makes to the ciphertext.
    fn write_traffic(
        &mut self,
        write: impl Fn(
            &mut WriteTraffic<'_, ClientConnectionData>,
            &mut [u8],
        ) -> Result<usize, EncryptError>,
    ) -> io::Result<()> {
        let pending = self.received.get_mut(self.pending.clone()).unwrap_or_default();
        let UnbufferedStatus { state, .. } = self.tls.process_tls_records(pending);
        let ConnectionState::WriteTraffic(mut traffic) = state.map_err(io::Error::other)? else {
            return Err(io::Error::other("the TLS session cannot send data in this state"));
        };
        self.ciphertext.push(|room| match write(&mut traffic, room) {
            Err(EncryptError::InsufficientSize(size)) => Ok(Err(size.required_size)),
            written => written.map(Ok).map_err(io::Error::other),
        })
    }
}

/// A session on a socket that blocks.
pub(super) struct Blocking<'a> {
    session: &'a mut TlsSession,
    socket: &'a Socket,
    /// Received bytes; the first `read` of them were read.
    plaintext: Vec<u8>,
    read: usize,
}

impl Read for Blocking<'_> {
    fn read(&mut self, memory: &mut [u8]) -> io::Result<usize> {
        while self.read == self.plaintext.len() {
            self.plaintext.clear();
            self.read = 0;
            let plaintext = &mut self.plaintext;
            let received = self.session.receive(self.socket, |bytes| {
                plaintext.extend_from_slice(bytes);
                Ok::<(), io::Error>(())
            })?;
            if received == Received::End && plaintext.is_empty() {
                return Ok(0);
            }
        }
        let count = self.plaintext.get(self.read..).unwrap_or_default().read(memory)?;
        self.read += count;
        Ok(count)
    }
}

impl Write for Blocking<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.session.encrypt(bytes)?;
        self.session.flush_or_alert(self.socket)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
