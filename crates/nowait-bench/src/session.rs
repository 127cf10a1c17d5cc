//! The client's half of TLS, over a socket that may block.
//!
//! Invariant: one suite and one version are offered, so that no server is measured with a cheaper one than
//! another; what came is opened where it was received, and what is sent is sealed into one buffer.
//! Knows: certificates. Known by: client, report.

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

/// What is offered, for people: the suite that clients with GnuTLS (libnbd, QEMU) ask for first.
pub(crate) const SUITE: &str = "TLS 1.3 with TLS_AES_256_GCM_SHA384";

/// As much as the client without TLS takes at once.
const RECEIVE_BYTES: usize = 256 << 10;
/// A record with its header; no server may send a longer one (RFC 8446, section 5.2).
const RECORD_BYTES_MAX: usize = 5 + (16 << 10) + 256;

/// Where a session stands when all was done that could be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stand {
    /// In the handshake, and the server's turn.
    Handshake,
    Established,
    /// The server has said goodbye.
    Closed,
}

/// A connection's TLS session, and its socket.
pub(crate) struct Session {
    tls: UnbufferedClientConnection,
    stream: Stream,
    received: Vec<u8>,
    /// The part of `received` that is not opened yet: less than a record, between two calls.
    pending: std::ops::Range<usize>,
    sealed: Vec<u8>,
    /// Opened, and not asked for yet.
    opened: VecDeque<u8>,
}

impl Session {
    /// Goes through the TLS handshake, which the server is ready for, and makes sure of its name.
    pub(crate) fn begin(stream: Stream, certificates: &Certificates) -> io::Result<Session> {
        let name = ServerName::try_from(NAME).map_err(io::Error::other)?;
        let tls = UnbufferedClientConnection::new(config(certificates)?, name)
            .map_err(io::Error::other)?;
        let mut session = Session {
            tls,
            stream,
            received: vec![0; RECEIVE_BYTES + RECORD_BYTES_MAX],
            pending: 0..0,
            sealed: vec![0; RECORD_BYTES_MAX],
            opened: VecDeque::new(),
        };
        while session.advance(|_| Ok(()))? == Stand::Handshake {
            if !session.fill()? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(session)
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Seals all of `bytes` and sends it.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        let pending = &mut self.received[self.pending.clone()];
        let UnbufferedStatus { state, .. } = self.tls.process_tls_records(pending);
        let ConnectionState::WriteTraffic(mut traffic) = state.map_err(io::Error::other)? else {
            return Err(io::Error::other("TLS has something else to say first"));
        };
        let count = loop {
            match traffic.encrypt(bytes, &mut self.sealed) {
                Ok(count) => break count,
                Err(EncryptError::InsufficientSize(InsufficientSizeError { required_size })) => {
                    self.sealed.resize(required_size, 0);
                }
                Err(error) => return Err(io::Error::other(error)),
            }
        };
        self.stream.write_all(&self.sealed[..count])
    }

    /// Sleeps until something has come, and gives what was in whole records to `sink`. False at the end.
    pub(crate) fn receive(
        &mut self,
        sink: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<bool> {
        Ok(self.fill()? && self.advance(sink)? == Stand::Established)
    }

    /// Receives once. False at the end.
    fn fill(&mut self) -> io::Result<bool> {
        self.received.copy_within(self.pending.clone(), 0);
        self.pending = 0..self.pending.len();
        let count = self.stream.read(&mut self.received[self.pending.end..])?;
        self.pending.end += count;
        Ok(count > 0)
    }

    /// Opens all there is, and says what TLS itself has to say.
    fn advance(&mut self, mut sink: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<Stand> {
        let mut said = 0;
        loop {
            let pending = &mut self.received[self.pending.clone()];
            let UnbufferedStatus { mut discard, state } = self.tls.process_tls_records(pending);
            let stand = match state.map_err(io::Error::other)? {
                ConnectionState::ReadTraffic(mut traffic) => {
                    while let Some(record) = traffic.next_record() {
                        let record = record.map_err(io::Error::other)?;
                        sink(record.payload)?;
                        discard += record.discard;
                    }
                    None
                }
                ConnectionState::EncodeTlsData(mut data) => {
                    match data.encode(&mut self.sealed[said..]) {
                        Ok(count) => said += count,
                        Err(EncodeError::InsufficientSize(size)) => {
                            self.sealed.resize(said + size.required_size, 0);
                            let count = data.encode(&mut self.sealed[said..]);
                            said += count.map_err(io::Error::other)?;
                        }
                        Err(error) => return Err(io::Error::other(error)),
                    }
                    None
                }
                ConnectionState::TransmitTlsData(data) => {
                    self.stream.write_all(&self.sealed[..said])?;
                    said = 0;
                    data.done();
                    None
                }
                ConnectionState::BlockedHandshake => Some(Stand::Handshake),
                ConnectionState::WriteTraffic(_) => Some(Stand::Established),
                _ => Some(Stand::Closed),
            };
            self.pending.start += discard;
            if let Some(stand) = stand {
                return Ok(stand);
            }
        }
    }
}

/// For the handshake of NBD, in which the server says nothing that was not asked for.
impl Read for Session {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut opened = std::mem::take(&mut self.opened);
        while opened.is_empty() {
            let open = self.receive(|bytes| {
                opened.extend(bytes);
                Ok(())
            })?;
            if !open {
                break;
            }
        }
        let count = opened.read(buffer);
        self.opened = opened;
        count
    }
}

/// A client that knows the server by `certificates`.
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
