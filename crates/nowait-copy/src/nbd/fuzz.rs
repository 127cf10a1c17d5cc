//! Fuzzing entry points of the client: negotiation and the reply parser.
//!
//! Invariant: no protocol logic of its own; the pending requests are the same in each run.

use std::io::{self, Read, Write};

use nowait::{ByteRange, ExtentStatus};
use nowait_nbd as nbd;
use nowait_nbd::ReplyMode;
use nowait_nbd::client::{self, HandshakeError, ReplyParser};
use slab::Slab;

use super::connection::wanted;
use crate::nbd::pending_requests::{Pending, PendingReplies, StatusKind};
use nowait_nbd::client::failure;

/// The metadata context id of block-status replies.
pub const CONTEXT: u32 = 1;

/// First byte and length of each pending request, in bytes, and its command; the index in this list
/// is its cookie.
pub const PENDING: [(u64, u64, u16); 7] = [
    (1 << 33, 8, nbd::CMD_READ),
    (4096, 4096, nbd::CMD_READ),
    (0, 64 << 10, nbd::CMD_READ),
    (512, 512, nbd::CMD_WRITE),
    (0, 1 << 20, nbd::CMD_BLOCK_STATUS),
    (0, 0, nbd::CMD_FLUSH),
    (8192, 1 << 20, nbd::CMD_WRITE_ZEROES),
];

/// A server that sends `0` and accepts every byte.
struct Server<'a>(&'a [u8]);

impl Read for Server<'_> {
    fn read(&mut self, memory: &mut [u8]) -> io::Result<usize> {
        self.0.read(memory)
    }
}

impl Write for Server<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The negotiated export `disk`, as text, of a server that sends `bytes` and nothing else.
///
/// # Errors
/// A message that says what was refused or invalid.
pub fn negotiate(bytes: &[u8]) -> Result<String, String> {
    let mut server = Server(bytes);
    let failed = |error: HandshakeError| failure(&error.into(), "disk");
    client::greet(&mut server).map_err(failed)?;
    let export = client::choose(&mut server, "disk", wanted("base:allocation")).map_err(failed)?;
    Ok(format!("{export:?}"))
}

/// A completed request: its cookie, the bytes of a read, the extents of a block-status request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Its index in [`PENDING`].
    pub cookie: usize,
    /// The bytes of a read; empty for other commands.
    pub bytes: Vec<u8>,
    /// Runs of data and holes.
    pub spans: Vec<ExtentStatus>,
}

/// Parses the replies of a server whose bytes arrive in `pieces`. Returns the completed requests in
/// the order of completion, and the error that broke the connection, if any.
pub fn replies<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<Ended>, Result<(), String>) {
    let mut pending = Slab::new();
    for (pos, len, command) in PENDING {
        pending.insert(Pending::whole(command, ByteRange::new(pos, len)));
    }
    let mut parser = ReplyParser::new(ReplyMode::Structured);
    let mut ended = Vec::new();
    for piece in pieces {
        let mut completed = Vec::new();
        let (all, context, done) = (&mut pending, Some(CONTEXT), &mut completed);
        let kind = StatusKind::Zeros;
        let mut replies =
            PendingReplies { pending: all, connection: 0, context, kind, completed: done };
        let taken = parser.feed(piece, &mut replies);
        for cookie in completed {
            let Pending { memory, extents, .. } = pending.remove(cookie);
            let bytes = memory.map_or(Vec::new(), |memory| memory.to_vec());
            ended.push(Ended { cookie, bytes, spans: extents });
        }
        if taken.is_err() {
            return (ended, taken);
        }
    }
    (ended, Ok(()))
}
