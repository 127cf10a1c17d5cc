//! Fuzzing entry points of the client: negotiation and the reply parser.
//!
//! Invariant: no protocol logic of its own; the pending requests are the same in each run.

use std::io::{self, Read, Write};

use nowait::{ByteRange, ExtentStatus};
use nowait_nbd::client;
use slab::Slab;

use super::connection::WANTED;
use super::handshake_error::failure;
use super::wire;
use crate::nbd::reply_parser::{Pending, ReplyParser};

/// The metadata context id of block-status replies.
pub const CONTEXT: u32 = 1;

/// First byte and length of each pending request, in bytes, and its command; the index in this list
/// is its cookie.
pub const PENDING: [(u64, u64, u16); 7] = [
    (1 << 33, 8, wire::CMD_READ),
    (4096, 4096, wire::CMD_READ),
    (0, 64 << 10, wire::CMD_READ),
    (512, 512, wire::CMD_WRITE),
    (0, 1 << 20, wire::CMD_BLOCK_STATUS),
    (0, 0, wire::CMD_FLUSH),
    (8192, 1 << 20, wire::CMD_WRITE_ZEROES),
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
    let failed = |error| failure(error, "disk");
    client::greet(&mut server).map_err(failed)?;
    let export = client::choose(&mut server, "disk", WANTED).map_err(failed)?;
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
/// the order of completion, and the error that broke the connection, if any. Bytes of a read are
/// copied directly to the request's memory as far as a piece has them.
pub fn replies<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<Ended>, Result<(), String>) {
    let mut pending = Slab::new();
    for (pos, len, command) in PENDING {
        pending.insert(Pending::whole(command, ByteRange::new(pos, len)));
    }
    let mut receiver = ReplyParser::new(0, Some(CONTEXT));
    let mut ended = Vec::new();
    for piece in pieces {
        let mut indices = Vec::new();
        let taken = take(&mut receiver, piece, &mut pending, &mut |index| indices.push(index));
        for cookie in indices {
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

/// Parses one piece in the way that a connection does.
fn take(
    receiver: &mut ReplyParser,
    piece: &[u8],
    pending: &mut Slab<Pending>,
    ended: &mut dyn FnMut(usize),
) -> Result<(), String> {
    let direct = receiver.data_target(pending).map_or(0, |target| {
        let count = target.len().min(piece.len());
        let (to, from) = (target.get_mut(..count), piece.get(..count));
        to.zip(from).map_or(0, |(to, from)| {
            to.copy_from_slice(from);
            count
        })
    });
    if direct > 0 {
        receiver.data_received(direct, pending, ended)?;
    }
    receiver.feed(piece.get(direct..).unwrap_or_default(), pending, ended)
}
