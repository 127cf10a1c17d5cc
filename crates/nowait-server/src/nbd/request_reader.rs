//! Parses received bytes into requests.
//!
//! Invariant: how the socket cuts the stream makes no difference. A request header is taken whole
//! or stays in the unparsed input.

use std::ops::RangeInclusive;

use crate::nbd::command::TransmissionMode;
use crate::nbd::extended_headers;
use crate::nbd::extended_headers::ParseError;
use crate::nbd::reply::builder::RequestContext;
use crate::nbd::session::{Phase, Session};
use crate::nbd::wire::{ReplyMode, RequestHeader};

/// A batch of this many requests is served in halves. A smaller one would wake the client too
/// often; with a larger one the client is busy anyway.
const HALF_BATCH_REQUESTS: RangeInclusive<u64> = 12..=32;
/// The fewest bytes that such a batch has.
const HALF_BATCH_BYTES: usize =
    *HALF_BATCH_REQUESTS.start() as usize * ReplyMode::Simple.request_bytes();

/// Kinds of the next bytes of the input.
pub(crate) enum Parsed {
    /// The input ends within a header or a payload.
    NeedMore,
    /// They are not a request, or not the end of one.
    Malformed,
    /// This many bytes of a payload.
    Bytes(usize),
    /// This many bytes of a payload, which is complete: [`Session::take_write`] gives the write.
    Write(usize),
    /// The next fragment of a split write, which needs a buffer.
    Fragment,
    /// A request.
    Request(ParsedRequest),
}

/// A request that was just received.
pub(crate) struct ParsedRequest {
    pub(crate) request: RequestContext,
    /// Bytes of the header and, for block status with extended headers, of its payload.
    pub(crate) taken: usize,
    /// Bytes of payload that follow.
    pub(crate) payload: u64,
}

impl Session {
    /// How many bytes of the received `input` to parse first. `usize::MAX` (all), unless it holds
    /// many requests: then the client gets its first replies, and makes new requests, while the
    /// second half is served.
    pub(crate) fn half_batch_len(&self, input: &[u8]) -> usize {
        if input.len() < HALF_BATCH_BYTES {
            return usize::MAX;
        }
        let Phase::Transmission(transmission) = &self.phase else { return usize::MAX };
        // A discarded payload may look like a request; halving it does no harm.
        let Some(header) = RequestHeader::parse(transmission.mode, input) else {
            return usize::MAX;
        };
        let head = transmission.mode.request_bytes() as u64;
        let one = header.payload(transmission.mode).saturating_add(head);
        let many = HALF_BATCH_REQUESTS.contains(&(input.len() as u64 / one));
        if many { input.len() / 2 } else { usize::MAX }
    }

    /// Takes the next piece of input in the transmission phase: a header, or some payload.
    #[inline(always)]
    pub(crate) fn parse_next(&mut self, transmission: TransmissionMode, input: &[u8]) -> Parsed {
        if let Some(payload) = &mut self.payload {
            let count = payload.fill(input);
            let whole = payload.missing().is_empty();
            return match (whole, count) {
                (true, _) => Parsed::Write(count),
                (false, 0) => Parsed::NeedMore,
                (false, _) => Parsed::Bytes(count),
            };
        }
        if self.discard_bytes > 0 {
            let count = self.discard_bytes.min(input.len() as u64);
            self.discard_bytes -= count;
            return if count > 0 { Parsed::Bytes(count as usize) } else { Parsed::NeedMore };
        }
        if self.incoming_split.is_some() {
            return Parsed::Fragment;
        }
        match parse_request(transmission, input) {
            Ok(request) => Parsed::Request(request),
            Err(ParseError::NeedMore) => Parsed::NeedMore,
            Err(ParseError::Malformed) => Parsed::Malformed,
        }
    }
}

/// Parses the request at the start of `input`.
#[inline(always)]
fn parse_request(
    transmission: TransmissionMode,
    input: &[u8],
) -> Result<ParsedRequest, ParseError> {
    let TransmissionMode { mode, mut contexts } = transmission;
    let mut taken = mode.request_bytes();
    if input.len() < taken {
        return Err(ParseError::NeedMore);
    }
    let mut header = RequestHeader::parse(mode, input).ok_or(ParseError::Malformed)?;
    let mut payload = header.payload(mode);
    if mode == ReplyMode::Extended {
        let rest = input.get(taken..).unwrap_or_default();
        let used = extended_headers::normalize(&mut header, &mut contexts, rest)?;
        taken += used;
        payload -= used as u64;
    }
    let request = RequestContext { header, contexts, budget_used: 0 };
    Ok(ParsedRequest { request, taken, payload })
}
