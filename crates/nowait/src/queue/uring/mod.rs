//! Transfers through io_uring(7), with registered files and buffers and one enter for a batch.
//!
//! Invariant: a token is in the ring from `push` to `drain_completions`; a file is attached for longer. With `DEFER_TASKRUN` only the thread that made the ring enters it.
#![allow(unsafe_code)]

mod sqe;
pub(crate) mod locked_memory;
mod enter_result;
mod ring_files;
mod reserved_numbers;
mod iopoll;
mod sleep;
mod unsubmitted_entries;

use std::cell::OnceCell;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use io_uring::{IoUring, Probe, cqueue, opcode, squeue, types};
use rustix::event::{EventfdFlags, eventfd};

use crate::queue::event_source::{EventSource, Interest, check_fd_token};
use crate::queue::{IoQueue, QueueFile, QueueFull};
use crate::types::error::{Error, Operation, is_of_a_filter};
use crate::types::token::{self, RING_ONCE, RING_OWN, Token};
use crate::types::transfer::{Outcome, Transfer};
use iopoll::IopollRing;
use reserved_numbers::ReservedNumbers;
use ring_files::RingFiles;
use sleep::Sleep;

/// Sizes of the submission and the completion queue in entries; the kernel keeps completions
/// beyond. The second pair is used if the limit on locked memory has no room for the first, 84 KiB
/// (Linux counts a ring's own memory before 5.12 and from 6.13 on).
const ENTRIES: [(u32, u32); 2] = [(256, 4096), (64, 256)];
/// The greatest numbers of kernel threads for this ring's bounded and unbounded work.
const IOWQ_WORKERS: [u32; 2] = [8, 4];
/// The greatest number of registered buffers of a ring.
/// Beyond it: buffers are not registered.
const MAX_BUFFERS: u32 = 256;
/// Numbers of buffers beyond those, for drivers: enough for eight queues of 128 requests.
const RESERVED_BUFFERS: u32 = 1024;

/// The features that the kernel offered when the ring was set up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingFeatures {
    /// The ring has its full size; false if the limit on locked memory (`ulimit -l`) is too low for
    /// it.
    pub full_size: bool,
    /// `SINGLE_ISSUER`, `DEFER_TASKRUN` and `TASKRUN_FLAG` (Linux 6.1).
    pub deferred: bool,
    /// Files are registered.
    pub file: bool,
    /// Buffers can be registered.
    pub buffers: bool,
}

impl fmt::Display for RingFeatures {
    /// Features of the ring, and after "without" what it has not.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = [
            (self.full_size, "its full size"),
            (self.deferred, "deferred completions"),
            (self.file, "registered files"),
            (self.buffers, "registered buffers"),
        ];
        let list = |wanted| {
            let listed = all.into_iter().filter(move |(has, _)| *has == wanted);
            listed.map(|(_, name)| name).collect::<Vec<_>>().join(", ")
        };
        match (list(true), list(false)) {
            (with, without) if without.is_empty() => write!(f, "with {with}"),
            (with, without) if with.is_empty() => write!(f, "without {without}"),
            (with, without) => write!(f, "with {with}; without {without}"),
        }
    }
}

/// A queue on a ring.
pub struct Uring {
    ring: IoUring,
    sleep: Sleep,
    /// Transfers in this ring.
    in_flight: usize,
    /// The ring for `HIPRI` transfers, made for the first file whose transfers can be polled for.
    polled: Option<Box<IopollRing>>,
    /// Every transfer is one of these.
    polls_all: bool,
    ring_features: RingFeatures,
    buffers: u16,
    /// Numbers of buffers that drivers register by themselves.
    reserved: Box<ReservedNumbers>,
    /// Bytes of registered buffers.
    locked: usize,
    /// The most that all rings of the process may register; `None` if this one is not counted.
    locked_limit: Option<usize>,
    rearm: Vec<(RawFd, Token)>,
    watched: Vec<(RawFd, Token)>,
    /// The eventfd for the caller's own event loop. Made on first use, because the kernel then
    /// writes to it with each completion; `None` inside means that it could not be made.
    wake: OnceCell<Option<OwnedFd>>,
    files: RingFiles,
}

impl Uring {
    /// A ring with no file attached. It does without features that the kernel lacks or that the limit
    /// on locked memory has no room for: registered buffers, registered files, the full size.
    ///
    /// # Errors
    /// `EPERM` or `ENOSYS` where io_uring is forbidden or missing, also if a ring may be made and not be
    /// used (seccomp on io_uring_enter(2) or io_uring_register(2)), `ENOMEM` where the user's limit
    /// on locked memory (`ulimit -l`) has no room for the smallest ring, `EMFILE` or `ENFILE` when
    /// no descriptor is left. The caller then uses [`crate::AioThreadQueue`]; [`Uring::refusal`]
    /// puts the reason into words.
    pub fn new() -> Result<Self, Error> {
        let set_up = |e: std::io::Error| Error::from_io(&e, Operation::SetUp);
        let (mut ring, mut features) = Self::build().map_err(set_up)?;
        Self::try_out(&mut ring).map_err(set_up)?;
        Self::try_registration(&ring).map_err(set_up)?;
        let files = RingFiles::new(&ring);
        features.file = files.has_table();
        let buffers = MAX_BUFFERS + RESERVED_BUFFERS;
        features.buffers = ring.submitter().register_buffers_sparse(buffers).is_ok();
        // Missing before Linux 5.15, where the kernel's own bound applies.
        let _ = ring.submitter().register_iowq_max_workers(&mut IOWQ_WORKERS.clone());
        Ok(Self {
            sleep: Sleep::new(&ring),
            in_flight: 0,
            ring,
            polled: None,
            polls_all: false,
            ring_features: features,
            buffers: 0,
            reserved: Box::new(ReservedNumbers::new(MAX_BUFFERS as u16, RESERVED_BUFFERS as u16)),
            locked: 0,
            locked_limit: locked_memory::limit(),
            rearm: Vec::new(),
            watched: Vec::new(),
            wake: OnceCell::new(),
            files,
        })
    }

    /// This ring, which polls for every transfer, as if it had
    /// [`Flags::HIPRI`](crate::Flags::HIPRI). A thread that waits then polls as long as transfers
    /// are in flight, and sleeps without.
    #[must_use]
    pub fn polling(mut self) -> Self {
        self.polls_all = true;
        self
    }

    /// Makes one request that does nothing: a filter of system calls may allow the ring and forbid its
    /// use, which would fail requests later.
    fn try_out(ring: &mut IoUring) -> std::io::Result<()> {
        // SAFETY: the entry names no memory.
        if unsafe { ring.submission().push(&opcode::Nop::new().build()) }.is_err() {
            return Err(std::io::ErrorKind::WriteZero.into());
        }
        while ring.completion().next().is_none() {
            match ring.submit_and_wait(1) {
                Err(error) if error.raw_os_error() != Some(libc::EINTR) => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Asks which operations there are: a filter of system calls may allow the ring and forbid the call by
    /// which its files, its buffers and the descriptor for event loops are registered. Linux before 5.6 does
    /// not know the question (`EINVAL`).
    fn try_registration(ring: &IoUring) -> std::io::Result<()> {
        match ring.submitter().register_probe(&mut Probe::new()) {
            Err(error) if error.raw_os_error().is_some_and(is_of_a_filter) => Err(error),
            _ => Ok(()),
        }
    }

    fn build() -> std::io::Result<(IoUring, RingFeatures)> {
        let mut ring = Err(std::io::ErrorKind::Unsupported.into());
        for entries in ENTRIES {
            ring = Self::build_with(entries);
            let is_short_of_memory =
                ring.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::ENOMEM));
            if !is_short_of_memory {
                break;
            }
        }
        ring
    }

    fn build_with(entries: (u32, u32)) -> std::io::Result<(IoUring, RingFeatures)> {
        let (submissions, completions) = entries;
        let full_size = entries == ENTRIES[0];
        let mut plain = IoUring::builder();
        plain.setup_clamp().setup_cqsize(completions);
        let mut best = plain.clone();
        best.setup_submit_all();
        best.setup_single_issuer().setup_coop_taskrun().setup_defer_taskrun().setup_taskrun_flag();
        let mut newest = best.clone();
        newest.setup_no_sqarray();
        let of = |ring, deferred| {
            (ring, RingFeatures { full_size, deferred, ..RingFeatures::default() })
        };
        for builder in [newest, best] {
            match builder.build(submissions) {
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
                ring => return Ok(of(ring?, true)),
            }
        }
        Ok(of(plain.build(submissions)?, false))
    }

    /// A message for the user on why there is no ring; `error` is that of [`Uring::new`].
    #[must_use]
    pub fn refusal(error: Error) -> String {
        match error.errno() {
            libc::EPERM | libc::EACCES => {
                "io_uring is forbidden here (sysctl kernel.io_uring_disabled, or seccomp)".into()
            }
            libc::ENOSYS => "the kernel has no io_uring".into(),
            libc::ENOMEM => "what this user may lock of memory leaves no room for io_uring \
                             (ulimit -l)"
                .into(),
            errno => {
                let error = std::io::Error::from_raw_os_error(errno).to_string();
                let words = error.split(" (os error ").next().unwrap_or(&error);
                format!("io_uring: {words}")
            }
        }
    }

    /// The features that the kernel offered.
    #[must_use]
    pub fn offered(&self) -> RingFeatures {
        self.ring_features
    }

    #[inline]
    fn sqe(&self, transfer: &Transfer) -> squeue::Entry {
        let (fd, flags) = self.files.target(transfer.file);
        sqe::of(fd, transfer).flags(flags)
    }

    /// Pushes a request of the ring's own, after a submission if there is no room.
    fn push_sqe(&mut self, entry: &squeue::Entry) -> Result<(), Error> {
        // SAFETY: polls name no memory, and the caller of `command` keeps that of its command.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            self.submit()?;
        }
        Ok(())
    }

    fn poll_entry(fd: RawFd, token: Token, interest: Interest) -> squeue::Entry {
        let (events, multi, mark) = match interest {
            Interest::Readable => (libc::POLLIN | libc::POLLRDHUP, true, 0),
            Interest::Writable => (libc::POLLOUT, false, RING_ONCE),
        };
        opcode::PollAdd::new(types::Fd(fd), events as u32)
            .multi(multi)
            .build()
            .user_data(token | mark)
    }

    /// A descriptor that the kernel makes readable with each completion. With `DEFER_TASKRUN` the
    /// ring's own descriptor does not wake a thread that sleeps on it.
    fn make_wake(&self) -> Option<OwnedFd> {
        // Readable at first, because there may be completions already.
        let wake = eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()?;
        self.ring.submitter().register_eventfd(wake.as_raw_fd()).ok()?;
        Some(wake)
    }

    /// Pushes a `HIPRI` transfer. Without a polled ring, or with no room in it, the transfer is an
    /// ordinary one.
    ///
    /// # Safety
    /// As for [`IoQueue::push`].
    #[cold]
    unsafe fn push_polled(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull> {
        let transfer = Transfer { rw_flags: transfer.rw_flags & !libc::RWF_HIPRI, ..*transfer };
        if let Some(polled) = &mut self.polled {
            // SAFETY: as promised by the caller.
            if unsafe { polled.push(&transfer, token) } {
                return Ok(());
            }
        }
        let entry = self.sqe(&transfer).user_data(token);
        // SAFETY: as promised by the caller.
        unsafe { self.push_entry(&entry) }
    }

    /// Pushes the entry of a transfer.
    ///
    /// # Safety
    /// As for [`IoQueue::push`].
    #[inline]
    unsafe fn push_entry(&mut self, entry: &squeue::Entry) -> Result<(), QueueFull> {
        // SAFETY: as promised by the caller.
        unsafe { self.ring.submission().push(entry) }.map_err(|_| QueueFull)?;
        self.in_flight += 1;
        Ok(())
    }

    /// Submits polled transfers and polls for them; pushes to this ring those that the device
    /// refused to poll for.
    #[cold]
    fn poll_device(&mut self) -> Result<(), Error> {
        let Some(polled) = &mut self.polled else { return Ok(()) };
        polled.submit()?;
        let next = |polled: &mut Option<Box<IopollRing>>| polled.as_mut()?.next_refused();
        while let Some((transfer, token)) = next(&mut self.polled) {
            let entry = self.sqe(&transfer).user_data(token);
            // SAFETY: the transfer was pushed and not made, and its token not returned.
            if unsafe { self.push_entry(&entry) }.is_err() {
                if let Some(polled) = &mut self.polled {
                    polled.keep_refused(transfer, token);
                }
                break;
            }
        }
        if self.must_poll()
            && let Some(Some(wake)) = self.wake.get()
        {
            // Only polling completes these, so a thread must not sleep on the descriptor.
            let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
        }
        Ok(())
    }

    /// Whether transfers make progress only while this queue is polled.
    fn must_poll(&self) -> bool {
        self.polled.as_ref().is_some_and(|polled| polled.is_busy() || polled.has_refused())
    }

    fn rearm(&mut self) {
        while let Some((fd, token)) = self.rearm.pop() {
            if self.watched.contains(&(fd, token)) {
                // If the ring accepts no entry, the next `submit` or `wait` returns the reason.
                let _ = self.push_sqe(&Self::poll_entry(fd, token, Interest::Readable));
            }
        }
    }
}

// SAFETY: the kernel completes each entry once, after its last access to the memory; the ring's own
// entries have `RING_OWN` or `FD_TOKEN` in their tokens.
unsafe impl IoQueue for Uring {
    fn attach(&mut self, files: &[QueueFile<'_>]) -> Result<u32, Error> {
        let files = files.iter().map(QueueFile::descriptor).collect::<Result<Vec<_>, _>>()?;
        let first = self.files.find_free(files.len());
        let Self { ring, polled, reserved, files: attached, .. } = self;
        for (number, &(file, _)) in (first..).zip(&files) {
            let poll = || iopoll::attach(polled, number, file, !reserved.is_empty());
            if let Err(error) = attached.attach(ring, number, file, poll) {
                self.detach(first, number - first);
                return Err(error);
            }
        }
        Ok(first)
    }

    fn detach(&mut self, first: u32, count: u32) {
        for number in first..first + count {
            if let Some(polled) = &mut self.polled {
                polled.detach(number);
            }
            self.files.detach(&self.ring, number);
        }
    }

    fn polling_refusal(&self, file: u32) -> Option<&'static str> {
        self.files.polling_refusal(file)
    }

    // SAFETY: the caller keeps the memory valid until the completion was drained, and an engine
    // drains all of its completions before it drops the ring.
    #[inline]
    unsafe fn push(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull> {
        if transfer.rw_flags & libc::RWF_HIPRI != 0 || self.polls_all {
            // SAFETY: as above.
            return unsafe { self.push_polled(transfer, token) };
        }
        let entry = self.sqe(transfer).user_data(token);
        // SAFETY: as above.
        unsafe { self.push_entry(&entry) }
    }

    /// The kernel cancels a transfer that waits for the file to be ready, or in its list of work, not one that a
    /// device has. Polled ones are left to it.
    fn cancel(&mut self, token: Token) {
        unsubmitted_entries::clear(&mut self.ring, token);
        // An error means that the ring accepts no entries any more; `submit` and `wait` return it, too.
        let _ = self.push_sqe(&opcode::AsyncCancel::new(token).build().user_data(RING_OWN));
    }

    #[inline]
    fn submit(&mut self) -> Result<(), Error> {
        self.rearm();
        if let Some(Some(wake)) = self.wake.get() {
            // Cleared before the kernel's deferred work runs, because the kernel writes for the
            // first item of it only. EAGAIN: there was no completion since the last read.
            let _ = rustix::io::read(wake, &mut [0u8; 8]);
        }
        if self.polled.is_some() {
            self.poll_device()?;
        }
        let submission = self.ring.submission();
        let idle = submission.is_empty() && !submission.taskrun() && !submission.cq_overflow();
        drop(submission);
        if idle {
            return Ok(());
        }
        enter_result::checked(self.ring.submit())
    }

    #[inline]
    fn drain_completions(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        let (mut transfers, mut events) = (0, 0);
        for completion in self.ring.completion() {
            let token = completion.user_data();
            if token::is_transfer(token) {
                sink(token, completion.result());
                transfers += 1;
                continue;
            }
            if !token::is_event(token) {
                continue;
            }
            let ended = token & RING_ONCE == 0 && !cqueue::more(completion.flags());
            let token = token & !RING_ONCE;
            if ended && let Some(&watch) = self.watched.iter().find(|watch| watch.1 == token) {
                self.rearm.push(watch);
            }
            sink(token, completion.result());
            events += 1;
        }
        self.in_flight -= transfers;
        let count = transfers + events;
        match &mut self.polled {
            Some(polled) => count + polled.drain(sink),
            None => count,
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        self.rearm();
        if self.must_poll() {
            // A thread with polled transfers does not sleep: only its polling completes them.
            return self.submit();
        }
        enter_result::checked(self.sleep.sleep(&mut self.ring, timeout, self.in_flight > 0))
    }

    #[inline]
    fn has_completions(&mut self) -> bool {
        !self.ring.completion().is_empty() || self.ring.submission().taskrun() || self.must_poll()
    }

    fn events(&self) -> &dyn EventSource {
        self
    }

    fn events_mut(&mut self) -> &mut dyn EventSource {
        self
    }

    // SAFETY: the caller keeps the memory allocated for the life of the ring.
    unsafe fn register(&mut self, base: *mut u8, bytes: usize) -> Option<u16> {
        if !self.ring_features.buffers
            || u32::from(self.buffers) >= MAX_BUFFERS
            || !locked_memory::take(bytes, self.locked_limit)
        {
            return None;
        }
        let iov = [libc::iovec { iov_base: base.cast(), iov_len: bytes }];
        // SAFETY: as above; the entry is copied by the kernel.
        let done = unsafe {
            self.ring.submitter().register_buffers_update(u32::from(self.buffers), &iov, None)
        };
        if done.is_err() {
            // ENOMEM: other processes of the user have used up the limit on locked memory, so no
            // further registration is tried.
            self.ring_features.buffers = false;
            locked_memory::give_back(bytes);
            return None;
        }
        self.buffers += 1;
        self.locked += bytes;
        if let Some(polled) = &mut self.polled
            && locked_memory::take(bytes, self.locked_limit)
        {
            match polled.register(self.buffers - 1, &iov) {
                true => self.locked += bytes,
                false => locked_memory::give_back(bytes),
            }
        }
        Some(self.buffers - 1)
    }

    /// Not for a ring that polls, because transfers then go to another ring.
    fn reserve_buffers(&mut self, count: u16) -> Option<u16> {
        let can = self.ring_features.buffers && self.polled.is_none();
        if can { self.reserved.reserve(count) } else { None }
    }

    fn release_buffers(&mut self, first: u16) {
        self.reserved.release(first);
    }

    fn polled(&self) -> u64 {
        self.polled.as_ref().map_or(0, |polled| polled.completed())
    }

    fn has_stopped_polling(&self) -> bool {
        self.polled.as_ref().is_some_and(|polled| polled.has_stopped())
    }
}

impl EventSource for Uring {
    fn watch(&mut self, fd: BorrowedFd<'_>, token: Token, interest: Interest) -> Result<(), Error> {
        check_fd_token(token)?;
        debug_assert!(token & (RING_OWN | RING_ONCE) == 0);
        if interest == Interest::Readable {
            self.watched.push((fd.as_raw_fd(), token));
        }
        self.push_sqe(&Self::poll_entry(fd.as_raw_fd(), token, interest))
    }

    fn unwatch(&mut self, fd: BorrowedFd<'_>, token: Token) {
        self.watched.retain(|watch| *watch != (fd.as_raw_fd(), token));
        for token in [token, token | RING_ONCE] {
            // The poll keeps the file open until it is removed, so the removal must not be lost. An
            // error means that the ring accepts no entries any more; `submit` and `wait` return it,
            // too. `PollRemove` would leave a poll that has an event at that moment (EALREADY),
            // which is the usual case for a connection that is being closed.
            let _ = self.push_sqe(&opcode::AsyncCancel::new(token).build().user_data(RING_OWN));
        }
    }

    // SAFETY: the caller promises it for the memory of the command.
    unsafe fn command(
        &mut self,
        fd: BorrowedFd<'_>,
        op: u32,
        address: u64,
        arguments: [u8; 16],
        token: Token,
    ) -> Result<(), Error> {
        check_fd_token(token)?;
        let command = opcode::UringCmd16::new(types::Fd(fd.as_raw_fd()), op).cmd(arguments);
        self.push_sqe(&command.addr(Some(address)).build().user_data(token | RING_ONCE))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match self.wake.get_or_init(|| self.make_wake()) {
            Some(wake) => wake.as_fd(),
            // SAFETY: the ring's descriptor stays open as long as `self` exists.
            None => unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) },
        }
    }
}

impl Drop for Uring {
    /// Unregisters buffers and files. The kernel destroys a closed ring some time later; until then
    /// its buffers would count against the limit on locked memory, and its files would keep their
    /// file system busy. If that fails, on a thread other than the ring's for example, it is left
    /// to the kernel.
    fn drop(&mut self) {
        if self.locked > 0 {
            let _ = self.ring.submitter().unregister_buffers();
        }
        if self.ring_features.file {
            let _ = self.ring.submitter().unregister_files();
        }
        locked_memory::give_back(self.locked);
    }
}
