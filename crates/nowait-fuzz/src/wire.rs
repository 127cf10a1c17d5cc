//! Encodes and parses NBD messages.
//!
//! Invariant: no read goes past the end.

use std::collections::BTreeMap;

use nowait_nbd::{self as nbd, Fields, ReplyHeader, ReplyMode, RequestHeader};

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
    requests: &'a [Request],
    ended: BTreeMap<u64, Result<u64, u32>>,
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
        let mut answers = Self { requests, ended: BTreeMap::new(), covered, failed };
        let mut rest = Fields(bytes);
        while !rest.0.is_empty() {
            match answers.message(mode, &mut rest) {
                Some(outcome) => outcome?,
                None if whole => return Err("the last message is cut off".into()),
                None => break,
            }
        }
        if whole && !answers.covered.is_empty() {
            return Err(format!("reads {:?} are answered in part", answers.covered));
        }
        Ok(answers.ended)
    }

    fn request(&self, cookie: u64) -> Result<Request, String> {
        let request = usize::try_from(cookie).ok().and_then(|at| self.requests.get(at));
        if self.ended.contains_key(&cookie) {
            return Err(format!("{cookie} is answered twice"));
        }
        request.copied().ok_or(format!("{cookie} was never asked"))
    }

    /// Parses the next message; `None` if it is incomplete.
    fn message(&mut self, mode: ReplyMode, rest: &mut Fields<'_>) -> Option<Result<(), String>> {
        match ReplyHeader::parse(mode, rest.0) {
            Err(magic) => Some(Err(format!("{magic:x?} begins no reply"))),
            Ok(None) => None,
            Ok(Some((head, len))) => {
                rest.take(len)?;
                match head {
                    ReplyHeader::Simple { error, cookie } => self.simple(mode, error, cookie, rest),
                    ReplyHeader::Chunk { .. } => self.chunk(head, rest),
                }
            }
        }
    }

    fn simple(
        &mut self,
        mode: ReplyMode,
        error: u32,
        cookie: u64,
        rest: &mut Fields<'_>,
    ) -> Option<Result<(), String>> {
        let request = match self.request(cookie) {
            Ok(request) => request,
            Err(wrong) => return Some(Err(wrong)),
        };
        let read = request.command == nbd::CMD_READ;
        if read && mode == ReplyMode::Structured {
            return Some(Err(format!("{request:?} has a simple reply")));
        }
        let bytes = if read && error == 0 { request.len } else { 0 };
        rest.take(bytes as usize)?;
        self.ended.insert(cookie, if error == 0 { Ok(bytes) } else { Err(error) });
        Some(Ok(()))
    }

    fn chunk(&mut self, head: ReplyHeader, rest: &mut Fields<'_>) -> Option<Result<(), String>> {
        let ReplyHeader::Chunk { kind, cookie, length, .. } = head else { return None };
        let payload = rest.take(usize::try_from(length).ok()?)?;
        let outcome = self.request(cookie).and_then(|request| {
            self.payload(request, cookie, kind, Fields(payload))?;
            if head.is_last() { self.done(request, cookie) } else { Ok(()) }
        });
        Some(outcome)
    }

    fn payload(
        &mut self,
        request: Request,
        cookie: u64,
        kind: u16,
        mut payload: Fields<'_>,
    ) -> Result<(), String> {
        let wrong = || Err(format!("a chunk of type {kind} for {request:?} makes no sense"));
        let covers = match kind {
            nbd::REPLY_TYPE_NONE if payload.0.is_empty() => return Ok(()),
            nbd::REPLY_TYPE_OFFSET_DATA if request.command == nbd::CMD_READ => {
                payload.u64().map(|at| (at, payload.0.len() as u64))
            }
            nbd::REPLY_TYPE_OFFSET_HOLE if request.command == nbd::CMD_READ => {
                payload.u64().zip(payload.u32().map(u64::from))
            }
            nbd::REPLY_TYPE_BLOCK_STATUS | nbd::REPLY_TYPE_BLOCK_STATUS_EXT
                if request.command == nbd::CMD_BLOCK_STATUS && payload.0.len() > 8 =>
            {
                return Ok(());
            }
            _ if kind & nbd::REPLY_TYPE_ERROR_BIT != 0 => match payload.u32() {
                Some(error) if error != 0 => {
                    self.failed.insert(cookie, error);
                    return Ok(());
                }
                _ => return wrong(),
            },
            _ => return wrong(),
        };
        let Some((at, len)) = covers else { return wrong() };
        let end = at.checked_add(len);
        if len == 0 || at < request.offset || end.is_none_or(|e| e > request.offset + request.len) {
            return Err(format!("{len} bytes at {at} for {request:?}"));
        }
        *self.covered.entry(cookie).or_default() += len;
        Ok(())
    }

    fn done(&mut self, request: Request, cookie: u64) -> Result<(), String> {
        let covered = self.covered.remove(&cookie).unwrap_or(0);
        let answer = match self.failed.remove(&cookie) {
            Some(error) => Err(error),
            None if request.command == nbd::CMD_READ && covered != request.len => {
                return Err(format!("{request:?} is answered with {covered} bytes"));
            }
            None => Ok(covered),
        };
        self.ended.insert(cookie, answer);
        Ok(())
    }
}
