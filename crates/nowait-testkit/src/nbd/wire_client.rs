//! A client that sends any bytes and shows every message as it came.
//!
//! Invariant: messages are parsed only as far as their headers require; the offset of a chunk with an extended header is
//! compared with its request's.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use crate::nbd::constants::*;
use crate::nbd::handshake::{
    Mode, context_request, export_request, number, option_bytes, read_number, read_replies,
};

/// The most payload of one message in bytes.
const MAX_PAYLOAD_BYTES: u64 = 40 << 20;

/// A request for the wire, without any checks.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Its type.
    pub command: u16,
    /// Command flags.
    pub flags: u16,
    /// In bytes.
    pub offset: u64,
    /// The header's length field.
    pub length: u64,
    /// The bytes after the header, independent of its length field.
    pub payload: &'a [u8],
}

impl<'a> Request<'a> {
    /// A request for a range, without payload.
    pub fn of(command: u16, offset: u64, length: u64) -> Self {
        Self { command, flags: 0, offset, length, payload: &[] }
    }

    /// A correct write in `mode`.
    pub fn write(mode: Mode, offset: u64, payload: &'a [u8]) -> Self {
        let flags = if mode == Mode::Extended { PAYLOAD_LEN } else { 0 };
        Self { command: WRITE, flags, offset, length: payload.len() as u64, payload }
    }

    /// The request with these flags, too.
    pub fn with(self, flags: u16) -> Self {
        Self { flags: self.flags | flags, ..self }
    }
}

/// One message of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are the specification's")]
pub enum Message {
    /// Without the data that follow after a successful read.
    Simple { cookie: u64, error: u32 },
    /// A chunk of a structured reply.
    Chunk { cookie: u64, done: bool, kind: u16, payload: Vec<u8> },
}

/// The extents of a context: bytes and flags.
pub type Extents = Vec<(u64, u64)>;

/// The reply to a request, assembled from all of its messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// 0 for success.
    pub error: u32,
    /// Bytes that were read, holes included.
    pub data: Vec<u8>,
    /// Chunks: type, first byte and length of the range that each describes.
    pub chunks: Vec<(u16, u64, u64)>,
    /// Block status: context id, and extents with their flags.
    pub status: Vec<(u32, Extents)>,
}

/// A connection in the transmission phase.
pub struct WireClient<S = UnixStream> {
    /// The transport.
    pub stream: S,
    /// The format of replies.
    pub mode: Mode,
    /// `NBD_INFO_EXPORT`, in bytes.
    pub size: u64,
    /// The flags that came with the size.
    pub transmission_flags: u16,
    /// `NBD_INFO_BLOCK_SIZE`: the smallest and the preferred block, the longest payload; zeros if it was not sent.
    pub block_sizes: [u64; 3],
    /// The names of the contexts by their ids.
    pub contexts: BTreeMap<u32, String>,
    cookie: u64,
    /// Unanswered requests: command, offset and length.
    pending: HashMap<u64, (u16, u64, u64)>,
}

impl<S: Read + Write> WireClient<S> {
    /// A client on a stream that is ready for an option.
    pub fn greeted(stream: S, mode: Mode) -> Self {
        Self {
            stream,
            mode,
            size: 0,
            transmission_flags: 0,
            block_sizes: [0; 3],
            contexts: BTreeMap::new(),
            cookie: 0x1122_3344_0000_0000,
            pending: HashMap::new(),
        }
    }

    /// Goes on to the transmission phase of the export `name` with the contexts `queries`, and sends `bytes` directly after
    /// the choice.
    ///
    /// # Errors
    /// Errors of the stream, or `Unsupported` with the option error.
    pub fn choose(mut self, name: &str, queries: &[&str], bytes: &[u8]) -> io::Result<Self> {
        let option = match self.mode {
            Mode::Simple => None,
            Mode::Structured => Some(OPT_STRUCTURED_REPLY),
            Mode::Extended => Some(OPT_EXTENDED_HEADERS),
        };
        if let Some(option) = option {
            assert_eq!(self.option(option, &[]).expect("its format of replies"), []);
        }
        if !queries.is_empty() {
            let selected = self.option(OPT_SET_META_CONTEXT, &context_request(name, queries))?;
            for (kind, context) in selected {
                assert_eq!(kind, REP_META_CONTEXT);
                let name = String::from_utf8(context[4..].to_vec()).expect("a name");
                self.contexts.insert(number(&context[..4]) as u32, name);
            }
        }
        let go = option_bytes(OPT_GO, &export_request(name));
        self.stream.write_all(&[&go[..], bytes].concat())?;
        let infos = read_replies(&mut self.stream, Some(OPT_GO))?;
        for (kind, data) in &infos {
            assert_eq!(*kind, REP_INFO);
            match (number(&data[..2]), &data[2..]) {
                (0, export) => {
                    assert_eq!(export.len(), 10);
                    self.size = number(&export[..8]);
                    self.transmission_flags = number(&export[8..]) as u16;
                }
                (3, sizes) => {
                    assert_eq!(sizes.len(), 12);
                    self.block_sizes = [0, 4, 8].map(|at| number(&sizes[at..at + 4]));
                }
                _ => {}
            }
        }
        let is_export = |(_, data): &(u32, Vec<u8>)| data[..2] == INFO_EXPORT.to_be_bytes();
        assert!(infos.iter().any(is_export), "NBD_INFO_EXPORT before the acknowledgement");
        Ok(self)
    }

    /// Sends an option; returns the replies before the acknowledgement.
    ///
    /// # Errors
    /// Like [`Self::choose`].
    pub fn option(&mut self, option: u32, data: &[u8]) -> io::Result<Vec<(u32, Vec<u8>)>> {
        self.stream.write_all(&option_bytes(option, data))?;
        read_replies(&mut self.stream, Some(option))
    }

    /// The id of the only context, 0 without one.
    pub fn context(&self) -> u32 {
        assert!(self.contexts.len() <= 1);
        self.contexts.keys().next().copied().unwrap_or_default()
    }

    /// Sends `request`; returns its cookie.
    pub fn send(&mut self, request: Request<'_>) -> u64 {
        self.try_send(request).expect("a server that takes requests")
    }

    /// Like `send`.
    ///
    /// # Errors
    /// Errors of the stream.
    pub fn try_send(&mut self, request: Request<'_>) -> io::Result<u64> {
        let bytes = self.header(request);
        self.stream.write_all(&[&bytes, request.payload].concat())?;
        Ok(self.cookie)
    }

    /// Like `call`, with the given cookie.
    pub fn call_as(&mut self, cookie: u64, request: Request<'_>) -> Outcome {
        self.cookie = cookie.wrapping_sub(1);
        self.call(request)
    }

    /// The header of a request with a new cookie.
    pub fn header(&mut self, request: Request<'_>) -> Vec<u8> {
        let Request { command, flags, offset, length, .. } = request;
        self.cookie = self.cookie.wrapping_add(1);
        self.expect(self.cookie, request);
        let extended = self.mode == Mode::Extended;
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        let mut bytes = magic.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(command.to_be_bytes());
        bytes.extend(self.cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        match extended {
            true => bytes.extend(length.to_be_bytes()),
            false => bytes.extend(u32::try_from(length).expect("a short length").to_be_bytes()),
        }
        bytes
    }

    /// Expects the reply to `request`, which the caller sends with this cookie.
    pub fn expect(&mut self, cookie: u64, request: Request<'_>) {
        self.pending.insert(cookie, (request.command, request.offset, request.length));
    }

    /// Expects the replies to the requests whose headers `other` has made.
    pub fn take_over(&mut self, other: &Self) {
        self.pending = other.pending.clone();
    }

    /// Sends bytes unchanged.
    ///
    /// # Errors
    /// Errors of the stream.
    pub fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Sends `request` and waits for all of its reply.
    pub fn call(&mut self, request: Request<'_>) -> Outcome {
        let cookie = self.send(request);
        let (answered, outcome) = self.outcome();
        assert_eq!(answered, cookie, "nothing else was asked");
        outcome
    }

    /// Waits for one complete reply; chunks of others must not come between.
    pub fn outcome(&mut self) -> (u64, Outcome) {
        self.try_outcome().expect("a reply")
    }

    /// Like `outcome`.
    ///
    /// # Errors
    /// Errors of the stream; `UnexpectedEof` when the server closed it.
    pub fn try_outcome(&mut self) -> io::Result<(u64, Outcome)> {
        let (mut outcome, mut of) = (Outcome::default(), None);
        loop {
            let message = self.try_message()?;
            let (Message::Simple { cookie, .. } | Message::Chunk { cookie, .. }) = message;
            assert_eq!(*of.get_or_insert(cookie), cookie);
            if self.collect(message, &mut outcome)? {
                let (command, _, length) = self.pending.remove(&cookie).expect("its request");
                let is_whole = outcome.data.len() as u64 == length;
                assert!(command != READ || outcome.error != 0 || is_whole, "MUST cover all of it");
                return Ok((cookie, outcome));
            }
        }
    }

    /// Adds a message to an outcome; returns whether it was the last.
    fn collect(&mut self, message: Message, outcome: &mut Outcome) -> io::Result<bool> {
        let (done, kind, payload, (_, offset, length)) = match message {
            Message::Simple { cookie, error } => {
                outcome.error = error;
                let (command, _, length) = self.pending[&cookie];
                if command == READ && error == 0 {
                    assert_eq!(self.mode, Mode::Simple, "a read MUST be answered in chunks");
                    outcome.data = self.take(length)?;
                }
                return Ok(true);
            }
            Message::Chunk { cookie, done, kind, payload } => {
                (done, kind, payload, self.pending[&cookie])
            }
        };
        match kind {
            NONE => assert!(done && payload.is_empty()),
            OFFSET_DATA | OFFSET_HOLE => {
                let at = number(&payload[..8]);
                let before = outcome.data.len() as u64;
                match kind {
                    OFFSET_DATA => outcome.data.extend(&payload[8..]),
                    _ => outcome.data.resize((before + number(&payload[8..12])) as usize, 0),
                }
                let bytes = outcome.data.len() as u64 - before;
                assert!(bytes > 0, "each content chunk MUST describe at least one byte");
                // This server sends them in order, so that none overlaps or is missing.
                assert_eq!(at, offset + before);
                outcome.chunks.push((kind, at, bytes));
                assert!(before + bytes <= length);
            }
            BLOCK_STATUS_CHUNK => {
                assert_eq!(self.mode, Mode::Structured);
                outcome.status.push((number(&payload[..4]) as u32, extents(&payload[4..], 4)));
            }
            BLOCK_STATUS_EXT => {
                assert_eq!(self.mode, Mode::Extended);
                let extents = extents(&payload[8..], 8);
                assert_eq!(number(&payload[4..8]), extents.len() as u64);
                outcome.status.push((number(&payload[..4]) as u32, extents));
            }
            ERROR => {
                outcome.error = number(&payload[..4]) as u32;
                assert_ne!(outcome.error, 0);
                assert_eq!(payload.len() as u64, 6 + number(&payload[4..6]));
            }
            other => panic!("a chunk of type {other}"),
        }
        Ok(done)
    }

    /// Receives one message, without the data that follow a simple reply to a read.
    pub fn message(&mut self) -> Message {
        self.try_message().expect("a message")
    }

    fn try_message(&mut self) -> io::Result<Message> {
        let stream = &mut self.stream;
        let magic = read_number(stream, 4)? as u32;
        if magic == SIMPLE_REPLY_MAGIC {
            assert_ne!(self.mode, Mode::Extended, "MUST NOT use simple replies");
            let error = read_number(stream, 4)? as u32;
            let cookie = read_number(stream, 8)?;
            assert!(self.pending.contains_key(&cookie), "an answer to a pending request");
            return Ok(Message::Simple { error, cookie });
        }
        let wanted = match self.mode {
            Mode::Simple => panic!("{magic:#x} without structured replies"),
            Mode::Structured => CHUNK_MAGIC,
            Mode::Extended => EXTENDED_CHUNK_MAGIC,
        };
        assert_eq!(magic, wanted, "{magic:#x}");
        let flags = read_number(stream, 2)?;
        assert_eq!(flags & !1, 0, "MUST NOT set any other flags");
        let kind = read_number(stream, 2)? as u16;
        let cookie = read_number(stream, 8)?;
        let (_, offset, _) = self.pending.get(&cookie).expect("an answer to a pending request");
        let length = match self.mode {
            Mode::Extended => {
                assert_eq!(read_number(stream, 8)?, *offset, "the request's offset");
                read_number(stream, 8)?
            }
            _ => read_number(stream, 4)?,
        };
        Ok(Message::Chunk { cookie, done: flags == 1, kind, payload: self.take(length)? })
    }

    /// Whether the server has closed the connection without another message.
    pub fn is_closed(&mut self) -> bool {
        match self.stream.read(&mut [0]) {
            Ok(count) => count == 0,
            Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
        }
    }

    fn take(&mut self, length: u64) -> io::Result<Vec<u8>> {
        assert!(length <= MAX_PAYLOAD_BYTES, "{length} bytes of payload");
        let mut bytes = vec![0; length as usize];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

/// The extents in a chunk, whose fields have `width` bytes.
fn extents(bytes: &[u8], width: usize) -> Extents {
    assert!(bytes.len().is_multiple_of(2 * width));
    bytes.chunks(2 * width).map(|it| (number(&it[..width]), number(&it[width..]))).collect()
}
