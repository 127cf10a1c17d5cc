//! A small NBD client for tests, which can also send invalid requests.
//!
//! Invariant: every sent request is answered exactly once, or the test fails.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use crate::nbd::constants::*;
use crate::nbd::handshake::{Mode, greet};
use crate::nbd::wire_client::{Outcome, Request, WireClient};

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

    fn request<'a>(&self, mode: Mode, payload: &'a [u8]) -> Request<'a> {
        let Self { flags, kind, offset, len, .. } = *self;
        let written = if kind == WRITE && mode == Mode::Extended { PAYLOAD_LEN } else { 0 };
        Request { payload, ..Request::of(kind, offset, len.into()).with(flags | written) }
    }
}

/// The result of a request: the bytes read (empty for other commands), or the NBD error.
pub type Answer = Result<Vec<u8>, u32>;

/// One connection in transmission phase.
pub struct Client<S = UnixStream> {
    wire: WireClient<S>,
    /// Size of the export in bytes.
    pub size: u64,
    /// Bytes of reads that were answered as holes.
    pub hole_bytes: u64,
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
    pub fn over(stream: S, name: &str, mode: Mode) -> io::Result<Self> {
        let wire = WireClient::greeted(stream, mode).choose(name, &[], &[])?;
        Ok(Self { size: wire.size, wire, hole_bytes: 0 })
    }

    /// The stream itself, to send raw bytes.
    pub fn stream(&mut self) -> &mut S {
        &mut self.wire.stream
    }

    /// Sends `command`; returns its cookie.
    ///
    /// # Errors
    /// Errors of the socket.
    pub fn send(&mut self, command: &Command) -> io::Result<u64> {
        self.wire.try_send(request_of(command, self.wire.mode))
    }

    /// Waits for one complete answer to any pending request.
    ///
    /// # Errors
    /// Errors of the socket; `UnexpectedEof` when the server closed it.
    pub fn receive(&mut self) -> io::Result<(u64, Answer)> {
        let (cookie, Outcome { error, data, chunks, .. }) = self.wire.try_outcome()?;
        let holes = chunks.iter().filter(|(kind, ..)| *kind == OFFSET_HOLE);
        self.hole_bytes += holes.map(|(_, _, bytes)| bytes).sum::<u64>();
        Ok((cookie, if error == 0 { Ok(data) } else { Err(error) }))
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
        self.wire.expect(request.cookie, request.request(self.wire.mode, &[]));
    }

    /// Sends `request` unchecked, followed by `payload`, with nothing else pending; waits for its
    /// answer.
    ///
    /// # Errors
    /// As `call`.
    pub fn call_raw(&mut self, request: &RawRequest, payload: &[u8]) -> Answer {
        let request = request.request(self.wire.mode, payload);
        let cookie = self.wire.send(request);
        let (answered, answer) = self.receive().expect("an answer");
        assert_eq!(answered, cookie, "an answer to something else");
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
}

fn request_of(command: &Command, mode: Mode) -> Request<'_> {
    let flag = |is_set, flag| if is_set { flag } else { 0 };
    match command {
        Command::Read { offset, len } => Request::of(READ, *offset, (*len).into()),
        Command::Write { offset, data, fua } => {
            Request::write(mode, *offset, data).with(flag(*fua, FUA))
        }
        Command::Zero { offset, len, keep } => {
            Request::of(WRITE_ZEROES, *offset, (*len).into()).with(flag(*keep, NO_HOLE))
        }
        Command::Trim { offset, len } => Request::of(TRIM, *offset, (*len).into()),
        Command::Flush => Request::of(FLUSH, 0, 0),
    }
}
