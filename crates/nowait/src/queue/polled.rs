//! A second ring for transfers whose completion is polled for (`HIPRI`).
//!
//! Invariant: it exists only where the device has polled queues and the file bypasses the page
//! cache; then whoever waits looks again and again instead of sleeping.
//! Knows: ring_entry. Known by: uring.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use io_uring::{IoUring, types};
use rustix::fs::{AtFlags, FileType, OFlags, StatxFlags};

use super::{QueueFull, Token, ring_entry};
use crate::error::{Doing, Error};
use crate::io::{Outcome, Transfer, UNREGISTERED};

const ENTRIES: u32 = 128;

/// The polled ring of a queue.
pub(super) struct Polled {
    ring: IoUring,
    /// Transfers in the ring.
    busy: usize,
    files: Vec<OwnedFd>,
}

impl Polled {
    /// A polled ring for `files`, if the devices of all of them have polled queues.
    pub(super) fn for_device_of(files: &[OwnedFd]) -> Option<Self> {
        let polls = |file: &OwnedFd| {
            let flags = rustix::fs::fcntl_getfl(file);
            flags.is_ok_and(|flags| flags.contains(OFlags::DIRECT)) && has_polled_queues(file)
        };
        if !files.iter().all(polls) {
            return None;
        }
        let ring = IoUring::builder().setup_iopoll().setup_clamp().build(ENTRIES).ok()?;
        let files = files.iter().map(OwnedFd::try_clone).collect::<Result<_, _>>().ok()?;
        Some(Self { ring, busy: 0, files })
    }

    pub(super) fn is_busy(&self) -> bool {
        self.busy > 0
    }

    /// Places a transfer.
    ///
    /// # Safety
    /// As for `Queue::place`.
    pub(super) unsafe fn place(
        &mut self,
        transfer: &Transfer,
        token: Token,
    ) -> Result<(), QueueFull> {
        // Buffers are registered with the other ring.
        let transfer = Transfer { buffer: UNREGISTERED, ..*transfer };
        let fd = self.files.get(usize::from(transfer.file)).map_or(-1, AsRawFd::as_raw_fd);
        let fd = types::Fd(fd);
        let entry = ring_entry::of(fd, &transfer).user_data(token);
        // SAFETY: as promised by the caller.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| QueueFull)?;
        self.busy += 1;
        Ok(())
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
        self.busy -= count;
        count
    }
}

/// What sysfs says of the queue of the device that `file` is, or lies on.
fn has_polled_queues(file: &OwnedFd) -> bool {
    let basic = StatxFlags::BASIC_STATS;
    let Ok(stat) = rustix::fs::statx(file.as_fd(), "", AtFlags::EMPTY_PATH, basic) else {
        return false;
    };
    let block = FileType::from_raw_mode(stat.stx_mode.into()) == FileType::BlockDevice;
    let (major, minor) = match block {
        true => (stat.stx_rdev_major, stat.stx_rdev_minor),
        false => (stat.stx_dev_major, stat.stx_dev_minor),
    };
    // A partition has its queue one directory higher.
    ["queue", "../queue"].iter().any(|queue| {
        std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/{queue}/io_poll"))
            .is_ok_and(|text| text.trim() == "1")
    })
}
