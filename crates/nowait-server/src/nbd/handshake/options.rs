//! The refusals of options, and the final reply to one.
//!
//! Invariant: a refusal has a text for a human.

use crate::nbd::wire::{self, option_reply};

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
        Ok(()) => option_reply(out, option, wire::REP_ACK, &[]),
        Err(refusal) => option_reply(out, option, refusal.kind, &[refusal.text.as_bytes()]),
    }
}
