//! A model of what a device may hold: the oracle checks all answers against it.
//!
//! The model is told when each request began and how it completed, and does not depend on how requests
//! are served. A device is divided into cells, and each cell has the list of writes that it may
//! hold.
//!
//! Invariant: a write is removed only when neither a request in flight nor a power cut can still
//! expose it. Rules of docs/contract.md: C17 and C18 (the result of a read), C24, C28 and C49 (the
//! state after a power cut), C52 (discard and zeroes), C54 (overlapping requests), C55 and C56.

use std::fmt;
use std::rc::Rc;

use nowait::ByteRange;

use crate::pattern;
use crate::pattern::{Value, ZERO};

/// A logical time: the number of events (begins and ends) before it.
pub type Time = u32;

const NEVER: Time = Time::MAX;
/// The unit in bytes that a device rewrites as a whole when one byte of it changes.
const RISK_BYTES: u64 = 4096;
/// The shortest length in bytes at which two values always differ.
const TELLING_BYTES: u64 = 8;

/// A write that a cell may hold.
#[derive(Clone, Debug)]
struct Held {
    bytes: Bytes,
    began: Time,
    completed: Time,
    /// The time since which a later write is known to have replaced it: a request that begins after
    /// that cannot see it.
    covered: Time,
    /// The time since which a completed write is known to have replaced it: a flush that begins
    /// after that removes it permanently.
    settled: Time,
    /// A power cut does not revert it.
    durable: bool,
    /// A failed flush may have lost it: no later flush makes it durable (C51).
    doubtful: bool,
    /// A power cut cannot restore it.
    gone: bool,
    /// It has failed, and may be there and not be there by turns until a later write succeeds.
    wavers: bool,
}

#[derive(Clone, PartialEq, Eq)]
enum Bytes {
    Value(Value),
    /// The bytes read from this offset on after a power cut: parts of several writes, or garbage.
    Found(u64, Rc<[u8]>),
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Value(ZERO) => f.write_str("zeros"),
            Self::Value(value) => write!(f, "value {value}"),
            Self::Found(..) => f.write_str("as found"),
        }
    }
}

#[derive(Default)]
struct Cell {
    held: Vec<Held>,
    /// Whether the cell is in `Model::open`.
    listed: bool,
}

/// How a write completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It succeeded; with `durable` it survives a power cut.
    Done {
        /// The request had FUA.
        durable: bool,
    },
    /// It failed, or was advisory: its data may be present or not.
    Maybe,
    /// It failed behind a network: its data may come and go.
    Wavers,
    /// It was never begun.
    Never,
}

/// A violation of the contract.
#[derive(Debug)]
pub struct Violation(String);

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Violation {
    /// A violation with a message.
    pub fn new(what: String) -> Self {
        Self(what)
    }
}

/// The model of one device.
pub struct Model {
    size: u64,
    grain: u64,
    /// The block in bytes within which overlapping writes do not mix (C54).
    block: u64,
    /// The unit in bytes that a power cut does not tear.
    unit: u64,
    now: Time,
    cells: Vec<Cell>,
    /// Cells with a write that is not durable, or with several possible writes.
    open: Vec<u32>,
}

impl Model {
    /// A device of `size` bytes, all zero, in cells of `grain` bytes.
    pub fn new(size: u64, grain: u64, block: u64, unit: u64) -> Self {
        let zero = Held::pinned(Bytes::Value(ZERO), 0);
        let count = size.div_ceil(grain);
        let cells = (0..count).map(|_| Cell { held: vec![zero.clone()], listed: false });
        Self { size, grain, block, unit, now: 1, cells: cells.collect(), open: Vec::new() }
    }

    /// Sets the content of the cells of `range` to their part of `disk`, which is followed by zeros.
    pub fn hold(&mut self, range: ByteRange, disk: &[u8]) {
        for n in self.touched(range) {
            let own = self.range_of(n);
            let part = disk.get(own.pos as usize..).unwrap_or_default();
            let mut part = part.get(..own.len as usize).unwrap_or(part).to_vec();
            part.resize(own.len as usize, 0);
            self.pin(n, own, &part);
        }
    }

    /// Records the begin of a request and returns its time.
    pub fn begin(&mut self) -> Time {
        self.now += 1;
        self.now
    }

    fn range_of(&self, cell: usize) -> ByteRange {
        let pos = cell as u64 * self.grain;
        ByteRange::new(pos, self.grain.min(self.size - pos))
    }

    /// The cells that `range` touches.
    fn touched(&self, range: ByteRange) -> std::ops::Range<usize> {
        let end = range.end().min(self.size).div_ceil(self.grain);
        (range.pos / self.grain).min(end) as usize..end as usize
    }

    /// Records the begin of a write of `value` to `range`, which is whole cells. No request in
    /// flight began before `oldest`.
    pub fn begin_write(&mut self, range: ByteRange, value: Value, oldest: Time) -> Time {
        let began = self.begin();
        for n in self.touched(range) {
            let Some(cell) = self.cells.get_mut(n) else { continue };
            cell.held.retain(|held| !held.gone || held.covered >= oldest);
            cell.held.push(Held {
                bytes: Bytes::Value(value),
                began,
                completed: NEVER,
                covered: NEVER,
                settled: NEVER,
                durable: false,
                doubtful: false,
                gone: false,
                wavers: false,
            });
            if !std::mem::replace(&mut cell.listed, true) {
                self.open.push(n as u32);
            }
        }
        began
    }

    /// Records the end of the write that began at `began`, for `range`, all or a part of its range.
    pub fn end_write(&mut self, range: ByteRange, began: Time, ending: Ending) {
        self.now += 1;
        for n in self.touched(range) {
            let whole = self.range_of(n).end() <= range.end();
            let ending = if whole { ending } else { Ending::Maybe };
            if let Some(cell) = self.cells.get_mut(n) {
                cell.end_write(began, ending, self.now);
            }
        }
    }

    /// Records the success of a flush that began at `began` (C49).
    pub fn end_flush(&mut self, began: Time) {
        self.now += 1;
        let cells = &mut self.cells;
        self.open.retain(|&n| {
            let Some(cell) = cells.get_mut(n as usize) else { return false };
            cell.flushed(began);
            cell.listed
        });
    }

    /// Records that a flush failed, or may have: no later flush makes durable the writes that are
    /// not durable now (C51).
    pub fn doubt(&mut self) {
        for &n in &self.open {
            if let Some(cell) = self.cells.get_mut(n as usize) {
                cell.held.iter_mut().for_each(Held::doubt);
            }
        }
    }

    /// Checks the `bytes` that a read, begun at `began`, returned for `pos`.
    ///
    /// # Errors
    /// The read cannot return these bytes.
    pub fn check(&mut self, pos: u64, bytes: &[u8], began: Time) -> Result<(), Violation> {
        self.now += 1;
        let range = ByteRange::new(pos, bytes.len() as u64);
        let mut before: Option<(usize, Time)> = None;
        for n in self.touched(range) {
            let own = self.range_of(n);
            let (from, to) = (own.pos.max(pos), own.end().min(range.end()));
            let part = bytes.get((from - pos) as usize..(to - pos) as usize).unwrap_or_default();
            let whole = part.len() as u64 == own.len;
            let now = self.now;
            let Some(cell) = self.cells.get_mut(n) else { continue };
            let Some(found) = cell.find(from, part, began) else {
                if cell.finds_blocks(from, part, self.block, began) {
                    before = None;
                    continue;
                }
                return Err(self.describe(n, from, part, began));
            };
            // A few bytes may be equal by chance and identify no write.
            let telling = whole && own.len >= TELLING_BYTES;
            let alone = telling && cell.is_of_one(from, part);
            if telling && cell.held.len() > 1 {
                let sure = alone && cell.is_of_one_in_each(from, part, self.unit.min(self.block));
                cell.seen(found, sure, from, part, began, now);
            }
            let Some(found) = cell.held.get(found).filter(|_| alone).map(|held| held.began) else {
                before = None;
                continue;
            };
            if let Some((last, other)) = before
                && other != found
                && self.range_of(last).pos / self.block == own.pos / self.block
                && (own.end() - 1) / self.block == own.pos / self.block
                && self.holds(last, found)
                && self.holds(n, other)
            {
                let block = own.pos / self.block * self.block;
                let what = format!("C54: the block at {block} is a mixture of two writes");
                return Err(Violation(what));
            }
            before = Some((n, found));
        }
        Ok(())
    }

    fn holds(&self, n: usize, began: Time) -> bool {
        self.cells.get(n).is_some_and(|cell| cell.held.iter().any(|held| held.began == began))
    }

    /// Checks a status answer, for a request begun at `began`, that `range` reads as zeros.
    ///
    /// # Errors
    /// A cell cannot read as zeros.
    pub fn check_zeros(&self, range: ByteRange, began: Time) -> Result<(), Violation> {
        for n in self.touched(range) {
            let own = self.range_of(n);
            if own.pos < range.pos || own.end() > range.end() {
                continue;
            }
            let zeros = vec![0; own.len as usize];
            let Some(cell) = self.cells.get(n) else { continue };
            if cell.find(own.pos, &zeros, began).is_none() {
                return Err(self.describe(n, own.pos, &zeros, began));
            }
        }
        Ok(())
    }

    /// Checks the content `bytes` after a power cut; the device reports garbage in the ranges of
    /// `rotten`. No request is in flight.
    ///
    /// # Errors
    /// A power cut cannot leave these bytes.
    pub fn power_cut(&mut self, bytes: &[u8], rotten: &[ByteRange]) -> Result<(), Violation> {
        self.now += 1;
        let mut rotten = rotten.to_vec();
        rotten.retain(|&range| self.is_at_risk(range));
        let rotten = rotten.as_slice();
        for n in 0..self.cells.len() {
            let own = self.range_of(n);
            let part = bytes.get(own.pos as usize..own.end() as usize).unwrap_or_default();
            let Some(cell) = self.cells.get(n) else { continue };
            if let [only] = cell.held.as_slice()
                && only.is(own.pos, part)
            {
                continue;
            }
            // Writes in flight may be complete in some blocks only.
            let left = cell.may_be_left(own.pos, part, self.unit, rotten)
                || cell.may_be_left(own.pos, part, self.unit.min(self.block), rotten);
            if !left {
                let mut wrong = self.describe(n, own.pos, part, 0);
                wrong.0.insert_str(0, "after a power cut: ");
                return Err(wrong);
            }
            self.pin(n, own, part);
        }
        for n in std::mem::take(&mut self.open) {
            // The present content is durable.
            if let Some(cell) = self.cells.get_mut(n as usize) {
                cell.listed = false;
                cell.held.iter_mut().for_each(|held| held.durable = true);
            }
        }
        Ok(())
    }

    /// The device was truncated to `size` bytes and reopened: no request is in flight.
    pub fn shrink(&mut self, size: u64) {
        self.size = self.size.min(size);
        self.cells.truncate(self.size.div_ceil(self.grain) as usize);
    }

    /// The device has `size` bytes, whole cells, and was reopened: what is new reads as zeros.
    pub fn grow(&mut self, size: u64) {
        self.size = self.size.max(size);
        let zero = Held::pinned(Bytes::Value(ZERO), 0);
        let count = self.size.div_ceil(self.grain) as usize;
        self.cells.resize_with(count, || Cell { held: vec![zero.clone()], listed: false });
    }

    /// Whether a write in the blocks of `range` is not durable: then the blocks were being written
    /// and may be garbage.
    fn is_at_risk(&self, range: ByteRange) -> bool {
        let pos = range.pos / RISK_BYTES * RISK_BYTES;
        let all = ByteRange::new(pos, range.end().next_multiple_of(RISK_BYTES) - pos);
        let cells = self.cells.get(self.touched(all)).unwrap_or_default();
        cells.iter().flat_map(|cell| &cell.held).any(|held| !held.gone && !held.durable)
    }

    /// Sets the content of a cell to the bytes that were read from it.
    fn pin(&mut self, n: usize, own: ByteRange, bytes: &[u8]) {
        let now = self.now;
        let Some(cell) = self.cells.get_mut(n) else { return };
        let known = cell.held.iter().find(|held| held.is(own.pos, bytes));
        let found = || Bytes::Found(own.pos, bytes.into());
        let bytes = known.map_or_else(found, |held| held.bytes.clone());
        cell.held.clear();
        cell.held.push(Held::pinned(bytes, now));
        cell.listed = false;
    }

    fn describe(&self, n: usize, pos: u64, bytes: &[u8], began: Time) -> Violation {
        let first = bytes.get(..bytes.len().min(16)).unwrap_or_default();
        let cell = self.cells.get(n).map(|cell| cell.held.as_slice()).unwrap_or_default();
        let kind = match bytes.iter().all(|&byte| byte == 0) {
            true => "zeros".to_owned(),
            false => format!("{first:02x?}"),
        };
        let known = cell.iter().find(|held| held.is(pos, bytes));
        let known = known.map(|held| format!(", which is {held:?},")).unwrap_or_default();
        Violation(format!(
            "byte {pos} (+{}): {kind}{known} asked at {began}; may be {cell:?}",
            bytes.len()
        ))
    }
}

impl Held {
    fn pinned(bytes: Bytes, now: Time) -> Self {
        let never = NEVER;
        Self {
            bytes,
            began: now,
            completed: now,
            covered: never,
            settled: never,
            durable: true,
            doubtful: false,
            gone: false,
            wavers: false,
        }
    }

    /// A write that is not durable now never becomes durable, and the writes that it replaced may
    /// return.
    fn doubt(&mut self) {
        self.doubtful |= !self.durable;
        self.settled = NEVER;
    }

    /// Whether `bytes` at `pos` match this write.
    fn is(&self, pos: u64, bytes: &[u8]) -> bool {
        match &self.bytes {
            Bytes::Value(value) => pattern::matches(bytes, pos, *value),
            Bytes::Found(start, all) => {
                let from = (pos - start) as usize;
                all.get(from..from + bytes.len()) == Some(bytes)
            }
        }
    }
}

impl Cell {
    fn end_write(&mut self, began: Time, ending: Ending, now: Time) {
        let Some(own) = self.held.iter().position(|held| held.began == began) else { return };
        if ending == Ending::Never {
            self.held.remove(own);
            return;
        }
        let durable = ending == Ending::Done { durable: true };
        let mut sure = durable;
        if let Some(held) = self.held.get_mut(own) {
            held.completed = now;
            held.durable |= durable;
            sure |= !held.doubtful;
            held.wavers = ending == Ending::Wavers;
            held.doubtful |= held.wavers;
        }
        if ending == Ending::Wavers {
            // Older bytes may be there again.
            self.held.iter_mut().filter(|held| !held.gone).for_each(|held| held.covered = NEVER);
            return;
        }
        if ending == Ending::Maybe {
            return;
        }
        for held in self.held.iter_mut().filter(|held| held.completed < began) {
            held.covered = held.covered.min(now);
            held.settled = if sure { held.settled.min(now) } else { held.settled };
            held.gone |= durable;
        }
    }

    fn flushed(&mut self, began: Time) {
        for held in &mut self.held {
            held.durable |= held.completed < began && !held.doubtful;
            held.gone |= held.settled < began;
        }
        let mut there = self.held.iter().filter(|held| !held.gone);
        self.listed = !there.next().is_some_and(|held| held.durable) || there.next().is_some();
    }

    /// The index of a write that matches `bytes` and that a request begun at `began` may see.
    fn find(&self, pos: u64, bytes: &[u8], began: Time) -> Option<usize> {
        self.held.iter().rposition(|held| held.covered > began && held.is(pos, bytes))
    }

    /// Whether each block's part of `bytes` may be seen: a read may see some blocks of a write and
    /// not yet the others.
    fn finds_blocks(&self, pos: u64, bytes: &[u8], block: u64, began: Time) -> bool {
        parts(pos, bytes, block).all(|(at, part)| self.find(at, part, began).is_some())
    }

    /// Whether exactly one write has `bytes` at `pos`; zeros, for example, may come from several.
    fn is_of_one(&self, pos: u64, bytes: &[u8]) -> bool {
        let mut writes = self.held.iter().filter(|held| held.is(pos, bytes));
        self.held.len() == 1 || writes.next().is_some() && writes.next().is_none()
    }

    /// Whether [`Cell::is_of_one`] holds for each unit's part of `bytes`. Two writes may agree in a
    /// unit; that unit may then come from the write that is not present as a whole.
    fn is_of_one_in_each(&self, pos: u64, bytes: &[u8], unit: u64) -> bool {
        let last = pos + bytes.len() as u64 - 1;
        pos / unit == last / unit
            || parts(pos, bytes, unit).all(|(at, part)| self.is_of_one(at, part))
    }

    /// A request begun at `began` has seen the write `which`, as `bytes` at `pos`: it has replaced
    /// all writes that had completed by then. `sure` if no part of `bytes` can come from another write.
    fn seen(&mut self, which: usize, sure: bool, pos: u64, bytes: &[u8], began: Time, now: Time) {
        let Some(found) = self.held.get(which).filter(|held| !held.wavers).cloned() else { return };
        for held in self.held.iter_mut().filter(|held| held.completed < began) {
            if held.wavers || held.is(pos, bytes) {
                continue;
            }
            held.covered = held.covered.min(now);
            if sure && found.completed < now && (found.durable || !found.doubtful) {
                held.settled = held.settled.min(now);
                held.gone |= found.durable;
            }
        }
    }

    /// Whether a power cut may leave `bytes`; it may tear writes between units.
    fn may_be_left(&self, pos: u64, bytes: &[u8], unit: u64, rotten: &[ByteRange]) -> bool {
        let left = |held: &&Held| !held.gone;
        parts(pos, bytes, unit).all(|(at, part)| {
            let end = at + part.len() as u64;
            self.held.iter().filter(left).any(|held| held.is(at, part))
                || rotten.iter().any(|range| range.pos < end && at < range.end())
        })
    }
}

/// `bytes` at `pos`, cut at multiples of `unit`.
fn parts(pos: u64, bytes: &[u8], unit: u64) -> impl Iterator<Item = (u64, &[u8])> {
    let first = (unit - pos % unit).min(bytes.len() as u64) as usize;
    let (head, rest) = bytes.split_at(first);
    let all = std::iter::once(head).chain(rest.chunks(unit as usize));
    let mut at = pos;
    all.map(move |part| {
        let place = at;
        at += part.len() as u64;
        (place, part)
    })
}

#[cfg(test)]
mod tests;
