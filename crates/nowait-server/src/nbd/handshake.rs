//! The handshake: what a client and the server agree on before the first request.
//!
//! Fixed newstyle negotiation (NBD proto.md, "Handshake") as a state machine without I/O: bytes
//! of the client go in, bytes for the client come out.
//! Invariant: the outcome depends on the bytes alone, never on how they were cut into pieces; a
//! byte after the end of the handshake is never taken; what a client can make the server keep
//! is bounded by `MAX_OPTION_BYTES`, and every option has one final reply or ends the connection.
//! Knows: wire, credentials, context, option. Known by: the connection.

use std::ops::ControlFlow::{self, Break, Continue};

use super::context::Contexts;
use super::credentials::Tls;
use super::option::{ContextRequest, Fields, InfoRequest, reply, string};
use super::wire::{self, MAX_STRING_BYTES, Mode};

/// The longest data of an option that is looked at, in bytes. Names and queries are at most
/// [`MAX_STRING_BYTES`] each, so that every sensible option is far below; longer data are
/// skipped as they come.
const MAX_OPTION_BYTES: u32 = 64 << 10;

/// The longest data of an option that is skipped, in bytes. Above it the client is not
/// negotiating but keeping the server busy, and the connection ends.
const MAX_SKIPPED_BYTES: u32 = 32 << 20;

/// The most options of one connection. A client needs about ten, or a few for each export it
/// looks at; one that never ends its handshake holds a connection that others could use.
const MAX_OPTIONS: u32 = 1024;

/// What follows the reply to `OPT_EXPORT_NAME` unless the client asked to leave it out.
const EXPORT_NAME_PADDING: [u8; 124] = [0; 124];

const CLIENT_FLAGS_BYTES: u32 = 4;
const OPTION_HEADER_BYTES: u32 = 16;

/// The context id in replies to `OPT_LIST_META_CONTEXT`, where it means nothing.
const RESERVED_CONTEXT_ID: u32 = 0;

/// One export, as clients get to know it.
pub(crate) struct ExportInfo {
    /// What a client calls it; no NUL, at most [`MAX_STRING_BYTES`] bytes.
    pub(crate) name: String,
    /// Words for a human, may be empty; no NUL, at most [`MAX_STRING_BYTES`] bytes.
    pub(crate) description: String,
    /// Size in bytes.
    pub(crate) size: u64,
    /// `FLAG_*` of the transmission phase. `FLAG_HAS_FLAGS` is added, `FLAG_SEND_DF` taken away from
    /// clients without chunks, and `FLAG_BLOCK_STATUS_PAYLOAD` added for those who can use it.
    pub(crate) transmission_flags: u16,
    /// What can be asked about it by block status.
    pub(crate) contexts: Contexts,
    /// The smallest unit of offset and length, in bytes; a power of 2 up to 65536.
    pub(crate) min_block: u32,
    /// The smallest unit that is served without detour, in bytes; a power of 2, at least 512.
    pub(crate) preferred_block: u32,
    /// The longest data of one request, in bytes; at least `preferred_block`.
    pub(crate) max_payload: u32,
}

/// Asks for all exports as they are now. Their names and their order never change; a size may.
pub(crate) type Exports<'a> = &'a dyn Fn() -> Vec<ExportInfo>;

/// Where the connection stands after [`Handshake::feed`]. Before anything else the caller sends
/// what `feed` wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// All input was taken and more is needed.
    More,
    /// The next byte of the client, one still in the input included, begins a TLS handshake. What
    /// it sends through TLS is fed here again.
    StartTls,
    /// The next byte of the client begins a request.
    Transmission(Negotiated),
    /// The connection ends here: the client asked for it, or broke a rule that leaves no way to
    /// tell it so.
    Close,
}

/// What was agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Negotiated {
    /// The export: an index into the list of [`Exports`].
    pub(crate) export: usize,
    /// Which messages are used from here on.
    pub(crate) mode: Mode,
    /// What the client selected for this export; without any, block status requests are invalid.
    pub(crate) contexts: Contexts,
}

/// What `OPT_SET_META_CONTEXT` selected.
#[derive(Clone, Copy)]
struct Selected {
    export: usize,
    contexts: Contexts,
}

/// How a connection stands to encryption (NBD proto.md, "Server-side requirements").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Secrecy {
    /// There is none.
    Off,
    /// It begins when the client asks for it.
    Offered,
    /// Nothing but asking for it is allowed.
    Required,
    /// It has begun.
    Begun,
}

impl From<&Tls> for Secrecy {
    fn from(tls: &Tls) -> Self {
        match tls {
            Tls::Off => Self::Off,
            Tls::Offered(_) => Self::Offered,
            Tls::Required(_) => Self::Required,
        }
    }
}

/// What the next bytes of the client are.
#[derive(Clone, Copy)]
enum Phase {
    ClientFlags,
    OptionHeader,
    /// The data of `option`, `length` bytes.
    OptionData {
        option: u32,
        length: u32,
    },
    /// Data of `option` that are not looked at; `verdict` is the reply after the last of the
    /// `left` bytes.
    Skipped {
        option: u32,
        left: u32,
        verdict: u32,
    },
    Over,
}

/// The handshake of one connection.
pub(crate) struct Handshake {
    phase: Phase,
    secrecy: Secrecy,
    /// The beginning of something that is not complete yet.
    partial: Vec<u8>,
    client_flags: u32,
    options: u32,
    mode: Mode,
    selected: Option<Selected>,
}

impl Handshake {
    /// The state before the first byte of the client.
    pub(crate) fn new(secrecy: Secrecy) -> Self {
        Self {
            phase: Phase::ClientFlags,
            secrecy,
            partial: Vec::new(),
            client_flags: 0,
            options: 0,
            mode: Mode::Simple,
            selected: None,
        }
    }

    /// Appends what the server says first (NBD proto.md, "Newstyle negotiation"); 18 bytes.
    pub(crate) fn greeting(out: &mut Vec<u8>) {
        out.extend_from_slice(&wire::INIT_MAGIC.to_be_bytes());
        out.extend_from_slice(&wire::OPTION_MAGIC.to_be_bytes());
        out.extend_from_slice(&(wire::FLAG_FIXED_NEWSTYLE | wire::FLAG_NO_ZEROES).to_be_bytes());
    }

    /// Takes the next bytes of the client and appends the replies to `out`. Returns how many
    /// bytes were taken (all of them on [`Step::More`]) and where the connection stands.
    ///
    /// `exports` is asked once for each complete option, so that a client is told what holds when
    /// it asks. After the end of the handshake nothing more is taken and the answer is
    /// [`Step::Close`].
    pub(crate) fn feed(
        &mut self,
        input: &[u8],
        exports: Exports<'_>,
        out: &mut Vec<u8>,
    ) -> (usize, Step) {
        let mut rest = input;
        loop {
            let Break(step) = self.advance(&mut rest, exports, out) else {
                continue;
            };
            if !matches!(step, Step::More | Step::StartTls) {
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
    ) -> ControlFlow<Step> {
        match self.phase {
            Phase::ClientFlags => {
                let bytes = self.collect(rest, CLIENT_FLAGS_BYTES)?;
                self.accept_client_flags(&bytes)
            }
            Phase::OptionHeader => {
                let bytes = self.collect(rest, OPTION_HEADER_BYTES)?;
                self.accept_header(&bytes)
            }
            Phase::OptionData { option, length } => {
                let data = self.collect(rest, length)?;
                self.phase = Phase::OptionHeader;
                self.answer(option, &data, &exports(), out)
            }
            Phase::Skipped { option, ref mut left, verdict } => {
                skip(rest, left)?;
                self.phase = Phase::OptionHeader;
                reply(out, option, verdict, &[]);
                match option {
                    wire::OPT_ABORT => Break(Step::Close),
                    _ => Continue(()),
                }
            }
            Phase::Over => Break(Step::Close),
        }
    }

    /// The next `wanted` bytes, once they are all there.
    fn collect(&mut self, rest: &mut &[u8], wanted: u32) -> ControlFlow<Step, Vec<u8>> {
        let missing = (wanted as usize).saturating_sub(self.partial.len());
        let (taken, left) = rest.split_at(missing.min(rest.len()));
        self.partial.extend_from_slice(taken);
        *rest = left;
        if taken.len() < missing {
            return Break(Step::More);
        }
        Continue(std::mem::take(&mut self.partial))
    }

    fn accept_client_flags(&mut self, bytes: &[u8]) -> ControlFlow<Step> {
        let known = u32::from(wire::FLAG_FIXED_NEWSTYLE | wire::FLAG_NO_ZEROES);
        match Fields(bytes).u32() {
            Some(flags) if flags & !known == 0 => {
                self.client_flags = flags;
                self.phase = Phase::OptionHeader;
                Continue(())
            }
            _ => Break(Step::Close),
        }
    }

    fn client_set(&self, flag: u16) -> bool {
        self.client_flags & u32::from(flag) != 0
    }

    /// Decides by the header of an option whether its data are worth keeping.
    fn accept_header(&mut self, bytes: &[u8]) -> ControlFlow<Step> {
        let mut fields = Fields(bytes);
        let (Some(wire::OPTION_MAGIC), Some(option), Some(length)) =
            (fields.u64(), fields.u32(), fields.u32())
        else {
            return Break(Step::Close);
        };
        self.options += 1;
        if self.options > MAX_OPTIONS || length > MAX_SKIPPED_BYTES {
            return Break(Step::Close);
        }
        if option == wire::OPT_SET_META_CONTEXT {
            // It replaces what was selected before, whether it succeeds or not.
            self.selected = None;
        }
        let skipped = |verdict| Phase::Skipped { option, left: length, verdict };
        let bare = self.secrecy == Secrecy::Required;
        self.phase = match option {
            // This option has no error reply: a name that cannot exist ends the connection.
            wire::OPT_EXPORT_NAME if bare || length as usize > MAX_STRING_BYTES => {
                return Break(Step::Close);
            }
            // "Once extended headers are successfully requested, a client MUST NOT use" it.
            wire::OPT_EXPORT_NAME if self.mode == Mode::Extended => return Break(Step::Close),
            wire::OPT_EXPORT_NAME => Phase::OptionData { option, length },
            // Nor has a client a way to read one that did not agree to fixed newstyle.
            _ if !self.client_set(wire::FLAG_FIXED_NEWSTYLE) => return Break(Step::Close),
            wire::OPT_ABORT => skipped(wire::REP_ACK),
            wire::OPT_STARTTLS => match (self.secrecy, length) {
                (Secrecy::Off, _) => skipped(wire::REP_ERR_POLICY),
                (Secrecy::Offered | Secrecy::Required, 0) => Phase::OptionData { option, length },
                _ => skipped(wire::REP_ERR_INVALID),
            },
            _ if bare => skipped(wire::REP_ERR_TLS_REQD),
            wire::OPT_LIST
            | wire::OPT_INFO
            | wire::OPT_GO
            | wire::OPT_STRUCTURED_REPLY
            | wire::OPT_EXTENDED_HEADERS
            | wire::OPT_LIST_META_CONTEXT
            | wire::OPT_SET_META_CONTEXT => {
                if length > MAX_OPTION_BYTES {
                    skipped(wire::REP_ERR_TOO_BIG)
                } else {
                    Phase::OptionData { option, length }
                }
            }
            _ => skipped(wire::REP_ERR_UNSUP),
        };
        Continue(())
    }

    /// Replies to an option whose data are complete.
    fn answer(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &[ExportInfo],
        out: &mut Vec<u8>,
    ) -> ControlFlow<Step> {
        match option {
            wire::OPT_EXPORT_NAME => return self.export_name(data, exports, out),
            wire::OPT_STARTTLS => {
                reply(out, option, wire::REP_ACK, &[]);
                self.begin_secrecy();
                return Break(Step::StartTls);
            }
            _ => {}
        }
        let mut chosen = None;
        let outcome = match option {
            wire::OPT_LIST => list(data, exports, out),
            wire::OPT_STRUCTURED_REPLY | wire::OPT_EXTENDED_HEADERS => self.mode(option, data),
            wire::OPT_INFO => self.information(option, data, exports, out).map(drop),
            wire::OPT_GO => {
                self.information(option, data, exports, out).map(|export| chosen = Some(export))
            }
            _ => self.meta_context(option, data, exports, out),
        };
        reply(out, option, outcome.err().unwrap_or(wire::REP_ACK), &[]);
        match chosen {
            Some(export) => Break(Step::Transmission(self.negotiated(export))),
            None => Continue(()),
        }
    }

    /// Forgets what was agreed on so far (NBD proto.md, `NBD_OPT_STARTTLS`): somebody between here
    /// and the client may have had a part in it. The flags of the client are not said again.
    fn begin_secrecy(&mut self) {
        *self = Self {
            phase: Phase::OptionHeader,
            client_flags: self.client_flags,
            options: self.options,
            ..Self::new(Secrecy::Begun)
        };
    }

    /// Agrees to chunks or extended headers, or returns the error reply. Extended headers take
    /// precedence, in whichever order a client asks for both.
    fn mode(&mut self, option: u32, data: &[u8]) -> Result<(), u32> {
        no_data(data)?;
        self.mode = match (option, self.mode) {
            (wire::OPT_EXTENDED_HEADERS, _) => Mode::Extended,
            (_, Mode::Extended) => return Err(wire::REP_ERR_EXT_HEADER_REQD),
            (_, Mode::Simple | Mode::Structured) => Mode::Structured,
        };
        Ok(())
    }

    fn export_name(
        &self,
        data: &[u8],
        exports: &[ExportInfo],
        out: &mut Vec<u8>,
    ) -> ControlFlow<Step> {
        let Some((index, export)) = string(data).and_then(|name| find(exports, name)) else {
            return Break(Step::Close);
        };
        out.extend_from_slice(&export.size.to_be_bytes());
        out.extend_from_slice(&self.transmission_flags(index, export).to_be_bytes());
        if !self.client_set(wire::FLAG_NO_ZEROES) {
            out.extend_from_slice(&EXPORT_NAME_PADDING);
        }
        Break(Step::Transmission(self.negotiated(index)))
    }

    /// Tells about the export that `OPT_INFO` or `OPT_GO` names and returns its index, or the
    /// error reply.
    fn information(
        &self,
        option: u32,
        data: &[u8],
        exports: &[ExportInfo],
        out: &mut Vec<u8>,
    ) -> Result<usize, u32> {
        let request = InfoRequest::parse(data).ok_or(wire::REP_ERR_INVALID)?;
        let (index, export) = find(exports, request.export).ok_or(wire::REP_ERR_UNKNOWN)?;
        let mut info = |data: &[&[u8]]| reply(out, option, wire::REP_INFO, data);
        info(&[
            &wire::INFO_EXPORT.to_be_bytes(),
            &export.size.to_be_bytes(),
            &self.transmission_flags(index, export).to_be_bytes(),
        ]);
        info(&[
            &wire::INFO_BLOCK_SIZE.to_be_bytes(),
            &export.min_block.to_be_bytes(),
            &export.preferred_block.to_be_bytes(),
            &export.max_payload.to_be_bytes(),
        ]);
        if request.kinds.contains(&wire::INFO_NAME) {
            info(&[&wire::INFO_NAME.to_be_bytes(), export.name.as_bytes()]);
        }
        if request.kinds.contains(&wire::INFO_DESCRIPTION) {
            let description = export.description.as_bytes();
            info(&[&wire::INFO_DESCRIPTION.to_be_bytes(), description]);
        }
        Ok(index)
    }

    /// Lists or selects metadata contexts, or returns the error reply.
    fn meta_context(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &[ExportInfo],
        out: &mut Vec<u8>,
    ) -> Result<(), u32> {
        if !self.mode.has_chunks() {
            return Err(wire::REP_ERR_INVALID);
        }
        let request = ContextRequest::parse(data).ok_or(wire::REP_ERR_INVALID)?;
        let (index, export) = find(exports, request.export).ok_or(wire::REP_ERR_UNKNOWN)?;
        let queries = &request.queries;
        let select = option == wire::OPT_SET_META_CONTEXT;
        let chosen = export.contexts.filter(|context| match select {
            true => queries.contains(&context.name()),
            false => queries.is_empty() || queries.iter().any(|query| context.is_listed_by(query)),
        });
        if select {
            self.selected = Some(Selected { export: index, contexts: chosen });
        }
        for context in chosen.iter() {
            let id = if select { context.id() } else { RESERVED_CONTEXT_ID };
            let data: [&[u8]; 2] = [&id.to_be_bytes(), context.name().as_bytes()];
            reply(out, option, wire::REP_META_CONTEXT, &data);
        }
        Ok(())
    }

    /// What the client has selected for `export` so far.
    fn contexts_of(&self, export: usize) -> Contexts {
        let selected = self.selected.filter(|selected| selected.export == export);
        selected.map_or(Contexts::NONE, |selected| selected.contexts)
    }

    fn transmission_flags(&self, index: usize, export: &ExportInfo) -> u16 {
        // "Don't fragment" is about chunks, and must not be offered to a client without them; nor
        // a payload of block status to one that has no way to send it, or nothing to select from.
        let withheld = if self.mode.has_chunks() { 0 } else { wire::FLAG_SEND_DF };
        let selects = self.mode == Mode::Extended && !self.contexts_of(index).is_empty();
        let added = if selects { wire::FLAG_BLOCK_STATUS_PAYLOAD } else { 0 };
        (export.transmission_flags & !withheld) | added | wire::FLAG_HAS_FLAGS
    }

    fn negotiated(&self, export: usize) -> Negotiated {
        Negotiated { export, mode: self.mode, contexts: self.contexts_of(export) }
    }
}

/// Takes up to `left` bytes off `rest`, and breaks as long as some are missing.
fn skip(rest: &mut &[u8], left: &mut u32) -> ControlFlow<Step> {
    let count = rest.len().min(*left as usize);
    *rest = &rest[count..];
    *left -= count as u32;
    if *left > 0 {
        return Break(Step::More);
    }
    Continue(())
}

/// Tells the name and description of every export, or returns the error reply.
fn list(data: &[u8], exports: &[ExportInfo], out: &mut Vec<u8>) -> Result<(), u32> {
    no_data(data)?;
    for export in exports {
        let name = export.name.as_bytes();
        let name_len = (name.len() as u32).to_be_bytes();
        let data: [&[u8]; 3] = [&name_len, name, export.description.as_bytes()];
        reply(out, wire::OPT_LIST, wire::REP_SERVER, &data);
    }
    Ok(())
}

/// The rule of options that take no data.
fn no_data(data: &[u8]) -> Result<(), u32> {
    if data.is_empty() { Ok(()) } else { Err(wire::REP_ERR_INVALID) }
}

/// The export that a client calls `name`; the first one if it names none.
fn find<'a>(exports: &'a [ExportInfo], name: &str) -> Option<(usize, &'a ExportInfo)> {
    let mut numbered = exports.iter().enumerate();
    numbered.find(|(_, export)| name.is_empty() || export.name == name)
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
