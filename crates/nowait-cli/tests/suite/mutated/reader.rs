//! Reads replies from a stream and compares each with its request.
//!
//! Invariant: every message answers a request that is not yet answered; no reply has missing or
//! surplus bytes.

use std::collections::HashMap;
use std::io::{self, Read};

use super::Terms;
use super::spec::{Asked, End, Expected, Verdict};
use nowait_testkit::nbd::*;

/// A request, and how much of its answer has arrived.
struct Open {
    asked: Asked,
    /// Received bytes of a read, or contexts of a block status request.
    received: u64,
}

/// The server's side of a connection.
pub(super) struct Reader<R> {
    terms: Terms,
    end: End,
    open: HashMap<u64, Open>,
    stream: R,
}

impl<R: Read> Reader<R> {
    /// A reader of the answers in `stream` to the `expected` requests.
    pub(super) fn new(terms: Terms, expected: Expected, stream: R) -> Self {
        let Expected { asked, end } = expected;
        let open =
            asked.into_iter().map(|asked| (asked.cookie, Open { asked, received: 0 })).collect();
        Self { terms, end, open, stream }
    }

    /// Reads until the server closes the connection, and checks all answers.
    pub(super) fn read_to_end(&mut self) {
        let error = loop {
            if let Err(error) = self.message() {
                break error;
            }
        };
        assert_ne!(error.kind(), io::ErrorKind::WouldBlock, "silence; open: {}", self.open.len());
        if self.end == End::Orderly {
            let left: Vec<_> = self.open.values().filter(|open| !open.asked.is_cut).collect();
            assert!(left.is_empty(), "{error}; not answered: {:?}", left[0].asked);
        }
    }

    fn number(&mut self, bytes: usize) -> io::Result<u64> {
        let mut field = [0; 8];
        self.stream.read_exact(&mut field[8 - bytes..])?;
        Ok(u64::from_be_bytes(field))
    }

    fn open(&mut self, cookie: u64) -> &mut Open {
        let terms = self.terms;
        self.open
            .get_mut(&cookie)
            .unwrap_or_else(|| panic!("{terms:?}: an answer to what was not asked: {cookie:#x}"))
    }

    /// Reads one message. An error of the stream is its end.
    fn message(&mut self) -> io::Result<()> {
        let magic = self.number(4)? as u32;
        match (magic, self.terms.mode) {
            (SIMPLE_REPLY_MAGIC, Mode::Simple | Mode::Structured) => self.simple(),
            (CHUNK_MAGIC, Mode::Structured) | (EXTENDED_CHUNK_MAGIC, Mode::Extended) => {
                self.chunk()
            }
            (magic, mode) => panic!("{magic:#x} in {mode:?}"),
        }
    }

    fn simple(&mut self) -> io::Result<()> {
        let (error, cookie) = (self.number(4)? as u32, self.number(8)?);
        let asked = self.open(cookie).asked;
        let has_chunks = matches!(asked.command, READ | BLOCK_STATUS);
        assert!(self.terms.mode == Mode::Simple || !has_chunks, "a simple reply to {asked:?}");
        check(asked, error);
        if asked.command == READ && error == 0 {
            self.skip(asked.length)?;
        }
        self.open.remove(&cookie);
        Ok(())
    }

    fn chunk(&mut self) -> io::Result<()> {
        let (flags, kind) = (self.number(2)?, self.number(2)? as u16);
        let cookie = self.number(8)?;
        let Asked { command, flags: asked_flags, offset, length, .. } = self.open(cookie).asked;
        let bytes = if self.terms.mode == Mode::Extended {
            assert_eq!(self.number(8)?, offset, "the offset of the request");
            self.number(8)?
        } else {
            self.number(4)?
        };
        assert!(flags <= 1, "flags {flags:#x}");
        let done = flags == 1;
        let mut error = 0;
        match (kind, command) {
            (NONE, _) => assert!(done && bytes == 0),
            (OFFSET_DATA | OFFSET_HOLE, READ) => {
                let at = self.number(8)?;
                let len = if kind == OFFSET_HOLE { self.number(4)? } else { bytes - 8 };
                assert!(kind == OFFSET_DATA || bytes == 12);
                let open = self.open(cookie);
                assert_eq!(at, offset + open.received, "this server sends content in order");
                open.received += len;
                assert!(len > 0 && open.received <= length);
                if kind == OFFSET_DATA {
                    self.skip(len)?;
                }
            }
            (BLOCK_STATUS_CHUNK, BLOCK_STATUS) if self.terms.mode == Mode::Structured => {
                self.extents(cookie, (bytes - 4) / 8, asked_flags & REQ_ONE != 0)?;
            }
            (BLOCK_STATUS_EXT, BLOCK_STATUS) if self.terms.mode == Mode::Extended => {
                self.extents(cookie, (bytes - 8) / 16, asked_flags & REQ_ONE != 0)?;
            }
            (ERROR, _) => {
                error = self.number(4)? as u32;
                let message = self.number(2)?;
                assert!(error != 0 && bytes == 6 + message);
                self.skip(message)?;
            }
            (kind, command) => panic!("a chunk of type {kind} in answer to command {command}"),
        }
        if done && let Some(Open { asked, received }) = self.open.remove(&cookie) {
            check(asked, error);
            let wanted = match asked.command {
                READ => asked.length,
                BLOCK_STATUS => 1,
                _ => 0,
            };
            assert!(
                error != 0 || received == wanted,
                "{received} of {wanted} in answer to {asked:?}"
            );
        }
        Ok(())
    }

    /// The extents of the one context.
    fn extents(&mut self, cookie: u64, count: u64, only_one: bool) -> io::Result<()> {
        assert_eq!(Some(self.number(4)? as u32), self.terms.context);
        let width = match self.terms.mode {
            Mode::Extended => {
                assert_eq!(self.number(4)?, count);
                8
            }
            _ => 4,
        };
        assert!(count > 0 && (!only_one || count == 1));
        let open = self.open(cookie);
        open.received += 1;
        let length = open.asked.length;
        let mut sum = 0;
        for _ in 0..count {
            let (len, flags) = (self.number(width)?, self.number(width)?);
            assert!(len > 0 && flags <= 3 && sum < length);
            sum += len;
        }
        assert!(!only_one || sum <= length);
        Ok(())
    }

    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        let skipped = io::copy(&mut self.stream.by_ref().take(bytes), &mut io::sink())?;
        if skipped < bytes { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }
}

fn check(asked: Asked, error: u32) {
    let is_right = match (asked.verdict, error) {
        // A request with an incomplete payload cannot succeed.
        (_, 0) if asked.is_cut => false,
        (Verdict::Success | Verdict::FastOrNot, 0) | (Verdict::FastOrNot, ENOTSUP) => true,
        (Verdict::Refusal, error) => [EPERM, EINVAL, ENOSPC, EOVERFLOW].contains(&error),
        _ => false,
    };
    assert!(is_right, "error {error} in answer to {asked:?}");
}
