//! A small NBD client for tests, which can also send invalid requests.
//!
//! Invariant: every sent request is answered exactly once, or the test fails.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use crate::nbd::constants::*;
use crate::wait::BOUND;

/// The message format that a connection negotiates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// One message for each reply.
    Simple,
    /// Structured replies: reads in chunks.
    Structured,
    /// Extended headers: every reply in chunks.
    Extended,
}

impl Mode {
    /// Every format.
    pub const ALL: [Self; 3] = [Self::Simple, Self::Structured, Self::Extended];
    /// The formats in which reads are answered in chunks.
    pub const CHUNKED: [Self; 2] = [Self::Structured, Self::Extended];
}

/// One command, offsets and lengths in bytes.
#[derive(Debug, Clone)]
#[allow(missing_docs, reason = "offsets and lengths, as above")]
pub enum Command {
    /// Read a range.
    Read { offset: u64, len: u32 },
    /// Write these bytes; with `fua`, durable before the answer.
    Write { offset: u64, data: Vec<u8>, fua: bool },
    /// Make a range read as zeros; with `keep`, without freeing its storage.
    Zero { offset: u64, len: u32, keep: bool },
    /// Free a range's storage.
    Trim { offset: u64, len: u32 },
    /// Make all answered writes durable.
    Flush,
}

/// A request as it is sent, unchecked.
pub struct RawRequest {
    /// `REQUEST_MAGIC`, or an invalid value.
    pub magic: u32,
    /// Command flags.
    pub flags: u16,
    /// Request type.
    pub kind: u16,
    /// The cookie, which the reply repeats.
    pub cookie: u64,
    /// In bytes.
    pub offset: u64,
    /// In bytes.
    pub len: u32,
}

impl RawRequest {
    /// A well-formed write header.
    pub fn write(offset: u64, len: u32) -> Self {
        Self { magic: REQUEST_MAGIC, flags: 0, kind: WRITE, cookie: 0, offset, len }
    }

    /// A well-formed read.
    pub fn read(offset: u64, len: u32) -> Self {
        Self { kind: READ, ..Self::write(offset, len) }
    }

    /// NBD_CMD_DISC.
    pub fn disconnect() -> Self {
        Self { kind: DISC, ..Self::write(0, 0) }
    }

    /// The 28 bytes of "Request message".
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(28);
        bytes.extend(self.magic.to_be_bytes());
        bytes.extend(self.flags.to_be_bytes());
        bytes.extend(self.kind.to_be_bytes());
        bytes.extend(self.cookie.to_be_bytes());
        bytes.extend(self.offset.to_be_bytes());
        bytes.extend(self.len.to_be_bytes());
        bytes
    }

    /// The 32 bytes of an extended header, valid where `bytes` is.
    fn extended_bytes(&self) -> Vec<u8> {
        let payload = if self.kind == WRITE { PAYLOAD_LEN } else { 0 };
        let compact = Self { magic: EXTENDED_REQUEST_MAGIC, flags: self.flags | payload, ..*self };
        let mut bytes = compact.bytes();
        bytes.splice(24.., u64::from(self.len).to_be_bytes());
        bytes
    }
}

/// The result of a request: the bytes read (empty for other commands), or the NBD error.
pub type Answer = Result<Vec<u8>, u32>;

/// A request that was sent and not yet answered.
struct Pending {
    offset: u64,
    /// Filled by chunks as they arrive; its length is that of the read.
    data: Vec<u8>,
    covered: usize,
    error: Option<u32>,
}

/// One connection in transmission phase.
pub struct Client<S = UnixStream> {
    stream: S,
    mode: Mode,
    /// Size of the export in bytes.
    pub size: u64,
    /// Bytes of reads that were answered as holes.
    pub hole_bytes: u64,
    next_cookie: u64,
    pending: HashMap<u64, Pending>,
}

impl Client {
    /// Negotiates the default export at `socket`.
    ///
    /// # Errors
    /// Errors of the socket, or `Unsupported` with the option error.
    pub fn connect(socket: &Path, mode: Mode) -> io::Result<Self> {
        Self::connect_to(socket, "", mode)
    }

    /// Negotiates the export called `name` at `socket`.
    ///
    /// # Errors
    /// As `connect`.
    pub fn connect_to(socket: &Path, name: &str, mode: Mode) -> io::Result<Self> {
        Self::over(greet(socket)?, name, mode)
    }
}

impl<S: Read + Write> Client<S> {
    /// Negotiates the export called `name` over `stream`, which must be ready for an option.
    ///
    /// # Errors
    /// As `connect`.
    pub fn over(mut stream: S, name: &str, mode: Mode) -> io::Result<Self> {
        let option = match mode {
            Mode::Simple => None,
            Mode::Structured => Some(OPT_STRUCTURED_REPLY),
            Mode::Extended => Some(OPT_EXTENDED_HEADERS),
        };
        if let Some(option) = option {
            send_option(&mut stream, option, &[])?;
            let (kind, _) = read_option_reply(&mut stream)?;
            assert_eq!(kind, REP_ACK, "{mode:?} refused");
        }
        send_option(&mut stream, OPT_GO, &export_request(name))?;
        let size = read_size(&mut stream)?;
        Ok(Self { stream, mode, size, hole_bytes: 0, next_cookie: 1, pending: HashMap::new() })
    }

    /// The stream itself, to send raw bytes.
    pub fn stream(&mut self) -> &mut S {
        &mut self.stream
    }

    /// Sends `command`; returns its cookie.
    ///
    /// # Errors
    /// Errors of the socket.
    pub fn send(&mut self, command: &Command) -> io::Result<u64> {
        let (kind, flags, offset, len, payload) = wire_form(command);
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let request = RawRequest { magic: REQUEST_MAGIC, flags, kind, cookie, offset, len };
        let mut bytes = self.bytes_of(&request);
        bytes.extend(payload);
        let expected = if kind == READ { len as usize } else { 0 };
        self.pending.insert(cookie, Pending::of(offset, expected));
        self.stream.write_all(&bytes)?;
        Ok(cookie)
    }

    /// Waits for one complete answer to any pending request.
    ///
    /// # Errors
    /// Errors of the socket; `UnexpectedEof` when the server closed it.
    pub fn receive(&mut self) -> io::Result<(u64, Answer)> {
        loop {
            let magic = read_u32(&mut self.stream)?;
            let done = match (magic, self.mode) {
                (SIMPLE_REPLY_MAGIC, Mode::Simple | Mode::Structured) => self.simple_reply()?,
                (CHUNK_MAGIC, Mode::Structured) => self.chunk()?,
                (EXTENDED_CHUNK_MAGIC, Mode::Extended) => self.chunk()?,
                (other, mode) => panic!("{other:#x} is not a reply in {mode:?}"),
            };
            if let Some(cookie) = done {
                let pending = self.pending.remove(&cookie).expect("a pending request");
                if let Some(error) = pending.error {
                    return Ok((cookie, Err(error)));
                }
                assert_eq!(
                    pending.covered,
                    pending.data.len(),
                    "a read answered in part and called done"
                );
                return Ok((cookie, Ok(pending.data)));
            }
        }
    }

    /// Sends `command` with nothing else pending and waits for its answer.
    ///
    /// # Errors
    /// The NBD error of the answer. A broken connection fails the test.
    pub fn call(&mut self, command: &Command) -> Answer {
        let cookie = self.send(command).expect("a server that takes requests");
        let (answered, answer) = self.receive().expect("an answer");
        assert_eq!(answered, cookie, "an answer to something else");
        answer
    }

    /// Registers `request`, which the caller sends over the stream itself, as pending.
    pub fn expect_answer_to(&mut self, request: &RawRequest) {
        self.pending.insert(request.cookie, Pending::of(request.offset, 0));
    }

    /// Sends `request` unchecked, followed by `payload`, with nothing else pending; waits for its
    /// answer.
    ///
    /// # Errors
    /// As `call`.
    pub fn call_raw(&mut self, request: &RawRequest, payload: &[u8]) -> Answer {
        self.expect_answer_to(request);
        let bytes = self.bytes_of(request);
        self.stream.write_all(&bytes).expect("a server that takes requests");
        self.stream.write_all(payload).expect("a server that takes requests");
        let (answered, answer) = self.receive().expect("an answer");
        assert_eq!(answered, request.cookie, "an answer to something else");
        answer
    }

    /// Reads a range, as `call`.
    ///
    /// # Errors
    /// As `call`.
    pub fn read(&mut self, offset: u64, len: u32) -> Answer {
        self.call(&Command::Read { offset, len })
    }

    /// Writes bytes, as `call`.
    ///
    /// # Errors
    /// As `call`.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Answer {
        self.call(&Command::Write { offset, data: data.to_vec(), fua: false })
    }

    fn bytes_of(&self, request: &RawRequest) -> Vec<u8> {
        match self.mode {
            Mode::Simple | Mode::Structured => request.bytes(),
            Mode::Extended => request.extended_bytes(),
        }
    }

    fn simple_reply(&mut self) -> io::Result<Option<u64>> {
        let error = read_u32(&mut self.stream)?;
        let cookie = read_u64(&mut self.stream)?;
        let pending = self.pending.get_mut(&cookie).expect("an answer to a pending request");
        if error == 0 {
            self.stream.read_exact(&mut pending.data)?;
            pending.covered = pending.data.len();
        } else {
            pending.error = Some(error);
        }
        Ok(Some(cookie))
    }

    fn chunk(&mut self) -> io::Result<Option<u64>> {
        let flags = read_u16(&mut self.stream)?;
        let kind = read_u16(&mut self.stream)?;
        let cookie = read_u64(&mut self.stream)?;
        let pending = self.pending.get_mut(&cookie).expect("an answer to a pending request");
        let len = match self.mode {
            Mode::Simple | Mode::Structured => u64::from(read_u32(&mut self.stream)?),
            Mode::Extended => {
                assert_eq!(read_u64(&mut self.stream)?, pending.offset, "the request's offset");
                read_u64(&mut self.stream)?
            }
        };
        let mut payload = vec![0; usize::try_from(len).expect("a chunk that fits memory")];
        self.stream.read_exact(&mut payload)?;
        match kind {
            NONE => assert_eq!((len, flags & CHUNK_DONE), (0, CHUNK_DONE)),
            OFFSET_DATA => pending.fill(&payload[..8], &payload[8..]),
            OFFSET_HOLE => {
                let zeros = u32::from_be_bytes(payload[8..12].try_into().expect("4 bytes"));
                pending.fill(&payload[..8], &vec![0; zeros as usize]);
                self.hole_bytes += u64::from(zeros);
            }
            error if error & CHUNK_ERROR_BIT != 0 => {
                pending.error = Some(u32::from_be_bytes(payload[..4].try_into().expect("4 bytes")));
            }
            other => panic!("a chunk of type {other} was not asked for"),
        }
        Ok((flags & CHUNK_DONE != 0).then_some(cookie))
    }
}

impl Pending {
    /// A new request, to be answered with `expected` bytes.
    fn of(offset: u64, expected: usize) -> Self {
        Self { offset, data: vec![0; expected], covered: 0, error: None }
    }

    /// Copies one chunk's bytes to its offset.
    fn fill(&mut self, offset: &[u8], bytes: &[u8]) {
        let offset = u64::from_be_bytes(offset.try_into().expect("8 bytes"));
        let start = usize::try_from(offset - self.offset).expect("a chunk inside the read");
        self.data[start..start + bytes.len()].copy_from_slice(bytes);
        self.covered += bytes.len();
    }
}

/// Connects and exchanges the greeting: the next message is an option.
///
/// # Errors
/// Errors of the socket.
pub fn greet(socket: &Path) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(BOUND))?;
    stream.set_write_timeout(Some(BOUND))?;
    assert_eq!(read_u64(&mut stream)?, SERVER_MAGIC);
    assert_eq!(read_u64(&mut stream)?, OPTION_MAGIC);
    assert_eq!(read_u16(&mut stream)? & 1, 1, "fixed newstyle");
    stream.write_all(&CLIENT_FLAGS.to_be_bytes())?;
    Ok(stream)
}

/// An option with its data, encoded for the wire.
pub fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::from(OPTION_MAGIC.to_be_bytes());
    bytes.extend(option.to_be_bytes());
    bytes.extend(u32::try_from(data.len()).expect("a short option").to_be_bytes());
    bytes.extend(data);
    bytes
}

/// Sends one option with its data.
///
/// # Errors
/// Errors of the socket.
pub fn send_option(stream: &mut impl Write, option: u32, data: &[u8]) -> io::Result<()> {
    stream.write_all(&option_bytes(option, data))
}

/// The type and the data of one option reply.
///
/// # Errors
/// Errors of the socket.
pub fn read_option_reply(stream: &mut impl Read) -> io::Result<(u32, Vec<u8>)> {
    assert_eq!(read_u64(stream)?, OPTION_REPLY_MAGIC);
    let _option = read_u32(stream)?;
    let kind = read_u32(stream)?;
    let mut data = vec![0; read_u32(stream)? as usize];
    stream.read_exact(&mut data)?;
    Ok((kind, data))
}

/// True for the reply types that refuse an option.
pub fn is_refusal(kind: u32) -> bool {
    kind & REP_ERROR_BIT != 0
}

/// The data of an option that names an export and requests no further information.
pub fn export_request(name: &str) -> Vec<u8> {
    let mut data = Vec::from((name.len() as u32).to_be_bytes());
    data.extend(name.as_bytes());
    data.extend([0; 2]);
    data
}

/// Enters the transmission phase with the default export; returns its size.
///
/// # Errors
/// As `read_size`.
pub fn go(stream: &mut (impl Read + Write)) -> io::Result<u64> {
    send_option(stream, OPT_GO, &export_request(""))?;
    read_size(stream)
}

/// The size of an export, from the replies to an option that names it.
///
/// # Errors
/// Errors of the socket, or `Unsupported` with the option error.
pub fn read_size(stream: &mut impl Read) -> io::Result<u64> {
    let mut size = None;
    loop {
        let (kind, data) = read_option_reply(stream)?;
        match kind {
            REP_ACK => return Ok(size.expect("NBD_INFO_EXPORT before the acknowledgement")),
            REP_INFO => {
                let (head, rest) = data.split_at(2);
                if head == INFO_EXPORT.to_be_bytes() {
                    size = Some(u64::from_be_bytes(rest[..8].try_into().expect("8 bytes")));
                }
            }
            error => {
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    format!("option error {error:#x}"),
                ));
            }
        }
    }
}

/// Type, flags, offset, length and payload.
fn wire_form(command: &Command) -> (u16, u16, u64, u32, &[u8]) {
    match command {
        Command::Read { offset, len } => (READ, 0, *offset, *len, &[]),
        Command::Write { offset, data, fua } => {
            let len = u32::try_from(data.len()).expect("a payload the protocol can express");
            (WRITE, if *fua { FUA } else { 0 }, *offset, len, data)
        }
        Command::Zero { offset, len, keep } => {
            (WRITE_ZEROES, if *keep { NO_HOLE } else { 0 }, *offset, *len, &[])
        }
        Command::Trim { offset, len } => (TRIM, 0, *offset, *len, &[]),
        Command::Flush => (FLUSH, 0, 0, 0, &[]),
    }
}

fn read_u16(stream: &mut impl Read) -> io::Result<u16> {
    let mut bytes = [0; 2];
    stream.read_exact(&mut bytes)?;
    Ok(u16::from_be_bytes(bytes))
}

fn read_u32(stream: &mut impl Read) -> io::Result<u32> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    Ok(u32::from_be_bytes(bytes))
}

fn read_u64(stream: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes)?;
    Ok(u64::from_be_bytes(bytes))
}
