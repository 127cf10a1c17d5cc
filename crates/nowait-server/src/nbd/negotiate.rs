//! The handshakes of the connections of a thread, up to the use of the export that a client has chosen.
//!
//! Invariant: a connection is listed as a client of its export before its use of the export begins. One
//! whose export is paused leaves at the end of its service, and sends no request before.

use std::sync::Arc;

use nowait::IoQueue;

use crate::export::ExportId;
use crate::loop_context::LoopContext;
use crate::nbd::connection::{Connection, HandoffConnection};
use crate::nbd::handshake::timeout::HandshakeDeadlines;
use crate::nbd::handshake::{ExportList, HandshakeProgress, Negotiated, TlsState};
use crate::nbd::session::{Phase, ReadState};
use crate::nbd::submit::ParseProgress;
use crate::nbd::tls_config::Tls;
use crate::shared_export::{ExportUse, NotServed};

/// The exports of the server, and its threads.
pub(crate) trait ExportDirectory: ExportList + Send + Sync {
    /// The name of an export; empty if there is none.
    fn name(&self, export: ExportId) -> String;

    /// Begins the use of an export.
    ///
    /// # Errors
    /// It is paused or removed.
    fn begin_use(&self, export: ExportId) -> Result<ExportUse, NotServed>;

    /// Hands a connection that was accepted over to the thread with the fewest connections.
    fn assign(&self, connection: HandoffConnection);

    /// Keeps a connection of a paused export until the end of the pause.
    fn keep(&self, export: ExportId, connection: HandoffConnection);
}

/// State that the handshakes of a thread have in common.
pub(crate) struct Handshakes {
    pub(crate) deadlines: HandshakeDeadlines,
    pub(crate) directory: Arc<dyn ExportDirectory>,
    pub(crate) tls: Tls,
}

impl Handshakes {
    /// The TLS policy for a new connection.
    pub(crate) fn tls_state(&self) -> TlsState {
        TlsState::from(&self.tls)
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
        let directory = &*handshakes.directory;
        let (used, step) = self.session.negotiate(input, directory);
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
                self.session.phase = Phase::Chosen(negotiated);
                handshakes.deadlines.end();
            }
        }
        ParseProgress::Bytes(used)
    }

    /// Begins to use the export that the client has chosen.
    #[cold]
    pub(crate) fn open<Q: IoQueue>(
        &mut self,
        handshakes: &Handshakes,
        context: &mut LoopContext<Q>,
        negotiated: Negotiated,
    ) -> ParseProgress {
        self.session.phase = Phase::Transmission(negotiated.into());
        match handshakes.directory.begin_use(negotiated.export) {
            Ok(used) => self.use_export(context, used),
            Err(NotServed::Paused) => self.waits_for = Some(negotiated.export),
            Err(NotServed::Removed) => self.session.abort(),
        }
        ParseProgress::Bytes(0)
    }

    /// Uses an export from now on. The connection ends if the thread cannot serve it.
    pub(crate) fn use_export<Q: IoQueue>(&mut self, context: &mut LoopContext<Q>, used: ExportUse) {
        if let Err(error) = context.use_export(&mut self.member, used) {
            tracing::warn!("{} cannot be served: {error}", self.peer);
            self.session.abort();
        }
    }
}
