//! The client side of TLS, over a blocking socket.
//!
//! Invariant: one cipher suite and one version are offered, so that no server is measured with a
//! cheaper one than another. Data is decrypted in the receive buffer and encrypted into one send
//! buffer.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::sync::Arc;

use rustls::client::{Resumption, UnbufferedClientConnection};
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::{self, cipher_suite::TLS13_AES_256_GCM_SHA384};
use rustls::pki_types::ServerName;
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncryptError, InsufficientSizeError, UnbufferedStatus,
};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore};

use crate::address::Stream;
use crate::certificates::{Certificates, NAME};

/// The offered cipher suite, as shown in reports: the one that clients with GnuTLS (libnbd, QEMU)
/// prefer.
pub(crate) const SUITE: &str = "TLS 1.3 with TLS_AES_256_GCM_SHA384";

/// The same receive size as in the client without TLS.
const RECEIVE_BYTES: usize = 256 << 10;
/// A record with its header; no server may send a longer one (RFC 8446, section 5.2).
const RECORD_BYTES_MAX: usize = 5 + (16 << 10) + 256;

/// The state of a session after all possible progress.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TlsProgress {
    /// In the handshake, waiting for the server.
    Handshake,
    Established,
    /// The server has closed the session.
    Closed,
}

/// A connection's TLS session, and its socket.
pub(crate) struct Session {
    tls: UnbufferedClientConnection,
    stream: Stream,
    received: Vec<u8>,
    /// The part of `received` that is not decrypted yet: between two calls less than a record.
    pending: std::ops::Range<usize>,
    ciphertext: Vec<u8>,
    /// Decrypted data that was not read yet.
    plaintext: VecDeque<u8>,
}

impl Session {
    /// Performs the TLS handshake, which the server expects now, and verifies the name of the
    /// server.
    pub(crate) fn begin(stream: Stream, certificates: &Certificates) -> io::Result<Session> {
        let name = ServerName::try_from(NAME).map_err(io::Error::other)?;
        let tls = UnbufferedClientConnection::new(config(certificates)?, name)
            .map_err(io::Error::other)?;
        let mut session = Session {
            tls,
            stream,
            received: vec![0; RECEIVE_BYTES + RECORD_BYTES_MAX],
            pending: 0..0,
            ciphertext: vec![0; RECORD_BYTES_MAX],
            plaintext: VecDeque::new(),
        };
        while session.advance(|_| Ok(()))? == TlsProgress::Handshake {
            if !session.fill()? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(session)
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Encrypts and sends all of `bytes`.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        let pending = &mut self.received[self.pending.clone()];
        let UnbufferedStatus { state, .. } = self.tls.process_tls_records(pending);
        let ConnectionState::WriteTraffic(mut traffic) = state.map_err(io::Error::other)? else {
            return Err(io::Error::other("TLS has something else to say first"));
        };
        let count = loop {
            match traffic.encrypt(bytes, &mut self.ciphertext) {
                Ok(count) => break count,
                Err(EncryptError::InsufficientSize(InsufficientSizeError { required_size })) => {
                    self.ciphertext.resize(required_size, 0);
                }
                Err(error) => return Err(io::Error::other(error)),
            }
        };
        self.stream.write_all(&self.ciphertext[..count])
    }

    /// Waits for data and passes the content of complete records to `sink`. False at the end of the
    /// stream.
    pub(crate) fn receive(
        &mut self,
        sink: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<bool> {
        Ok(self.fill()? && self.advance(sink)? == TlsProgress::Established)
    }

    /// Receives once. False at the end of the stream.
    fn fill(&mut self) -> io::Result<bool> {
        self.received.copy_within(self.pending.clone(), 0);
        self.pending = 0..self.pending.len();
        let count = self.stream.read(&mut self.received[self.pending.end..])?;
        self.pending.end += count;
        Ok(count > 0)
    }

    /// Decrypts all complete records and sends the protocol messages of TLS.
    fn advance(
        &mut self,
        mut sink: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<TlsProgress> {
        let mut encoded = 0;
        loop {
            let pending = &mut self.received[self.pending.clone()];
            let UnbufferedStatus { mut discard, state } = self.tls.process_tls_records(pending);
            let progress = match state.map_err(io::Error::other)? {
                ConnectionState::ReadTraffic(mut traffic) => {
                    while let Some(record) = traffic.next_record() {
                        let record = record.map_err(io::Error::other)?;
                        sink(record.payload)?;
                        discard += record.discard;
                    }
                    None
                }
                ConnectionState::EncodeTlsData(mut data) => {
                    match data.encode(&mut self.ciphertext[encoded..]) {
                        Ok(count) => encoded += count,
                        Err(EncodeError::InsufficientSize(size)) => {
                            self.ciphertext.resize(encoded + size.required_size, 0);
                            let count = data.encode(&mut self.ciphertext[encoded..]);
                            encoded += count.map_err(io::Error::other)?;
                        }
                        Err(error) => return Err(io::Error::other(error)),
                    }
                    None
                }
                ConnectionState::TransmitTlsData(data) => {
                    self.stream.write_all(&self.ciphertext[..encoded])?;
                    encoded = 0;
                    data.done();
                    None
                }
                ConnectionState::BlockedHandshake => Some(TlsProgress::Handshake),
                ConnectionState::WriteTraffic(_) => Some(TlsProgress::Established),
                _ => Some(TlsProgress::Closed),
            };
            self.pending.start += discard;
            if let Some(progress) = progress {
                return Ok(progress);
            }
        }
    }
}

/// For the handshake of NBD, in which the server sends only replies.
impl Read for Session {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut plaintext = std::mem::take(&mut self.plaintext);
        while plaintext.is_empty() {
            let open = self.receive(|bytes| {
                plaintext.extend(bytes);
                Ok(())
            })?;
            if !open {
                break;
            }
        }
        let count = plaintext.read(buffer);
        self.plaintext = plaintext;
        count
    }
}

/// The configuration of a client that trusts `certificates`.
fn config(certificates: &Certificates) -> io::Result<Arc<ClientConfig>> {
    let mut roots = RootCertStore::empty();
    roots.add(certificates.authority()).map_err(io::Error::other)?;
    let provider = CryptoProvider {
        cipher_suites: vec![TLS13_AES_256_GCM_SHA384],
        ..ring::default_provider()
    };
    let mut config = ClientConfig::builder_with_provider(Arc::new(provider))
        .with_protocol_versions(&[&TLS13])
        .map_err(io::Error::other)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}
