//! Messages of NBD as bytes, and numbers out of bytes.
//!
//! Invariant: nothing is read behind the end.
//! Knows: the numbers of the protocol. Known by: targets.

use std::collections::BTreeMap;

use nowait_nbd as nbd;

/// Bytes that are read from the front.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl<'a> Fields<'a> {
    /// The next `count` bytes.
    pub(crate) fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn chunk<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N).and_then(|bytes| bytes.try_into().ok())
    }

    /// The next number of two bytes.
    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.chunk().map(u16::from_be_bytes)
    }

    /// The next number of four bytes.
    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.chunk().map(u32::from_be_bytes)
    }

    /// The next number of eight bytes.
    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.chunk().map(u64::from_be_bytes)
    }
}

/// An option with its data ("Option types").
pub(crate) fn option(kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = nbd::OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend(kind.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// A string behind its length.
fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat()
}

/// The data of `OPT_INFO` and `OPT_GO`.
pub(crate) fn info_request(name: &str, kinds: &[u16]) -> Vec<u8> {
    let mut data = text(name);
    data.extend((kinds.len() as u16).to_be_bytes());
    data.extend(kinds.iter().flat_map(|kind| kind.to_be_bytes()));
    data
}

/// The data of `OPT_LIST_META_CONTEXT` and `OPT_SET_META_CONTEXT`.
pub(crate) fn context_query(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = text(name);
    data.extend((queries.len() as u32).to_be_bytes());
    data.extend(queries.iter().flat_map(|query| text(query)));
    data
}

/// Which messages are used after the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Compact requests, simple replies.
    Simple,
    /// Compact requests, replies in chunks where there is a payload.
    Structured,
    /// Extended requests and replies.
    Extended,
}

/// A request, as it was understood here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    command: u16,
    /// Command flags.
    pub(crate) flags: u16,
    offset: u64,
    /// Bytes concerned, or of payload.
    len: u64,
    /// Whether all of its payload is there.
    pub(crate) is_whole: bool,
}

impl Request {
    /// A request that is whole.
    pub(crate) const fn new(command: u16, flags: u16, offset: u64, len: u64) -> Self {
        Self { command, flags, offset, len, is_whole: true }
    }

    /// As it goes out, with `payload` behind it.
    pub(crate) fn bytes(self, mode: Mode, payload: &[u8]) -> Vec<u8> {
        let magic = match mode {
            Mode::Extended => nbd::EXTENDED_REQUEST_MAGIC,
            _ => nbd::REQUEST_MAGIC,
        };
        let mut bytes = magic.to_be_bytes().to_vec();
        bytes.extend(self.flags.to_be_bytes());
        bytes.extend(self.command.to_be_bytes());
        bytes.extend([0; 8]);
        bytes.extend(self.offset.to_be_bytes());
        match mode {
            Mode::Extended => bytes.extend(self.len.to_be_bytes()),
            _ => bytes.extend((self.len as u32).to_be_bytes()),
        }
        bytes.extend(payload);
        bytes
    }

    fn payload(&self, mode: Mode) -> u64 {
        let says_so = mode == Mode::Extended && self.flags & nbd::CMD_FLAG_PAYLOAD_LEN != 0;
        if says_so || self.command == nbd::CMD_WRITE { self.len } else { 0 }
    }
}

/// How a stream of requests ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// With a goodbye, or amid a request or behind one.
    Orderly,
    /// With what is no request, or with one behind which the next cannot be found.
    Broken,
}

impl End {
    /// Whether every whole request must be answered.
    pub(crate) fn is_orderly(self) -> bool {
        self == Self::Orderly
    }
}

/// The requests in `bytes`; and the bytes again, with each cookie the place of its request among
/// them, so that every answer can be told from the others.
pub(crate) fn renumbered(mode: Mode, bytes: &[u8]) -> (Vec<u8>, Vec<Request>, End) {
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
        let payload = request.payload(mode);
        // A write that hides its payload, and one that is too long, end the connection.
        let write = request.command == nbd::CMD_WRITE;
        let hides = mode == Mode::Extended && write && payload == 0 && request.len > 0;
        let too_long = mode == Mode::Extended && payload > MAX_PAYLOAD_BYTES;
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

/// The next request; none if it is not all there; an error if it is none.
fn header(mode: Mode, rest: &mut Fields<'_>) -> Result<Option<Request>, ()> {
    let (magic, bytes) = match mode {
        Mode::Extended => (nbd::EXTENDED_REQUEST_MAGIC, nbd::EXTENDED_REQUEST_BYTES),
        _ => (nbd::REQUEST_MAGIC, nbd::REQUEST_BYTES),
    };
    let Some(header) = rest.take(bytes) else { return Ok(None) };
    let mut fields = Fields(header);
    if fields.u32() != Some(magic) {
        return Err(());
    }
    let mut read = || {
        let (flags, command) = (fields.u16()?, fields.u16()?);
        let _cookie = fields.u64()?;
        let offset = fields.u64()?;
        let len = match mode {
            Mode::Extended => fields.u64()?,
            _ => fields.u32()?.into(),
        };
        Some(Request::new(command, flags, offset, len))
    };
    Ok(read())
}

/// What came for each request: the bytes of a read, or the error.
pub(crate) struct Answers<'a> {
    requests: &'a [Request],
    ended: BTreeMap<u64, Result<u64, u32>>,
    /// Of reads that have not ended.
    covered: BTreeMap<u64, u64>,
    /// Errors of requests that have not ended.
    failed: BTreeMap<u64, u32>,
}

impl<'a> Answers<'a> {
    /// Takes `bytes` apart: what each request came to, by its cookie. The last message may be cut
    /// off unless `whole`.
    ///
    /// # Errors
    /// What no server may say.
    pub(crate) fn read(
        mode: Mode,
        requests: &'a [Request],
        bytes: &[u8],
        whole: bool,
    ) -> Result<BTreeMap<u64, Result<u64, u32>>, String> {
        let (covered, failed) = (BTreeMap::new(), BTreeMap::new());
        let mut answers = Self { requests, ended: BTreeMap::new(), covered, failed };
        let mut rest = Fields(bytes);
        while !rest.0.is_empty() {
            match answers.message(mode, &mut rest) {
                Some(said) => said?,
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

    /// The next message; `None` if it is not all there.
    fn message(&mut self, mode: Mode, rest: &mut Fields<'_>) -> Option<Result<(), String>> {
        let magic = rest.u32()?;
        match (magic, mode) {
            (nbd::SIMPLE_REPLY_MAGIC, Mode::Simple | Mode::Structured) => self.simple(mode, rest),
            (nbd::STRUCTURED_REPLY_MAGIC, Mode::Structured)
            | (nbd::EXTENDED_REPLY_MAGIC, Mode::Extended) => self.chunk(mode, rest),
            _ => Some(Err(format!("{magic:x} begins no reply"))),
        }
    }

    fn simple(&mut self, mode: Mode, rest: &mut Fields<'_>) -> Option<Result<(), String>> {
        let (error, cookie) = (rest.u32()?, rest.u64()?);
        let request = match self.request(cookie) {
            Ok(request) => request,
            Err(wrong) => return Some(Err(wrong)),
        };
        let read = request.command == nbd::CMD_READ;
        if read && mode == Mode::Structured {
            return Some(Err(format!("{request:?} has a simple reply")));
        }
        let bytes = if read && error == 0 { request.len } else { 0 };
        rest.take(bytes as usize)?;
        self.ended.insert(cookie, if error == 0 { Ok(bytes) } else { Err(error) });
        Some(Ok(()))
    }

    fn chunk(&mut self, mode: Mode, rest: &mut Fields<'_>) -> Option<Result<(), String>> {
        let (flags, kind, cookie) = (rest.u16()?, rest.u16()?, rest.u64()?);
        let len = match mode {
            Mode::Extended => {
                rest.u64()?;
                rest.u64()?
            }
            _ => rest.u32()?.into(),
        };
        let payload = rest.take(usize::try_from(len).ok()?)?;
        let said = self.request(cookie).and_then(|request| {
            self.payload(request, cookie, kind, Fields(payload))?;
            if flags & nbd::REPLY_FLAG_DONE != 0 { self.done(request, cookie) } else { Ok(()) }
        });
        Some(said)
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
