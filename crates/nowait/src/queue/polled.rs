//! A second ring for transfers whose completion is polled for (`HIPRI`).
//!
//! Invariant: it exists only where the device has polled queues, the file bypasses the page cache
//! and its file system can poll; then whoever waits looks again and again instead of sleeping. What
//! is in the polled rings of this process is less than what a polled queue of the device holds:
//! whoever submits one more would sleep for room that only a poll makes.
//! Knows: ring_entry. Known by: uring.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use io_uring::{IoUring, opcode, types};
use rustix::fs::{AtFlags, FileType, OFlags, StatxFlags};

use super::{Token, ring_entry};
use crate::error::{Doing, Error};
use crate::io::{Outcome, Transfer, UNREGISTERED};

const ENTRIES: u32 = 128;
/// Transfers in all polled rings of this process: they may be on the same queue of the device.
static POLLED: AtomicUsize = AtomicUsize::new(0);

/// The polled ring of a queue.
pub(super) struct Polled {
    ring: IoUring,
    /// Transfers in the ring.
    busy: usize,
    /// Transfers in all polled rings, at most: no more than the entries of this one.
    bound: usize,
    /// Transfers reaped.
    reaped: u64,
    files: Vec<OwnedFd>,
}

impl Polled {
    /// A polled ring for `files`, if the devices of all of them have polled queues.
    pub(super) fn for_device_of(files: &[OwnedFd]) -> Option<Self> {
        let rooms = files.iter().map(room_for_polled).collect::<Option<Vec<_>>>()?;
        // Half is left to other processes.
        let bound = (rooms.into_iter().min()? / 2).min(ENTRIES as usize);
        let ring = IoUring::builder().setup_iopoll().setup_clamp().build(ENTRIES).ok()?;
        let files = files.iter().map(OwnedFd::try_clone).collect::<Result<Vec<_>, _>>().ok()?;
        let mut polled = Self { ring, busy: 0, bound, reaped: 0, files };
        (0..polled.files.len()).all(|file| polled.file_system_polls(file)).then_some(polled)
    }

    fn fd(&self, file: usize) -> types::Fd {
        types::Fd(self.files.get(file).map_or(-1, AsRawFd::as_raw_fd))
    }

    /// Whether a read of nothing is taken: some file systems cannot poll, whatever their device can,
    /// and answer `EOPNOTSUPP`.
    fn file_system_polls(&mut self, file: usize) -> bool {
        let nothing = opcode::Read::new(self.fd(file), std::ptr::null_mut(), 0).build();
        // SAFETY: no memory is named.
        unsafe { self.ring.submission().push(&nothing) }.is_ok()
            && self.ring.submit_and_wait(1).is_ok()
            && self.ring.completion().next().is_some_and(|completion| completion.result() == 0)
    }

    pub(super) fn is_busy(&self) -> bool {
        self.busy > 0
    }

    pub(super) fn reaped(&self) -> u64 {
        self.reaped
    }

    /// Places a transfer; false where it must not, because the device might have no room for it.
    ///
    /// # Safety
    /// As for `Queue::place`.
    pub(super) unsafe fn place(&mut self, transfer: &Transfer, token: Token) -> bool {
        if POLLED.fetch_add(1, Ordering::Relaxed) >= self.bound {
            POLLED.fetch_sub(1, Ordering::Relaxed);
            return false;
        }
        // Buffers are registered with the other ring.
        let transfer = Transfer { buffer: UNREGISTERED, ..*transfer };
        let fd = self.fd(usize::from(transfer.file));
        let entry = ring_entry::of(fd, &transfer).user_data(token);
        // SAFETY: as promised by the caller.
        let placed = unsafe { self.ring.submission().push(&entry) }.is_ok();
        match placed {
            true => self.busy += 1,
            false => _ = POLLED.fetch_sub(1, Ordering::Relaxed),
        }
        placed
    }

    /// Hands over what was placed, and looks for what has ended.
    pub(super) fn kick(&mut self) -> Result<(), Error> {
        if self.busy == 0 {
            return Ok(());
        }
        match self.ring.submit() {
            Ok(_) => Ok(()),
            Err(error) if ring_entry::is_transient(&error) => Ok(()),
            Err(error) => Err(Error::from_io(&error, Doing::Wait)),
        }
    }

    pub(super) fn reap(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        let mut count = 0;
        for completion in self.ring.completion() {
            sink(completion.user_data(), completion.result());
            count += 1;
        }
        if count > 0 {
            POLLED.fetch_sub(count, Ordering::Relaxed);
        }
        self.busy -= count;
        self.reaped += count as u64;
        count
    }
}

impl Drop for Polled {
    fn drop(&mut self) {
        POLLED.fetch_sub(self.busy, Ordering::Relaxed);
    }
}

/// How many requests a polled queue holds of the device that `file` is, or lies on; `None` if it has
/// no such queue (sysfs-block in the kernel's documentation, `io_poll` and `nr_requests`) or the file
/// goes through the page cache.
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
    // A partition has its queue one directory higher.
    ["queue", "../queue"].iter().find_map(|queue| {
        let number = |name: &str| -> Option<usize> {
            let path = format!("/sys/dev/block/{major}:{minor}/{queue}/{name}");
            std::fs::read_to_string(path).ok()?.trim().parse().ok()
        };
        (number("io_poll")? == 1).then(|| number("nr_requests"))?
    })
}
