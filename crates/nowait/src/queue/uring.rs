//! Transfers through io_uring(7): registered file, registered buffers, one enter for a batch.
//!
//! Invariant: the ring is dropped before the file it was given; a token is in the ring from
//! `place` to `reap`. With `DEFER_TASKRUN` only the thread that made the ring enters it.
//! Knows: queue.
#![allow(unsafe_code)]

use std::cell::OnceCell;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::event::{EventfdFlags, eventfd};

use super::polled::Polled;
use super::{Interest, Queue, QueueFull, Token, WATCHED, ring_entry};
use crate::error::{Doing, Error};
use crate::io::{Outcome, Transfer};

/// Transfers handed over at once.
const SQ_ENTRIES: u32 = 256;
const CQ_ENTRIES: u32 = 4096;
/// Kernel threads that may block for this ring's bounded and unbounded work.
const IOWQ_WORKERS: [u32; 2] = [8, 4];
const MAX_BUFFERS: u32 = 256;
/// Bytes that the rings of this process have registered: it is locked memory, of which a user may
/// have other use.
static REGISTERED: AtomicUsize = AtomicUsize::new(0);
/// Set in tokens of the ring's own requests, whose completions nobody waits for.
const OWN: Token = WATCHED >> 1;
/// Set in tokens of watches that end with their first report.
const ONCE: Token = WATCHED >> 2;

/// What the kernel offered when the ring was set up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offered {
    /// `SINGLE_ISSUER`, `DEFER_TASKRUN` and `TASKRUN_FLAG` (Linux 6.1).
    pub deferred: bool,
    /// The file is registered.
    pub file: bool,
    /// Buffers can be registered.
    pub buffers: bool,
    /// The ring itself is registered (Linux 5.18).
    pub ring: bool,
    /// The device has queues that are polled, so that `HIPRI` means something (C48).
    pub polled: bool,
}

/// A queue on a ring.
pub struct Uring {
    ring: IoUring,
    /// The ring for `HIPRI` transfers.
    polled: Option<Polled>,
    offered: Offered,
    buffers: u16,
    /// Bytes registered.
    locked: usize,
    rearm: Vec<(RawFd, Token)>,
    watched: Vec<(RawFd, Token)>,
    /// What an event loop of the caller's own polls: made when it is first asked for, because the
    /// kernel then writes to it with each completion. `None` inside: it could not be made.
    wake: OnceCell<Option<OwnedFd>>,
    files: Vec<OwnedFd>,
}

impl Uring {
    /// As [`Uring::for_files`], for one.
    ///
    /// # Errors
    /// As [`Uring::for_files`].
    pub fn new(file: BorrowedFd<'_>) -> Result<Self, Error> {
        Self::for_files(&[file])
    }

    /// A ring for transfers to and from `files`, which [`Transfer::file`] counts from 0 on. Each
    /// feature that the kernel lacks is left out.
    ///
    /// # Errors
    /// `EPERM` or `ENOSYS` where io_uring is forbidden or missing, `ENOMEM` where the limit on
    /// locked memory is too low: use [`super::Threads`] then.
    pub fn for_files(files: &[BorrowedFd<'_>]) -> Result<Self, Error> {
        let set_up = |e: std::io::Error| Error::from_io(&e, Doing::SetUp);
        let own = files.iter().map(BorrowedFd::try_clone_to_owned);
        let files = own.collect::<Result<Vec<_>, _>>().map_err(set_up)?;
        let (ring, deferred) = Self::build().map_err(set_up)?;
        let mut offered = Offered { deferred, ..Offered::default() };
        offered.ring = ring.submitter().register_ring_fd().is_ok();
        let numbers: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
        offered.file = ring.submitter().register_files(&numbers).is_ok();
        offered.buffers = ring.submitter().register_buffers_sparse(MAX_BUFFERS).is_ok();
        // Missing before Linux 5.15: then the kernel's own bound stays.
        let _ = ring.submitter().register_iowq_max_workers(&mut IOWQ_WORKERS.clone());
        let polled = Polled::for_device_of(&files);
        offered.polled = polled.is_some();
        let (rearm, watched) = (Vec::new(), Vec::new());
        Ok(Self {
            ring,
            polled,
            offered,
            buffers: 0,
            locked: 0,
            rearm,
            watched,
            wake: OnceCell::new(),
            files,
        })
    }

    fn build() -> std::io::Result<(IoUring, bool)> {
        let mut builder = IoUring::builder();
        builder.setup_clamp().setup_cqsize(CQ_ENTRIES).setup_submit_all();
        let mut best = builder.clone();
        best.setup_single_issuer().setup_coop_taskrun().setup_defer_taskrun().setup_taskrun_flag();
        match best.build(SQ_ENTRIES) {
            Ok(ring) => Ok((ring, true)),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                let mut plain = IoUring::builder();
                plain.setup_clamp().setup_cqsize(CQ_ENTRIES);
                Ok((plain.build(SQ_ENTRIES)?, false))
            }
            Err(error) => Err(error),
        }
    }

    /// What the kernel offered.
    #[must_use]
    pub fn offered(&self) -> Offered {
        self.offered
    }

    #[inline]
    fn entry(&self, transfer: &Transfer) -> squeue::Entry {
        let (fd, flags) = match self.offered.file {
            true => (RawFd::from(transfer.file), squeue::Flags::FIXED_FILE),
            false => (number_of(&self.files, transfer.file), squeue::Flags::empty()),
        };
        let fd = types::Fd(fd);
        ring_entry::of(fd, transfer).flags(flags)
    }

    /// Places an entry of the ring's own, handing over what is placed if there is no room.
    fn push(&mut self, entry: &squeue::Entry) -> Result<(), Error> {
        // SAFETY: polls name no memory.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            self.kick()?;
        }
        Ok(())
    }

    fn poll_entry(fd: RawFd, token: Token, interest: Interest) -> squeue::Entry {
        let (events, multi, mark) = match interest {
            Interest::Readable => (libc::POLLIN | libc::POLLRDHUP, true, 0),
            Interest::Writable => (libc::POLLOUT, false, ONCE),
        };
        opcode::PollAdd::new(types::Fd(fd), events as u32)
            .multi(multi)
            .build()
            .user_data(token | mark)
    }

    /// A descriptor that the kernel makes readable with each completion. The ring's own would do
    /// without `DEFER_TASKRUN`; with it, nobody who sleeps on it is woken.
    fn make_wake(&self) -> Option<OwnedFd> {
        // Readable at first: something may have ended before.
        let wake = eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()?;
        self.ring.submitter().register_eventfd(wake.as_raw_fd()).ok()?;
        Some(wake)
    }

    /// Places a transfer that asks to be polled for; without polled queues, or with no room in
    /// them, it is one like others.
    ///
    /// # Safety
    /// As for [`Queue::place`].
    #[cold]
    unsafe fn place_polled(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull> {
        let transfer = Transfer { rw_flags: transfer.rw_flags & !libc::RWF_HIPRI, ..*transfer };
        if let Some(polled) = &mut self.polled {
            // SAFETY: as promised by the caller.
            if unsafe { polled.place(&transfer, token) } {
                return Ok(());
            }
        }
        // SAFETY: as promised by the caller.
        unsafe { self.place(&transfer, token) }
    }

    fn rearm(&mut self) {
        while let Some((fd, token)) = self.rearm.pop() {
            if self.watched.contains(&(fd, token)) {
                // A ring that takes no entry fails the next `kick` or `wait` with the reason.
                let _ = self.push(&Self::poll_entry(fd, token, Interest::Readable));
            }
        }
    }
}

fn number_of(files: &[OwnedFd], file: u16) -> RawFd {
    files.get(usize::from(file)).map_or(-1, AsRawFd::as_raw_fd)
}

impl Queue for Uring {
    // SAFETY: the caller keeps the memory valid until the token is reaped, and an engine reaps all
    // of its tokens before the ring goes.
    #[inline]
    unsafe fn place(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull> {
        if transfer.rw_flags & libc::RWF_HIPRI != 0 {
            // SAFETY: as above.
            return unsafe { self.place_polled(transfer, token) };
        }
        let entry = self.entry(transfer).user_data(token);
        // SAFETY: as above.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| QueueFull)
    }

    #[inline]
    fn kick(&mut self) -> Result<(), Error> {
        self.rearm();
        if let Some(Some(wake)) = self.wake.get() {
            // Before the kernel's deferred work is run, because it writes for the first of it only.
            // EAGAIN: nothing has ended since the last look.
            let _ = rustix::io::read(wake, &mut [0u8; 8]);
        }
        if let Some(polled) = &mut self.polled {
            polled.kick()?;
        }
        let submission = self.ring.submission();
        let idle = submission.is_empty() && !submission.taskrun() && !submission.cq_overflow();
        drop(submission);
        if idle {
            return Ok(());
        }
        match self.ring.submit() {
            Ok(_) => Ok(()),
            // EBUSY, EAGAIN: the kernel wants completions reaped first; what is left stays placed.
            Err(error) if ring_entry::is_transient(&error) => Ok(()),
            Err(error) => Err(Error::from_io(&error, Doing::Wait)),
        }
    }

    #[inline]
    fn reap(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        let mut count = 0;
        for completion in self.ring.completion() {
            let token = completion.user_data();
            if token & WATCHED == 0 {
                if token & OWN == 0 {
                    sink(token, completion.result());
                    count += 1;
                }
                continue;
            }
            let ended = token & ONCE == 0 && !cqueue::more(completion.flags());
            let token = token & !ONCE;
            if ended && let Some(&watch) = self.watched.iter().find(|watch| watch.1 == token) {
                self.rearm.push(watch);
            }
            sink(token, completion.result());
            count += 1;
        }
        match &mut self.polled {
            Some(polled) => count + polled.reap(sink),
            None => count,
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        self.rearm();
        if self.polled.as_ref().is_some_and(Polled::is_busy) {
            // Whoever polls does not sleep: the next look may find something.
            return self.kick();
        }
        let waited = match timeout {
            None => self.ring.submit_and_wait(1),
            Some(timeout) => {
                let time = types::Timespec::from(timeout);
                let args = types::SubmitArgs::new().timespec(&time);
                self.ring.submitter().submit_with_args(1, &args)
            }
        };
        match waited {
            Ok(_) => Ok(()),
            Err(error) if ring_entry::is_transient(&error) => Ok(()),
            Err(error) => Err(Error::from_io(&error, Doing::Wait)),
        }
    }

    #[inline]
    fn pending(&mut self) -> bool {
        !self.ring.completion().is_empty()
            || self.ring.submission().taskrun()
            || self.polled.as_ref().is_some_and(Polled::is_busy)
    }

    fn watch(&mut self, fd: BorrowedFd<'_>, token: Token, interest: Interest) -> Result<(), Error> {
        debug_assert!(token & WATCHED != 0 && token & (OWN | ONCE) == 0);
        if interest == Interest::Readable {
            self.watched.push((fd.as_raw_fd(), token));
        }
        self.push(&Self::poll_entry(fd.as_raw_fd(), token, interest))
    }

    fn unwatch(&mut self, fd: BorrowedFd<'_>, token: Token) {
        self.watched.retain(|watch| *watch != (fd.as_raw_fd(), token));
        for token in [token, token | ONCE] {
            // The poll holds the file open until it is removed, so the removal must not get lost: a
            // ring that takes no entry any more ends the server. `PollRemove` would leave a poll in
            // place that has something to report at that moment (EALREADY), as one of a connection
            // that is being closed mostly has.
            let _ = self.push(&opcode::AsyncCancel::new(token).build().user_data(OWN));
        }
    }

    // SAFETY: the caller keeps the memory allocated as long as the ring.
    unsafe fn register(&mut self, base: *mut u8, bytes: usize) -> Option<u16> {
        if !self.offered.buffers || u32::from(self.buffers) >= MAX_BUFFERS || !may_lock(bytes) {
            return None;
        }
        let iov = [libc::iovec { iov_base: base.cast(), iov_len: bytes }];
        // SAFETY: as above; the entry is copied by the kernel.
        let done = unsafe {
            self.ring.submitter().register_buffers_update(u32::from(self.buffers), &iov, None)
        };
        if done.is_err() {
            // ENOMEM: the limit on locked memory. It will not grow, so nothing more is tried.
            self.offered.buffers = false;
            REGISTERED.fetch_sub(bytes, Ordering::Relaxed);
            return None;
        }
        self.buffers += 1;
        self.locked += bytes;
        Some(self.buffers - 1)
    }

    fn polled(&self) -> u64 {
        self.polled.as_ref().map_or(0, Polled::reaped)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match self.wake.get_or_init(|| self.make_wake()) {
            Some(wake) => wake.as_fd(),
            // SAFETY: the ring's descriptor is open as long as `self`.
            None => unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) },
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        REGISTERED.fetch_sub(self.locked, Ordering::Relaxed);
    }
}

/// Whether `bytes` more may be registered; if so, they are counted. Half of what the limit on
/// locked memory allows is left to others.
fn may_lock(bytes: usize) -> bool {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    let limit = limit.map_or(usize::MAX, |limit| limit as usize / 2);
    let more = |now: usize| now.checked_add(bytes).filter(|&then| then <= limit);
    REGISTERED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
}
