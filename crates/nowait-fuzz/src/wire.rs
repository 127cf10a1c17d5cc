//! Encodes and parses NBD messages.
//!
//! Invariant: no read goes past the end.

use std::collections::BTreeMap;

use nowait_nbd::client::{Outcome, Replies, ReplyParser};
use nowait_nbd::{self as nbd, Extents, Fields, ReplyMode, RequestHeader};

/// A request as parsed here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    command: u16,
    /// Command flags.
    pub(crate) flags: u16,
    offset: u64,
    /// Bytes concerned, or of payload.
    len: u64,
    /// Whether its payload is complete.
    pub(crate) is_whole: bool,
}

impl Request {
    /// A complete request.
    pub(crate) const fn new(command: u16, flags: u16, offset: u64, len: u64) -> Self {
        Self { command, flags, offset, len, is_whole: true }
    }

    /// The request in wire format, followed by `payload`.
    pub(crate) fn bytes(self, mode: ReplyMode, payload: &[u8]) -> Vec<u8> {
        let (bytes, len) = self.header().encode(mode);
        let mut bytes = bytes[..len].to_vec();
        bytes.extend(payload);
        bytes
    }

    const fn header(self) -> RequestHeader {
        let Self { command, flags, offset, len, .. } = self;
        RequestHeader { flags, command, cookie: 0, offset, length: len }
    }
}

/// How a stream of requests ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// With a disconnect request, or in the middle or at the end of a request.
    Orderly,
    /// With an invalid request, or with one after which the next cannot be located.
    Broken,
}

impl End {
    /// Whether every complete request must get a reply.
    pub(crate) fn is_orderly(self) -> bool {
        self == Self::Orderly
    }
}

/// The requests in `bytes`; and the bytes with each cookie replaced by the index of its request, so
/// that replies can be matched.
pub(crate) fn renumbered(mode: ReplyMode, bytes: &[u8]) -> (Vec<u8>, Vec<Request>, End) {
    let mut new = bytes.to_vec();
    let (mut requests, mut rest) = (Vec::new(), Fields(bytes));
    loop {
        let at = bytes.len() - rest.0.len();
        let Some(mut request) = (match header(mode, &mut rest) {
            Ok(request) => request,
            Err(()) => return (new, requests, End::Broken),
        }) else {
            return (new, requests, End::Orderly);
        };
        let cookie = (requests.len() as u64).to_be_bytes();
        new.splice(at + 8..at + 16, cookie);
        let payload = request.header().payload(mode);
        // A write that hides its payload, and one that is too long, end the connection.
        let write = request.command == nbd::CMD_WRITE;
        let hides = mode == ReplyMode::Extended && write && payload == 0 && request.len > 0;
        let too_long = mode == ReplyMode::Extended && payload > MAX_PAYLOAD_BYTES;
        if hides || too_long {
            return (new, requests, End::Broken);
        }
        if request.command == nbd::CMD_DISC {
            return (new, requests, End::Orderly);
        }
        request.is_whole = rest.take(payload.min(usize::MAX as u64) as usize).is_some();
        requests.push(request);
        if !request.is_whole {
            return (new, requests, End::Orderly);
        }
    }
}

/// The longest payload that a server takes ("Block size constraints").
const MAX_PAYLOAD_BYTES: u64 = 32 << 20;

/// The next request; `None` if it is incomplete; an error if it is invalid.
fn header(mode: ReplyMode, rest: &mut Fields<'_>) -> Result<Option<Request>, ()> {
    let Some(bytes) = rest.take(mode.request_bytes()) else { return Ok(None) };
    let header = RequestHeader::parse(mode, bytes).ok_or(())?;
    let RequestHeader { flags, command, offset, length, .. } = header;
    Ok(Some(Request::new(command, flags, offset, length)))
}

/// The reply to each request: the bytes of a read, or the error.
pub(crate) struct Answers<'a> {
    mode: ReplyMode,
    requests: &'a [Request],
    answered: BTreeMap<u64, Result<u64, u32>>,
    /// The bytes received for reads that are not complete.
    covered: BTreeMap<u64, u64>,
    /// The errors of requests that are not complete.
    failed: BTreeMap<u64, u32>,
}

impl<'a> Answers<'a> {
    /// Parses `bytes` into the reply of each request, by its cookie. The last message may be
    /// incomplete unless `whole`.
    ///
    /// # Errors
    /// A message that no server may send.
    pub(crate) fn read(
        mode: ReplyMode,
        requests: &'a [Request],
        bytes: &[u8],
        whole: bool,
    ) -> Result<BTreeMap<u64, Result<u64, u32>>, String> {
        let (covered, failed) = (BTreeMap::new(), BTreeMap::new());
        let mut answers = Self { mode, requests, answered: BTreeMap::new(), covered, failed };
        let mut parser = ReplyParser::new(mode);
        parser.feed(bytes, &mut answers)?;
        if whole && !parser.is_between_messages() {
            return Err("the last message is cut off".into());
        }
        if whole && !answers.covered.is_empty() {
            return Err(format!("reads {:?} are answered in part", answers.covered));
        }
        Ok(answers.answered)
    }

    fn request(&self, cookie: u64) -> Outcome<Request> {
        let request = usize::try_from(cookie).ok().and_then(|at| self.requests.get(at));
        if self.answered.contains_key(&cookie) {
            return Err(format!("{cookie} is answered twice"));
        }
        request.copied().ok_or(format!("{cookie} was never asked"))
    }
}

impl Replies for Answers<'_> {
    fn simple(&mut self, cookie: u64, error: u32) -> Outcome<Option<(u64, u64)>> {
        let request = self.request(cookie)?;
        let read = request.command == nbd::CMD_READ;
        if read && self.mode == ReplyMode::Structured {
            return Err(format!("{request:?} has a simple reply"));
        }
        if error != 0 {
            self.failed.insert(cookie, error);
        } else if read {
            self.covered.insert(cookie, request.len);
            return Ok(Some((request.offset, request.len)));
        }
        Ok(None)
    }

    fn data(&mut self, cookie: u64, at: u64, len: u64) -> Outcome<()> {
        let request = self.request(cookie)?;
        let end = at.checked_add(len);
        let inside = at >= request.offset && end.is_some_and(|e| e <= request.offset + request.len);
        if request.command != nbd::CMD_READ || len == 0 || !inside {
            return Err(format!("{len} bytes at {at} for {request:?}"));
        }
        *self.covered.entry(cookie).or_default() += len;
        Ok(())
    }

    fn hole(&mut self, cookie: u64, at: u64, len: u64) -> Outcome<()> {
        self.data(cookie, at, len)
    }

    fn status(&mut self, cookie: u64, _: u32, _: Extents<'_>) -> Outcome<()> {
        let request = self.request(cookie)?;
        let asked = request.command == nbd::CMD_BLOCK_STATUS;
        if asked { Ok(()) } else { Err(format!("extents for {request:?}")) }
    }

    fn error(&mut self, cookie: u64, error: u32, _: &str) -> Outcome<()> {
        let request = self.request(cookie)?;
        self.failed.insert(cookie, error);
        if error == 0 { Err(format!("the error 0 for {request:?}")) } else { Ok(()) }
    }

    fn done(&mut self, cookie: u64) -> Outcome<()> {
        let request = self.request(cookie)?;
        let covered = self.covered.remove(&cookie).unwrap_or(0);
        let answer = match self.failed.remove(&cookie) {
            Some(error) => Err(error),
            None if request.command == nbd::CMD_READ && covered != request.len => {
                return Err(format!("{request:?} is answered with {covered} bytes"));
            }
            None => Ok(covered),
        };
        self.answered.insert(cookie, answer);
        Ok(())
    }

    fn memory(&mut self, _: u64, _: u64) -> Option<&mut [u8]> {
        None
    }
}
