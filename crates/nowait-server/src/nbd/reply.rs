//! Replies on their way out: heads and data of many requests in one send.
//!
//! Invariant: what is sent are whole replies in the order in which they were pushed; a buffer goes
//! home when its last byte was taken by the socket.
//! Knows: head, socket. Known by: respond, tls, conn.

use std::collections::VecDeque;
use std::io::IoSlice;

use nowait::Buf;

use super::head::ReplyHead;
use super::socket::Socket;

/// Pieces that one send takes.
pub(crate) const PIECES: usize = 256;
/// Pieces that a send takes which is for a few replies: it has less to prepare.
const FEW_PIECES: usize = 36;
/// The most chunks that one reply may have.
pub(crate) const MAX_CHUNKS: usize = 16;
const _: () = assert!(2 + 2 * MAX_CHUNKS <= FEW_PIECES);

/// What follows the head of a reply.
pub(crate) enum Body {
    /// Nothing.
    None,
    /// `len` bytes of the buffer from `start` on.
    Data { buf: Buf, start: u32, len: u32 },
    /// Bytes made for this reply.
    Bytes(Vec<u8>),
    /// Further chunks, which leave out some of the buffer.
    Chunks(Box<Chunks>),
}

impl Body {
    /// What follows the head at once.
    #[inline]
    fn as_slice(&self) -> &[u8] {
        match self {
            Self::Data { buf, start, len } => &buf[*start as usize..(*start + *len) as usize],
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

    /// The data of one of [`Body::chunks`].
    fn data_of(&self, chunk: &Chunk) -> &[u8] {
        match self {
            Self::Chunks(chunks) => &chunks.buf[chunk.start as usize..][..chunk.len as usize],
            _ => &[],
        }
    }
}

/// Chunks with data of one buffer.
pub(crate) struct Chunks {
    pub(crate) buf: Buf,
    pub(crate) list: Vec<Chunk>,
}

/// One chunk: its head, and `len` bytes of the buffer from `start` on.
pub(crate) struct Chunk {
    pub(crate) head: ReplyHead,
    pub(crate) start: u32,
    pub(crate) len: u32,
}

struct Reply {
    head: ReplyHead,
    body: Body,
    /// Bytes of the connection's budget that end with this reply.
    budget: u32,
}

impl Reply {
    /// How many pieces it is sent in at most.
    #[inline]
    fn count(&self) -> usize {
        2 + 2 * self.body.chunks().len()
    }

    /// Its pieces in order; some may be empty.
    #[inline(always)]
    fn pieces<'a>(&'a self, mut take: impl FnMut(&'a [u8])) {
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
        self.pieces(|piece| len += piece.len());
        len
    }
}

/// How a send went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// Everything was taken.
    All,
    /// The socket is full.
    Full,
    /// Enough for now: there is more to send.
    Enough,
    /// The peer is gone.
    Broken,
}

/// The replies of one connection that were not sent yet.
#[derive(Default)]
pub(crate) struct Out {
    replies: VecDeque<Reply>,
    /// Bytes of the first reply that were sent.
    sent: usize,
}

impl Out {
    #[inline]
    pub(crate) fn push(&mut self, head: ReplyHead, body: Body, budget: u32) {
        debug_assert!(body.chunks().len() <= MAX_CHUNKS);
        self.replies.push_back(Reply { head, body, budget });
    }

    /// Bytes that are no reply: the handshake.
    pub(crate) fn push_bytes(&mut self, bytes: Vec<u8>) {
        self.push(ReplyHead::EMPTY, Body::Bytes(bytes), 0);
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

    /// Takes out what was not sent yet, as bytes.
    pub(crate) fn take_unsent(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for reply in self.replies.drain(..) {
            reply.pieces(|piece| bytes.extend_from_slice(piece));
        }
        bytes.drain(..std::mem::take(&mut self.sent).min(bytes.len()));
        bytes
    }

    /// Sends as much as the socket takes, and no more than `most` bytes, which become fewer by that.
    /// Adds up the budget of what was sent.
    pub(crate) fn send(&mut self, socket: &Socket, most: &mut u64, budget: &mut u64) -> Sent {
        while !self.replies.is_empty() {
            if *most == 0 {
                return Sent::Enough;
            }
            let sent = if self.replies.len() <= FEW_PIECES / 2 {
                self.send_once::<FEW_PIECES>(socket, *most)
            } else {
                self.send_once::<PIECES>(socket, *most)
            };
            match sent {
                Ok(taken) => {
                    *most -= taken as u64;
                    self.advance(taken, budget);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Sent::Full,
                Err(_) => return Sent::Broken,
            }
        }
        Sent::All
    }

    fn send_once<const N: usize>(&self, socket: &Socket, most: u64) -> rustix::io::Result<usize> {
        let mut pieces = [IoSlice::new(&[]); N];
        let used = self.pieces(&mut pieces, most);
        socket.send(&pieces[..used])
    }

    /// What is to be sent next, `most` bytes of it, as far as there is room in `pieces`, which has
    /// room for any one reply. Returns how many are used.
    pub(crate) fn pieces<'a, const N: usize>(
        &'a self,
        pieces: &mut [IoSlice<'a>; N],
        most: u64,
    ) -> usize {
        const { assert!(N >= FEW_PIECES) };
        let mut used = 0;
        let mut skip = self.sent;
        let mut most = usize::try_from(most).unwrap_or(usize::MAX);
        for reply in &self.replies {
            if used + reply.count() > N || most == 0 {
                break;
            }
            reply.pieces(|piece| {
                let (before, piece) = piece.split_at(skip.min(piece.len()));
                skip -= before.len();
                let piece = &piece[..most.min(piece.len())];
                most -= piece.len();
                if !piece.is_empty() {
                    pieces[used] = IoSlice::new(piece);
                    used += 1;
                }
            });
        }
        used
    }

    /// The next `taken` bytes have left. Adds up the budget of the replies that are through.
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

    use super::super::head::Answer;
    use super::super::wire::Mode;
    use super::*;

    fn simple(cookie: u64) -> ReplyHead {
        Answer::to_cookie(Mode::Simple, cookie).simple(0)
    }

    #[test]
    fn replies_cut_by_a_full_socket_or_by_a_bound_arrive_whole_and_in_order() {
        let (near, mut far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let near = Socket::from(near);
        let mut out = Out::default();
        let mut expected = Vec::new();
        for n in 0..600u64 {
            let head = simple(n);
            let bytes = vec![n as u8; (n as usize * 37) % 5000];
            expected.extend_from_slice(head.as_slice());
            expected.extend_from_slice(&bytes);
            out.push(head, Body::Bytes(bytes), 1);
        }
        let (mut budget, mut got, mut fulls, mut enoughs) = (0, Vec::new(), 0, 0);
        loop {
            let mut most = 70_001;
            match out.send(&near, &mut most, &mut budget) {
                Sent::All => break,
                Sent::Full => fulls += 1,
                Sent::Enough => {
                    assert_eq!(most, 0);
                    enoughs += 1;
                }
                Sent::Broken => panic!("the peer is there"),
            }
            let mut some = vec![0; 10_001];
            let count = far.read(&mut some).unwrap();
            got.extend_from_slice(&some[..count]);
        }
        drop(near);
        far.read_to_end(&mut got).unwrap();
        assert!(got == expected && budget == 600 && out.is_empty());
        assert!(fulls > 0 && enoughs > 0, "{fulls} {enoughs}");
    }

    #[test]
    fn the_bytes_of_replies_begin_where_a_full_socket_cut_them() {
        // A send does not wait, whatever the socket is set to.
        let (near, mut far) = UnixStream::pair().unwrap();
        let near = Socket::from(near);
        let mut out = Out::default();
        out.push_bytes(vec![7; 4 << 20]);
        out.push_bytes(vec![8; 100]);
        assert_eq!(out.send(&near, &mut u64::MAX.clone(), &mut 0), Sent::Full);
        let rest = out.take_unsent();
        drop(near);
        let mut got = Vec::new();
        far.read_to_end(&mut got).unwrap();
        assert!(!got.is_empty() && rest.len() > 100);
        got.extend(rest);
        assert!(got == [vec![7; 4 << 20], vec![8; 100]].concat());
    }

    #[test]
    fn a_peer_that_is_gone_breaks_the_connection() {
        let (near, far) = UnixStream::pair().unwrap();
        let near = Socket::from(near);
        drop(far);
        let mut out = Out::default();
        out.push(simple(1), Body::None, 0);
        assert_eq!(out.send(&near, &mut 100, &mut 0), Sent::Broken);
    }
}
