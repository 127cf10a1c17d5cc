//! Rejects request heads with a bare LF as a line terminator, which hyper accepts (RFC 9112, section 2.2).
//!
//! Invariant: body bytes are not inspected. A bare LF is replaced by NUL, which is invalid in a head, so hyper answers 400.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Maximum number of bytes kept of a line: enough for a `content-length` field.
const LINE_BYTES: usize = 64;
const CONTENT_LENGTH: &[u8] = b"content-length:";
/// NUL, which is invalid in a head.
const INVALID: u8 = 0;

/// A client's stream, whose request heads are checked.
pub(crate) struct LineEndingCheck<S> {
    stream: S,
    lines: Lines,
}

/// The parser's state between two reads.
#[derive(Default)]
struct Lines {
    /// The beginning of the line, in lower case.
    line: Vec<u8>,
    after_cr: bool,
    /// Value of `content-length` in the current head, in bytes.
    content_length: u64,
    /// Number of body bytes before the next head.
    body: u64,
}

impl<S> LineEndingCheck<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, lines: Lines::default() }
    }
}

impl Lines {
    /// Checks the next received bytes.
    fn check(&mut self, mut bytes: &mut [u8]) {
        loop {
            let skipped = bytes.len().min(usize::try_from(self.body).unwrap_or(usize::MAX));
            self.body -= skipped as u64;
            let Some((byte, later)) = bytes.split_at_mut(skipped).1.split_first_mut() else {
                return;
            };
            bytes = later;
            let ends = *byte == b'\n';
            if ends && !(self.after_cr && self.end_line()) {
                *byte = INVALID;
            } else if !ends && self.line.len() < LINE_BYTES {
                self.line.push(byte.to_ascii_lowercase());
            }
            self.after_cr = *byte == b'\r';
        }
    }

    /// Processes a complete line. Returns false for an invalid `content-length`.
    fn end_line(&mut self) -> bool {
        let line = std::mem::take(&mut self.line);
        if line == b"\r" {
            self.body = std::mem::take(&mut self.content_length);
        }
        let Some(length) = line.strip_prefix(CONTENT_LENGTH) else { return true };
        let length = std::str::from_utf8(length).ok().and_then(|text| text.trim().parse().ok());
        self.content_length = length.unwrap_or_default();
        length.is_some() && line.len() < LINE_BYTES
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for LineEndingCheck<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buf))?;
        if let Some(new) = buf.filled_mut().get_mut(before..) {
            self.lines.check(new);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for LineEndingCheck<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns `bytes` as hyper reads them when `size` bytes are received at a time.
    fn read(bytes: &[u8], size: usize) -> Vec<u8> {
        let (mut lines, mut bytes) = (Lines::default(), bytes.to_vec());
        bytes.chunks_mut(size).for_each(|piece| lines.check(piece));
        bytes
    }

    #[test]
    fn a_line_that_ends_with_lf_alone_is_no_line_of_a_head() {
        let body = "POST / HTTP/1.1\r\nContent-Length:  3 \r\n\r\n\n\n\nGET / HTTP/1.1\r\n\r\n";
        for (sent, wrong) in [
            (body.to_owned(), None),
            (body.replace("POST / HTTP/1.1\r", "POST / HTTP/1.1"), Some(15)),
            (body.replace("3 \r\n\r\n", "3 \r\n\n"), Some(38)),
            (body.replace("Length:  3", "Length:  2"), Some(42)),
            (body.replace("Length:  3", "Length:  x"), Some(37)),
            (body.replace("Length:  3", "Length: -1"), Some(37)),
            (body.replace("Length:", &format!("Length:{}", " ".repeat(60))), Some(97)),
            (format!("{body}GET / HTTP/1.1\n"), Some(body.len() + 14)),
            ("GET / HTTP/1.1\r\r\n\r\n".to_owned(), None),
        ] {
            for size in [1, 2, 7, 1000] {
                let read = read(sent.as_bytes(), size);
                let first = read.iter().position(|byte| *byte == INVALID);
                assert_eq!(first, wrong, "{sent:?} by {size}");
            }
        }
    }
}
