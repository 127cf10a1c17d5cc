//! Simulated sockets: a connection is two streams of bytes with bounds.
//!
//! Invariant: bytes arrive once and in order, or with a reset not at all; what is reported of a
//! socket's side that a queue watches is true when it is reported, but what comes may be kept back.
//! Knows: random, queue (interests, tokens). Known by: queue, and servers that have a feature `sim`.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use super::random::Random;
use crate::error::{Doing, Error};
use crate::io::Outcome;
use crate::queue::{Interest, Token};

/// How often in 65536 reports of an end that comes with the last bytes the end is kept back, as a
/// multishot poll of Linux 6.18 does it.
const KEPT_BACK: u16 = 1 << 14;

const IN: Outcome = libc::POLLIN as Outcome;
const OUT: Outcome = libc::POLLOUT as Outcome;
const ENDED: Outcome = libc::POLLRDHUP as Outcome;
const GONE: Outcome = (libc::POLLRDHUP | libc::POLLHUP) as Outcome;

/// One direction of a connection.
struct Stream {
    bytes: VecDeque<u8>,
    room: usize,
    /// Nothing more comes.
    ended: bool,
    /// Nobody reads any more.
    gone: bool,
}

impl Stream {
    fn new(room: usize) -> Self {
        Self { bytes: VecDeque::new(), room, ended: false, gone: false }
    }

    fn put<'a>(&mut self, pieces: impl Iterator<Item = &'a [u8]>) -> Result<usize, Errno> {
        if self.gone || self.ended {
            return Err(Errno::PIPE);
        }
        let before = self.bytes.len();
        for piece in pieces {
            let taken = piece.len().min(self.room - self.bytes.len());
            self.bytes.extend(piece.get(..taken).unwrap_or_default());
        }
        let taken = self.bytes.len() - before;
        if taken == 0 { Err(Errno::AGAIN) } else { Ok(taken) }
    }

    /// Takes as many bytes as `to` has room for, and there are.
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

struct Pair {
    to_near: Stream,
    to_far: Stream,
    /// How often something came to the near side: bytes, or their end.
    came: u64,
    /// Of these, how often it was the end.
    ends: u64,
    /// The far side was closed with bytes that it had not read.
    reset: bool,
}

fn lock(pair: &Mutex<Pair>) -> MutexGuard<'_, Pair> {
    pair.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    /// The near sides of this thread, by the descriptor that stands for them.
    static NEAR: std::cell::RefCell<Vec<(RawFd, Weak<Mutex<Pair>>)>> = const {
        std::cell::RefCell::new(Vec::new())
    };
}

/// The side of a connection that a server has, and a queue of the same thread watches.
pub struct Near {
    pair: Arc<Mutex<Pair>>,
    /// Stands for it where a descriptor is asked for.
    fd: OwnedFd,
}

/// The other side.
pub struct Far(Arc<Mutex<Pair>>);

/// A connection that holds `to_near` and `to_far` bytes, at least 1 each, that were sent and not
/// received.
///
/// # Errors
/// `EMFILE`, `ENFILE`, `ENOMEM`: what eventfd(2) said.
pub fn connection(to_near: usize, to_far: usize) -> Result<(Near, Far), Error> {
    let fd = eventfd(0, EventfdFlags::CLOEXEC).map_err(|e| Error::from_os(e, Doing::SetUp))?;
    let (to_near, to_far) = (Stream::new(to_near.max(1)), Stream::new(to_far.max(1)));
    let pair = Pair { to_near, to_far, came: 0, ends: 0, reset: false };
    let pair = Arc::new(Mutex::new(pair));
    NEAR.with_borrow_mut(|near| near.push((fd.as_raw_fd(), Arc::downgrade(&pair))));
    Ok((Near { pair: pair.clone(), fd }, Far(pair)))
}

impl Near {
    /// readv(2), which never waits.
    ///
    /// # Errors
    /// `EAGAIN`, `ECONNRESET`.
    pub fn receive(&self, pieces: &mut [IoSliceMut<'_>]) -> Result<usize, Errno> {
        let mut pair = lock(&self.pair);
        let stream = &mut pair.to_near;
        let count = pieces.iter_mut().map(|piece| stream.take(piece)).sum();
        let (ended, asked) = (stream.ended, pieces.iter().any(|piece| !piece.is_empty()));
        match count {
            0 if asked && std::mem::take(&mut pair.reset) => Err(Errno::CONNRESET),
            0 if asked && !ended => Err(Errno::AGAIN),
            count => Ok(count),
        }
    }

    /// sendmsg(2), which neither waits nor raises a signal.
    ///
    /// # Errors
    /// `EAGAIN`, `EPIPE`.
    pub fn send(&self, pieces: &[IoSlice<'_>]) -> Result<usize, Errno> {
        lock(&self.pair).to_far.put(pieces.iter().map(|piece| &**piece))
    }

    /// shutdown(2) of both directions.
    pub fn shutdown(&self) {
        let mut pair = lock(&self.pair);
        (pair.to_near.gone, pair.to_far.ended) = (true, true);
    }
}

impl AsFd for Near {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Near {
    fn drop(&mut self) {
        self.shutdown();
        let own = self.fd.as_raw_fd();
        NEAR.with_borrow_mut(|near| near.retain(|&(fd, _)| fd != own));
    }
}

impl Far {
    /// Sends as much of `bytes` as there is room for, at once.
    ///
    /// # Errors
    /// `EAGAIN`: there is none; `EPIPE`.
    pub fn send(&self, bytes: &[u8]) -> Result<usize, Errno> {
        let mut pair = lock(&self.0);
        let taken = pair.to_near.put([bytes].into_iter())?;
        pair.came += 1;
        Ok(taken)
    }

    /// Receives as much as `to`, which is not empty, has room for. 0: there will never be more.
    ///
    /// # Errors
    /// `EAGAIN`: there is nothing yet.
    pub fn receive(&self, to: &mut [u8]) -> Result<usize, Errno> {
        let mut pair = lock(&self.0);
        match pair.to_far.take(to) {
            0 if !pair.to_far.ended => Err(Errno::AGAIN),
            count => Ok(count),
        }
    }

    /// Sends nothing more; `both`: and receives nothing more.
    pub fn shutdown(&self, both: bool) {
        let mut pair = lock(&self.0);
        (pair.to_near.ended, pair.to_far.gone) = (true, pair.to_far.gone | both);
        (pair.came, pair.ends) = (pair.came + 1, pair.ends + 1);
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        let unread = !lock(&self.0).to_far.bytes.is_empty();
        self.shutdown(true);
        lock(&self.0).reset |= unread;
    }
}

/// A near side that a queue watches.
struct Watch {
    fd: RawFd,
    pair: Weak<Mutex<Pair>>,
    readable: Option<Token>,
    writable: Option<Token>,
    /// What was there when it was reported last.
    came: u64,
    ends: u64,
}

/// The near sides that one queue watches.
#[derive(Default)]
pub(super) struct Watched(Vec<Watch>);

impl Watched {
    /// Watches `fd`, if it stands for a near side; else false.
    pub(super) fn watch(&mut self, fd: BorrowedFd<'_>, token: Token, interest: Interest) -> bool {
        let fd = fd.as_raw_fd();
        let find = |near: &Vec<(RawFd, Weak<Mutex<Pair>>)>| {
            near.iter().find(|it| it.0 == fd).map(|it| it.1.clone())
        };
        let Some(pair) = NEAR.with_borrow(find) else { return false };
        let place = self.0.iter().position(|watch| watch.fd == fd).unwrap_or_else(|| {
            let (readable, writable) = (None, None);
            self.0.push(Watch { fd, pair, readable, writable, came: 0, ends: 0 });
            self.0.len() - 1
        });
        if let Some(watch) = self.0.get_mut(place) {
            match interest {
                Interest::Readable => watch.readable = Some(token),
                Interest::Writable => watch.writable = Some(token),
            }
        }
        true
    }

    /// Ends the watch on `fd`, if there is one; else false.
    pub(super) fn unwatch(&mut self, fd: BorrowedFd<'_>, token: Token) -> bool {
        let own = |watch: &Watch| watch.fd == fd.as_raw_fd();
        let Some(watch) = self.0.iter_mut().find(|watch| own(watch)) else { return false };
        watch.readable.take_if(|known| *known == token);
        watch.writable.take_if(|known| *known == token);
        self.0.retain(|watch| watch.readable.is_some() || watch.writable.is_some());
        true
    }

    /// Puts what is to be reported into `ready`.
    pub(super) fn look(&mut self, random: &mut Random, ready: &mut Vec<(Token, Outcome)>) {
        for watch in &mut self.0 {
            let Some(pair) = watch.pair.upgrade() else { continue };
            let pair = lock(&pair);
            if let Some(token) = watch.readable
                && watch.came != pair.came
            {
                // The end has come with bytes, and is not reported a second time.
                let with_bytes = pair.ends > watch.ends && pair.came - watch.came > 1;
                let mut bits = IN;
                if pair.to_near.ended && !(with_bytes && random.chance(KEPT_BACK)) {
                    bits |= if pair.to_far.gone { GONE } else { ENDED };
                }
                (watch.came, watch.ends) = (pair.came, pair.ends);
                ready.push((token, bits));
            }
            let room = pair.to_far.gone || pair.to_far.bytes.len() < pair.to_far.room;
            if let Some(token) = watch.writable.take_if(|_| room) {
                ready.push((token, OUT));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(watched: &mut Watched, seed: u64) -> Vec<(Token, Outcome)> {
        let mut ready = Vec::new();
        watched.look(&mut Random::new(seed), &mut ready);
        ready
    }

    fn receive(near: &Near, most: usize) -> Result<Vec<u8>, Errno> {
        let mut bytes = vec![0; most];
        let (one, other) = bytes.split_at_mut(most / 3);
        let count = near.receive(&mut [IoSliceMut::new(one), IoSliceMut::new(other)])?;
        bytes.truncate(count);
        Ok(bytes)
    }

    #[test]
    fn bytes_arrive_in_order_as_far_as_there_is_room_and_the_end_after_them() {
        let (near, far) = connection(10, 4).unwrap();
        assert_eq!(receive(&near, 6), Err(Errno::AGAIN));
        let mut sent: Vec<u8> = (0..16).collect();
        let (mut got, all) = (Vec::new(), sent.clone());
        while !sent.is_empty() {
            let count = far.send(&sent).unwrap();
            assert!(count <= 10);
            sent.drain(..count);
            got.extend(receive(&near, 7).unwrap());
        }
        far.send(&[16]).unwrap();
        far.shutdown(false);
        got.extend(receive(&near, 100).unwrap());
        assert!(got[..16] == all && got[16..] == [16]);
        assert_eq!((receive(&near, 5), far.send(&[1])), (Ok(vec![]), Err(Errno::PIPE)));

        let pieces = [IoSlice::new(&[1, 2, 3]), IoSlice::new(&[4, 5])];
        assert_eq!((near.send(&pieces), near.send(&pieces)), (Ok(4), Err(Errno::AGAIN)));
        let mut to = [0; 8];
        assert_eq!((far.receive(&mut to), &to[..4]), (Ok(4), &[1, 2, 3, 4][..]));
        assert_eq!(far.receive(&mut to), Err(Errno::AGAIN));
        drop(near);
        assert_eq!(far.receive(&mut to), Ok(0));
    }

    #[test]
    fn a_side_that_is_closed_with_bytes_unread_resets_the_other_once_its_own_are_read() {
        let (near, far) = connection(10, 10).unwrap();
        near.send(&[IoSlice::new(&[1])]).unwrap();
        far.send(&[2]).unwrap();
        drop(far);
        assert_eq!(near.send(&[IoSlice::new(&[1])]), Err(Errno::PIPE));
        assert_eq!(receive(&near, 6), Ok(vec![2]));
        assert_eq!(receive(&near, 6), Err(Errno::CONNRESET));
        assert_eq!(receive(&near, 6), Ok(vec![]));
    }

    #[test]
    fn what_comes_is_reported_once_and_an_end_behind_bytes_sometimes_not_at_all() {
        let mut ends = 0;
        for seed in 0..100 {
            let (near, far) = connection(10, 1).unwrap();
            let mut watched = Watched::default();
            assert!(watched.watch(near.as_fd(), 7, Interest::Readable));
            assert!(report(&mut watched, seed).is_empty());
            far.send(&[2]).unwrap();
            assert_eq!(report(&mut watched, seed), [(7, IN)]);
            assert!(report(&mut watched, seed).is_empty());
            far.send(&[2]).unwrap();
            far.shutdown(false);
            let last = report(&mut watched, seed);
            ends += usize::from(last == [(7, IN | ENDED)]);
            assert!(last == [(7, IN | ENDED)] || last == [(7, IN)]);

            near.send(&[IoSlice::new(&[1])]).unwrap();
            assert!(watched.watch(near.as_fd(), 8, Interest::Writable));
            assert!(report(&mut watched, seed).is_empty());
            far.receive(&mut [0]).unwrap();
            assert_eq!(report(&mut watched, seed), [(8, OUT)]);
            assert!(report(&mut watched, seed).is_empty());
            assert!(watched.unwatch(near.as_fd(), 7) && !watched.unwatch(near.as_fd(), 7));
        }
        assert!((50..100).contains(&ends), "{ends}");
        let (near, far) = connection(10, 1).unwrap();
        let mut watched = Watched::default();
        watched.watch(near.as_fd(), 7, Interest::Readable);
        far.shutdown(true);
        assert_eq!(report(&mut watched, 1), [(7, IN | GONE)], "an end by itself is told");
    }
}
