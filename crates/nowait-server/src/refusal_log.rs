//! The log of clients that are refused, or send what no client sends. Virtual machines are among them.
//!
//! Invariant: a reason is logged when it first occurs, and then as [`LogLimit`] allows, so that
//! clients cannot fill a log; with `--verbose` each one is.

use std::fmt;
use std::time::Instant;

use crate::log_limit::{LogLimit, left_out_note};

/// Why a client is refused.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Refusal {
    UnknownExport,
    Tls,
    NoTls,
    Handshake,
    Protocol,
    /// A VMM does not share the memory of its virtual machine.
    Memory,
    /// A VMM sends a message that is not valid.
    Message,
    /// A driver breaks a rule of its queue.
    Queue,
    /// Too many connections are open.
    Connections,
    /// A client keeps memory that others wait for, and neither sends nor receives.
    Stalled,
}

static REFUSALS: LogLimit<Refusal> = LogLimit::new();

/// Logs that a client is refused: `message` says which and why. Returns whether that is a warning.
#[cold]
pub(crate) fn note(refusal: Refusal, message: fmt::Arguments<'_>) -> bool {
    let reason = refusal.name();
    let due = REFUSALS.due(refusal, Instant::now());
    match due {
        Some(left_out) => tracing::warn!(reason, "{message}{}", left_out_note(left_out)),
        None => tracing::info!(reason, "{message}"),
    }
    due.is_some()
}

/// Logs how many were only counted.
pub(crate) fn summarize() {
    for (refusal, count) in REFUSALS.take_left_out() {
        let reason = refusal.name();
        tracing::warn!(reason, "{count} more clients were refused: {reason}");
    }
}

impl Refusal {
    fn name(self) -> &'static str {
        match self {
            Self::UnknownExport => "unknown export",
            Self::Tls => "TLS has failed",
            Self::NoTls => "no TLS",
            Self::Handshake => "no end of the handshake",
            Self::Protocol => "no request",
            Self::Memory => "memory is not shared",
            Self::Message => "no valid vhost-user message",
            Self::Queue => "a queue breaks a rule",
            Self::Connections => "too many connections",
            Self::Stalled => "memory is kept",
        }
    }
}
