//! The state of a simulated device: its time, its transfers in flight, its power.
//!
//! Invariant: a transfer's memory is accessed only between its start and its completion; each
//! transfer completes once. An invalid request (not aligned, behind the end, with a token that is
//! in flight) is recorded as a violation.
#![allow(unsafe_code)]

use std::collections::BinaryHeap;

use crate::sim::fault::{Call, Fault, Faults};
use crate::sim::random::Random;
use crate::sim::sim_disk::SimDisk;
use crate::sim_hooks::injected_bug;
use crate::sim_hooks::injected_bug::EngineBug;
use crate::types::alignment::{Alignment, round_down};
use crate::types::byte_range::ByteRange;
use crate::types::iovec;
use crate::types::iovec::IoSegment;
use crate::types::token::Token;
use crate::types::transfer::{Outcome, Transfer};

/// The properties of a simulated device.
#[derive(Clone, Copy, Debug)]
pub struct SimOptions {
    /// The seed of the device's random numbers.
    pub seed: u64,
    /// Size of the device in bytes.
    pub bytes: u64,
    /// The alignment that it requires of direct I/O.
    pub align: Alignment,
    /// Bytes that a power cut does not tear, a power of two from 512 to 4096.
    pub unit: u32,
    /// Blocks of 4096 bytes that can be allocated at the same time.
    pub capacity: u64,
    /// It is a file, whose size can be changed.
    pub grows: bool,
    /// It can deallocate storage.
    pub punches: bool,
    /// It can zero a range and keep its storage.
    pub zeroes: bool,
    /// It supports `RWF_NOWAIT`.
    pub nowait: bool,
    /// It makes several durable writes durable together.
    pub shares_syncs: bool,
    /// The greatest duration of an operation, in virtual nanoseconds.
    pub latency: u64,
    /// How many of 65536 calls that may wait yield to other tasks.
    pub pauses: u16,
}

impl SimOptions {
    /// A device of `bytes` bytes in blocks of 4096 that supports everything, never runs out of
    /// space and never yields; an operation takes up to 1000 nanoseconds.
    #[must_use]
    pub fn able(bytes: u64) -> Self {
        Self {
            seed: 1,
            bytes,
            align: Alignment { memory: 512, offset: 4096, read_offset: 4096 },
            unit: 512,
            capacity: u64::MAX,
            grows: false,
            punches: true,
            zeroes: true,
            nowait: true,
            shares_syncs: true,
            latency: 1000,
            pauses: 0,
        }
    }
}

/// Whether the device completes operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PowerState {
    On,
    /// No operation completes.
    Silent,
    /// Every operation fails with `EIO`.
    Off,
}

/// The next step of a transfer in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The bytes of the transfer up to this one move.
    Moving(u32),
    /// The transfer completes.
    Ended(Outcome),
    /// The bytes move after the completion, because of an injected bug.
    Late,
}

pub(crate) struct InFlight {
    pub(crate) due: u64,
    order: u64,
    pub(crate) queue: usize,
    token: Token,
    transfer: Transfer,
    moved: u32,
    /// The numbers of the changes that it has made: the first, and the one after the last.
    changes: (u64, u64),
    stage: Stage,
}

// SAFETY: the caller of `push` promised that the memory stays valid and is not accessed otherwise
// until the completion was drained; the transfer may run on any thread.
unsafe impl Send for InFlight {}

impl PartialEq for InFlight {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for InFlight {}

impl PartialOrd for InFlight {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for InFlight {
    /// Reversed, so that the earliest transfer is the greatest.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (other.due, other.order).cmp(&(self.due, self.order))
    }
}

/// The way by which a transfer reaches the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccessPath {
    /// A queue, where a misaligned transfer is a violation.
    Queue,
    /// A direct call. A misaligned one takes the page cache, which is a violation but for a write
    /// to the block in which the file ends.
    Direct,
    /// The page cache.
    Buffered,
}

/// The completion of a transfer: its token, its outcome, and the changes that it has made.
pub(crate) type Report = (Token, Outcome, (u64, u64));

pub(crate) struct SimState {
    pub(crate) options: SimOptions,
    pub(crate) random: Random,
    pub(crate) faults: Faults,
    pub(crate) media: SimDisk,
    /// The read-only files, with the numbers from 1 on.
    pub(crate) below: Vec<SimDisk>,
    pub(crate) now: u64,
    pub(crate) power: PowerState,
    /// Power cuts so far.
    pub(crate) power_cuts: u64,
    pub(crate) in_flight: BinaryHeap<InFlight>,
    /// The number of transfers that were ever started.
    started: u64,
    /// The completions of each queue; `None` for a removed queue.
    pub(crate) ended: Vec<Option<Vec<Report>>>,
    pub(crate) ops: u64,
    /// The value of [`Faults::once`] that was already applied to a queue.
    spent: Option<(u64, Fault)>,
    /// Bit `n`: errno `n` was injected; bit 0: a transfer was cut short.
    pub(crate) injected: u128,
    pub(crate) violations: Vec<String>,
}

impl SimState {
    pub(crate) fn new(options: SimOptions) -> Self {
        Self {
            options,
            random: Random::new(options.seed),
            faults: Faults::default(),
            media: SimDisk::new(options.bytes, options.unit, options.capacity),
            below: Vec::new(),
            now: 0,
            power: PowerState::On,
            power_cuts: 0,
            in_flight: BinaryHeap::new(),
            started: 0,
            ended: Vec::new(),
            ops: 0,
            spent: None,
            injected: 0,
            violations: Vec::new(),
        }
    }

    /// New contents for the device that begin with `own`.
    pub(crate) fn new_media(&mut self, own: &[u8]) -> SimDisk {
        if self.options.grows {
            self.options.bytes = own.len() as u64;
        }
        let SimOptions { bytes, unit, capacity, .. } = self.options;
        SimDisk::holding(own, bytes, unit, capacity)
    }

    /// The file with this number: the device itself, or a read-only file.
    pub(crate) fn file(&self, number: u16) -> &SimDisk {
        let below = usize::from(number).checked_sub(1).and_then(|below| self.below.get(below));
        below.unwrap_or(&self.media)
    }

    pub(crate) fn violation(&mut self, what: String) {
        self.violations.push(what);
    }

    fn fault(&mut self, call: Call) -> Option<Fault> {
        self.ops += 1;
        let fault = self.faults.draw(self.ops, call, &mut self.random);
        match fault {
            Some(Fault::Errno(errno)) => self.injected |= 1 << errno.clamp(0, 127),
            Some(_) => self.injected |= 1,
            None => {}
        }
        fault
    }

    /// Whether `fault` happens to a queue now: as [`Faults::once`], or with probability `often` /
    /// 65536.
    pub(crate) fn applies_to_queue(&mut self, fault: Fault, often: u16) -> bool {
        if let Some(once) = self.faults.once
            && once.1 == fault
            && self.ops + 1 >= once.0
            && self.spent != self.faults.once
        {
            self.spent = self.faults.once;
            return true;
        }
        self.random.chance(often)
    }

    pub(crate) fn check(&mut self, call: Call) -> Result<(), i32> {
        match self.fault(call) {
            Some(Fault::Errno(errno)) => Err(errno),
            _ => Ok(()),
        }
    }

    fn due(&mut self) -> u64 {
        self.now + 1 + self.random.below(self.options.latency)
    }

    /// # Safety
    /// As for [`crate::IoQueue::push`].
    pub(crate) unsafe fn start(&mut self, queue: usize, transfer: Transfer, token: Token) {
        let again = self.in_flight.iter().any(|other| {
            other.queue == queue && other.token == token && other.stage != Stage::Late
        });
        if again {
            self.violation(format!("token {token} was pushed a second time"));
        }
        self.started += 1;
        let mut stop = transfer.len;
        let block = self.options.align.offset.max(512);
        if transfer.len > block && self.random.below(16) == 0 {
            stop = block * (1 + self.random.below(u64::from((transfer.len - 1) / block)) as u32);
        }
        let mut stage = Stage::Moving(stop);
        if self.power == PowerState::Off {
            stage = Stage::Ended(-libc::EIO);
        }
        if injected_bug::injected(EngineBug::CompleteBeforeData) && transfer.segments == 0 {
            self.report(queue, (token, transfer.len as Outcome, (0, 0)));
            stage = Stage::Late;
        } else if !transfer.write && self.random.below(4) == 0 {
            // The memory of a read in flight holds undefined bytes.
            let size = self.file(transfer.file as u16).size();
            let inside = size.saturating_sub(transfer.pos).min(transfer.len.into());
            let one = [IoSegment { base: transfer.base, len: transfer.len as usize }];
            // SAFETY: as promised by the caller.
            let segments = unsafe { segments(&transfer, &one) };
            // SAFETY: the part lies in the transfer's memory.
            iovec::slice_segments(segments, 0, inside, |part| unsafe {
                part.base.write_bytes(0xa5, part.len)
            });
        }
        let due = if self.power == PowerState::Off { self.now } else { self.due() };
        let order = self.started;
        let (moved, changes) = (0, (0, 0));
        self.in_flight.push(InFlight { due, order, queue, token, transfer, moved, changes, stage });
    }

    fn report(&mut self, queue: usize, report: Report) {
        if let Some(Some(ended)) = self.ended.get_mut(queue) {
            ended.push(report);
        }
    }

    /// Advances the time to `until`, and makes the steps that are due.
    pub(crate) fn advance(&mut self, until: u64) {
        self.now = self.now.max(until);
        if self.power == PowerState::Silent {
            return;
        }
        while self.in_flight.peek().is_some_and(|flight| flight.due <= self.now) {
            let Some(flight) = self.in_flight.pop() else { return };
            self.step(flight);
        }
    }

    /// Makes the next step of a transfer.
    fn step(&mut self, mut flight: InFlight) {
        let stop = match flight.stage {
            Stage::Ended(outcome) => {
                return self.report(flight.queue, (flight.token, outcome, flight.changes));
            }
            Stage::Moving(stop) => stop,
            Stage::Late => flight.transfer.len,
        };
        let (transfer, from) = (flight.transfer, flight.moved);
        // SAFETY: as promised to `start`; only an injected bug lets a transfer complete before
        // this.
        let (outcome, changes) = unsafe { self.perform(&transfer, from, stop, AccessPath::Queue) };
        if changes.1 > 0 {
            let first = if flight.changes.1 > 0 { flight.changes.0 } else { changes.0 };
            flight.changes = (first, changes.1);
        }
        if flight.stage == Stage::Late {
            return;
        }
        if outcome == (stop - from) as Outcome && stop < transfer.len {
            flight.moved = stop;
            flight.stage = Stage::Moving(transfer.len);
        } else {
            let outcome = if outcome < 0 { outcome } else { from as Outcome + outcome };
            flight.stage = Stage::Ended(outcome);
        }
        if self.random.below(4) == 0 {
            flight.due = self.due();
        }
        self.in_flight.push(flight);
    }

    /// Ends all transfers in flight with `EIO`; some of the writes reach the device.
    pub(crate) fn end_all(&mut self) {
        for mut flight in std::mem::take(&mut self.in_flight).into_sorted_vec() {
            if let (Stage::Moving(stop), true) = (flight.stage, flight.transfer.write)
                && self.random.below(2) == 0
            {
                // SAFETY: as promised to `start`; the transfer has not completed yet.
                unsafe { self.perform(&flight.transfer, flight.moved, stop, AccessPath::Queue) };
            }
            flight.stage = Stage::Ended(-libc::EIO);
            flight.due = self.now;
            self.in_flight.push(flight);
        }
    }

    /// Moves the bytes `from..to` of a transfer. Returns the outcome, and the changes it has made.
    ///
    /// # Safety
    /// Until this returns, the memory that `transfer` names is valid and not accessed otherwise.
    pub(crate) unsafe fn perform(
        &mut self,
        transfer: &Transfer,
        from: u32,
        to: u32,
        path: AccessPath,
    ) -> (Outcome, (u64, u64)) {
        let none = (0, 0);
        let tries = transfer.rw_flags & libc::RWF_NOWAIT != 0;
        let fault = self.fault(if tries { Call::Try } else { Call::Transfer });
        if tries && !self.options.nowait {
            return (-libc::EOPNOTSUPP, none);
        }
        let one = [IoSegment { base: transfer.base, len: transfer.len as usize }];
        // SAFETY: as promised by the caller.
        let segments = unsafe { segments(transfer, &one) };
        if path != AccessPath::Buffered && !self.is_aligned(transfer, segments) {
            let ends =
                round_down(self.file(transfer.file as u16).size(), self.options.align.offset);
            if path == AccessPath::Queue || !transfer.write || transfer.pos < ends {
                self.violation(format!("not aligned: {transfer:?} of {segments:?}"));
                return (-libc::EINVAL, none);
            }
        }
        let pos = transfer.pos + u64::from(from);
        let block = u64::from(self.options.align.offset.max(512));
        let mut len = u64::from(to - from);
        let mut errno = 0;
        match fault {
            Some(Fault::Errno(n)) if self.random.below(4) > 0 || len <= block => return (-n, none),
            Some(Fault::Errno(n)) => errno = n,
            _ => {}
        }
        if fault.is_some() && len > block {
            len = block * (1 + self.random.below((len - 1) / block));
        }
        let inside = len.min(self.file(transfer.file as u16).size().saturating_sub(pos));
        let range = ByteRange::new(pos, inside);
        let (done, changes) = if transfer.write {
            if transfer.file > 0 {
                self.violation(format!("a write to a file that is read only: {transfer:?}"));
                return (-libc::EBADF, none);
            }
            if pos + len > self.options.bytes {
                self.violation(format!("a write reaches behind the end: {transfer:?}"));
            }
            if tries && self.media.allocates(range) {
                return (-libc::EAGAIN, none);
            }
            self.write(range, segments, u64::from(from), transfer.rw_flags & libc::RWF_DSYNC != 0)
        } else {
            let mut rest = self.file(transfer.file as u16).read(range);
            iovec::slice_segments(segments, from.into(), inside, |part| {
                let (now, later) = rest.split_at(part.len.min(rest.len()));
                // SAFETY: the part lies in the transfer's memory.
                unsafe { part.base.copy_from_nonoverlapping(now.as_ptr(), now.len()) };
                rest = later;
            });
            (inside as Outcome, none)
        };
        (if errno > 0 { -errno } else { done }, changes)
    }

    fn write(
        &mut self,
        range: ByteRange,
        segments: &[IoSegment],
        start: u64,
        durable: bool,
    ) -> (Outcome, (u64, u64)) {
        if range.len == 0 {
            return (-libc::ENOSPC, (0, 0));
        }
        let (done, change) = self.media.write(range, durable, |bytes| {
            iovec::slice_segments(segments, start, range.len, |part| {
                // SAFETY: the part lies in the memory of a write, which is initialised.
                bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(part.base, part.len) });
            });
        });
        (if done == 0 { -libc::ENOSPC } else { done as Outcome }, (change, change + 1))
    }

    fn is_aligned(&self, transfer: &Transfer, segments: &[IoSegment]) -> bool {
        let align = self.options.align;
        let block = if transfer.write { align.offset } else { align.read_offset };
        (transfer.pos | u64::from(transfer.len)) & (u64::from(block) - 1) == 0
            && iovec::aligned(segments, align.memory, block)
    }
}

/// The segments of a transfer: its list, or `one` if it has none.
///
/// # Safety
/// The list that `transfer` names, if it names one, stays valid as long as the result is used.
unsafe fn segments<'a>(transfer: &Transfer, one: &'a [IoSegment; 1]) -> &'a [IoSegment] {
    match usize::from(transfer.segments) {
        0 => one,
        // SAFETY: as promised by the caller; a list is laid out as an array of segments.
        many => unsafe { std::slice::from_raw_parts(transfer.base.cast_const().cast(), many) },
    }
}
