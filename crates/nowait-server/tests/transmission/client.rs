//! A client that sends any bytes and shows every message as it came.
//!
//! Invariant: messages are parsed only as far as their headers require; the offset of a chunk with
//! an extended header is compared with its request's.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::path::Path;
use std::time::Duration;

use nowait_testkit::BOUND;
use nowait_testkit::nbd::constants::*;
use nowait_testkit::nbd::{Mode, export_request, greet, option_bytes};
use rustls::pki_types::CertificateDer;

use crate::stream::Stream;

/// A server that takes nothing for this long is blocked.
const STILL: Duration = Duration::from_secs(1);

/// A request for the wire, without any checks.
#[derive(Clone, Copy)]
pub(crate) struct Request<'a> {
    pub(crate) command: u16,
    pub(crate) flags: u16,
    pub(crate) offset: u64,
    /// The header's length field.
    pub(crate) length: u64,
    /// The bytes after the header, independent of its length field.
    pub(crate) payload: &'a [u8],
}

impl<'a> Request<'a> {
    /// A request for a range, without payload.
    pub(crate) fn of(command: u16, offset: u64, length: u64) -> Self {
        Self { command, flags: 0, offset, length, payload: &[] }
    }

    /// A correct write in `mode`.
    pub(crate) fn write(mode: Mode, offset: u64, payload: &'a [u8]) -> Self {
        let flags = if mode == Mode::Extended { PAYLOAD_LEN } else { 0 };
        Self { command: WRITE, flags, offset, length: payload.len() as u64, payload }
    }

    pub(crate) fn with(self, flags: u16) -> Self {
        Self { flags: self.flags | flags, ..self }
    }
}

/// One message of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// Without the data that follow after a successful read.
    Simple {
        cookie: u64,
        error: u32,
    },
    Chunk {
        cookie: u64,
        done: bool,
        kind: u16,
        payload: Vec<u8>,
    },
}

/// The reply to a request, assembled from all of its messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// 0 for success.
    pub(crate) error: u32,
    /// Bytes that were read, holes included.
    pub(crate) data: Vec<u8>,
    /// Chunks: type, first byte and length of the range that each describes.
    pub(crate) chunks: Vec<(u16, u64, u64)>,
    /// Block status: context id, and extents with their flags.
    pub(crate) status: Vec<(u32, Vec<(u64, u64)>)>,
}

/// A connection in the transmission phase.
pub(crate) struct Client {
    pub(crate) stream: Stream,
    pub(crate) mode: Mode,
    /// `NBD_INFO_EXPORT`.
    pub(crate) size: u64,
    pub(crate) transmission_flags: u16,
    /// `NBD_INFO_BLOCK_SIZE`: the smallest and the preferred block, the longest payload.
    pub(crate) block_sizes: [u64; 3],
    /// The id of `base:allocation`, 0 if it was not selected.
    pub(crate) context: u32,
    cookie: u64,
    /// Unanswered requests: command, offset and length.
    pending: HashMap<u64, (u16, u64, u64)>,
}

impl Client {
    /// Opens the default export at `socket`, with `base:allocation` where `mode` has chunks.
    pub(crate) fn connect(socket: &Path, mode: Mode) -> Self {
        Self::connect_selecting(socket, mode, mode != Mode::Simple)
    }

    /// The same, with or without a context.
    pub(crate) fn connect_selecting(socket: &Path, mode: Mode, with_context: bool) -> Self {
        Self::greeted(socket, mode).negotiated(with_context)
    }

    /// Like `connect`, by TLS with the server whose certificate is `cert`.
    pub(crate) fn connect_encrypted(
        socket: &Path,
        mode: Mode,
        cert: &CertificateDer<'static>,
    ) -> Self {
        let mut client = Self::greeted(socket, mode);
        assert_eq!(client.option(OPT_STARTTLS, &[]), []);
        client.stream = client.stream.encrypted(cert);
        client.negotiated(mode != Mode::Simple)
    }

    /// Like `connect`, to the export called `name`, with `bytes` directly after the choice.
    pub(crate) fn connect_to(socket: &Path, mode: Mode, name: &str, bytes: &[u8]) -> Self {
        Self::greeted(socket, mode).chosen(name, mode != Mode::Simple, bytes)
    }

    /// A client that has received the greeting and sent its flags.
    pub(crate) fn greeted(socket: &Path, mode: Mode) -> Self {
        let stream = Stream::Plain(greet(socket).unwrap());
        Self {
            stream,
            mode,
            size: 0,
            transmission_flags: 0,
            block_sizes: [0; 3],
            context: 0,
            cookie: 0x1122_3344_0000_0000,
            pending: HashMap::new(),
        }
    }

    /// Goes on to the transmission phase of the default export.
    fn negotiated(self, with_context: bool) -> Self {
        self.chosen("", with_context, &[])
    }

    /// Goes on to the transmission phase of the export `name`, with `bytes` directly after the
    /// choice.
    fn chosen(mut self, name: &str, with_context: bool, bytes: &[u8]) -> Self {
        let client = &mut self;
        match client.mode {
            Mode::Simple => {}
            Mode::Structured => assert_eq!(client.option(OPT_STRUCTURED_REPLY, &[]), []),
            Mode::Extended => assert_eq!(client.option(OPT_EXTENDED_HEADERS, &[]), []),
        }
        if with_context {
            let query = b"base:allocation";
            let head = [0, 0, 0, 1, 0, 0, 0, query.len() as u8];
            let replies =
                client.option(OPT_SET_META_CONTEXT, &[&named(name)[..], &head, query].concat());
            let [(REP_META_CONTEXT, context)] = &replies[..] else { panic!("{replies:?}") };
            client.context = number(&context[..4]) as u32;
        }
        let go = option_bytes(OPT_GO, &export_request(name));
        client.stream.write_all(&[&go[..], bytes].concat()).unwrap();
        let infos = client.replies_to(OPT_GO);
        let (kind, export) = infos.iter().find(|(_, data)| data[..2] == [0, 0]).unwrap();
        assert_eq!((*kind, export.len()), (REP_INFO, 12));
        client.size = number(&export[2..10]);
        client.transmission_flags = number(&export[10..]) as u16;
        let (_, sizes) = infos.iter().find(|(_, data)| data[..2] == [0, 3]).unwrap();
        assert_eq!(sizes.len(), 14);
        client.block_sizes = [2, 6, 10].map(|at| number(&sizes[at..at + 4]));
        self
    }

    /// Sends an option; returns the replies before the acknowledgement.
    fn option(&mut self, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.stream.write_all(&option_bytes(option, data)).unwrap();
        self.replies_to(option)
    }

    /// The replies to an option before the acknowledgement.
    fn replies_to(&mut self, option: u32) -> Vec<(u32, Vec<u8>)> {
        let mut replies = Vec::new();
        loop {
            assert_eq!(number(&self.bytes::<8>()), OPTION_REPLY_MAGIC);
            assert_eq!(number(&self.bytes::<4>()), u64::from(option));
            let kind = number(&self.bytes::<4>()) as u32;
            let length = number(&self.bytes::<4>());
            let data = self.take(length);
            assert!(kind & REP_ERROR_BIT == 0, "option {option} refused: {kind:#x}");
            if kind == REP_ACK {
                return replies;
            }
            replies.push((kind, data));
        }
    }

    /// Sends `request`; returns its cookie.
    pub(crate) fn send(&mut self, request: Request<'_>) -> u64 {
        let bytes = self.header(request);
        self.stream.write_all(&bytes).unwrap();
        self.stream.write_all(request.payload).unwrap();
        self.cookie
    }

    /// Like `call`, with the given cookie.
    pub(crate) fn call_as(&mut self, cookie: u64, request: Request<'_>) -> Outcome {
        self.cookie = cookie.wrapping_sub(1);
        self.call(request)
    }

    /// The header of a request with a new cookie.
    pub(crate) fn header(&mut self, request: Request<'_>) -> Vec<u8> {
        let Request { command, flags, offset, length, .. } = request;
        self.cookie = self.cookie.wrapping_add(1);
        self.pending.insert(self.cookie, (command, offset, length));
        let extended = self.mode == Mode::Extended;
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        let mut bytes = magic.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(command.to_be_bytes());
        bytes.extend(self.cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        match extended {
            true => bytes.extend(length.to_be_bytes()),
            false => bytes.extend(u32::try_from(length).unwrap().to_be_bytes()),
        }
        bytes
    }

    /// Expects the replies to the requests whose headers `other` has made.
    pub(crate) fn take_over(&mut self, other: &Self) {
        self.pending = other.pending.clone();
    }

    /// Sends bytes unchanged.
    pub(crate) fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Sends bytes unchanged until the server stops taking them. Returns whether it took all.
    pub(crate) fn send_while_taken(&mut self, bytes: &[u8]) -> bool {
        self.stream.socket().set_write_timeout(Some(STILL)).unwrap();
        let sent = self.stream.write_all(bytes);
        self.stream.socket().set_write_timeout(Some(BOUND)).unwrap();
        match sent {
            Ok(()) => true,
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                false
            }
        }
    }

    /// Sends `request` and waits for all of its reply.
    pub(crate) fn call(&mut self, request: Request<'_>) -> Outcome {
        let cookie = self.send(request);
        let (answered, outcome) = self.outcome();
        assert_eq!(answered, cookie, "nothing else was asked");
        outcome
    }

    /// Waits for one complete reply; chunks of others must not come between.
    pub(crate) fn outcome(&mut self) -> (u64, Outcome) {
        let mut outcome =
            Outcome { error: 0, data: Vec::new(), chunks: Vec::new(), status: Vec::new() };
        let mut of = None;
        loop {
            let message = self.message();
            let (Message::Simple { cookie, .. } | Message::Chunk { cookie, .. }) = message;
            assert_eq!(*of.get_or_insert(cookie), cookie);
            if self.collect(message, &mut outcome) {
                self.pending.remove(&cookie);
                return (cookie, outcome);
            }
        }
    }

    /// Adds a message to an outcome; returns whether it was the last.
    fn collect(&mut self, message: Message, outcome: &mut Outcome) -> bool {
        let (done, kind, payload, (_, offset, length)) = match message {
            Message::Simple { cookie, error } => {
                outcome.error = error;
                let (command, _, length) = self.pending[&cookie];
                if command == READ && error == 0 {
                    assert_eq!(self.mode, Mode::Simple, "a read MUST be answered in chunks");
                    outcome.data = self.take(length);
                }
                return true;
            }
            Message::Chunk { cookie, done, kind, payload } => {
                (done, kind, payload, self.pending[&cookie])
            }
        };
        match kind {
            NONE => assert!(done && payload.is_empty()),
            OFFSET_DATA | OFFSET_HOLE => {
                let at = number(&payload[..8]);
                let bytes = match kind {
                    OFFSET_DATA => payload[8..].to_vec(),
                    _ => vec![0; number(&payload[8..12]) as usize],
                };
                assert!(!bytes.is_empty(), "each content chunk MUST describe at least one byte");
                // This server sends them in order, so that none overlaps or is missing.
                assert_eq!(at, offset + outcome.data.len() as u64);
                outcome.chunks.push((kind, at, bytes.len() as u64));
                outcome.data.extend(bytes);
                assert!(outcome.data.len() as u64 <= length);
                assert!(!done || outcome.data.len() as u64 == length, "MUST cover all of it");
            }
            BLOCK_STATUS_CHUNK => {
                let extents = payload[4..].chunks(8).map(|e| (number(&e[..4]), number(&e[4..])));
                outcome.status.push((number(&payload[..4]) as u32, extents.collect()));
            }
            BLOCK_STATUS_EXT => {
                let extents = payload[8..].chunks(16).map(|e| (number(&e[..8]), number(&e[8..])));
                let extents: Vec<_> = extents.collect();
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
        done
    }

    /// Receives one message, without the data that follow a simple reply to a read.
    pub(crate) fn message(&mut self) -> Message {
        let magic = number(&self.bytes::<4>()) as u32;
        if magic == SIMPLE_REPLY_MAGIC {
            assert_ne!(self.mode, Mode::Extended, "MUST NOT use simple replies");
            let error = number(&self.bytes::<4>()) as u32;
            return Message::Simple { error, cookie: number(&self.bytes::<8>()) };
        }
        let wanted = match self.mode {
            Mode::Simple => panic!("{magic:#x} without structured replies"),
            Mode::Structured => CHUNK_MAGIC,
            Mode::Extended => EXTENDED_CHUNK_MAGIC,
        };
        assert_eq!(magic, wanted, "{magic:#x}");
        let flags = number(&self.bytes::<2>());
        assert_eq!(flags & !1, 0, "MUST NOT set any other flags");
        let kind = number(&self.bytes::<2>()) as u16;
        let cookie = number(&self.bytes::<8>());
        if self.mode == Mode::Extended {
            assert_eq!(number(&self.bytes::<8>()), self.pending[&cookie].1, "the request's offset");
        }
        let length = match self.mode {
            Mode::Extended => number(&self.bytes::<8>()),
            _ => number(&self.bytes::<4>()),
        };
        Message::Chunk { cookie, done: flags == 1, kind, payload: self.take(length) }
    }

    /// True once the server has closed the connection without another message.
    pub(crate) fn is_closed(&mut self) -> bool {
        let mut byte = [0];
        match self.stream.read(&mut byte) {
            Ok(count) => count == 0,
            Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
        }
    }

    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn take(&mut self, length: u64) -> Vec<u8> {
        assert!(length <= 40 << 20, "{length} bytes of payload");
        let mut bytes = vec![0; length as usize];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }
}

/// An export's name, encoded for an option.
fn named(name: &str) -> Vec<u8> {
    [&(name.len() as u32).to_be_bytes(), name.as_bytes()].concat()
}

/// A number in network order.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
