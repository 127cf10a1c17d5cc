//! The replies of a server under measurement, as simple as a client can have them.
//!
//! Invariant: whatever a server sends, the answer is a result or an error, never a panic. Structured replies
//! are not asked for.

use std::io;

use nowait_nbd::client::{Export, HandshakeError, Wanted, choose, greet, start_tls};
use nowait_nbd::{ReplyHeader, ReplyMode, SIMPLE_REPLY_BYTES};

/// Opens the export called `name`, after the greeting or in a TLS session; requests follow.
pub(crate) fn open_export(
    stream: &mut (impl io::Read + io::Write),
    name: &str,
) -> io::Result<Export> {
    choose(stream, name, Wanted::default()).map_err(failed)
}

/// Answers the greeting, and asks for TLS if it is wanted.
pub(crate) fn begin(stream: &mut (impl io::Read + io::Write), with_tls: bool) -> io::Result<()> {
    greet(stream).map_err(failed)?;
    if with_tls { start_tls(stream).map_err(failed) } else { Ok(()) }
}

fn failed(error: HandshakeError) -> io::Error {
    match error {
        HandshakeError::Io(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
            broken("the server hung up")
        }
        HandshakeError::Io(e) if e.kind() == io::ErrorKind::WouldBlock => {
            broken("no answer in the handshake")
        }
        HandshakeError::Io(e) => e,
        error => broken(error.to_string()),
    }
}

/// Parses replies from a byte stream that is split at arbitrary points.
pub(crate) struct ReplyParser {
    header: [u8; SIMPLE_REPLY_BYTES],
    /// The number of bytes of `header` received so far.
    have: usize,
    /// Of the current reply.
    cookie: u64,
    /// The number of data bytes of the current reply that are still missing.
    skip: usize,
    /// Bytes of data after every header: the block size for reads, 0 for writes.
    data_bytes: usize,
}

impl ReplyParser {
    pub(crate) fn new(data_bytes: usize) -> ReplyParser {
        ReplyParser { header: [0; SIMPLE_REPLY_BYTES], have: 0, cookie: 0, skip: 0, data_bytes }
    }

    /// Parses the next bytes of the stream; passes the cookie of each completed reply to
    /// `finished`.
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
                self.cookie = self.check_header()?;
                self.skip = self.data_bytes;
            }
            let skipped = bytes.len().min(self.skip);
            bytes = &bytes[skipped..];
            self.skip -= skipped;
            if self.skip == 0 {
                self.have = 0;
                finished(self.cookie)?;
            }
        }
        Ok(())
    }

    /// The cookie of the reply whose header has arrived.
    fn check_header(&self) -> io::Result<u64> {
        match ReplyHeader::parse(ReplyMode::Simple, &self.header) {
            Ok(Some((ReplyHeader::Simple { error: 0, cookie }, _))) => Ok(cookie),
            Ok(Some((ReplyHeader::Simple { error, .. }, _))) => {
                Err(broken(format!("the server answered a request with NBD error {error}")))
            }
            _ => Err(broken("the stream of replies is out of step")),
        }
    }
}

fn broken(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nowait_nbd::SIMPLE_REPLY_MAGIC;

    fn reply(errno: u32, cookie: u64, data_bytes: usize) -> Vec<u8> {
        let mut bytes = SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
        bytes.extend(errno.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(vec![0x67; data_bytes]);
        bytes
    }

    #[test]
    fn replies_are_parsed_at_every_split_of_the_stream() {
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
}
