//! The handshake: fixed newstyle negotiation (NBD proto.md, "Handshake") as a state machine without
//! I/O, from bytes of the client to bytes for the client.
//!
//! Invariant: the outcome depends on the bytes alone, never on how they were cut into pieces. A
//! byte after the end of the handshake is never consumed. A client can make the server hold at most
//! `MAX_OPTION_BYTES` and the replies to one option. Every option has one final reply or ends the
//! connection.

use std::mem;
use std::ops::ControlFlow::{self, Break, Continue};

use crate::dirty_bitmaps::BitmapName;
use crate::export::ExportId;
use crate::nbd::meta_context::{ChosenContexts, Contexts};
use crate::nbd::tls_config::Tls;
use crate::nbd::wire::{
    self, Fields, Info, InfoOption, MAX_STRING_BYTES, MetaContextOption, OptionHeader, ReplyMode,
    option_reply,
};
use crate::refusal_log::{self, Refusal};
use options::{OptionError, conclude};

/// The longest data of an option that is parsed, in bytes. Names and queries are at most
/// [`MAX_STRING_BYTES`] each, so that every sensible option is far below; longer data are skipped
/// as they arrive.
/// Beyond it: the data is skipped and the option refused.
const MAX_OPTION_BYTES: u32 = 64 << 10;

/// The longest data of an option that is skipped, in bytes. A client that sends more only keeps the
/// server busy: the connection ends.
/// Beyond it: the connection is closed.
const MAX_SKIPPED_BYTES: u32 = 32 << 20;

/// The most options of one connection. A client needs about ten, or a few for each export it
/// queries; a client that never ends its handshake occupies a connection.
/// Beyond it: the connection is closed.
const MAX_OPTIONS: u32 = 1024;

const CLIENT_FLAGS_BYTES: u32 = 4;

/// The context id in replies to `OPT_LIST_META_CONTEXT`, where it has no meaning.
const RESERVED_CONTEXT_ID: u32 = 0;

/// The properties of one export, as told to clients.
#[derive(Clone)]
pub(crate) struct ExportInfo {
    pub(crate) id: ExportId,
    /// The name; no NUL, at most [`MAX_STRING_BYTES`] bytes.
    pub(crate) name: String,
    /// Text for a human, may be empty; no NUL, at most [`MAX_STRING_BYTES`] bytes.
    pub(crate) description: String,
    /// Size in bytes.
    pub(crate) size: u64,
    /// `FLAG_*` of the transmission phase. `FLAG_HAS_FLAGS` is added; `FLAG_SEND_DF` is removed for
    /// clients without chunks; `FLAG_BLOCK_STATUS_PAYLOAD` is added for clients that can use it.
    pub(crate) transmission_flags: u16,
    /// The contexts of its block status, those of its dirty bitmaps apart.
    pub(crate) contexts: Contexts,
    /// Its dirty bitmaps.
    pub(crate) bitmaps: Vec<BitmapName>,
    /// The smallest unit of offset and length, in bytes; a power of 2 up to 65536.
    pub(crate) min_block: u32,
    /// The smallest unit that is served efficiently, in bytes; a power of 2, at least 512.
    pub(crate) preferred_block: u32,
    /// The longest data of one request, in bytes; at least `preferred_block`.
    pub(crate) max_payload: u32,
}

/// The exports that a client can choose.
pub(crate) trait ExportList {
    /// The current properties of all exports, the default one first.
    fn infos(&self) -> Vec<ExportInfo>;

    /// Properties of the export called `name`, of the first one if `name` is empty. No other export is
    /// queried.
    fn info(&self, name: &str) -> Option<ExportInfo>;
}

/// The exports, for a handshake.
pub(crate) type Exports<'a> = &'a dyn ExportList;

/// The state of the connection after [`Handshake::feed`]. The caller first sends the bytes that
/// `feed` has appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandshakeProgress {
    /// All input was consumed and more is needed.
    More,
    /// An option was answered. The rest of the input is parsed after the answer has been sent.
    Answered,
    /// The client's next byte, even if it is in the input, begins a TLS handshake. The decrypted
    /// bytes are fed here again.
    StartTls,
    /// The next byte of the client begins a request.
    Transmission(Negotiated),
    /// The connection ends: the client asked for it, or broke a rule for which no error reply
    /// exists.
    Close,
}

/// The result of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Negotiated {
    /// The export.
    pub(crate) export: ExportId,
    /// The messages used from here on.
    pub(crate) mode: ReplyMode,
    /// The contexts selected for this export; without any, block status requests are invalid.
    pub(crate) contexts: Contexts,
}

/// The selection of `OPT_SET_META_CONTEXT`.
struct Selected {
    export: ExportId,
    contexts: Contexts,
    bitmaps: Vec<BitmapName>,
}

/// The TLS state of a connection (NBD proto.md, "Server-side requirements").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TlsState {
    /// There is no TLS.
    Off,
    /// TLS begins if the client asks for it.
    Offered,
    /// TLS must begin before any other option.
    Required,
    /// TLS has begun.
    Begun,
}

impl From<&Tls> for TlsState {
    fn from(tls: &Tls) -> Self {
        match tls {
            Tls::Off => Self::Off,
            Tls::Offered(_) => Self::Offered,
            Tls::Required(_) => Self::Required,
        }
    }
}

/// The meaning of the client's next bytes.
#[derive(Clone, Copy)]
enum Phase {
    ClientFlags,
    OptionHeader,
    /// The data of `option`, `length` bytes.
    OptionData {
        option: u32,
        length: u32,
    },
    /// Data of `option` that are skipped; `outcome` is the final reply, sent after the last of the
    /// `left` bytes.
    Skipped {
        option: u32,
        left: u32,
        outcome: Result<(), OptionError>,
    },
    Over,
}

/// The handshake of one connection.
pub(crate) struct Handshake {
    phase: Phase,
    tls: TlsState,
    /// An incomplete client flags field, option header or option data.
    partial: Vec<u8>,
    client_flags: u32,
    options: u32,
    /// The log has that this client uses no TLS.
    is_told: bool,
    mode: ReplyMode,
    selected: Option<Selected>,
}

impl Handshake {
    /// The state before the first byte of the client.
    pub(crate) fn new(tls: TlsState) -> Self {
        Self {
            phase: Phase::ClientFlags,
            tls,
            partial: Vec::new(),
            client_flags: 0,
            options: 0,
            is_told: false,
            mode: ReplyMode::Simple,
            selected: None,
        }
    }

    /// Appends the greeting (NBD proto.md, "Newstyle negotiation"); 18 bytes.
    pub(crate) fn greeting(out: &mut Vec<u8>) {
        out.extend_from_slice(&wire::greeting(wire::FLAG_FIXED_NEWSTYLE | wire::FLAG_NO_ZEROES));
    }

    /// Consumes the client's next bytes, up to the end of an option that is answered, and appends
    /// its replies to `out`. Returns how many bytes were consumed (all of them on
    /// [`HandshakeProgress::More`]) and the state of the connection.
    ///
    /// `exports` is called once for each option that asks for one, so that the replies are current. After
    /// the end of the handshake nothing more is consumed and the result is
    /// [`HandshakeProgress::Close`].
    pub(crate) fn feed(
        &mut self,
        input: &[u8],
        exports: Exports<'_>,
        out: &mut Vec<u8>,
    ) -> (usize, HandshakeProgress) {
        let mut rest = input;
        let unanswered = out.len();
        loop {
            let step = match self.advance(&mut rest, exports, out) {
                Break(step) => step,
                Continue(()) if out.len() > unanswered => HandshakeProgress::Answered,
                Continue(()) => continue,
            };
            if !matches!(
                step,
                HandshakeProgress::More | HandshakeProgress::Answered | HandshakeProgress::StartTls
            ) {
                self.phase = Phase::Over;
            }
            return (input.len() - rest.len(), step);
        }
    }

    /// Completes the current phase, or breaks with the reason why it cannot.
    fn advance(
        &mut self,
        rest: &mut &[u8],
        exports: Exports<'_>,
        out: &mut Vec<u8>,
    ) -> ControlFlow<HandshakeProgress> {
        match self.phase {
            Phase::ClientFlags => {
                let bytes = self.collect(rest, CLIENT_FLAGS_BYTES)?;
                self.accept_client_flags(&bytes)
            }
            Phase::OptionHeader => {
                let bytes = self.collect(rest, OptionHeader::BYTES as u32)?;
                self.accept_header(&bytes)
            }
            Phase::OptionData { option, length } => {
                let data = self.collect(rest, length)?;
                self.phase = Phase::OptionHeader;
                self.answer(option, &data, exports, out)
            }
            Phase::Skipped { option, ref mut left, outcome } => {
                skip(rest, left)?;
                self.phase = Phase::OptionHeader;
                conclude(out, option, outcome);
                match option {
                    wire::OPT_ABORT => Break(HandshakeProgress::Close),
                    _ => Continue(()),
                }
            }
            Phase::Over => Break(HandshakeProgress::Close),
        }
    }

    /// The next `wanted` bytes, once they are complete.
    fn collect(
        &mut self,
        rest: &mut &[u8],
        wanted: u32,
    ) -> ControlFlow<HandshakeProgress, Vec<u8>> {
        let missing = (wanted as usize).saturating_sub(self.partial.len());
        let (taken, left) = rest.split_at(missing.min(rest.len()));
        self.partial.extend_from_slice(taken);
        *rest = left;
        if taken.len() < missing {
            return Break(HandshakeProgress::More);
        }
        Continue(mem::take(&mut self.partial))
    }

    fn accept_client_flags(&mut self, bytes: &[u8]) -> ControlFlow<HandshakeProgress> {
        let known = u32::from(wire::FLAG_FIXED_NEWSTYLE | wire::FLAG_NO_ZEROES);
        match Fields(bytes).u32() {
            Some(flags) if flags & !known == 0 => {
                self.client_flags = flags;
                self.phase = Phase::OptionHeader;
                Continue(())
            }
            _ => Break(HandshakeProgress::Close),
        }
    }

    fn client_set(&self, flag: u16) -> bool {
        self.client_flags & u32::from(flag) != 0
    }

    /// Logs, once for a connection, that its client uses no TLS where TLS is required.
    fn log_no_tls(&mut self) {
        if !mem::replace(&mut self.is_told, true) {
            refusal_log::note(
                Refusal::NoTls,
                format_args!("a client without TLS was refused: this server requires TLS (--tls)"),
            );
        }
    }

    /// Decides by the header of an option whether its data are parsed or skipped.
    fn accept_header(&mut self, bytes: &[u8]) -> ControlFlow<HandshakeProgress> {
        let Some(OptionHeader { option, length }) = OptionHeader::parse(bytes) else {
            return Break(HandshakeProgress::Close);
        };
        self.options += 1;
        if self.options > MAX_OPTIONS || length > MAX_SKIPPED_BYTES {
            return Break(HandshakeProgress::Close);
        }
        if option == wire::OPT_SET_META_CONTEXT {
            // It replaces the earlier selection, whether it succeeds or not.
            self.selected = None;
        }
        let skipped = |outcome| Phase::Skipped { option, left: length, outcome };
        let refused = |refusal| skipped(Err(refusal));
        let bare = self.tls == TlsState::Required;
        self.phase = match option {
            // This option has no error reply: a name that cannot exist ends the connection.
            wire::OPT_EXPORT_NAME if bare || length as usize > MAX_STRING_BYTES => {
                if bare {
                    self.log_no_tls();
                }
                return Break(HandshakeProgress::Close);
            }
            // "Once extended headers are successfully requested, a client MUST NOT use" it.
            wire::OPT_EXPORT_NAME if self.mode == ReplyMode::Extended => {
                return Break(HandshakeProgress::Close);
            }
            wire::OPT_EXPORT_NAME => Phase::OptionData { option, length },
            // Without fixed newstyle a client cannot parse an error reply.
            _ if !self.client_set(wire::FLAG_FIXED_NEWSTYLE) => {
                return Break(HandshakeProgress::Close);
            }
            wire::OPT_ABORT => skipped(Ok(())),
            wire::OPT_STARTTLS => match (self.tls, length) {
                (TlsState::Off, _) => refused(OptionError::TLS_NOT_CONFIGURED),
                (TlsState::Offered | TlsState::Required, 0) => Phase::OptionData { option, length },
                (TlsState::Begun, _) => refused(OptionError::TLS_HAS_BEGUN),
                _ => refused(OptionError::HAS_DATA),
            },
            _ if bare => {
                self.log_no_tls();
                refused(OptionError::TLS_REQUIRED)
            }
            wire::OPT_LIST
            | wire::OPT_INFO
            | wire::OPT_GO
            | wire::OPT_STRUCTURED_REPLY
            | wire::OPT_EXTENDED_HEADERS
            | wire::OPT_LIST_META_CONTEXT
            | wire::OPT_SET_META_CONTEXT => {
                if length > MAX_OPTION_BYTES {
                    refused(OptionError::TOO_BIG)
                } else {
                    Phase::OptionData { option, length }
                }
            }
            _ => refused(OptionError::UNSUPPORTED),
        };
        Continue(())
    }

    /// Replies to an option whose data are complete.
    fn answer(
        &mut self,
        option: u32,
        data: &[u8],
        exports: Exports<'_>,
        out: &mut Vec<u8>,
    ) -> ControlFlow<HandshakeProgress> {
        match option {
            wire::OPT_EXPORT_NAME => return self.export_name(data, exports, out),
            wire::OPT_STARTTLS => {
                option_reply(out, option, wire::REP_ACK, &[]);
                self.begin_tls();
                return Break(HandshakeProgress::StartTls);
            }
            _ => {}
        }
        let mut chosen = None;
        let outcome = match option {
            wire::OPT_LIST => list(data, &exports.infos(), out),
            wire::OPT_STRUCTURED_REPLY | wire::OPT_EXTENDED_HEADERS => self.mode(option, data),
            wire::OPT_INFO => self.information(option, data, exports, out).map(drop),
            wire::OPT_GO => {
                self.information(option, data, exports, out).map(|export| chosen = Some(export))
            }
            _ => self.meta_context(option, data, exports, out),
        };
        conclude(out, option, outcome);
        match chosen {
            Some(export) => Break(HandshakeProgress::Transmission(self.negotiated(export))),
            None => Continue(()),
        }
    }

    /// Resets what was negotiated so far (NBD proto.md, `NBD_OPT_STARTTLS`): a man in the middle
    /// may have influenced it. The client does not send its flags again.
    fn begin_tls(&mut self) {
        *self = Self {
            phase: Phase::OptionHeader,
            client_flags: self.client_flags,
            options: self.options,
            ..Self::new(TlsState::Begun)
        };
    }

    /// Agrees to chunks or extended headers, or returns the error reply. Extended headers take
    /// precedence, in whichever order a client asks for both.
    fn mode(&mut self, option: u32, data: &[u8]) -> Result<(), OptionError> {
        no_data(data)?;
        self.mode = match (option, self.mode) {
            (wire::OPT_EXTENDED_HEADERS, _) => ReplyMode::Extended,
            (_, ReplyMode::Extended) => return Err(OptionError::EXTENDED_HEADERS),
            (_, ReplyMode::Simple | ReplyMode::Structured) => ReplyMode::Structured,
        };
        Ok(())
    }

    fn export_name(
        &self,
        data: &[u8],
        exports: Exports<'_>,
        out: &mut Vec<u8>,
    ) -> ControlFlow<HandshakeProgress> {
        let Some(export) = wire::valid_string(data).and_then(|name| exports.info(name)) else {
            log_unknown(data);
            return Break(HandshakeProgress::Close);
        };
        out.extend_from_slice(&export.size.to_be_bytes());
        out.extend_from_slice(&self.transmission_flags(&export).to_be_bytes());
        if !self.client_set(wire::FLAG_NO_ZEROES) {
            out.extend_from_slice(&[0; wire::EXPORT_NAME_PADDING_BYTES]);
        }
        Break(HandshakeProgress::Transmission(self.negotiated(export.id)))
    }

    /// Describes the export that `OPT_INFO` or `OPT_GO` names and returns its id, or the error reply.
    fn information(
        &self,
        option: u32,
        data: &[u8],
        exports: Exports<'_>,
        out: &mut Vec<u8>,
    ) -> Result<ExportId, OptionError> {
        let request = InfoOption::parse(data).ok_or(OptionError::MALFORMED)?;
        let export = exports.info(request.export).ok_or_else(|| {
            log_unknown(request.export.as_bytes());
            OptionError::NO_SUCH_EXPORT
        })?;
        let mut info =
            |info: Info<'_>| option_reply(out, option, wire::REP_INFO, &[&info.encode()]);
        let flags = self.transmission_flags(&export);
        info(Info::Export { size: export.size, flags });
        let ExportInfo { min_block: min, preferred_block: preferred, max_payload: max, .. } =
            export;
        info(Info::BlockSize { min, preferred, max });
        let texts =
            [(wire::INFO_NAME, &export.name), (wire::INFO_DESCRIPTION, &export.description)];
        for (kind, text) in texts.into_iter().filter(|(kind, _)| request.kinds.contains(kind)) {
            info(Info::Other { kind, data: text.as_bytes() });
        }
        Ok(export.id)
    }

    /// Lists or selects metadata contexts, or returns the error reply.
    fn meta_context(
        &mut self,
        option: u32,
        data: &[u8],
        exports: Exports<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), OptionError> {
        if !self.mode.has_chunks() {
            return Err(OptionError::NO_CHUNKS);
        }
        let request = MetaContextOption::parse(data).ok_or(OptionError::MALFORMED)?;
        let export = exports.info(request.export).ok_or(OptionError::NO_SUCH_EXPORT)?;
        let select = option == wire::OPT_SET_META_CONTEXT;
        let all = (export.contexts, &export.bitmaps[..]);
        let ChosenContexts { contexts, names, bitmaps } =
            ChosenContexts::of(select, &request.queries, all);
        if select {
            self.selected = Some(Selected { export: export.id, contexts, bitmaps });
        }
        for (context, name) in names {
            let id = if select { context.id() } else { RESERVED_CONTEXT_ID };
            let data: [&[u8]; 2] = [&id.to_be_bytes(), name.as_bytes()];
            option_reply(out, option, wire::REP_META_CONTEXT, &data);
        }
        Ok(())
    }

    /// The contexts that the client has selected for `export` so far.
    fn contexts_of(&self, export: ExportId) -> Contexts {
        let selected = self.selected.as_ref().filter(|selected| selected.export == export);
        selected.map_or(Contexts::NONE, |selected| selected.contexts)
    }

    /// The dirty bitmaps that the client has selected, once, after the end of the handshake.
    pub(crate) fn take_bitmaps(&mut self) -> Vec<BitmapName> {
        self.selected.take().map(|selected| selected.bitmaps).unwrap_or_default()
    }

    fn transmission_flags(&self, export: &ExportInfo) -> u16 {
        // DF ("don't fragment") must not be offered to a client without chunks, and block status
        // payloads not to a client without extended headers or without a selected context.
        let withheld = if self.mode.has_chunks() { 0 } else { wire::FLAG_SEND_DF };
        let selects = self.mode == ReplyMode::Extended && !self.contexts_of(export.id).is_empty();
        let added = if selects { wire::FLAG_BLOCK_STATUS_PAYLOAD } else { 0 };
        (export.transmission_flags & !withheld) | added | wire::FLAG_HAS_FLAGS
    }

    fn negotiated(&self, export: ExportId) -> Negotiated {
        Negotiated { export, mode: self.mode, contexts: self.contexts_of(export) }
    }
}

/// Takes up to `left` bytes off `rest`, and breaks as long as some are missing.
fn skip(rest: &mut &[u8], left: &mut u32) -> ControlFlow<HandshakeProgress> {
    let count = rest.len().min(*left as usize);
    *rest = &rest[count..];
    *left -= count as u32;
    if *left > 0 {
        return Break(HandshakeProgress::More);
    }
    Continue(())
}

/// Lists the name and description of every export, or returns the error reply.
fn list(data: &[u8], exports: &[ExportInfo], out: &mut Vec<u8>) -> Result<(), OptionError> {
    no_data(data)?;
    for export in exports {
        let name = export.name.as_bytes();
        let name_len = (name.len() as u32).to_be_bytes();
        let data: [&[u8]; 3] = [&name_len, name, export.description.as_bytes()];
        option_reply(out, wire::OPT_LIST, wire::REP_SERVER, &data);
    }
    Ok(())
}

/// Checks that an option without data has none.
fn no_data(data: &[u8]) -> Result<(), OptionError> {
    if data.is_empty() { Ok(()) } else { Err(OptionError::HAS_DATA) }
}

/// Logs that a client has asked for an unknown export, `name`.
fn log_unknown(name: &[u8]) {
    let name = String::from_utf8_lossy(name);
    refusal_log::note(
        Refusal::UnknownExport,
        format_args!("a client asked for an unknown export, {name:?}"),
    );
}

/// A list of a test or a fuzzer.
#[cfg(any(test, feature = "fuzz"))]
impl ExportList for Vec<ExportInfo> {
    fn infos(&self) -> Vec<ExportInfo> {
        self.clone()
    }

    fn info(&self, name: &str) -> Option<ExportInfo> {
        self.iter().find(|export| name.is_empty() || export.name == name).cloned()
    }
}

mod options;
#[cfg(test)]
mod tests;
pub(crate) mod timeout;
