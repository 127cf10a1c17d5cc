//! The client's half of NBD, as much as a measurement needs: handshake, requests, simple replies.
//!
//! Invariant: whatever a server sends, the answer is a result or an error, never a panic or an unbounded
//! allocation. Knows: the numbers of the protocol. Known by: client, server (to see that one is ready).
//! Source of all numbers: the NBD project's proto.md, "Newstyle negotiation", "Option types", "Request
//! message" and "Simple reply message". Structured replies are not asked for.

use std::io::{self, Read, Write};

pub(crate) use nowait_nbd::REQUEST_BYTES;
use nowait_nbd::{
    CMD_DISC, CMD_READ, CMD_WRITE, FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, FLAG_READ_ONLY,
    INFO_EXPORT, INIT_MAGIC, OPT_GO, OPT_STARTTLS, OPTION_MAGIC, OPTION_REPLY_MAGIC, REP_ACK,
    REP_ERR_BIT, REP_INFO, SIMPLE_REPLY_BYTES, SIMPLE_REPLY_MAGIC,
};

/// The longest answer to an option that a server has reason to give.
const OPTION_REPLY_BYTES_MAX: usize = 64 * 1024;
/// A server may send several pieces of information before it acknowledges, but not without end.
const OPTION_REPLIES_MAX: usize = 64;

/// What a server says of the device it exports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Export {
    pub(crate) bytes: u64,
    pub(crate) read_only: bool,
}

/// A request as it goes over the wire; `cookie` comes back with the reply.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) command: Command,
    pub(crate) cookie: u64,
    pub(crate) position: u64,
    pub(crate) bytes: u32,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Command {
    Read,
    Write,
    Disconnect,
}

impl Request {
    pub(crate) fn header(&self) -> [u8; REQUEST_BYTES] {
        let command = match self.command {
            Command::Read => CMD_READ,
            Command::Write => CMD_WRITE,
            Command::Disconnect => CMD_DISC,
        };
        nowait_nbd::request(command, 0, self.cookie, self.position, self.bytes)
    }
}

/// The first words of a connection; options follow.
pub(crate) fn greet(stream: &mut (impl Read + Write)) -> io::Result<()> {
    let greeting: [u8; 18] = read_array(stream)?;
    let [magic, option_magic] = [be64(&greeting, 0), be64(&greeting, 8)];
    let flags = u16::from_be_bytes([greeting[16], greeting[17]]);
    if magic != INIT_MAGIC || option_magic != OPTION_MAGIC || flags & FLAG_FIXED_NEWSTYLE == 0 {
        return Err(broken("the greeting is not that of a fixed newstyle NBD server"));
    }
    let mine = FLAG_FIXED_NEWSTYLE | (flags & FLAG_NO_ZEROES);
    stream.write_all(&u32::from(mine).to_be_bytes())
}

/// Asks for TLS, which begins with the next byte in both directions.
pub(crate) fn starttls(stream: &mut (impl Read + Write)) -> io::Result<()> {
    let mut option = OPTION_MAGIC.to_be_bytes().to_vec();
    option.extend(OPT_STARTTLS.to_be_bytes());
    option.extend(0u32.to_be_bytes());
    stream.write_all(&option)?;
    let (kind, data) = read_option_reply(stream, OPT_STARTTLS)?;
    match kind {
        REP_ACK => Ok(()),
        _ => Err(refused("TLS", kind, &data)),
    }
}

/// Opens the export called `name`; requests follow.
pub(crate) fn go(stream: &mut (impl Read + Write), name: &str) -> io::Result<Export> {
    let mut go = Vec::with_capacity(32 + name.len());
    go.extend(OPTION_MAGIC.to_be_bytes());
    go.extend(OPT_GO.to_be_bytes());
    go.extend((name.len() as u32 + 6).to_be_bytes());
    go.extend((name.len() as u32).to_be_bytes());
    go.extend(name.as_bytes());
    go.extend(0u16.to_be_bytes());
    stream.write_all(&go)?;
    read_go_replies(stream)
}

fn read_go_replies(stream: &mut impl Read) -> io::Result<Export> {
    let mut export = None;
    for _ in 0..OPTION_REPLIES_MAX {
        let (kind, data) = read_option_reply(stream, OPT_GO)?;
        match kind {
            REP_ACK => return export.ok_or_else(|| broken("GO was acknowledged without a size")),
            REP_INFO => export = parse_export(&data).or(export),
            _ if kind & REP_ERR_BIT != 0 => return Err(refused("the export", kind, &data)),
            _ => {}
        }
    }
    Err(broken("GO was never acknowledged"))
}

/// The kind of the next answer to `option`, and what else is in it.
fn read_option_reply(stream: &mut impl Read, option: u32) -> io::Result<(u32, Vec<u8>)> {
    let head: [u8; 20] = read_array(stream)?;
    let [kind, bytes] = [be32(&head, 12), be32(&head, 16)];
    if be64(&head, 0) != OPTION_REPLY_MAGIC || be32(&head, 8) != option {
        return Err(broken("the answer to an option is not an option reply"));
    }
    let bytes = bytes as usize;
    if bytes > OPTION_REPLY_BYTES_MAX {
        return Err(broken("the answer to an option is too long"));
    }
    let mut data = vec![0; bytes];
    stream.read_exact(&mut data)?;
    Ok((kind, data))
}

fn refused(what: &str, kind: u32, data: &[u8]) -> io::Error {
    let text = String::from_utf8_lossy(data);
    broken(format!("the server refused {what}: error {kind:#x} {text}"))
}

fn parse_export(data: &[u8]) -> Option<Export> {
    let data: &[u8; 12] = data.try_into().ok()?;
    let [kind, flags] =
        [u16::from_be_bytes([data[0], data[1]]), u16::from_be_bytes([data[10], data[11]])];
    let bytes = be64(data, 2);
    (kind == INFO_EXPORT).then_some(Export { bytes, read_only: flags & FLAG_READ_ONLY != 0 })
}

/// Finds the replies in a stream of bytes that is cut anywhere.
pub(crate) struct ReplyParser {
    header: [u8; SIMPLE_REPLY_BYTES],
    /// How many bytes of `header` are there.
    have: usize,
    /// How many bytes of the current reply's data are still to come.
    skip: usize,
    /// Bytes of data behind every header: the block size when reading, 0 when writing.
    data_bytes: usize,
}

impl ReplyParser {
    pub(crate) fn new(data_bytes: usize) -> ReplyParser {
        ReplyParser { header: [0; SIMPLE_REPLY_BYTES], have: 0, skip: 0, data_bytes }
    }

    /// Takes the next bytes of the stream; gives `finished` the cookie of each reply that is now complete.
    pub(crate) fn feed(
        &mut self,
        mut bytes: &[u8],
        mut finished: impl FnMut(u64) -> io::Result<()>,
    ) -> io::Result<()> {
        while !bytes.is_empty() {
            if self.have < SIMPLE_REPLY_BYTES {
                let (taken, rest) = bytes.split_at(bytes.len().min(SIMPLE_REPLY_BYTES - self.have));
                self.header[self.have..self.have + taken.len()].copy_from_slice(taken);
                self.have += taken.len();
                bytes = rest;
                if self.have < SIMPLE_REPLY_BYTES {
                    break;
                }
                self.check_header()?;
                self.skip = self.data_bytes;
            }
            let skipped = bytes.len().min(self.skip);
            bytes = &bytes[skipped..];
            self.skip -= skipped;
            if self.skip == 0 {
                self.have = 0;
                finished(be64(&self.header, 8))?;
            }
        }
        Ok(())
    }

    fn check_header(&self) -> io::Result<()> {
        if be32(&self.header, 0) != SIMPLE_REPLY_MAGIC {
            return Err(broken("the stream of replies is out of step"));
        }
        match be32(&self.header, 4) {
            0 => Ok(()),
            errno => Err(broken(format!("the server answered a request with NBD error {errno}"))),
        }
    }
}

fn read_array<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    match stream.read_exact(&mut bytes) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Err(broken("the server hung up")),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
            Err(broken("no answer in the handshake"))
        }
        outcome => outcome.map(|()| bytes),
    }
}

fn be32<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    bytes[at..at + 4].iter().fold(0, |value, &byte| value << 8 | u32::from(byte))
}

fn be64<const N: usize>(bytes: &[u8; N], at: usize) -> u64 {
    bytes[at..at + 8].iter().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

fn broken(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(errno: u32, cookie: u64, data_bytes: usize) -> Vec<u8> {
        let mut bytes = SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
        bytes.extend(errno.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(vec![0x67; data_bytes]);
        bytes
    }

    #[test]
    fn replies_are_found_wherever_the_stream_is_cut() {
        for data_bytes in [0, 1, 40] {
            let stream: Vec<u8> =
                [3, 1, 2].into_iter().flat_map(|c| reply(0, c, data_bytes)).collect();
            for first in 0..=stream.len() {
                for second in first..=stream.len() {
                    let mut cookies = Vec::new();
                    let mut parser = ReplyParser::new(data_bytes);
                    for piece in [&stream[..first], &stream[first..second], &stream[second..]] {
                        let outcome = parser.feed(piece, |cookie| {
                            cookies.push(cookie);
                            Ok(())
                        });
                        assert!(outcome.is_ok());
                    }
                    assert_eq!(cookies, [3, 1, 2], "cut at {first} and {second}");
                }
            }
        }
    }

    #[test]
    fn a_reply_is_not_finished_before_its_last_byte() {
        let stream = reply(0, 9, 8);
        let mut parser = ReplyParser::new(8);
        let mut count = 0;
        for (at, byte) in stream.iter().enumerate() {
            let outcome = parser.feed(&[*byte], |_| {
                count += 1;
                Ok(())
            });
            assert!(outcome.is_ok());
            assert_eq!(count, usize::from(at + 1 == stream.len()));
        }
    }

    #[test]
    fn an_error_reply_and_a_foreign_magic_are_errors() {
        assert!(ReplyParser::new(0).feed(&reply(5, 1, 0), |_| Ok(())).is_err());
        assert!(ReplyParser::new(0).feed(&[0xff; 16], |_| Ok(())).is_err());
    }

    #[test]
    fn an_option_reply_of_any_length_but_twelve_is_no_export() {
        let mut data = vec![0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 3];
        assert_eq!(parse_export(&data), Some(Export { bytes: 4096, read_only: true }));
        data.push(0);
        assert_eq!(parse_export(&data), None);
        assert_eq!(parse_export(&[]), None);
    }
}
