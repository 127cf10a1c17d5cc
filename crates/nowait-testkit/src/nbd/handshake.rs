//! A client's side of a handshake, one message at a time.
//!
//! Invariant: a reply that breaks the protocol fails the test.

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

/// Connects and exchanges the greeting: the next message is an option.
///
/// # Errors
/// Errors of the socket.
pub fn greet(socket: &Path) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(BOUND))?;
    stream.set_write_timeout(Some(BOUND))?;
    assert_eq!(read_number(&mut stream, 8)?, SERVER_MAGIC);
    assert_eq!(read_number(&mut stream, 8)?, OPTION_MAGIC);
    assert_eq!(read_number(&mut stream, 2)? & 1, 1, "fixed newstyle");
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
    read_reply_to(stream, None)
}

/// The type and the data of one reply to `option`, if it is known.
fn read_reply_to(stream: &mut impl Read, option: Option<u32>) -> io::Result<(u32, Vec<u8>)> {
    assert_eq!(read_number(stream, 8)?, OPTION_REPLY_MAGIC);
    let answered = read_number(stream, 4)? as u32;
    assert_eq!(answered, option.unwrap_or(answered), "the option that was sent");
    let kind = read_number(stream, 4)? as u32;
    let mut data = vec![0; read_number(stream, 4)? as usize];
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
/// Like `read_size`.
pub fn go(stream: &mut (impl Read + Write)) -> io::Result<u64> {
    send_option(stream, OPT_GO, &export_request(""))?;
    read_size(stream)
}

/// The size of an export, from the replies to an option that names it.
///
/// # Errors
/// Errors of the socket, or `Unsupported` with the option error.
pub fn read_size(stream: &mut impl Read) -> io::Result<u64> {
    let replies = read_replies(stream, None)?;
    let export = replies.iter().find_map(|(_, data)| data.strip_prefix(&INFO_EXPORT.to_be_bytes()));
    Ok(number(&export.expect("NBD_INFO_EXPORT before the acknowledgement")[..8]))
}

/// The replies to `option`, if it is known, before the acknowledgement.
///
/// # Errors
/// Like `read_size`.
pub(crate) fn read_replies(
    stream: &mut impl Read,
    option: Option<u32>,
) -> io::Result<Vec<(u32, Vec<u8>)>> {
    let mut replies = Vec::new();
    loop {
        match read_reply_to(stream, option)? {
            (REP_ACK, _) => return Ok(replies),
            (kind, _) if is_refusal(kind) => {
                let what = format!("option error {kind:#x}");
                return Err(io::Error::new(io::ErrorKind::Unsupported, what));
            }
            reply => replies.push(reply),
        }
    }
}

/// The data of an option about the contexts of export `name` that `queries` ask for.
pub(crate) fn context_request(name: &str, queries: &[&str]) -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat();
    let count = (queries.len() as u32).to_be_bytes().to_vec();
    let queries = queries.iter().map(|query| text(query));
    [text(name), count].into_iter().chain(queries).collect::<Vec<_>>().concat()
}

/// A number in network order, of 8 bytes at most.
pub(crate) fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// The next `bytes` bytes, 8 at most, as a number in network order.
pub(crate) fn read_number(stream: &mut impl Read, bytes: usize) -> io::Result<u64> {
    let mut field = [0; 8];
    stream.read_exact(&mut field[8 - bytes..])?;
    Ok(u64::from_be_bytes(field))
}
