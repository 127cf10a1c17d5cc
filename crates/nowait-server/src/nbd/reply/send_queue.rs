//! The send queue of a connection: sends the headers and data of many replies with one call.
//!
//! Invariant: replies are sent whole and in the order in which they were pushed. A buffer returns
//! to its pool when the socket has taken its last byte.

use std::collections::VecDeque;
use std::io::IoSlice;

use nowait::PooledBuffer;
use rustix::io::Errno;

use crate::nbd::wire::EncodedHeader;

/// The most iovecs of one send.
/// Beyond it: the rest is sent by the next call.
pub(crate) const MAX_IOVECS: usize = 256;
/// The most iovecs of a send for a few replies, which is cheaper to prepare.
const SMALL_IOVECS: usize = 36;
/// The most chunks of one reply to a read.
/// Beyond it: the last one has all of the rest as data.
pub(crate) const MAX_CHUNKS: usize = 16;
const _: () = assert!(2 + 2 * MAX_CHUNKS <= SMALL_IOVECS);

/// The body of a reply, after its first header.
pub(crate) enum ReplyBody {
    /// Nothing.
    None,
    /// The first `len` bytes of the buffer.
    Data { buf: PooledBuffer, len: u32 },
    /// Bytes made for this reply.
    Bytes(Vec<u8>),
    /// Further chunks, which skip some of the buffer.
    Chunks(Box<Chunks>),
}

impl ReplyBody {
    /// The bytes directly after the header.
    #[inline]
    fn as_slice(&self) -> &[u8] {
        match self {
            Self::Data { buf, len } => &buf[..*len as usize],
            Self::Bytes(bytes) => bytes,
            Self::None | Self::Chunks(_) => &[],
        }
    }

    #[inline]
    fn chunks(&self) -> &[Chunk] {
        match self {
            Self::Chunks(chunks) => &chunks.list,
            _ => &[],
        }
    }

    /// The data of one of [`ReplyBody::chunks`].
    fn data_of(&self, chunk: &Chunk) -> &[u8] {
        match self {
            Self::Chunks(chunks) => &chunks.buf[chunk.start as usize..][..chunk.len as usize],
            _ => &[],
        }
    }
}

/// Chunks with data of one buffer.
pub(crate) struct Chunks {
    pub(crate) buf: PooledBuffer,
    pub(crate) list: Vec<Chunk>,
}

/// One chunk: its header, and `len` bytes of the buffer from `start` on.
pub(crate) struct Chunk {
    pub(crate) head: EncodedHeader,
    pub(crate) start: u32,
    pub(crate) len: u32,
}

struct Reply {
    head: EncodedHeader,
    body: ReplyBody,
    /// Bytes of the connection's budget that are released when the reply has been sent.
    budget: u32,
}

impl Reply {
    /// The most iovecs of the reply.
    #[inline]
    fn count(&self) -> usize {
        2 + 2 * self.body.chunks().len()
    }

    /// Its pieces in order; some may be empty.
    #[inline(always)]
    fn iovecs<'a>(&'a self, mut take: impl FnMut(&'a [u8])) {
        take(self.head.as_slice());
        take(self.body.as_slice());
        for chunk in self.body.chunks() {
            take(chunk.head.as_slice());
            take(self.body.data_of(chunk));
        }
    }

    /// Bytes of all pieces.
    #[inline]
    fn len(&self) -> usize {
        let mut len = 0;
        self.iovecs(|piece| len += piece.len());
        len
    }
}

/// The result of a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SendResult {
    /// Everything was sent.
    Drained,
    /// The socket is full.
    WouldBlock,
    /// The quota is used up; there is more to send.
    QuotaUsed,
    /// The peer is gone: the error of sendmsg(2), or `EIO` for one of TLS.
    Closed(Errno),
}

/// The unsent replies of one connection.
#[derive(Default)]
pub(crate) struct SendQueue {
    replies: VecDeque<Reply>,
    /// Bytes of the first reply that were sent.
    sent: usize,
}

impl SendQueue {
    #[inline]
    pub(crate) fn push(&mut self, head: EncodedHeader, body: ReplyBody, budget: u32) {
        debug_assert!(body.chunks().len() <= MAX_CHUNKS);
        self.replies.push_back(Reply { head, body, budget });
    }

    /// Queues bytes that are not a reply: the handshake.
    pub(crate) fn push_bytes(&mut self, bytes: Vec<u8>) {
        self.push(EncodedHeader::EMPTY, ReplyBody::Bytes(bytes), 0);
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.replies.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.replies.len()
    }

    pub(crate) fn clear(&mut self) {
        self.replies.clear();
    }

    /// Empties the queue and returns its unsent bytes.
    pub(crate) fn take_unsent(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for reply in self.replies.drain(..) {
            reply.iovecs(|piece| bytes.extend_from_slice(piece));
        }
        bytes.drain(..std::mem::take(&mut self.sent).min(bytes.len()));
        bytes
    }

    /// Sends as much as `write` takes, and at most `quota` bytes, which it decreases. Adds the
    /// budget of the sent replies to `budget`.
    pub(crate) fn send(
        &mut self,
        mut write: impl FnMut(&[IoSlice<'_>]) -> rustix::io::Result<usize>,
        quota: &mut u64,
        budget: &mut u64,
    ) -> SendResult {
        while !self.replies.is_empty() {
            if *quota == 0 {
                return SendResult::QuotaUsed;
            }
            let sent = if self.replies.len() <= SMALL_IOVECS / 2 {
                self.send_once::<SMALL_IOVECS>(&mut write, *quota)
            } else {
                self.send_once::<MAX_IOVECS>(&mut write, *quota)
            };
            match sent {
                Ok(taken) => {
                    *quota -= taken as u64;
                    self.advance(taken, budget);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return SendResult::WouldBlock,
                Err(error) => return SendResult::Closed(error),
            }
        }
        SendResult::Drained
    }

    fn send_once<const N: usize>(
        &self,
        write: &mut impl FnMut(&[IoSlice<'_>]) -> rustix::io::Result<usize>,
        quota: u64,
    ) -> rustix::io::Result<usize> {
        let mut pieces = [IoSlice::new(&[]); N];
        let used = self.iovecs(&mut pieces, quota);
        write(&pieces[..used])
    }

    /// Fills `iovecs`, which has room for any one reply, with at most `quota` of the next bytes.
    /// Returns how many are used.
    pub(crate) fn iovecs<'a, const N: usize>(
        &'a self,
        pieces: &mut [IoSlice<'a>; N],
        quota: u64,
    ) -> usize {
        const { assert!(N >= SMALL_IOVECS) };
        let mut used = 0;
        let mut skip = self.sent;
        let mut quota = usize::try_from(quota).unwrap_or(usize::MAX);
        for reply in &self.replies {
            if used + reply.count() > N || quota == 0 {
                break;
            }
            reply.iovecs(|piece| {
                let (before, piece) = piece.split_at(skip.min(piece.len()));
                skip -= before.len();
                let piece = &piece[..quota.min(piece.len())];
                quota -= piece.len();
                if !piece.is_empty() {
                    pieces[used] = IoSlice::new(piece);
                    used += 1;
                }
            });
        }
        used
    }

    /// Records that the next `taken` bytes were sent. Adds the budget of the completed replies to
    /// `budget`.
    pub(crate) fn advance(&mut self, taken: usize, budget: &mut u64) {
        self.sent += taken;
        while let Some(front) = self.replies.front() {
            let len = front.len();
            if self.sent < len {
                return;
            }
            self.sent -= len;
            *budget += u64::from(front.budget);
            self.replies.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::nbd::wire::ReplyEncoder;
    use crate::nbd::wire::ReplyMode;
    use crate::net::socket::Socket;

    fn simple(cookie: u64) -> EncodedHeader {
        ReplyEncoder::to_cookie(ReplyMode::Simple, cookie).simple(0)
    }

    #[test]
    fn replies_cut_by_a_full_socket_or_by_the_quota_arrive_whole_and_in_order() {
        let (near, mut far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let near = Socket::from(near);
        let mut out = SendQueue::default();
        let mut expected = Vec::new();
        for n in 0..600u64 {
            let head = simple(n);
            let bytes = vec![n as u8; (n as usize * 37) % 5000];
            expected.extend_from_slice(head.as_slice());
            expected.extend_from_slice(&bytes);
            out.push(head, ReplyBody::Bytes(bytes), 1);
        }
        let (mut budget, mut got, mut would_blocks, mut quota_hits) = (0, Vec::new(), 0, 0);
        loop {
            let mut quota = 70_001;
            match out.send(|pieces| near.send(pieces), &mut quota, &mut budget) {
                SendResult::Drained => break,
                SendResult::WouldBlock => would_blocks += 1,
                SendResult::QuotaUsed => {
                    assert_eq!(quota, 0);
                    quota_hits += 1;
                }
                SendResult::Closed(_) => panic!("the peer is there"),
            }
            let mut some = vec![0; 10_001];
            let count = far.read(&mut some).unwrap();
            got.extend_from_slice(&some[..count]);
        }
        drop(near);
        far.read_to_end(&mut got).unwrap();
        assert!(got == expected && budget == 600 && out.is_empty());
        assert!(would_blocks > 0 && quota_hits > 0, "{would_blocks} {quota_hits}");
    }

    #[test]
    fn the_bytes_of_replies_begin_where_a_full_socket_cut_them() {
        // A send does not block, even on a blocking socket.
        let (near, mut far) = UnixStream::pair().unwrap();
        let near = Socket::from(near);
        let mut out = SendQueue::default();
        out.push_bytes(vec![7; 4 << 20]);
        out.push_bytes(vec![8; 100]);
        assert_eq!(
            out.send(|pieces| near.send(pieces), &mut u64::MAX.clone(), &mut 0),
            SendResult::WouldBlock
        );
        let rest = out.take_unsent();
        drop(near);
        let mut got = Vec::new();
        far.read_to_end(&mut got).unwrap();
        assert!(!got.is_empty() && rest.len() > 100);
        got.extend(rest);
        assert!(got == [vec![7; 4 << 20], vec![8; 100]].concat());
    }

    #[test]
    fn a_send_to_a_lost_peer_reports_closed() {
        let (near, far) = UnixStream::pair().unwrap();
        let near = Socket::from(near);
        drop(far);
        let mut out = SendQueue::default();
        out.push(simple(1), ReplyBody::None, 0);
        assert_eq!(
            out.send(|pieces| near.send(pieces), &mut 100, &mut 0),
            SendResult::Closed(Errno::PIPE)
        );
    }
}
