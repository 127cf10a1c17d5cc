//! Replies on their way out: heads and data of many requests in one send.
//!
//! Invariant: what is sent are whole replies in the order in which they were pushed; a buffer goes
//! home when its last byte was taken by the socket.
//! Knows: wire. Known by: tls, conn.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::BorrowedFd;

use nowait::Buf;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use super::wire::ReplyHead;

/// Pieces that one send takes.
pub(crate) const PIECES: usize = 256;

/// What follows the head of a reply.
pub(crate) enum Body {
    /// Nothing.
    None,
    /// `len` bytes of the buffer from `start` on.
    Data { buf: Buf, start: u32, len: u32 },
    /// Bytes made for this reply.
    Bytes(Vec<u8>),
}

impl Body {
    #[inline]
    fn as_slice(&self) -> &[u8] {
        match self {
            Self::None => &[],
            Self::Data { buf, start, len } => &buf[*start as usize..(*start + *len) as usize],
            Self::Bytes(bytes) => bytes,
        }
    }
}

struct Reply {
    head: ReplyHead,
    body: Body,
    /// Bytes of the connection's budget that end with this reply.
    budget: u32,
}

/// How a send went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// Everything was taken.
    All,
    /// The socket is full.
    Full,
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
            bytes.extend_from_slice(reply.head.as_slice());
            bytes.extend_from_slice(reply.body.as_slice());
        }
        bytes.drain(..std::mem::take(&mut self.sent).min(bytes.len()));
        bytes
    }

    /// Sends as much as the socket takes. Adds up the budget of what was sent.
    pub(crate) fn send(&mut self, socket: BorrowedFd<'_>, budget: &mut u64) -> Sent {
        while !self.replies.is_empty() {
            match self.send_once(socket) {
                Ok(taken) => self.advance(taken, budget),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Sent::Full,
                Err(_) => return Sent::Broken,
            }
        }
        Sent::All
    }

    fn send_once(&self, socket: BorrowedFd<'_>) -> rustix::io::Result<usize> {
        let mut pieces = [IoSlice::new(&[]); PIECES];
        let used = self.pieces(&mut pieces);
        send_pieces(socket, &pieces[..used])
    }

    /// What is to be sent next, as far as there is room in `pieces`. Returns how many are used.
    pub(crate) fn pieces<'a>(&'a self, pieces: &mut [IoSlice<'a>; PIECES]) -> usize {
        let mut used = 0;
        let mut skip = self.sent;
        for reply in &self.replies {
            if used + 2 > PIECES {
                break;
            }
            for piece in [reply.head.as_slice(), reply.body.as_slice()] {
                let (before, piece) = piece.split_at(skip.min(piece.len()));
                skip -= before.len();
                if !piece.is_empty() {
                    pieces[used] = IoSlice::new(piece);
                    used += 1;
                }
            }
        }
        used
    }

    /// The next `taken` bytes have left. Adds up the budget of the replies that are through.
    pub(crate) fn advance(&mut self, taken: usize, budget: &mut u64) {
        self.sent += taken;
        while let Some(front) = self.replies.front() {
            let len = front.head.as_slice().len() + front.body.as_slice().len();
            if self.sent < len {
                return;
            }
            self.sent -= len;
            *budget += u64::from(front.budget);
            self.replies.pop_front();
        }
    }
}

/// One send, which neither waits nor raises a signal. Returns the bytes taken.
pub(crate) fn send_pieces(
    socket: BorrowedFd<'_>,
    pieces: &[IoSlice<'_>],
) -> rustix::io::Result<usize> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(socket, pieces, &mut SendAncillaryBuffer::default(), flags)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn replies_cut_by_a_full_socket_arrive_whole_and_in_order() {
        let (near, mut far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let mut out = Out::default();
        let mut expected = Vec::new();
        for n in 0..600u64 {
            let head = ReplyHead::simple(0, n);
            let bytes = vec![n as u8; (n as usize * 37) % 5000];
            expected.extend_from_slice(head.as_slice());
            expected.extend_from_slice(&bytes);
            out.push(head, Body::Bytes(bytes), 1);
        }
        let (mut budget, mut got, mut fulls) = (0, Vec::new(), 0);
        loop {
            match out.send(near.as_fd(), &mut budget) {
                Sent::All => break,
                Sent::Full => fulls += 1,
                Sent::Broken => panic!("the peer is there"),
            }
            let mut some = vec![0; 10_001];
            let count = far.read(&mut some).unwrap();
            got.extend_from_slice(&some[..count]);
        }
        drop(near);
        far.read_to_end(&mut got).unwrap();
        assert!(got == expected && budget == 600 && fulls > 0 && out.is_empty());
    }

    #[test]
    fn the_bytes_of_replies_begin_where_a_full_socket_cut_them() {
        let (near, mut far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let mut out = Out::default();
        out.push_bytes(vec![7; 4 << 20]);
        out.push_bytes(vec![8; 100]);
        assert_eq!(out.send(near.as_fd(), &mut 0), Sent::Full);
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
        drop(far);
        let mut out = Out::default();
        out.push(ReplyHead::simple(0, 1), Body::None, 0);
        assert_eq!(out.send(near.as_fd(), &mut 0), Sent::Broken);
    }
}
