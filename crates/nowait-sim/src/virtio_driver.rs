//! A simulated driver of virtio-blk: requests written to the rings of a guest's memory, and their
//! answers read from it.
//!
//! Invariant: a request begins when its entry is in the available ring; each is answered once, by
//! its entry in the used ring, whichever servers come and go meanwhile. The driver looks at a used
//! ring only if it was called.

use nowait::sim::Random;
use nowait::{ByteRange, Error, Flags, Op};
use nowait_server::{SimGuest, SimRing};

use crate::model::{Time, Violation};
use crate::oracle::{InFlight, Oracle};
use crate::pattern;
use crate::scenario::{MAX_REQUEST_BYTES, RequestSpec};

/// Requests in flight of a queue, and descriptors of each.
const REQUESTS: u16 = 16;
const DESCRIPTORS: u16 = 4;
const QUEUE_SIZE: u16 = REQUESTS * DESCRIPTORS;
const SECTOR_BYTES: u64 = 512;
/// Parts of a queue's memory, from its start on: descriptors, available ring, used ring.
const AVAILABLE_AT: u64 = 4096;
const USED_AT: u64 = 8192;
const REQUESTS_AT: u64 = 12288;
/// Parts of a request's memory: header, status, a table of descriptors, data with room before it.
const STATUS_AT: u64 = 16;
const TABLE_AT: u64 = 32;
const DATA_AT: u64 = 4096;
const REQUEST_BYTES: u64 = DATA_AT + 4096 + MAX_REQUEST_BYTES;
const QUEUE_BYTES: u64 = REQUESTS_AT + REQUEST_BYTES * REQUESTS as u64;
// Flags of a descriptor.
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// No status that a device writes.
const UNANSWERED: u8 = 0xff;

/// A request in the rings.
struct Asked {
    flight: InFlight,
    /// Where its data are, and how many.
    data: (u64, u64),
}

/// A queue of the driver.
struct DriverQueue {
    at: u64,
    event_idx: bool,
    available: u16,
    used: u16,
    /// Answers before this one are of servers that have died.
    alive_from: u16,
    /// By the index of the first descriptor, in `DESCRIPTORS`.
    asked: Vec<Option<Asked>>,
}

/// The driver of a guest.
pub struct Driver {
    guest: SimGuest,
    queues: Vec<DriverQueue>,
    /// The device makes each change durable before it answers.
    writes_through: bool,
}

fn gone<T>(found: Option<T>) -> Result<T, Violation> {
    found.ok_or_else(|| Violation::new("memory of the guest is missing".to_owned()))
}

impl Driver {
    /// A driver of `queues` queues in a new guest.
    ///
    /// # Errors
    /// As for [`SimGuest::new`].
    pub fn new(queues: u64, writes_through: bool, event_idx: bool) -> Result<Self, Error> {
        let guest = SimGuest::new(queues * QUEUE_BYTES, queues as u16, QUEUE_SIZE)?;
        let queue = |number| DriverQueue {
            at: number * QUEUE_BYTES,
            event_idx,
            available: 0,
            used: 0,
            alive_from: 0,
            asked: (0..REQUESTS).map(|_| None).collect(),
        };
        Ok(Self { guest, queues: (0..queues).map(queue).collect(), writes_through })
    }

    /// The guest.
    pub fn guest(&self) -> &SimGuest {
        &self.guest
    }

    /// The parameters of queue `number` that a server is told.
    pub fn ring(&self, number: usize) -> Option<(u16, SimRing, bool)> {
        let DriverQueue { at, event_idx, .. } = *self.queues.get(number)?;
        let ring = SimRing { descriptors: at, available: at + AVAILABLE_AT, used: at + USED_AT };
        Some((number as u16, ring, event_idx))
    }

    /// The server that has answered until now has died.
    pub fn server_died(&mut self) -> Result<(), Violation> {
        for queue in &mut self.queues {
            queue.alive_from = gone(read_u16(&self.guest, queue.at + USED_AT + 2))?;
        }
        Ok(())
    }

    /// Whether no request is unanswered.
    pub fn is_idle(&self) -> bool {
        self.in_flight().next().is_none()
    }

    /// The requests that are unanswered.
    pub fn in_flight(&self) -> impl Iterator<Item = &InFlight> {
        self.queues.iter().flat_map(|queue| queue.asked.iter().flatten()).map(|it| &it.flight)
    }

    /// When the oldest request in flight began.
    pub fn oldest(&self) -> Time {
        self.in_flight().map(|flight| flight.began).min().unwrap_or(Time::MAX)
    }

    /// Makes a request available on queue `number`. Returns whether the device is to be kicked, or
    /// `None` if there is no room.
    pub fn ask(
        &mut self,
        number: usize,
        spec: RequestSpec,
        oracle: &mut Oracle,
        random: &mut Random,
    ) -> Result<Option<bool>, Violation> {
        let (oldest, spec) = (self.oldest(), self.expressible(spec));
        let Some(queue) = self.queues.get_mut(number) else { return Ok(None) };
        let Some(slot) = queue.asked.iter().position(Option::is_none) else { return Ok(None) };
        let value = oracle.value_for(spec.op);
        let data = queue.describe(&self.guest, slot, &spec, value, random);
        let data = gone(data)?;
        let flight = oracle.begin(spec, value, oldest);
        if let Some(asked) = queue.asked.get_mut(slot) {
            *asked = Some(Asked { flight, data });
        }
        gone(queue.make_available(&self.guest, slot)).map(Some)
    }

    /// The request as a driver can make it.
    fn expressible(&self, spec: RequestSpec) -> RequestSpec {
        let op = if spec.op == Op::Status { Op::Read } else { spec.op };
        let mut flags = Flags::NONE;
        if op == Op::Zero && spec.flags.contains(Flags::NO_UNMAP) {
            flags |= Flags::NO_UNMAP;
        }
        if op.changes() && self.writes_through {
            flags |= Flags::DSYNC;
        }
        RequestSpec { op, flags, ..spec }
    }

    /// Takes the answers of queue `number`, if the driver was called.
    pub fn receive(&mut self, number: usize, oracle: &mut Oracle) -> Result<(), Violation> {
        let Some(queue) = self.queues.get_mut(number) else { return Ok(()) };
        if !self.guest.take_call(number) {
            return Ok(());
        }
        loop {
            // The ring has fewer entries than half of the numbers.
            let of_dead = queue.alive_from.wrapping_sub(queue.used).wrapping_sub(1) < QUEUE_SIZE;
            let Some((head, len)) = gone(queue.take_used(&self.guest))? else { return Ok(()) };
            let slot = (head / u32::from(DESCRIPTORS)) as usize;
            let asked = queue.asked.get_mut(slot).and_then(Option::take);
            let Some(asked) = asked.filter(|_| head.is_multiple_of(DESCRIPTORS.into())) else {
                let what = format!("C41: descriptor {head} was answered, but not in flight");
                return Err(Violation::new(what));
            };
            let status_at = queue.request(slot) + STATUS_AT;
            let check = |oracle: &mut Oracle| check(&self.guest, &asked, status_at, len, oracle);
            if of_dead { oracle.of_dead_server(check) } else { check(oracle) }?;
        }
    }
}

impl DriverQueue {
    /// Where the memory of a request is.
    fn request(&self, slot: usize) -> u64 {
        self.at + REQUESTS_AT + slot as u64 * REQUEST_BYTES
    }

    /// Writes a request and its descriptors. Returns where its data are.
    fn describe(
        &self,
        guest: &SimGuest,
        slot: usize,
        spec: &RequestSpec,
        value: pattern::Value,
        random: &mut Random,
    ) -> Option<(u64, u64)> {
        let at = self.request(slot);
        let ByteRange { pos, len } = spec.range;
        let sector = pos / SECTOR_BYTES;
        let (kind, len) = match spec.op {
            Op::Read | Op::Status => (0u32, len),
            Op::Write => (1, len),
            Op::Flush => (4, 0),
            Op::Discard => (11, 16),
            Op::Zero => (13, 16),
        };
        let offset = if random.below(2) == 0 { 0 } else { random.below(4096) };
        let data_at = at + DATA_AT + offset;
        let mut bytes = vec![0xa5; len as usize];
        match spec.op {
            Op::Write => pattern::fill(&mut bytes, pos, value),
            Op::Discard | Op::Zero => {
                let unmaps = spec.op == Op::Zero && !spec.flags.contains(Flags::NO_UNMAP);
                let sectors = (spec.range.len / SECTOR_BYTES) as u32;
                bytes = sector.to_le_bytes().to_vec();
                bytes.extend(sectors.to_le_bytes());
                bytes.extend(u32::from(unmaps).to_le_bytes());
            }
            _ => {}
        }
        guest.write(data_at, &bytes)?;
        let sector = if matches!(spec.op, Op::Read | Op::Write | Op::Status) { sector } else { 0 };
        let mut header = kind.to_le_bytes().to_vec();
        header.extend([0; 4]);
        header.extend(sector.to_le_bytes());
        guest.write(at, &header)?;
        guest.write(at + STATUS_AT, &[UNANSWERED])?;
        let direction = if matches!(spec.op, Op::Read | Op::Status) { WRITE } else { 0 };
        let mut parts = vec![(at, 16, 0)];
        let first = if len > 1 { random.below(len) } else { 0 };
        for (from, to) in [(0, first), (first, len)] {
            if from < to {
                parts.push((data_at + from, (to - from) as u32, direction));
            }
        }
        parts.push((at + STATUS_AT, 1, WRITE));
        let head = slot as u16 * DESCRIPTORS;
        if random.below(3) == 0 {
            let table = at + TABLE_AT;
            write_chain(guest, table, 0, &parts)?;
            let bytes = parts.len() as u32 * 16;
            write_descriptor(guest, self.at, head, (table, bytes, INDIRECT), 0)?;
        } else {
            write_chain(guest, self.at, head, &parts)?;
        }
        Some((data_at, len))
    }

    /// Puts a request into the available ring. Returns whether the device wants a kick.
    fn make_available(&mut self, guest: &SimGuest, slot: usize) -> Option<bool> {
        let ring = self.at + AVAILABLE_AT;
        let head = slot as u16 * DESCRIPTORS;
        guest.write(ring + 4 + 2 * u64::from(self.available % QUEUE_SIZE), &head.to_le_bytes())?;
        let before = self.available;
        self.available = before.wrapping_add(1);
        guest.write(ring + 2, &self.available.to_le_bytes())?;
        let used = self.at + USED_AT;
        if self.event_idx {
            let event = read_u16(guest, used + 4 + 8 * u64::from(QUEUE_SIZE))?;
            return Some(event == before);
        }
        Some(read_u16(guest, used)? & 1 == 0)
    }

    /// The next entry of the used ring: a head and a length.
    fn take_used(&mut self, guest: &SimGuest) -> Option<Option<(u32, u32)>> {
        let ring = self.at + USED_AT;
        if read_u16(guest, ring + 2)? == self.used {
            if !self.event_idx {
                return Some(None);
            }
            // The device is to call for the next one; what came meanwhile causes no call.
            let event = self.at + AVAILABLE_AT + 4 + 2 * u64::from(QUEUE_SIZE);
            guest.write(event, &self.used.to_le_bytes())?;
            if read_u16(guest, ring + 2)? == self.used {
                return Some(None);
            }
        }
        let mut entry = [0; 8];
        guest.read(ring + 4 + 8 * u64::from(self.used % QUEUE_SIZE), &mut entry)?;
        self.used = self.used.wrapping_add(1);
        let [a, b, c, d, e, f, g, h] = entry;
        Some(Some((u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]))))
    }
}

fn read_u16(guest: &SimGuest, at: u64) -> Option<u16> {
    let mut bytes = [0; 2];
    guest.read(at, &mut bytes)?;
    Some(u16::from_le_bytes(bytes))
}

/// A part of a chain: address, length, flags.
type Part = (u64, u32, u16);

fn write_chain(guest: &SimGuest, table: u64, first: u16, parts: &[Part]) -> Option<()> {
    for (number, &(address, len, flags)) in parts.iter().enumerate() {
        let index = first + number as u16;
        let more = if number + 1 < parts.len() { NEXT } else { 0 };
        write_descriptor(guest, table, index, (address, len, flags | more), index + 1)?;
    }
    Some(())
}

fn write_descriptor(
    guest: &SimGuest,
    table: u64,
    index: u16,
    (address, len, flags): Part,
    next: u16,
) -> Option<()> {
    let mut bytes = address.to_le_bytes().to_vec();
    bytes.extend(len.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes.extend(next.to_le_bytes());
    guest.write(table + 16 * u64::from(index), &bytes)
}

/// Checks the answer to a request: its status, and the number of bytes that were written.
fn check(
    guest: &SimGuest,
    asked: &Asked,
    status_at: u64,
    written: u32,
    oracle: &mut Oracle,
) -> Result<(), Violation> {
    let Asked { flight, data: (data_at, len) } = asked;
    let RequestSpec { op, range, .. } = flight.spec;
    let mut status = [0];
    gone(guest.read(status_at, &mut status))?;
    let outside = op != Op::Flush && flight.inside.len < range.len;
    match status {
        [0] if !outside => {}
        [1] => return oracle.io_error(flight, outside),
        [2] => return oracle.failed(flight, libc::EOPNOTSUPP),
        _ => return Err(Violation::new(format!("{:?}: status {status:?}", flight.spec))),
    }
    let expected = if op == Op::Read { range.len as u32 + 1 } else { 1 };
    if written != expected {
        return Err(Violation::new(format!("{:?}: {written} bytes were written", flight.spec)));
    }
    oracle.done(flight, if op == Op::Flush { 0 } else { range.len })?;
    if op == Op::Read {
        let mut bytes = vec![0; *len as usize];
        gone(guest.read(*data_at, &mut bytes))?;
        oracle.found(range.pos, &bytes, flight.began)?;
    }
    Ok(())
}
