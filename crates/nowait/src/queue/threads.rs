//! Transfers by plain system calls: inline where that cannot wait for the device, else by Linux AIO
//! or on a crew.
//!
//! Invariant: at depth 1 no other thread is involved; with more in flight, or with descriptors that
//! somebody watches for more than the engine's own ends, this thread makes no call that waits for a
//! device.
//! Knows: queue, syscall, epoll, aio, crew, remote.
#![allow(unsafe_code)]

use std::cell::OnceCell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use super::aio::Aio;
use super::epoll::Epoll;
use super::{Interest, Queue, QueueFull, Token, WATCHED, syscall};
use crate::crew::Crew;
use crate::error::{Doing, Error};
use crate::io::{Outcome, Transfer};
use crate::remote::Remote;

/// Threads of a queue: enough to keep a disk busy, few enough to start without being noticed.
const CREW: u32 = 16;
/// Descriptors whose reports are ends of requests: the crew's, and the one of the engine's workers.
const OWN_WATCHES: usize = 2;
const CREW_DONE: Token = WATCHED | WATCHED >> 1;
const AIO_DONE: Token = CREW_DONE | 1;
/// Transfers that AIO has at most; the crew takes what is beyond.
const AIO_TRANSFERS: u32 = 128;

struct Job(Transfer, u32);

// SAFETY: whoever placed the transfer promised that its memory stays valid and untouched until the
// token is reaped, on whichever thread the call is made.
unsafe impl Send for Job {}

/// A queue on preadv2(2) and pwritev2(2).
pub struct Threads {
    placed: Vec<Job>,
    ended: Vec<(Token, Outcome)>,
    /// Transfers that the crew has.
    out: usize,
    crew: Crew<Job>,
    remote: Arc<Remote>,
    watched: Epoll,
    /// Made when it is first needed; inside it is `None` where there is no AIO.
    aio: OnceCell<Option<Aio>>,
    /// Transfers that it has.
    aio_out: usize,
    files: Arc<[OwnedFd]>,
    /// A call for cached data does not wait for a device, however many are in flight.
    cached: bool,
}

impl Threads {
    /// As [`Threads::for_files`], for one.
    ///
    /// # Errors
    /// As [`Threads::for_files`].
    pub fn new(file: BorrowedFd<'_>, slots: u32, cached: bool) -> Result<Self, Error> {
        Self::for_files(&[file], slots, cached)
    }

    /// A queue on `files`, which [`Transfer::file`] counts from 0 on, for tokens below `slots`.
    /// `cached` says that they were opened without `O_DIRECT`.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: what dup(2), eventfd(2) or epoll_create1(2) said.
    pub fn for_files(files: &[BorrowedFd<'_>], slots: u32, cached: bool) -> Result<Self, Error> {
        let own = files.iter().map(BorrowedFd::try_clone_to_owned);
        let files = own.collect::<Result<Arc<[OwnedFd]>, _>>();
        let files = files.map_err(|e| Error::from_io(&e, Doing::SetUp))?;
        let remote = Arc::new(Remote::new(slots)?);
        let mut watched = Epoll::new()?;
        watched.watch(remote.fd(), CREW_DONE, Interest::Readable)?;
        let (crew_files, crew_remote) = (files.clone(), remote.clone());
        let crew = Crew::new(CREW, move |Job(transfer, token)| {
            // SAFETY: see `Job`.
            let outcome = unsafe { call(&crew_files, &transfer) };
            crew_remote.push(token, i64::from(outcome));
        });
        let (placed, ended) = (Vec::with_capacity(64), Vec::with_capacity(64));
        let aio = OnceCell::new();
        Ok(Self { placed, ended, out: 0, crew, remote, watched, aio, aio_out: 0, files, cached })
    }
}

impl Threads {
    /// Hands what is placed to AIO, as far as it takes it: all must be told not to wait.
    fn hand_to_aio(&mut self) {
        let waits = |Job(transfer, _): &Job| transfer.rw_flags & libc::RWF_NOWAIT == 0;
        if self.cached || self.placed.iter().any(waits) {
            return;
        }
        let watched = &mut self.watched;
        self.aio.get_or_init(|| {
            let aio = Aio::new(AIO_TRANSFERS)?;
            watched.watch(aio.fd(), AIO_DONE, Interest::Readable).ok()?;
            Some(aio)
        });
        let Some(Some(aio)) = self.aio.get_mut() else { return };
        for Job(transfer, token) in &self.placed {
            // One that there is no file for is for the crew, with all behind it.
            let Some(file) = self.files.get(usize::from(transfer.file)) else { break };
            aio.add(file.as_fd(), transfer, *token);
        }
        // SAFETY: see `Job`.
        let taken = unsafe { aio.hand_over() };
        self.aio_out += taken;
        self.placed.drain(..taken);
    }

    /// Whether something has ended that this thread knows of without a call.
    fn has_ended(&self) -> bool {
        let by_aio =
            matches!(self.aio.get(), Some(Some(aio)) if self.aio_out > 0 && aio.has_ended());
        by_aio || !self.ended.is_empty()
    }

    /// Whether somebody else watches descriptors.
    fn others_watch(&self) -> bool {
        let aio = matches!(self.aio.get(), Some(Some(_)));
        self.watched.count() > OWN_WATCHES + usize::from(aio)
    }
}

/// Makes the transfer; `EBADF` for a file that there is none of.
///
/// # Safety
/// As for `syscall::transfer`.
unsafe fn call(files: &[OwnedFd], transfer: &Transfer) -> Outcome {
    match files.get(usize::from(transfer.file)) {
        // SAFETY: as promised by the caller.
        Some(file) => unsafe { syscall::transfer(file.as_fd(), transfer) },
        None => -libc::EBADF,
    }
}

impl Queue for Threads {
    // SAFETY: the promise of the caller is the one that `Job` needs.
    unsafe fn place(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull> {
        self.placed.push(Job(*transfer, token as u32));
        Ok(())
    }

    fn kick(&mut self) -> Result<(), Error> {
        // With the page cache a call waits only if it was not told not to.
        let tries = |Job(transfer, _): &Job| transfer.rw_flags & libc::RWF_NOWAIT != 0;
        let inline = match self.cached {
            true => self.placed.iter().all(tries),
            // A device may take its time, or for ever: whoever else this thread serves is not to wait.
            false => self.out + self.aio_out == 0 && self.placed.len() == 1 && !self.others_watch(),
        };
        if inline {
            for Job(transfer, token) in self.placed.drain(..) {
                // SAFETY: the caller of `place` vouches for the memory until the token is reaped.
                let outcome = unsafe { call(&self.files, &transfer) };
                self.ended.push((Token::from(token), outcome));
            }
            return Ok(());
        }
        if !self.placed.is_empty() {
            self.hand_to_aio();
        }
        if !self.placed.is_empty() {
            // RWF_NOWAIT would only make the crew give up what it is there to wait for.
            self.out += self.placed.len();
            self.crew.post(self.placed.drain(..).map(|Job(mut transfer, token)| {
                if !transfer.must_not_wait {
                    transfer.rw_flags &= !libc::RWF_NOWAIT;
                }
                Job(transfer, token)
            }));
        }
        Ok(())
    }

    fn reap(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        let mut count = self.ended.len();
        if let Some(Some(aio)) = self.aio.get_mut()
            && self.aio_out > 0
        {
            let ended = aio.reap(&mut sink);
            self.aio_out -= ended;
            count += ended;
        }
        if count == 0 && !self.watched.is_ready() {
            // Whoever only polls hears of watched descriptors too. An error shows in `wait`.
            let _ = self.watched.wait(Some(Duration::ZERO));
        }
        self.ended.drain(..).for_each(|(token, outcome)| sink(token, outcome));
        if self.watched.is_ready() {
            let remote = &self.remote;
            count += self.watched.take(|token, bits| match token {
                CREW_DONE => remote.clear_wake(),
                AIO_DONE => {}
                _ => sink(token, bits),
            });
        }
        let home = self.remote.take(|slot, outcome| sink(Token::from(slot), outcome as Outcome));
        self.out -= home;
        count + home
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        self.kick()?;
        let timeout = if self.has_ended() { Some(Duration::ZERO) } else { timeout };
        self.watched.wait(timeout)
    }

    fn pending(&mut self) -> bool {
        self.has_ended()
            || self.watched.is_ready()
            || self.watched.wait(Some(Duration::ZERO)).is_ok() && self.watched.is_ready()
    }

    fn watch(&mut self, fd: BorrowedFd<'_>, token: Token, interest: Interest) -> Result<(), Error> {
        self.watched.watch(fd, token, interest)
    }

    fn unwatch(&mut self, fd: BorrowedFd<'_>, token: Token) {
        self.watched.unwatch(fd, token);
    }

    // SAFETY: the memory is not kept.
    unsafe fn register(&mut self, _: *mut u8, _: usize) -> Option<u16> {
        None
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.watched.fd()
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn beside_sockets_what_need_not_wait_goes_by_aio_and_what_may_to_the_crew() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 4096]).unwrap();
        let sockets =
            [(); OWN_WATCHES + 1].map(|()| std::os::unix::net::UnixStream::pair().unwrap());
        let mut queue = Threads::new(file.as_fd(), 8, false).unwrap();
        for (n, socket) in sockets.iter().enumerate() {
            queue.watch(socket.0.as_fd(), WATCHED | n as Token, Interest::Readable).unwrap();
        }
        for (rw_flags, wanted) in [(libc::RWF_NOWAIT, (0, 1)), (0, (1, 0))] {
            let mut memory = vec![0u8; 4096];
            let base = memory.as_mut_ptr();
            let read = Transfer { base, len: 4096, rw_flags, ..Transfer::NONE };
            // SAFETY: the memory is there until the token was reaped.
            unsafe { queue.place(&read, 5) }.unwrap();
            queue.kick().unwrap();
            let out = (queue.out, queue.aio_out);
            let mut ended = Vec::new();
            while ended.is_empty() {
                queue.wait(Some(Duration::from_secs(60))).unwrap();
                queue.reap(|token, outcome| ended.push((token, outcome)));
            }
            assert_eq!((ended, memory), (vec![(5, 4096)], vec![7; 4096]));
            if rw_flags != 0 && !matches!(queue.aio.get(), Some(Some(_))) {
                println!("skipped: no AIO");
                continue;
            }
            assert_eq!((out, queue.out, queue.aio_out), (wanted, 0, 0));
        }
    }
}
