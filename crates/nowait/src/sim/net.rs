//! Simulated sockets: a connection is two bounded streams of bytes.
//!
//! Invariant: bytes arrive once and in order, or with a reset not at all. An event of a watched
//! server end is true when it is returned, but the event of a disconnect may be withheld.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use super::random::Random;
use crate::queue::Interest;
use crate::types::error::{Error, Operation};
use crate::types::token::Token;
use crate::types::transfer::Outcome;

/// If a disconnect follows the last bytes immediately, how many of 65536 events withhold the
/// disconnect, as a multishot poll of Linux 6.18 does.
const WITHHELD: u16 = 1 << 14;

const IN: Outcome = libc::POLLIN as Outcome;
const OUT: Outcome = libc::POLLOUT as Outcome;
const ENDED: Outcome = libc::POLLRDHUP as Outcome;
const GONE: Outcome = (libc::POLLRDHUP | libc::POLLHUP) as Outcome;

/// One direction of a connection.
struct Stream {
    bytes: VecDeque<u8>,
    /// The greatest number of bytes that it holds.
    room: usize,
    /// The sender has closed it.
    ended: bool,
    /// The receiver has closed it.
    gone: bool,
}

impl Stream {
    fn new(room: usize) -> Self {
        Self { bytes: VecDeque::new(), room, ended: false, gone: false }
    }

    /// Appends as many bytes as there is room for; `EAGAIN` if there is none, `EPIPE` if it is
    /// closed.
    fn put<'a>(&mut self, bufs: impl Iterator<Item = &'a [u8]>) -> Result<usize, Errno> {
        if self.gone || self.ended {
            return Err(Errno::PIPE);
        }
        let before = self.bytes.len();
        for buf in bufs {
            let taken = buf.len().min(self.room - self.bytes.len());
            self.bytes.extend(buf.get(..taken).unwrap_or_default());
        }
        let taken = self.bytes.len() - before;
        if taken == 0 { Err(Errno::AGAIN) } else { Ok(taken) }
    }

    /// Moves as many bytes to `to` as fit and are there; returns their number.
    fn take(&mut self, to: &mut [u8]) -> usize {
        let count = to.len().min(self.bytes.len());
        let (front, back) = self.bytes.as_slices();
        let (one, other) = to.split_at_mut(front.len().min(count));
        one.copy_from_slice(front.get(..one.len()).unwrap_or_default());
        let rest = count - one.len();
        if let (Some(other), Some(back)) = (other.get_mut(..rest), back.get(..rest)) {
            other.copy_from_slice(back);
        }
        self.bytes.drain(..count);
        count
    }
}

struct SocketPair {
    to_server: Stream,
    to_client: Stream,
    /// The number of arrivals at the server end: bytes, or a disconnect.
    arrivals: u64,
    /// The number of disconnects among them.
    ends: u64,
    /// The client end was closed with unread bytes.
    reset: bool,
}

fn lock(pair: &Mutex<SocketPair>) -> MutexGuard<'_, SocketPair> {
    pair.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    /// The server ends of this thread, by the descriptor that represents them.
    static SERVER_ENDS: std::cell::RefCell<Vec<(RawFd, Weak<Mutex<SocketPair>>)>> = const {
        std::cell::RefCell::new(Vec::new())
    };
}

/// The server's end of a connection, which a queue of the same thread can watch.
pub struct ServerEnd {
    pair: Arc<Mutex<SocketPair>>,
    /// Represents the end where a descriptor is needed; never ready.
    fd: OwnedFd,
}

/// The client's end of a connection.
pub struct ClientEnd(Arc<Mutex<SocketPair>>);

/// A connection whose streams hold at most `to_server` and `to_client` bytes, at least 1 each, that
/// were sent and not received.
///
/// # Errors
/// The errno of eventfd(2): `EMFILE`, `ENFILE`, `ENOMEM`.
pub fn connection(to_server: usize, to_client: usize) -> Result<(ServerEnd, ClientEnd), Error> {
    let fd = eventfd(0, EventfdFlags::CLOEXEC).map_err(|e| Error::from_os(e, Operation::SetUp))?;
    let (to_server, to_client) = (Stream::new(to_server.max(1)), Stream::new(to_client.max(1)));
    let pair = SocketPair { to_server, to_client, arrivals: 0, ends: 0, reset: false };
    let pair = Arc::new(Mutex::new(pair));
    SERVER_ENDS.with_borrow_mut(|ends| ends.push((fd.as_raw_fd(), Arc::downgrade(&pair))));
    Ok((ServerEnd { pair: pair.clone(), fd }, ClientEnd(pair)))
}

impl ServerEnd {
    /// Receives as readv(2), without waiting.
    ///
    /// # Errors
    /// `EAGAIN` if there is nothing yet, `ECONNRESET` if the client closed its end with unread
    /// bytes.
    pub fn receive(&self, bufs: &mut [IoSliceMut<'_>]) -> Result<usize, Errno> {
        let mut pair = lock(&self.pair);
        let stream = &mut pair.to_server;
        let count = bufs.iter_mut().map(|buf| stream.take(buf)).sum();
        let (ended, has_room) = (stream.ended, bufs.iter().any(|buf| !buf.is_empty()));
        match count {
            0 if has_room && std::mem::take(&mut pair.reset) => Err(Errno::CONNRESET),
            0 if has_room && !ended => Err(Errno::AGAIN),
            count => Ok(count),
        }
    }

    /// Sends as sendmsg(2), without waiting and without a signal.
    ///
    /// # Errors
    /// `EAGAIN` if there is no room, `EPIPE` if one end has closed the stream.
    pub fn send(&self, bufs: &[IoSlice<'_>]) -> Result<usize, Errno> {
        lock(&self.pair).to_client.put(bufs.iter().map(|buf| &**buf))
    }

    /// Shuts both directions down, as shutdown(2).
    pub fn shutdown(&self) {
        let mut pair = lock(&self.pair);
        (pair.to_server.gone, pair.to_client.ended) = (true, true);
    }
}

impl AsFd for ServerEnd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for ServerEnd {
    fn drop(&mut self) {
        self.shutdown();
        let own = self.fd.as_raw_fd();
        SERVER_ENDS.with_borrow_mut(|ends| ends.retain(|&(fd, _)| fd != own));
    }
}

impl ClientEnd {
    /// Sends as much of `bytes` as there is room for, without waiting.
    ///
    /// # Errors
    /// `EAGAIN` if there is no room, `EPIPE` if one end has closed the stream.
    pub fn send(&self, bytes: &[u8]) -> Result<usize, Errno> {
        let mut pair = lock(&self.0);
        let taken = pair.to_server.put([bytes].into_iter())?;
        pair.arrivals += 1;
        Ok(taken)
    }

    /// Receives as much as fits into `to`, which is not empty; 0 after a disconnect.
    ///
    /// # Errors
    /// `EAGAIN` if there is nothing yet.
    pub fn receive(&self, to: &mut [u8]) -> Result<usize, Errno> {
        let mut pair = lock(&self.0);
        match pair.to_client.take(to) {
            0 if !pair.to_client.ended => Err(Errno::AGAIN),
            count => Ok(count),
        }
    }

    /// Closes the stream to the server; with `both` also the stream to the client.
    pub fn shutdown(&self, both: bool) {
        let mut pair = lock(&self.0);
        (pair.to_server.ended, pair.to_client.gone) = (true, pair.to_client.gone | both);
        (pair.arrivals, pair.ends) = (pair.arrivals + 1, pair.ends + 1);
    }
}

impl Drop for ClientEnd {
    fn drop(&mut self) {
        let unread = !lock(&self.0).to_client.bytes.is_empty();
        self.shutdown(true);
        lock(&self.0).reset |= unread;
    }
}

/// A server end that a queue watches.
struct Watch {
    fd: RawFd,
    pair: Weak<Mutex<SocketPair>>,
    readable: Option<Token>,
    writable: Option<Token>,
    /// The pair's counters at the last event.
    arrivals: u64,
    ends: u64,
}

/// The server ends that one queue watches.
#[derive(Default)]
pub(crate) struct Watched(Vec<Watch>);

impl Watched {
    /// Watches `fd`; false if it does not represent a server end.
    pub(crate) fn watch(&mut self, fd: BorrowedFd<'_>, token: Token, interest: Interest) -> bool {
        let fd = fd.as_raw_fd();
        let find = |ends: &Vec<(RawFd, Weak<Mutex<SocketPair>>)>| {
            ends.iter().find(|it| it.0 == fd).map(|it| it.1.clone())
        };
        let Some(pair) = SERVER_ENDS.with_borrow(find) else { return false };
        let index = self.0.iter().position(|watch| watch.fd == fd).unwrap_or_else(|| {
            let (readable, writable) = (None, None);
            self.0.push(Watch { fd, pair, readable, writable, arrivals: 0, ends: 0 });
            self.0.len() - 1
        });
        if let Some(watch) = self.0.get_mut(index) {
            match interest {
                Interest::Readable => watch.readable = Some(token),
                Interest::Writable => watch.writable = Some(token),
            }
        }
        true
    }

    /// Ends the watch on `fd` under `token`; false if `fd` is not watched.
    pub(crate) fn unwatch(&mut self, fd: BorrowedFd<'_>, token: Token) -> bool {
        let own = |watch: &Watch| watch.fd == fd.as_raw_fd();
        let Some(watch) = self.0.iter_mut().find(|watch| own(watch)) else { return false };
        watch.readable.take_if(|watched| *watched == token);
        watch.writable.take_if(|watched| *watched == token);
        self.0.retain(|watch| watch.readable.is_some() || watch.writable.is_some());
        true
    }

    /// Appends the pending events to `ready`.
    pub(crate) fn poll(&mut self, random: &mut Random, ready: &mut Vec<(Token, Outcome)>) {
        for watch in &mut self.0 {
            let Some(pair) = watch.pair.upgrade() else { continue };
            let pair = lock(&pair);
            if let Some(token) = watch.readable
                && watch.arrivals != pair.arrivals
            {
                // A disconnect that came with bytes gives no second event.
                let with_bytes = pair.ends > watch.ends && pair.arrivals - watch.arrivals > 1;
                let mut bits = IN;
                if pair.to_server.ended && !(with_bytes && random.chance(WITHHELD)) {
                    bits |= if pair.to_client.gone { GONE } else { ENDED };
                }
                (watch.arrivals, watch.ends) = (pair.arrivals, pair.ends);
                ready.push((token, bits));
            }
            let room = pair.to_client.gone || pair.to_client.bytes.len() < pair.to_client.room;
            if let Some(token) = watch.writable.take_if(|_| room) {
                ready.push((token, OUT));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(watched: &mut Watched, seed: u64) -> Vec<(Token, Outcome)> {
        let mut ready = Vec::new();
        watched.poll(&mut Random::new(seed), &mut ready);
        ready
    }

    fn receive(server: &ServerEnd, limit: usize) -> Result<Vec<u8>, Errno> {
        let mut bytes = vec![0; limit];
        let (one, other) = bytes.split_at_mut(limit / 3);
        let count = server.receive(&mut [IoSliceMut::new(one), IoSliceMut::new(other)])?;
        bytes.truncate(count);
        Ok(bytes)
    }

    #[test]
    fn bytes_arrive_in_order_within_the_room_and_before_the_disconnect() {
        let (server, client) = connection(10, 4).unwrap();
        assert_eq!(receive(&server, 6), Err(Errno::AGAIN));
        let mut unsent: Vec<u8> = (0..16).collect();
        let (mut got, all) = (Vec::new(), unsent.clone());
        while !unsent.is_empty() {
            let count = client.send(&unsent).unwrap();
            assert!(count <= 10);
            unsent.drain(..count);
            got.extend(receive(&server, 7).unwrap());
        }
        client.send(&[16]).unwrap();
        client.shutdown(false);
        got.extend(receive(&server, 100).unwrap());
        assert!(got[..16] == all && got[16..] == [16]);
        assert_eq!((receive(&server, 5), client.send(&[1])), (Ok(vec![]), Err(Errno::PIPE)));

        let bufs = [IoSlice::new(&[1, 2, 3]), IoSlice::new(&[4, 5])];
        assert_eq!((server.send(&bufs), server.send(&bufs)), (Ok(4), Err(Errno::AGAIN)));
        let mut to = [0; 8];
        assert_eq!((client.receive(&mut to), &to[..4]), (Ok(4), &[1, 2, 3, 4][..]));
        assert_eq!(client.receive(&mut to), Err(Errno::AGAIN));
        drop(server);
        assert_eq!(client.receive(&mut to), Ok(0));
    }

    #[test]
    fn an_end_closed_with_unread_bytes_resets_the_other_after_its_bytes_are_read() {
        let (server, client) = connection(10, 10).unwrap();
        server.send(&[IoSlice::new(&[1])]).unwrap();
        client.send(&[2]).unwrap();
        drop(client);
        assert_eq!(server.send(&[IoSlice::new(&[1])]), Err(Errno::PIPE));
        assert_eq!(receive(&server, 6), Ok(vec![2]));
        assert_eq!(receive(&server, 6), Err(Errno::CONNRESET));
        assert_eq!(receive(&server, 6), Ok(vec![]));
    }

    #[test]
    fn an_arrival_gives_one_event_and_a_disconnect_behind_bytes_may_give_none() {
        let mut ends = 0;
        for seed in 0..100 {
            let (server, client) = connection(10, 1).unwrap();
            let mut watched = Watched::default();
            assert!(watched.watch(server.as_fd(), 7, Interest::Readable));
            assert!(events(&mut watched, seed).is_empty());
            client.send(&[2]).unwrap();
            assert_eq!(events(&mut watched, seed), [(7, IN)]);
            assert!(events(&mut watched, seed).is_empty());
            client.send(&[2]).unwrap();
            client.shutdown(false);
            let last = events(&mut watched, seed);
            ends += usize::from(last == [(7, IN | ENDED)]);
            assert!(last == [(7, IN | ENDED)] || last == [(7, IN)]);

            server.send(&[IoSlice::new(&[1])]).unwrap();
            assert!(watched.watch(server.as_fd(), 8, Interest::Writable));
            assert!(events(&mut watched, seed).is_empty());
            client.receive(&mut [0]).unwrap();
            assert_eq!(events(&mut watched, seed), [(8, OUT)]);
            assert!(events(&mut watched, seed).is_empty());
            assert!(watched.unwatch(server.as_fd(), 7) && !watched.unwatch(server.as_fd(), 7));
        }
        assert!((50..100).contains(&ends), "{ends}");
        let (server, client) = connection(10, 1).unwrap();
        let mut watched = Watched::default();
        watched.watch(server.as_fd(), 7, Interest::Readable);
        client.shutdown(true);
        assert_eq!(events(&mut watched, 1), [(7, IN | GONE)], "a disconnect alone is reported");
    }
}
