//! Parses a stream of bytes by the specification (NBD proto.md, "Request message", "Request types";
//! extended headers as on its branch extension-ext-header).
//!
//! Invariant: no code of the server is used here.

use nowait_testkit::nbd::{
    BLOCK_STATUS, CACHE, DF, DISC, EXTENDED_REQUEST_MAGIC, FAST_ZERO, FLUSH, FUA, Mode, NO_HOLE,
    PAYLOAD_LEN, READ, REQ_ONE, REQUEST_MAGIC, TRIM, WRITE, WRITE_ZEROES,
};

use super::Terms;

/// The longest payload that the server advertises.
const MOST_PAYLOAD_BYTES: u64 = 32 << 20;

/// The allowed answers to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Success,
    Refusal,
    /// Success, or `NBD_ENOTSUP`.
    FastOrNot,
}

/// A request of the stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub(super) command: u16,
    pub(super) flags: u16,
    pub(super) cookie: u64,
    pub(super) offset: u64,
    /// The length of its range in bytes.
    pub(super) length: u64,
    pub(super) verdict: Verdict,
    /// Its payload is incomplete: the request is refused immediately, or not answered.
    pub(super) is_cut: bool,
}

/// The expected end of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// After all answers.
    Orderly,
    /// A rule was broken: earlier requests may be answered or not.
    Broken,
}

/// The expected effect of a stream.
#[derive(Debug)]
pub(super) struct Expected {
    pub(super) asked: Vec<Asked>,
    pub(super) end: End,
}

/// The rest of a stream.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn number(&mut self, bytes: usize) -> u64 {
        let (field, rest) = self.0.split_at(bytes);
        self.0 = rest;
        field.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }
}

/// The expected effect of `bytes` on a connection to an export of `size` bytes.
pub(super) fn parse(terms: Terms, size: u64, bytes: &[u8]) -> Expected {
    let extended = terms.mode == Mode::Extended;
    let (header_bytes, wanted, length_bytes) = match extended {
        true => (32, EXTENDED_REQUEST_MAGIC, 8),
        false => (28, REQUEST_MAGIC, 4),
    };
    let mut asked = Vec::new();
    let mut bytes = Bytes(bytes);
    while bytes.0.len() >= header_bytes {
        let magic = bytes.number(4);
        let (flags, command) = (bytes.number(2) as u16, bytes.number(2) as u16);
        let (cookie, offset) = (bytes.number(8), bytes.number(8));
        let length = bytes.number(length_bytes);
        let announced = extended && flags & PAYLOAD_LEN != 0;
        // A write has a payload even without the flag: some clients do not set it.
        let has_payload = announced || command == WRITE;
        let too_long = extended && has_payload && length > MOST_PAYLOAD_BYTES;
        if magic != u64::from(wanted) || too_long {
            return Expected { asked, end: End::Broken };
        }
        if command == DISC {
            break;
        }
        let payload = if has_payload { length } else { 0 };
        let there = (bytes.0.len() as u64).min(payload) as usize;
        let (payload_bytes, rest) = bytes.0.split_at(there);
        bytes.0 = rest;
        let is_cut = (there as u64) < payload;
        let plain =
            Asked { command, flags, cookie, offset, length, verdict: Verdict::Refusal, is_cut };
        asked.push(classified(terms, size, plain, announced.then_some(payload_bytes)));
    }
    Expected { asked, end: End::Orderly }
}

/// `asked` with its verdict; `payload` is the payload that a flag announced.
fn classified(terms: Terms, size: u64, mut asked: Asked, payload: Option<&[u8]>) -> Asked {
    let mut allowed = FUA;
    match (asked.command, payload) {
        (READ, _) => allowed |= DF,
        (WRITE_ZEROES, _) => allowed |= NO_HOLE | FAST_ZERO,
        (WRITE, Some(_)) => allowed |= PAYLOAD_LEN,
        (BLOCK_STATUS, Some(payload)) => {
            let Some(length) = named_length(terms, payload).filter(|_| !asked.is_cut) else {
                return asked;
            };
            asked.length = length;
            allowed |= REQ_ONE | PAYLOAD_LEN;
        }
        (BLOCK_STATUS, None) => allowed |= REQ_ONE,
        _ => {}
    }
    let in_range = asked.offset.checked_add(asked.length).is_some_and(|end| end <= size);
    let is_good = match asked.command {
        FLUSH => true,
        READ | WRITE | TRIM | CACHE | WRITE_ZEROES => in_range,
        BLOCK_STATUS => terms.context.is_some() && in_range && asked.length > 0,
        _ => false,
    };
    if is_good && asked.flags & !allowed == 0 {
        let fast = asked.command == WRITE_ZEROES && asked.flags & FAST_ZERO != 0;
        asked.verdict = if fast { Verdict::FastOrNot } else { Verdict::Success };
    }
    asked
}

/// The effect length in the payload of a block status request that names the selected context once.
fn named_length(terms: Terms, payload: &[u8]) -> Option<u64> {
    let (length, id) = payload.split_first_chunk()?;
    (id == terms.context?.to_be_bytes()).then_some(u64::from_be_bytes(*length))
}
