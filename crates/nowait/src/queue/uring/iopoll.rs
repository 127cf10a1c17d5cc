//! A second ring for transfers whose completion is polled for (`HIPRI`).
//!
//! Invariant: it exists only if the device has polled queues, the file bypasses the page cache and
//! its file system can poll. While it has transfers, a waiting thread polls instead of sleeping.
//! The polled rings of this process together hold fewer transfers than a polled queue of the
//! device: a thread that submitted one more would sleep for room that only a poll can make. A
//! transfer that a device refuses because it does not poll any more is handed back, to be made by
//! interrupt.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use io_uring::{IoUring, opcode, squeue, types};
use rustix::fs::{AtFlags, FileType, OFlags, StatxFlags};

use crate::memory::bounded_counter::BoundedCounter;
use crate::queue::Token;
use crate::queue::uring::{MAX_BUFFERS, enter_result, sqe};
use crate::types::error::Error;
use crate::types::transfer::{Outcome, Transfer, UNREGISTERED};

const ENTRIES: u32 = 128;
/// Transfers in all polled rings of this process, which may share a queue of the device.
static POLLED: BoundedCounter = BoundedCounter::new();

/// The polled ring of a queue.
pub(crate) struct IopollRing {
    ring: IoUring,
    /// Transfers in the ring, with their tokens; a free place is `None`. An entry's user data is
    /// its place.
    in_ring: Vec<Option<(Transfer, Token)>>,
    free: Vec<u8>,
    /// Transfers that the device refused to poll for, to be pushed to the other ring.
    refused: Vec<(Transfer, Token)>,
    /// The device has refused; no further transfer is pushed.
    stopped: bool,
    registered_files: bool,
    /// Buffers with numbers below this are registered here, too; `None` if none can be.
    buffers: Option<u16>,
    /// The greatest number of transfers in all polled rings; at most [`ENTRIES`].
    bound: usize,
    /// Completions drained so far.
    completed: u64,
    files: Arc<[OwnedFd]>,
}

impl IopollRing {
    /// A polled ring for `files`, if the devices of all of them have polled queues; else the
    /// reason.
    pub(crate) fn for_device_of(files: &Arc<[OwnedFd]>) -> Result<Self, &'static str> {
        const NO_FILE: &str = "there is no file";
        let rooms = files.iter().map(room_for_polled).collect::<Result<Vec<_>, _>>()?;
        // The other half is left to other processes.
        let bound = (rooms.into_iter().min().ok_or(NO_FILE)? / 2).min(ENTRIES as usize);
        let ring = IoUring::builder().setup_iopoll().setup_clamp().build(ENTRIES);
        let ring = ring.map_err(|_| "a ring that polls cannot be made")?;
        let numbers: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
        let registered_files = ring.submitter().register_files(&numbers).is_ok();
        let buffers = ring.submitter().register_buffers_sparse(MAX_BUFFERS).ok().map(|()| 0);
        let mut polled = Self {
            ring,
            in_ring: vec![None; ENTRIES as usize],
            free: (0..ENTRIES as u8).collect(),
            refused: Vec::new(),
            stopped: false,
            registered_files,
            buffers,
            bound,
            completed: 0,
            files: files.clone(),
        };
        match (0..polled.files.len()).all(|file| polled.file_system_polls(file)) {
            true => Ok(polled),
            false => Err("its file system cannot poll"),
        }
    }

    /// Whether a read of 0 bytes succeeds: some file systems cannot poll even if their device can,
    /// and fail with `EOPNOTSUPP`.
    fn file_system_polls(&mut self, file: usize) -> bool {
        let fd = sqe::fd_of(&self.files, file);
        let nothing = opcode::Read::new(fd, std::ptr::null_mut(), 0).build();
        // SAFETY: no memory is named.
        unsafe { self.ring.submission().push(&nothing) }.is_ok()
            && self.ring.submit_and_wait(1).is_ok()
            && self.ring.completion().next().is_some_and(|completion| completion.result() == 0)
    }

    /// Transfers in the ring.
    fn busy(&self) -> usize {
        self.in_ring.len() - self.free.len()
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.busy() > 0
    }

    pub(crate) fn completed(&self) -> u64 {
        self.completed
    }

    /// Pushes a transfer; false at the bound, because the device might have no room for it, and
    /// when the device has stopped polling.
    ///
    /// # Safety
    /// As for `IoQueue::push`.
    pub(crate) unsafe fn push(&mut self, transfer: &Transfer, token: Token) -> bool {
        if self.stopped || !POLLED.take(1, self.bound) {
            return false;
        }
        let Some(place) = self.free.pop() else {
            POLLED.give_back(1);
            return false;
        };
        let entry = self.entry(transfer).user_data(u64::from(place));
        // SAFETY: as promised by the caller.
        let pushed = unsafe { self.ring.submission().push(&entry) }.is_ok();
        if pushed {
            self.in_ring[usize::from(place)] = Some((*transfer, token));
        } else {
            self.free.push(place);
            POLLED.give_back(1);
        }
        pushed
    }

    /// Registers the memory of `iov` under the number that it has in the other ring. After a failure
    /// no further memory is registered: its numbers do not follow.
    pub(crate) fn register(&mut self, number: u16, iov: &[libc::iovec]) -> bool {
        if self.buffers != Some(number) {
            return false;
        }
        // SAFETY: the caller's memory stays allocated for the life of the ring, as for
        // `IoQueue::register`; the entry is copied by the kernel.
        let done =
            unsafe { self.ring.submitter().register_buffers_update(u32::from(number), iov, None) };
        if done.is_ok() {
            self.buffers = Some(number + 1);
        }
        done.is_ok()
    }

    fn entry(&self, transfer: &Transfer) -> squeue::Entry {
        let is_registered = self.buffers.is_some_and(|count| transfer.buffer < count);
        let buffer = if is_registered { transfer.buffer } else { UNREGISTERED };
        let transfer = Transfer { buffer, ..*transfer };
        let file = transfer.file;
        let (fd, flags) = match self.registered_files {
            true => (types::Fd(RawFd::from(file)), squeue::Flags::FIXED_FILE),
            false => (sqe::fd_of(&self.files, usize::from(file)), squeue::Flags::empty()),
        };
        sqe::of(fd, &transfer).flags(flags)
    }

    /// Submits the pushed transfers, and polls the device for completions.
    pub(crate) fn submit(&mut self) -> Result<(), Error> {
        if !self.is_busy() {
            return Ok(());
        }
        enter_result::checked(self.ring.submit())
    }

    /// Passes all completions to `sink`; returns their number. Refused transfers are no completions:
    /// they are for [`IopollRing::next_refused`].
    pub(crate) fn drain(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        let (mut count, mut ended) = (0, 0);
        for completion in self.ring.completion() {
            let place = completion.user_data() as u8;
            let Some((transfer, token)) =
                self.in_ring.get_mut(usize::from(place)).and_then(Option::take)
            else {
                continue;
            };
            self.free.push(place);
            ended += 1;
            if completion.result() == -libc::EOPNOTSUPP {
                self.stopped = true;
                self.refused.push((transfer, token));
                continue;
            }
            sink(token, completion.result());
            count += 1;
        }
        if ended > 0 {
            POLLED.give_back(ended);
        }
        self.completed += count as u64;
        count
    }

    /// A transfer that the device refused to poll for; it has not been made.
    pub(crate) fn next_refused(&mut self) -> Option<(Transfer, Token)> {
        self.refused.pop()
    }

    /// Whether the device has refused a transfer.
    pub(crate) fn has_stopped(&self) -> bool {
        self.stopped
    }

    pub(crate) fn has_refused(&self) -> bool {
        !self.refused.is_empty()
    }

    /// Puts a refused transfer back, for which the other ring has no room yet.
    pub(crate) fn keep_refused(&mut self, transfer: Transfer, token: Token) {
        self.refused.push((transfer, token));
    }
}

impl Drop for IopollRing {
    /// Unregisters buffers and files, as the other ring does.
    fn drop(&mut self) {
        let _ = self.ring.submitter().unregister_buffers();
        if self.registered_files {
            let _ = self.ring.submitter().unregister_files();
        }
        POLLED.give_back(self.busy());
    }
}

/// The number of requests that a polled queue of the device of `file` holds, or why it is not to be
/// polled (sysfs-block in the kernel's documentation, `io_poll` and `nr_requests`).
fn room_for_polled(file: &OwnedFd) -> Result<usize, &'static str> {
    let flags = rustix::fs::fcntl_getfl(file).unwrap_or(OFlags::empty());
    if !flags.contains(OFlags::DIRECT) {
        return Err("it is read and written through the page cache");
    }
    room_in_queue(file)
        .ok_or("its device has no queues for polling (sysfs: queue/io_poll is not 1)")
}

fn room_in_queue(file: &OwnedFd) -> Option<usize> {
    let basic = StatxFlags::BASIC_STATS;
    let stat = rustix::fs::statx(file.as_fd(), "", AtFlags::EMPTY_PATH, basic).ok()?;
    let block = FileType::from_raw_mode(stat.stx_mode.into()) == FileType::BlockDevice;
    let (major, minor) = match block {
        true => (stat.stx_rdev_major, stat.stx_rdev_minor),
        false => (stat.stx_dev_major, stat.stx_dev_minor),
    };
    // The queue of a partition is one directory higher.
    ["queue", "../queue"].iter().find_map(|queue| {
        let number = |name: &str| -> Option<usize> {
            let path = format!("/sys/dev/block/{major}:{minor}/{queue}/{name}");
            std::fs::read_to_string(path).ok()?.trim().parse().ok()
        };
        (number("io_poll")? == 1).then(|| number("nr_requests"))?
    })
}
