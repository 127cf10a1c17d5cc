//! What a simulated device is doing: its time, its transfers in flight, its power.
//!
//! Invariant: a transfer's memory is touched only between its placing and its report; each is
//! reported once. What the device was asked wrongly (not aligned, behind its end, a token that is in
//! flight) is kept as a violation.
//! Knows: random, fault, media. Known by: device.
#![allow(unsafe_code)]

use std::collections::BinaryHeap;

use super::fault::{Call, Fault, Faults};
use super::media::Media;
use super::random::Random;
use crate::align::Alignment;
use crate::breaks::{self, Break};
use crate::error::Range;
use crate::io::{Outcome, Transfer};
use crate::iov::{self, Segment};
use crate::queue::Token;

/// What a simulated device is like.
#[derive(Clone, Copy, Debug)]
pub struct SimOptions {
    /// What everything that happens by chance follows from.
    pub seed: u64,
    /// Bytes of the device.
    pub bytes: u64,
    /// What it asks of direct I/O.
    pub align: Alignment,
    /// Bytes that a power cut does not tear, a power of two from 512 to 4096.
    pub unit: u32,
    /// Blocks of 4096 bytes that can be backed at the same time.
    pub capacity: u64,
    /// It is a file, whose end can be moved.
    pub grows: bool,
    /// It can give storage back.
    pub punches: bool,
    /// It can zero a range and keep its storage.
    pub zeroes: bool,
    /// It takes `RWF_NOWAIT`.
    pub nowait: bool,
    /// The longest that an operation takes, in virtual nanoseconds.
    pub latency: u64,
    /// How often in 65536 calls that may wait others run meanwhile.
    pub pauses: u16,
}

impl SimOptions {
    /// A device of `bytes` bytes in blocks of 4096 that can do everything, never runs out and has
    /// nobody run meanwhile; an operation takes up to 1000 nanoseconds.
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
            latency: 1000,
            pauses: 0,
        }
    }
}

/// Whether there is anybody at home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Power {
    On,
    /// Nothing is answered.
    Silent,
    /// Everything is answered with `EIO`.
    Off,
}

/// What a transfer in flight waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Bytes up to this one of the transfer move next.
    Moving(u32),
    /// It is reported next.
    Ended(Outcome),
    /// It was reported, by mistake, and its bytes move next.
    Late,
}

pub(super) struct Flight {
    pub(super) due: u64,
    order: u64,
    pub(super) queue: usize,
    token: Token,
    transfer: Transfer,
    moved: u32,
    /// Changes that it has made, from the first to the one after the last.
    changes: (u64, u64),
    stage: Stage,
}

// SAFETY: whoever placed the transfer promised that its memory stays valid and untouched until it
// was reported, on whichever thread that happens.
unsafe impl Send for Flight {}

impl PartialEq for Flight {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Flight {}

impl PartialOrd for Flight {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Flight {
    /// The first one is the greatest.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (other.due, other.order).cmp(&(self.due, self.order))
    }
}

/// What a transfer goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Door {
    /// A queue, where everything has to be right.
    Queue,
    /// A direct call, which may be refused: what ended short is tried again where it ended.
    Direct,
    /// The page cache.
    Buffered,
}

/// A transfer that has ended: its token, its outcome, and the changes that it has made.
pub(super) type Report = (Token, Outcome, (u64, u64));

pub(super) struct State {
    pub(super) options: SimOptions,
    pub(super) random: Random,
    pub(super) faults: Faults,
    pub(super) media: Media,
    /// What is read only: the files with the numbers from 1 on.
    pub(super) below: Vec<Media>,
    pub(super) now: u64,
    pub(super) power: Power,
    pub(super) flights: BinaryHeap<Flight>,
    /// Transfers that were ever placed.
    placed: u64,
    /// What each queue has to report. `None`: the place is free.
    pub(super) ended: Vec<Option<Vec<Report>>>,
    pub(super) ops: u64,
    /// The fault that comes once, if it has befallen a queue.
    spent: Option<(u64, Fault)>,
    /// Bit `n`: errno `n` was injected; bit 0: something was cut short.
    pub(super) injected: u128,
    pub(super) violations: Vec<String>,
}

impl State {
    pub(super) fn new(options: SimOptions) -> Self {
        Self {
            options,
            random: Random::new(options.seed),
            faults: Faults::default(),
            media: Media::new(options.bytes, options.unit, options.capacity),
            below: Vec::new(),
            now: 0,
            power: Power::On,
            flights: BinaryHeap::new(),
            placed: 0,
            ended: Vec::new(),
            ops: 0,
            spent: None,
            injected: 0,
            violations: Vec::new(),
        }
    }

    /// What begins with `own`, and takes the place of the device's contents.
    pub(super) fn new_media(&mut self, own: &[u8]) -> Media {
        if self.options.grows {
            self.options.bytes = own.len() as u64;
        }
        let SimOptions { bytes, unit, capacity, .. } = self.options;
        Media::holding(own, bytes, unit, capacity)
    }

    /// The file with this number: the device itself, or one that is read only.
    pub(super) fn file(&self, number: u16) -> &Media {
        let below = usize::from(number).checked_sub(1).and_then(|below| self.below.get(below));
        below.unwrap_or(&self.media)
    }

    pub(super) fn violation(&mut self, what: String) {
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

    /// Whether `fault` befalls a queue now: the one that comes once, or so many times in 65536.
    pub(super) fn befalls_queue(&mut self, fault: Fault, often: u16) -> bool {
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

    pub(super) fn check(&mut self, call: Call) -> Result<(), i32> {
        match self.fault(call) {
            Some(Fault::Errno(errno)) => Err(errno),
            _ => Ok(()),
        }
    }

    fn due(&mut self) -> u64 {
        self.now + 1 + self.random.below(self.options.latency)
    }

    /// # Safety
    /// As for [`crate::Queue::place`].
    pub(super) unsafe fn start(&mut self, queue: usize, transfer: Transfer, token: Token) {
        let again = self.flights.iter().any(|other| {
            other.queue == queue && other.token == token && other.stage != Stage::Late
        });
        if again {
            self.violation(format!("token {token} was placed a second time"));
        }
        self.placed += 1;
        let mut stop = transfer.len;
        let block = self.options.align.offset.max(512);
        if transfer.len > block && self.random.below(16) == 0 {
            stop = block * (1 + self.random.below(u64::from((transfer.len - 1) / block)) as u32);
        }
        let mut stage = Stage::Moving(stop);
        if self.power == Power::Off {
            stage = Stage::Ended(-libc::EIO);
        }
        if breaks::is(Break::CompleteBeforeData) && transfer.segments == 0 {
            self.report(queue, (token, transfer.len as Outcome, (0, 0)));
            stage = Stage::Late;
        } else if !transfer.write && self.random.below(4) == 0 {
            // Until it is reported its memory is the device's, and holds anything.
            let size = self.file(transfer.file).size();
            let inside = size.saturating_sub(transfer.pos).min(transfer.len.into());
            let one = [Segment { base: transfer.base, len: transfer.len as usize }];
            // SAFETY: as promised by the caller.
            let segments = unsafe { segments(&transfer, &one) };
            // SAFETY: the part lies in the transfer's memory.
            iov::parts(segments, 0, inside, |part| unsafe {
                part.base.write_bytes(0xa5, part.len)
            });
        }
        let due = if self.power == Power::Off { self.now } else { self.due() };
        let order = self.placed;
        let (moved, changes) = (0, (0, 0));
        self.flights.push(Flight { due, order, queue, token, transfer, moved, changes, stage });
    }

    fn report(&mut self, queue: usize, report: Report) {
        if let Some(Some(ended)) = self.ended.get_mut(queue) {
            ended.push(report);
        }
    }

    /// What is due until `until` happens.
    pub(super) fn advance(&mut self, until: u64) {
        self.now = self.now.max(until);
        if self.power == Power::Silent {
            return;
        }
        while self.flights.peek().is_some_and(|flight| flight.due <= self.now) {
            let Some(flight) = self.flights.pop() else { return };
            self.happen(flight);
        }
    }

    /// The next thing happens to a transfer.
    fn happen(&mut self, mut flight: Flight) {
        let stop = match flight.stage {
            Stage::Ended(outcome) => {
                return self.report(flight.queue, (flight.token, outcome, flight.changes));
            }
            Stage::Moving(stop) => stop,
            Stage::Late => flight.transfer.len,
        };
        let (transfer, from) = (flight.transfer, flight.moved);
        // SAFETY: as promised to `start`: it was not reported yet.
        let (outcome, changes) = unsafe { self.perform(&transfer, from, stop, Door::Queue) };
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
        self.flights.push(flight);
    }

    /// Everything in flight ends; some of what was to be written is.
    pub(super) fn end_all(&mut self) {
        for mut flight in std::mem::take(&mut self.flights).into_sorted_vec() {
            if let (Stage::Moving(stop), true) = (flight.stage, flight.transfer.write)
                && self.random.below(2) == 0
            {
                // SAFETY: as promised to `start`: it was not reported yet.
                unsafe { self.perform(&flight.transfer, flight.moved, stop, Door::Queue) };
            }
            flight.stage = Stage::Ended(-libc::EIO);
            flight.due = self.now;
            self.flights.push(flight);
        }
    }

    /// Moves the bytes `from..to` of a transfer: what came of it, and the changes it has made.
    ///
    /// # Safety
    /// The memory that `transfer` names is valid and nobody else's until this returns.
    pub(super) unsafe fn perform(
        &mut self,
        transfer: &Transfer,
        from: u32,
        to: u32,
        door: Door,
    ) -> (Outcome, (u64, u64)) {
        let none = (0, 0);
        let tries = transfer.rw_flags & libc::RWF_NOWAIT != 0;
        let fault = self.fault(if tries { Call::Try } else { Call::Transfer });
        if tries && !self.options.nowait {
            return (-libc::EOPNOTSUPP, none);
        }
        let one = [Segment { base: transfer.base, len: transfer.len as usize }];
        // SAFETY: as promised by the caller.
        let segments = unsafe { segments(transfer, &one) };
        if door != Door::Buffered && !self.is_aligned(transfer, segments) {
            if door == Door::Queue {
                self.violation(format!("not aligned: {transfer:?} of {segments:?}"));
            }
            return (-libc::EINVAL, none);
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
        let inside = len.min(self.file(transfer.file).size().saturating_sub(pos));
        let range = Range::new(pos, inside);
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
            let mut rest = self.file(transfer.file).read(range);
            iov::parts(segments, from.into(), inside, |part| {
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
        range: Range,
        segments: &[Segment],
        start: u64,
        durable: bool,
    ) -> (Outcome, (u64, u64)) {
        if range.len == 0 {
            return (-libc::ENOSPC, (0, 0));
        }
        let (done, change) = self.media.write(range, durable, |bytes| {
            iov::parts(segments, start, range.len, |part| {
                // SAFETY: the part lies in the transfer's memory, which is initialised because it
                // is to be written.
                bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(part.base, part.len) });
            });
        });
        (if done == 0 { -libc::ENOSPC } else { done as Outcome }, (change, change + 1))
    }

    fn is_aligned(&self, transfer: &Transfer, segments: &[Segment]) -> bool {
        let align = self.options.align;
        let block = if transfer.write { align.offset } else { align.read_offset };
        (transfer.pos | u64::from(transfer.len)) & (u64::from(block) - 1) == 0
            && iov::aligned(segments, align.memory, block)
    }
}

/// The memory of a transfer: its list, or `one` where it has none.
///
/// # Safety
/// The list of segments that `transfer` names, if it names one, is valid for as long as the result
/// is used.
unsafe fn segments<'a>(transfer: &Transfer, one: &'a [Segment; 1]) -> &'a [Segment] {
    match usize::from(transfer.segments) {
        0 => one,
        // SAFETY: as promised by the caller; a list is laid out as an array of segments.
        many => unsafe { std::slice::from_raw_parts(transfer.base.cast_const().cast(), many) },
    }
}
