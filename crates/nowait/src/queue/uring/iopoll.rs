//! A second ring for transfers whose completion is polled for (`HIPRI`).
//!
//! Invariant: a file is attached only if its device has polled queues, it bypasses the page cache and
//! its file system can poll. While it has transfers, a waiting thread polls instead of sleeping.
//! The polled rings of this process together hold fewer transfers than a polled queue of the
//! device: a thread that submitted one more would sleep for room that only a poll can make. A
//! transfer that a device refuses because it does not poll any more is handed back, to be made by
//! interrupt.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use io_uring::{IoUring, opcode, squeue, types};
use rustix::fs::{AtFlags, FileType, OFlags, StatxFlags};

use crate::memory::bounded_counter::BoundedCounter;
use crate::queue::queue_files::NumberedFiles;
use crate::queue::uring::ring_files::register_table;
use crate::queue::uring::{MAX_BUFFERS, enter_result, sqe};
use crate::types::error::Error;
use crate::types::token::{POLLING_PROBE, Token};
use crate::types::transfer::{Outcome, Transfer, UNREGISTERED};

const ENTRIES: u32 = 128;
/// Transfers in all polled rings of this process, which may share a queue of the device.
static POLLED: BoundedCounter = BoundedCounter::new();

/// A file whose transfers are polled for.
struct PolledFile {
    /// The greatest number of transfers in all polled rings while this one adds to them; at most
    /// [`ENTRIES`].
    bound: usize,
    /// Its device has refused; no further transfer is pushed.
    stopped: bool,
}

/// The polled ring of a queue.
pub(crate) struct IopollRing {
    ring: IoUring,
    /// Transfers in the ring, with their tokens; a free place is `None`. An entry's user data is
    /// its place.
    in_ring: Vec<Option<(Transfer, Token)>>,
    free: Vec<u8>,
    /// Completions, by place, that came while a file was attached.
    early: Vec<(u64, Outcome)>,
    /// Transfers that the device refused to poll for, to be pushed to the other ring.
    refused: Vec<(Transfer, Token)>,
    /// Buffers with numbers below this are registered here, too; `None` if none can be.
    buffers: Option<u16>,
    /// A device has refused.
    has_stopped: bool,
    /// Completions drained so far.
    completed: u64,
    /// Numbers from this one on are not registered.
    registered: u32,
    /// By the numbers of the other ring.
    files: NumberedFiles<PolledFile>,
}

impl IopollRing {
    /// A polled ring without a file, or why there is none.
    pub(crate) fn new() -> Result<Self, &'static str> {
        let ring = IoUring::builder().setup_iopoll().setup_clamp().build(ENTRIES);
        let ring = ring.map_err(|_| "a ring that polls cannot be made")?;
        let registered = register_table(&ring);
        let buffers = ring.submitter().register_buffers_sparse(MAX_BUFFERS).ok().map(|()| 0);
        Ok(Self {
            ring,
            in_ring: vec![None; ENTRIES as usize],
            free: (0..ENTRIES as u8).collect(),
            early: Vec::new(),
            refused: Vec::new(),
            buffers,
            has_stopped: false,
            completed: 0,
            registered,
            files: NumberedFiles::new(),
        })
    }

    /// Attaches the file with this number in the other ring, whose device has room for `room` polled
    /// transfers; else the reason.
    pub(crate) fn attach(
        &mut self,
        number: u32,
        file: BorrowedFd<'_>,
        room: usize,
    ) -> Result<(), &'static str> {
        let submitter = self.ring.submitter();
        if number >= self.registered
            || submitter.register_files_update(number, &[file.as_raw_fd()]).is_err()
        {
            return Err("the ring that polls has no room for another file");
        }
        // The other half is left to other processes.
        let bound = (room / 2).min(ENTRIES as usize);
        self.files.put(number, PolledFile { bound, stopped: false });
        if self.file_system_polls(number) {
            return Ok(());
        }
        self.detach(number);
        Err("its file system cannot poll")
    }

    /// Forgets the file with this number, if it is attached. No transfer of it is in the ring.
    pub(crate) fn detach(&mut self, number: u32) {
        if self.files.take(number).is_some() {
            // The number is registered, so the kernel has no reason to refuse.
            let _ = self.ring.submitter().register_files_update(number, &[-1]);
        }
    }

    /// Whether a read of 0 bytes succeeds: some file systems cannot poll even if their device can,
    /// and fail with `EOPNOTSUPP`.
    fn file_system_polls(&mut self, number: u32) -> bool {
        let nothing = opcode::Read::new(types::Fixed(number), std::ptr::null_mut(), 0);
        // SAFETY: no memory is named.
        let pushed =
            unsafe { self.ring.submission().push(&nothing.build().user_data(POLLING_PROBE)) };
        if pushed.is_err() {
            return false;
        }
        let mut outcome = None;
        while outcome.is_none() && self.ring.submit_and_wait(1).is_ok() {
            for completion in self.ring.completion() {
                match completion.user_data() {
                    POLLING_PROBE => outcome = Some(completion.result()),
                    place => self.early.push((place, completion.result())),
                }
            }
        }
        outcome == Some(0)
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
        let Some(file) = self.files.get(transfer.file) else { return false };
        if file.stopped || !POLLED.take(1, file.bound) {
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
        sqe::of(types::Fd(transfer.file as RawFd), &transfer).flags(squeue::Flags::FIXED_FILE)
    }

    /// Submits the pushed transfers, and polls the device for completions.
    pub(crate) fn submit(&mut self) -> Result<(), Error> {
        if !self.is_busy() {
            return Ok(());
        }
        enter_result::checked(self.ring.submit())
    }

    /// Passes all completions to `sink`; returns their number. Refused transfers are not completions:
    /// they are for [`IopollRing::next_refused`].
    pub(crate) fn drain(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        let (mut count, mut ended) = (0, 0);
        let early = self.early.drain(..);
        let new = self.ring.completion().map(|it| (it.user_data(), it.result()));
        for (place, outcome) in early.chain(new) {
            let in_ring = self.in_ring.get_mut(place as usize);
            let Some((transfer, token)) = in_ring.and_then(Option::take) else { continue };
            self.free.push(place as u8);
            ended += 1;
            if outcome == -libc::EOPNOTSUPP {
                self.has_stopped = true;
                if let Some(file) = self.files.get_mut(transfer.file) {
                    file.stopped = true;
                }
                self.refused.push((transfer, token));
                continue;
            }
            sink(token, outcome);
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

    /// Whether a device has refused a transfer.
    pub(crate) fn has_stopped(&self) -> bool {
        self.has_stopped
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
        let _ = self.ring.submitter().unregister_files();
        POLLED.give_back(self.busy());
    }
}

/// Attaches a file to the ring that polls, which is made for the first one, or says why that cannot be.
/// A ring for which a driver `has_reserved` numbers of buffers does not poll: the driver registers its
/// memory there only.
pub(crate) fn attach(
    polled: &mut Option<Box<IopollRing>>,
    number: u32,
    file: BorrowedFd<'_>,
    has_reserved: bool,
) -> Result<(), &'static str> {
    let room = room_for_polled(file)?;
    if has_reserved {
        return Err("its thread serves a block device");
    }
    let polled = match polled {
        Some(polled) => polled,
        // Buffers that are registered already have no numbers there.
        none => none.insert(Box::new(IopollRing::new()?)),
    };
    polled.attach(number, file, room)
}

/// The number of requests that a polled queue of the device of `file` holds, or why it is not to be
/// polled (sysfs-block in the kernel's documentation, `io_poll` and `nr_requests`).
fn room_for_polled(file: BorrowedFd<'_>) -> Result<usize, &'static str> {
    let flags = rustix::fs::fcntl_getfl(file).unwrap_or(OFlags::empty());
    if !flags.contains(OFlags::DIRECT) {
        return Err("it is read and written through the page cache");
    }
    room_in_queue(file)
        .ok_or("its device has no queues for polling (sysfs: queue/io_poll is not 1)")
}

fn room_in_queue(file: BorrowedFd<'_>) -> Option<usize> {
    let basic = StatxFlags::BASIC_STATS;
    let stat = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, basic).ok()?;
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
