//! Parses the data of options and builds the replies to them.
//!
//! Invariant: data parse only as a whole. A missing byte, an extra byte, or a string that breaks
//! the rules for strings makes all of it invalid.

use crate::nbd::wire::{self, Fields};

/// Appends one reply of type `kind` to `option`, with the data of all `parts`.
pub(crate) fn reply(out: &mut Vec<u8>, option: u32, kind: u32, parts: &[&[u8]]) {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    out.extend_from_slice(&wire::OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&(length as u32).to_be_bytes());
    for part in parts {
        out.extend_from_slice(part);
    }
}

/// Why an option is refused.
#[derive(Clone, Copy)]
pub(crate) struct OptionError {
    /// The type of the reply, `REP_ERR_*`.
    pub(crate) kind: u32,
    /// The reply's text for a human (NBD proto.md, "Option reply types"); not empty.
    pub(crate) text: &'static str,
}

impl OptionError {
    pub(crate) const TLS_NOT_CONFIGURED: Self =
        Self { kind: wire::REP_ERR_POLICY, text: "TLS is not configured" };
    pub(crate) const TLS_HAS_BEGUN: Self =
        Self { kind: wire::REP_ERR_INVALID, text: "TLS has begun already" };
    pub(crate) const TLS_REQUIRED: Self =
        Self { kind: wire::REP_ERR_TLS_REQD, text: "TLS must begin before this option" };
    pub(crate) const TOO_BIG: Self =
        Self { kind: wire::REP_ERR_TOO_BIG, text: "the data of this option are too long" };
    pub(crate) const UNSUPPORTED: Self =
        Self { kind: wire::REP_ERR_UNSUP, text: "this option is not supported" };
    pub(crate) const HAS_DATA: Self =
        Self { kind: wire::REP_ERR_INVALID, text: "this option has no data" };
    pub(crate) const MALFORMED: Self =
        Self { kind: wire::REP_ERR_INVALID, text: "the data of this option are malformed" };
    pub(crate) const EXTENDED_HEADERS: Self =
        Self { kind: wire::REP_ERR_EXT_HEADER_REQD, text: "extended headers were agreed upon" };
    pub(crate) const NO_CHUNKS: Self = Self {
        kind: wire::REP_ERR_INVALID,
        text: "structured replies or extended headers must be agreed upon first",
    };
    pub(crate) const NO_SUCH_EXPORT: Self =
        Self { kind: wire::REP_ERR_UNKNOWN, text: "no such export" };
}

/// Appends the final reply to `option`.
pub(crate) fn conclude(out: &mut Vec<u8>, option: u32, outcome: Result<(), OptionError>) {
    match outcome {
        Ok(()) => reply(out, option, wire::REP_ACK, &[]),
        Err(refusal) => reply(out, option, refusal.kind, &[refusal.text.as_bytes()]),
    }
}

/// The data of `OPT_INFO` and `OPT_GO`.
pub(crate) struct InfoOption<'a> {
    pub(crate) export: &'a str,
    pub(crate) kinds: Vec<u16>,
}

impl<'a> InfoOption<'a> {
    /// `None` unless the data are exactly one request.
    pub(crate) fn parse(data: &'a [u8]) -> Option<Self> {
        let mut fields = Fields(data);
        let export = fields.string()?;
        let count = fields.u16()?;
        let kinds = (0..count).map(|_| fields.u16()).collect::<Option<_>>()?;
        fields.is_empty().then_some(Self { export, kinds })
    }
}

/// The data of `OPT_LIST_META_CONTEXT` and `OPT_SET_META_CONTEXT`.
pub(crate) struct MetaContextOption<'a> {
    pub(crate) export: &'a str,
    pub(crate) queries: Vec<&'a str>,
}

impl<'a> MetaContextOption<'a> {
    /// `None` unless the data are exactly one request.
    pub(crate) fn parse(data: &'a [u8]) -> Option<Self> {
        let mut fields = Fields(data);
        let export = fields.string()?;
        let count = fields.u32()?;
        let queries = (0..count).map(|_| fields.string()).collect::<Option<_>>()?;
        fields.is_empty().then_some(Self { export, queries })
    }
}
