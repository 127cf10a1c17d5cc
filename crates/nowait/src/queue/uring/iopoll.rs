//! A second ring for transfers whose completion is polled for (`HIPRI`).
//!
//! Invariant: it exists only if the device has polled queues, the file bypasses the page cache and
//! its file system can poll. While it has transfers, a waiting thread polls instead of sleeping.
//! The polled rings of this process together hold fewer transfers than a polled queue of the
//! device: a thread that submitted one more would sleep for room that only a poll can make.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use io_uring::{IoUring, opcode};
use rustix::fs::{AtFlags, FileType, OFlags, StatxFlags};

use crate::memory::bounded_counter::BoundedCounter;
use crate::queue::Token;
use crate::queue::uring::{enter_result, sqe};
use crate::types::error::Error;
use crate::types::transfer::{Outcome, Transfer, UNREGISTERED};

const ENTRIES: u32 = 128;
/// Transfers in all polled rings of this process, which may share a queue of the device.
static POLLED: BoundedCounter = BoundedCounter::new();

/// The polled ring of a queue.
pub(crate) struct IopollRing {
    ring: IoUring,
    /// Transfers in the ring.
    busy: usize,
    /// The greatest number of transfers in all polled rings; at most [`ENTRIES`].
    bound: usize,
    /// Completions drained so far.
    completed: u64,
    files: Arc<[OwnedFd]>,
}

impl IopollRing {
    /// A polled ring for `files`, if the devices of all of them have polled queues.
    pub(crate) fn for_device_of(files: &Arc<[OwnedFd]>) -> Option<Self> {
        let rooms = files.iter().map(room_for_polled).collect::<Option<Vec<_>>>()?;
        // The other half is left to other processes.
        let bound = (rooms.into_iter().min()? / 2).min(ENTRIES as usize);
        let ring = IoUring::builder().setup_iopoll().setup_clamp().build(ENTRIES).ok()?;
        let mut polled = Self { ring, busy: 0, bound, completed: 0, files: files.clone() };
        (0..polled.files.len()).all(|file| polled.file_system_polls(file)).then_some(polled)
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

    pub(crate) fn is_busy(&self) -> bool {
        self.busy > 0
    }

    pub(crate) fn completed(&self) -> u64 {
        self.completed
    }

    /// Pushes a transfer; false at the bound, because the device might have no room for it.
    ///
    /// # Safety
    /// As for `IoQueue::push`.
    pub(crate) unsafe fn push(&mut self, transfer: &Transfer, token: Token) -> bool {
        if !POLLED.take(1, self.bound) {
            return false;
        }
        // Buffers are registered with the other ring.
        let transfer = Transfer { buffer: UNREGISTERED, ..*transfer };
        let fd = sqe::fd_of(&self.files, usize::from(transfer.file));
        let entry = sqe::of(fd, &transfer).user_data(token);
        // SAFETY: as promised by the caller.
        let pushed = unsafe { self.ring.submission().push(&entry) }.is_ok();
        match pushed {
            true => self.busy += 1,
            false => POLLED.give_back(1),
        }
        pushed
    }

    /// Submits the pushed transfers, and polls the device for completions.
    pub(crate) fn submit(&mut self) -> Result<(), Error> {
        if self.busy == 0 {
            return Ok(());
        }
        enter_result::checked(self.ring.submit())
    }

    /// Passes all completions to `sink`; returns their number.
    pub(crate) fn drain(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        let mut count = 0;
        for completion in self.ring.completion() {
            sink(completion.user_data(), completion.result());
            count += 1;
        }
        if count > 0 {
            POLLED.give_back(count);
        }
        self.busy -= count;
        self.completed += count as u64;
        count
    }
}

impl Drop for IopollRing {
    fn drop(&mut self) {
        POLLED.give_back(self.busy);
    }
}

/// The number of requests that a polled queue of the device of `file` holds; `None` if it has no
/// such queue (sysfs-block in the kernel's documentation, `io_poll` and `nr_requests`) or the file
/// uses the page cache.
fn room_for_polled(file: &OwnedFd) -> Option<usize> {
    let flags = rustix::fs::fcntl_getfl(file).ok()?;
    if !flags.contains(OFlags::DIRECT) {
        return None;
    }
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
