//! What of the client's inside is fuzzed by itself: negotiation, and the taking apart of replies.
//!
//! Invariant: nothing here decides anything; the requests that are pending are the same each time.
//! Knows: handshake, receiver, wire. Known by: the fuzz targets, which alone have the feature `fuzz`.

use std::io::{self, Read, Write};

use nowait::{Range, Span};
use slab::Slab;

use super::handshake;
use super::receiver::{Pending, Receiver};
use super::wire;

/// The context that replies about the mapping come under.
pub const CONTEXT: u32 = 1;

/// First byte and length of each pending request, in bytes, and its command; the place in this
/// list is its cookie.
pub const PENDING: [(u64, u64, u16); 7] = [
    (1 << 33, 8, wire::CMD_READ),
    (4096, 4096, wire::CMD_READ),
    (0, 64 << 10, wire::CMD_READ),
    (512, 512, wire::CMD_WRITE),
    (0, 1 << 20, wire::CMD_BLOCK_STATUS),
    (0, 0, wire::CMD_FLUSH),
    (8192, 1 << 20, wire::CMD_WRITE_ZEROES),
];

/// A server that says `0` and hears everything.
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

/// What the server offers of the export `disk`, in words, if it says `bytes` and nothing else.
///
/// # Errors
/// What was refused or broken, in words.
pub fn negotiate(bytes: &[u8]) -> Result<String, String> {
    let export = handshake::negotiate(&mut Server(bytes), "disk")?;
    Ok(format!("{export:?}"))
}

/// What a request came to: its cookie, the bytes of a read, the spans of a question about the
/// mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Its place in [`PENDING`].
    pub cookie: usize,
    /// The bytes of a read; nothing else has some.
    pub bytes: Vec<u8>,
    /// Runs of data and holes.
    pub spans: Vec<Span>,
}

/// The requests that a server ends whose bytes come in `pieces`, in the order of their ends, and
/// what broke the connection, if something did. Bytes of a read go straight to their place as far
/// as a piece has them.
pub fn replies<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<Ended>, Result<(), String>) {
    let mut pending = Slab::new();
    for (pos, len, command) in PENDING {
        pending.insert(Pending::whole(command, Range::new(pos, len)));
    }
    let mut receiver = Receiver::new(0, Some(CONTEXT));
    let mut ended = Vec::new();
    for piece in pieces {
        let mut indices = Vec::new();
        let taken = take(&mut receiver, piece, &mut pending, &mut |index| indices.push(index));
        for cookie in indices {
            let Pending { memory, spans, .. } = pending.remove(cookie);
            let bytes = memory.map_or(Vec::new(), |memory| memory.to_vec());
            ended.push(Ended { cookie, bytes, spans });
        }
        if taken.is_err() {
            return (ended, taken);
        }
    }
    (ended, Ok(()))
}

/// As a connection does it with what a socket gave.
fn take(
    receiver: &mut Receiver,
    piece: &[u8],
    pending: &mut Slab<Pending>,
    ended: &mut dyn FnMut(usize),
) -> Result<(), String> {
    let direct = receiver.place(pending).map_or(0, |place| {
        let count = place.len().min(piece.len());
        let (to, from) = (place.get_mut(..count), piece.get(..count));
        to.zip(from).map_or(0, |(to, from)| {
            to.copy_from_slice(from);
            count
        })
    });
    if direct > 0 {
        receiver.placed(direct, pending, ended)?;
    }
    receiver.feed(piece.get(direct..).unwrap_or_default(), pending, ended)
}
