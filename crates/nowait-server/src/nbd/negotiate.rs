//! The handshakes of the connections of a thread.
//!
//! Invariant: a connection that has chosen an export of another thread leaves at the end of its
//! service, and sends no request here.

use std::sync::Arc;

use crate::export::ExportId;
use crate::nbd::connection::{Connection, HandoffConnection};
use crate::nbd::handshake::timeout::HandshakeDeadlines;
use crate::nbd::handshake::{ExportInfo, HandshakeProgress, Negotiated, TlsState};
use crate::nbd::session::{Phase, ReadState};
use crate::nbd::submit::ParseProgress;
use crate::nbd::tls_config::Tls;
use crate::net::listener::Listener;

/// The exports of the server, and the handover of connections to their threads.
pub(crate) trait ExportDirectory: Send + Sync {
    /// The current properties of each export, as told to clients.
    fn infos(&self) -> Vec<ExportInfo>;

    /// The name of an export; empty if there is none.
    fn name(&self, export: ExportId) -> String;

    /// Hands `connection` over to a thread of the export that its client has chosen, or that it is
    /// accepted for.
    fn assign(self: Arc<Self>, export: ExportId, connection: HandoffConnection);

    /// Keeps the listeners of a thread of `export` that ends, for the next one.
    fn park_listeners(&self, export: ExportId, listeners: Vec<Listener>);
}

/// What the handshakes of a thread have in common.
pub(crate) struct Handshakes {
    pub(crate) deadlines: HandshakeDeadlines,
    pub(crate) directory: Arc<dyn ExportDirectory>,
    /// The export of this thread.
    pub(crate) export: ExportId,
    pub(crate) tls: Tls,
}

impl Handshakes {
    /// The TLS policy for a new connection.
    pub(crate) fn tls_state(&self) -> TlsState {
        TlsState::from(&self.tls)
    }

    /// Hands over a connection whose client has chosen another export.
    pub(crate) fn migrate(&self, mut connection: Connection, negotiated: Negotiated) {
        connection.session.phase = Phase::Transmission(negotiated.into());
        self.directory.clone().assign(negotiated.export, connection.into_handoff());
    }
}

impl Connection {
    /// Passes input to the handshake.
    pub(crate) fn negotiate(&mut self, handshakes: &mut Handshakes, input: &[u8]) -> ParseProgress {
        if input.is_empty() {
            return ParseProgress::NeedMore;
        }
        // Otherwise a client that never reads could pile up replies to its options here.
        if self.has_unsent() {
            return ParseProgress::Blocked;
        }
        let directory = &handshakes.directory;
        let (used, step) = self.session.negotiate(input, &|| directory.infos());
        match step {
            HandshakeProgress::More | HandshakeProgress::Answered => {}
            HandshakeProgress::Close => self.session.input = ReadState::Eof,
            HandshakeProgress::StartTls => {
                match handshakes.tls.credentials() {
                    Some(credentials) => {
                        self.start_tls(credentials, input.get(used..).unwrap_or_default());
                    }
                    None => self.session.abort(),
                }
                return ParseProgress::Bytes(input.len());
            }
            HandshakeProgress::Transmission(negotiated) => {
                if tracing::enabled!(tracing::Level::INFO) {
                    self.log_opened(&directory.name(negotiated.export));
                }
                self.mark_transmission(negotiated.export);
                self.session.phase = match negotiated.export == handshakes.export {
                    true => Phase::Transmission(negotiated.into()),
                    false => Phase::Handoff(negotiated),
                };
                handshakes.deadlines.end();
            }
        }
        ParseProgress::Bytes(used)
    }
}
