//! What a device may hold: the judge of a simulation.
//!
//! It knows the requests, when each began and how it ended, and nothing of how they were served. A
//! device is cut into cells, and each cell has the writes that it may hold.
//!
//! Invariant: a write is forgotten only when nothing may find it any more: neither a request in
//! flight nor a power cut.
//! Rules of docs/contract.md: C17 and C18 (what a read finds), C24, C28 and C49 (what a power cut
//! leaves), C52 (discard and zeroes), C54 (overlapping requests), C55 and C56.
//! Knows: pattern. Known by: judge.

use std::fmt;
use std::rc::Rc;

use nowait::Range;

use crate::pattern::{self, Value, ZERO};

/// A moment: how many things have begun or ended before it.
pub type Time = u32;

const NEVER: Time = Time::MAX;
/// Bytes that are written together, if only one of them changes.
const RISK_BYTES: u64 = 4096;
/// Bytes that are not the same in two values.
const TELLING_BYTES: u64 = 8;

/// A write that a cell may hold.
#[derive(Clone, Debug)]
struct Held {
    bytes: Bytes,
    began: Time,
    ended: Time,
    /// Since when it is known that a later one has taken its place: whoever asks after that does
    /// not find it.
    covered: Time,
    /// Since when it is known that one that has ended has: a flush that begins after that makes
    /// it go for good.
    settled: Time,
    /// If it is there, a power cut leaves it there.
    durable: bool,
    /// A flush has failed that may have lost it: no later one makes it durable (C51).
    doubtful: bool,
    /// A power cut does not bring it back.
    gone: bool,
}

#[derive(Clone, PartialEq, Eq)]
enum Bytes {
    Value(Value),
    /// What was found at this place after a power cut: parts of several, or garbage.
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
    /// It is on the list of those that a flush changes.
    listed: bool,
}

/// How a write ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It is there, and with `durable` stays there.
    Done {
        /// It was asked to be durable.
        durable: bool,
    },
    /// It failed, or may do nothing: it may be there.
    Maybe,
    /// It was never begun.
    Never,
}

/// What is not as it may be.
#[derive(Debug)]
pub struct Wrong(String);

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Wrong {
    /// A fault in words.
    #[must_use]
    pub fn new(what: String) -> Self {
        Self(what)
    }
}

/// The judge of one device.
pub struct Model {
    size: u64,
    grain: u64,
    /// Bytes that overlapping writes do not mix (C54).
    block: u64,
    /// Bytes that a power cut does not tear.
    unit: u64,
    now: Time,
    cells: Vec<Cell>,
    /// Cells that hold something that is not durable, or more than one thing.
    open: Vec<u32>,
}

impl Model {
    /// A device of `size` bytes, all of them zero, in cells of `grain` bytes.
    #[must_use]
    pub fn new(size: u64, grain: u64, block: u64, unit: u64) -> Self {
        let zero = Held::pinned(Bytes::Value(ZERO), 0);
        let count = size.div_ceil(grain);
        let cells = (0..count).map(|_| Cell { held: vec![zero.clone()], listed: false });
        Self { size, grain, block, unit, now: 1, cells: cells.collect(), open: Vec::new() }
    }

    /// The device holds `bytes`, and zeros behind them, before anything has happened to it.
    pub fn hold(&mut self, bytes: &[u8]) {
        for n in self.touched(Range::new(0, bytes.len() as u64)) {
            let own = self.range_of(n);
            let mut part = bytes.get(own.pos as usize..).unwrap_or_default().to_vec();
            part.resize(own.len as usize, 0);
            self.pin(n, own, &part);
        }
    }

    /// Something begins.
    pub fn begin(&mut self) -> Time {
        self.now += 1;
        self.now
    }

    fn range_of(&self, cell: usize) -> Range {
        let pos = cell as u64 * self.grain;
        Range::new(pos, self.grain.min(self.size - pos))
    }

    /// The cells that `range` touches.
    fn touched(&self, range: Range) -> std::ops::Range<usize> {
        let end = range.end().min(self.size).div_ceil(self.grain);
        (range.pos / self.grain).min(end) as usize..end as usize
    }

    /// A write of `value` to `range`, which is whole cells, has begun. Nothing that is in flight
    /// began before `oldest`.
    pub fn begin_write(&mut self, range: Range, value: Value, oldest: Time) -> Time {
        let began = self.begin();
        for n in self.touched(range) {
            let Some(cell) = self.cells.get_mut(n) else { continue };
            cell.held.retain(|held| !held.gone || held.covered >= oldest);
            cell.held.push(Held {
                bytes: Bytes::Value(value),
                began,
                ended: NEVER,
                covered: NEVER,
                settled: NEVER,
                durable: false,
                doubtful: false,
                gone: false,
            });
            if !std::mem::replace(&mut cell.listed, true) {
                self.open.push(n as u32);
            }
        }
        began
    }

    /// The write to `range` that began at `began` has ended, or the part `range` of one.
    pub fn end_write(&mut self, range: Range, began: Time, ending: Ending) {
        self.now += 1;
        for n in self.touched(range) {
            let whole = self.range_of(n).end() <= range.end();
            let ending = if whole { ending } else { Ending::Maybe };
            if let Some(cell) = self.cells.get_mut(n) {
                cell.end_write(began, ending, self.now);
            }
        }
    }

    /// A flush that began at `began` has succeeded (C49).
    pub fn end_flush(&mut self, began: Time) {
        self.now += 1;
        let cells = &mut self.cells;
        self.open.retain(|&n| {
            let Some(cell) = cells.get_mut(n as usize) else { return false };
            cell.flushed(began);
            cell.listed
        });
    }

    /// A flush has failed, or may have: what is not durable by now no later one makes durable (C51).
    pub fn doubt(&mut self) {
        for &n in &self.open {
            if let Some(cell) = self.cells.get_mut(n as usize) {
                cell.held.iter_mut().for_each(Held::doubt);
            }
        }
    }

    /// A read that began at `began` has found `bytes` at `pos`.
    ///
    /// # Errors
    /// Bytes that it could not find.
    pub fn check(&mut self, pos: u64, bytes: &[u8], began: Time) -> Result<(), Wrong> {
        self.now += 1;
        let range = Range::new(pos, bytes.len() as u64);
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
            // A few bytes may be alike by chance, and tell nothing.
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
                return Err(Wrong(what));
            }
            before = Some((n, found));
        }
        Ok(())
    }

    fn holds(&self, n: usize, began: Time) -> bool {
        self.cells.get(n).is_some_and(|cell| cell.held.iter().any(|held| held.began == began))
    }

    /// Somebody who asked at `began` was told that `range` reads as zeros.
    ///
    /// # Errors
    /// A cell that could not.
    pub fn check_zeros(&self, range: Range, began: Time) -> Result<(), Wrong> {
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

    /// The power has failed, and the device holds `bytes` now; what the device says is garbage is
    /// `rotten`. Everything in flight has ended.
    ///
    /// # Errors
    /// Bytes that a power cut could not leave.
    pub fn power_cut(&mut self, bytes: &[u8], rotten: &[Range]) -> Result<(), Wrong> {
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
            // What was in flight may have arrived in parts, at any block.
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
            // What is there now stays there.
            if let Some(cell) = self.cells.get_mut(n as usize) {
                cell.listed = false;
                cell.held.iter_mut().for_each(|held| held.durable = true);
            }
        }
        Ok(())
    }

    /// The device ends at byte `size` from now on, and is opened anew: nothing is in flight.
    pub fn shrink(&mut self, size: u64) {
        self.size = self.size.min(size);
        self.cells.truncate(self.size.div_ceil(self.grain) as usize);
    }

    /// Whether something in the blocks of `range` is not durable: then all of what they hold was
    /// being written, and may be garbage.
    fn is_at_risk(&self, range: Range) -> bool {
        let pos = range.pos / RISK_BYTES * RISK_BYTES;
        let all = Range::new(pos, range.end().next_multiple_of(RISK_BYTES) - pos);
        let cells = self.cells.get(self.touched(all)).unwrap_or_default();
        cells.iter().flat_map(|cell| &cell.held).any(|held| !held.gone && !held.durable)
    }

    /// From now on a cell holds what was found in it.
    fn pin(&mut self, n: usize, own: Range, bytes: &[u8]) {
        let now = self.now;
        let Some(cell) = self.cells.get_mut(n) else { return };
        let known = cell.held.iter().find(|held| held.is(own.pos, bytes));
        let found = || Bytes::Found(own.pos, bytes.into());
        let bytes = known.map_or_else(found, |held| held.bytes.clone());
        cell.held.clear();
        cell.held.push(Held::pinned(bytes, now));
        cell.listed = false;
    }

    fn describe(&self, n: usize, pos: u64, bytes: &[u8], began: Time) -> Wrong {
        let first = bytes.get(..bytes.len().min(16)).unwrap_or_default();
        let cell = self.cells.get(n).map(|cell| cell.held.as_slice()).unwrap_or_default();
        let kind = match bytes.iter().all(|&byte| byte == 0) {
            true => "zeros".to_owned(),
            false => format!("{first:02x?}"),
        };
        let known = cell.iter().find(|held| held.is(pos, bytes));
        let known = known.map(|held| format!(", which is {held:?},")).unwrap_or_default();
        Wrong(format!(
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
            ended: now,
            covered: never,
            settled: never,
            durable: true,
            doubtful: false,
            gone: false,
        }
    }

    /// What is not durable by now never will be, and what it took the place of may come back.
    fn doubt(&mut self) {
        self.doubtful |= !self.durable;
        self.settled = NEVER;
    }

    /// Whether `bytes` at `pos` are some of it.
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
            held.ended = now;
            held.durable |= durable;
            sure |= !held.doubtful;
        }
        if ending == Ending::Maybe {
            return;
        }
        for held in self.held.iter_mut().filter(|held| held.ended < began) {
            held.covered = held.covered.min(now);
            held.settled = if sure { held.settled.min(now) } else { held.settled };
            held.gone |= durable;
        }
    }

    fn flushed(&mut self, began: Time) {
        for held in &mut self.held {
            held.durable |= held.ended < began && !held.doubtful;
            held.gone |= held.settled < began;
        }
        let mut there = self.held.iter().filter(|held| !held.gone);
        self.listed = !there.next().is_some_and(|held| held.durable) || there.next().is_some();
    }

    /// What was found by somebody who asked at `began`, if it may be.
    fn find(&self, pos: u64, bytes: &[u8], began: Time) -> Option<usize> {
        self.held.iter().rposition(|held| held.covered > began && held.is(pos, bytes))
    }

    /// Whether each block's part of `bytes` may be found: a read may see some blocks of a write and
    /// not yet the others.
    fn finds_blocks(&self, pos: u64, bytes: &[u8], block: u64, began: Time) -> bool {
        parts(pos, bytes, block).all(|(at, part)| self.find(at, part, began).is_some())
    }

    /// Whether only one write has `bytes` at `pos`, which some have: zeros do not tell which of
    /// several they come from.
    fn is_of_one(&self, pos: u64, bytes: &[u8]) -> bool {
        let mut writes = self.held.iter().filter(|held| held.is(pos, bytes));
        self.held.len() == 1 || writes.next().is_some() && writes.next().is_none()
    }

    /// Whether that holds for each unit's part of `bytes`. Two writes may have one in common, and then
    /// the one that is not there as a whole may have it there, over what came before it.
    fn is_of_one_in_each(&self, pos: u64, bytes: &[u8], unit: u64) -> bool {
        let last = pos + bytes.len() as u64 - 1;
        pos / unit == last / unit
            || parts(pos, bytes, unit).all(|(at, part)| self.is_of_one(at, part))
    }

    /// Who asked at `began` has found `which`, as `bytes` at `pos`: it has taken the place of all that
    /// had ended by then. `sure` if nothing of another one can have been found.
    fn seen(&mut self, which: usize, sure: bool, pos: u64, bytes: &[u8], began: Time, now: Time) {
        let Some(found) = self.held.get(which).cloned() else { return };
        for held in self.held.iter_mut().filter(|held| held.ended < began) {
            if held.is(pos, bytes) {
                continue;
            }
            held.covered = held.covered.min(now);
            if sure && found.ended < now && (found.durable || !found.doubtful) {
                held.settled = held.settled.min(now);
                held.gone |= found.durable;
            }
        }
    }

    /// Whether a power cut may leave `bytes`, of which it may have torn those of two units.
    fn may_be_left(&self, pos: u64, bytes: &[u8], unit: u64, rotten: &[Range]) -> bool {
        let left = |held: &&Held| !held.gone;
        parts(pos, bytes, unit).all(|(at, part)| {
            let end = at + part.len() as u64;
            self.held.iter().filter(left).any(|held| held.is(at, part))
                || rotten.iter().any(|range| range.pos < end && at < range.end())
        })
    }
}

/// `bytes`, which lie at `pos`, cut at multiples of `unit`.
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
