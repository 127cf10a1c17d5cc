//! The contents of a simulated device: the bytes that reads return, the bytes that are durable, and
//! the log of changes between the two.
//!
//! Invariant: `safe` with the changes of `log` applied in order equals `current`, except for lost
//! changes. A change that was reported before a flush is in `safe` after it. The bytes between the
//! device's end and the end of its last block are zero.

mod preallocation;
#[cfg(test)]
mod tests;

use crate::sim::random::Random;
use crate::types::byte_range::ByteRange;

/// Granularity of allocation in bytes, as of a file system.
pub(crate) const BLOCK_BYTES: u64 = 4096;
const ZEROS: [u8; BLOCK_BYTES as usize] = [0; BLOCK_BYTES as usize];
/// Size of the volatile cache in bytes; a fuller cache is written back as by a flush.
const CACHE_BYTES: usize = 4 << 20;

/// The allocation of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    Hole,
    /// Allocated, reads as zeros.
    Unwritten,
    Mapped,
}

/// A change that reads return and a power cut may undo.
struct AppliedWrite {
    pos: usize,
    len: usize,
    /// Index of its first byte in `SimDisk::bytes`; `None` for zeros.
    offset: Option<usize>,
    /// Its completion was drained.
    reported: bool,
    /// It was written with `RWF_DSYNC`.
    durable: bool,
    /// A failed flush has dropped it.
    lost: bool,
    /// It deallocates blocks that were never written. A file system only journals that, so a power
    /// cut makes no garbage of it.
    metadata_only: bool,
}

/// A change of the size that a power cut may undo.
#[derive(Clone, Copy)]
struct Resized {
    /// The number of the next change in the log.
    number: u64,
    size: u64,
}

/// The contents of a device.
pub(crate) struct SimDisk {
    size: u64,
    /// The durable size; later changes of the size are in `resized`.
    safe_size: u64,
    resized: Vec<Resized>,
    /// Bytes that a power cut does not tear.
    unit: usize,
    current: Vec<u8>,
    safe: Vec<u8>,
    blocks: Vec<Block>,
    /// The number of blocks that can be allocated at the same time.
    capacity: u64,
    backed: u64,
    log: Vec<AppliedWrite>,
    /// The number of the first change in the log, counted over the whole life of the device.
    first: u64,
    bytes: Vec<u8>,
    /// Blocks that were changed since the last power cut; in all others `safe` equals `current`.
    touched: Vec<usize>,
    is_touched: Vec<bool>,
    times: ChangeTimes,
}

/// When the contents changed last, as the times of a file tell it: numbers that only grow.
#[derive(Clone, Copy, Default)]
struct ChangeTimes {
    clock: u64,
    current: u64,
    safe: u64,
}

impl SimDisk {
    /// A device of `size` bytes, all of it a hole, of which `capacity` blocks can be allocated.
    pub(crate) fn new(size: u64, unit: u32, capacity: u64) -> Self {
        let padded = size.next_multiple_of(BLOCK_BYTES) as usize;
        Self {
            size,
            safe_size: size,
            resized: Vec::new(),
            unit: unit as usize,
            current: vec![0; padded],
            safe: vec![0; padded],
            blocks: vec![Block::Hole; padded / BLOCK_BYTES as usize],
            capacity,
            backed: 0,
            log: Vec::new(),
            first: 0,
            bytes: Vec::new(),
            touched: Vec::new(),
            is_touched: vec![false; padded / BLOCK_BYTES as usize],
            times: ChangeTimes::default(),
        }
    }

    /// When the contents changed last. After a power cut it may be earlier, if it was not durable.
    pub(crate) fn changed_at(&self) -> u64 {
        self.times.current
    }

    /// A device with the durable contents `bytes`, in which whole blocks of zeros are holes.
    pub(crate) fn holding(bytes: &[u8], size: u64, unit: u32, capacity: u64) -> Self {
        let mut media = Self::new(size, unit, capacity);
        for (block, at) in bytes.chunks(BLOCK_BYTES as usize).zip((0..).step_by(ZEROS.len())) {
            if !ZEROS.starts_with(block) {
                let range = ByteRange::new(at, block.len() as u64);
                let (_, change) = media.write(range, false, |bytes| bytes.extend(block));
                media.reported(change);
            }
        }
        media.flush();
        media
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Cuts the device to `size` bytes, durably; a greater `size` has no effect.
    pub(crate) fn shrink(&mut self, size: u64) {
        self.size = self.size.min(size);
        self.safe_size = self.size;
    }

    /// Sets the size to `size` bytes. A grown part is a hole; a cut part is gone, unless the power
    /// fails before a flush.
    pub(crate) fn resize(&mut self, size: u64) {
        let padded = size.next_multiple_of(BLOCK_BYTES) as usize;
        if padded > self.current.len() {
            self.current.resize(padded, 0);
            self.safe.resize(padded, 0);
            self.blocks.resize(padded / ZEROS.len(), Block::Hole);
            self.is_touched.resize(padded / ZEROS.len(), false);
        }
        if size < self.size {
            let lost = ByteRange::new(size, self.size - size);
            self.current.get_mut(size as usize..self.size as usize).unwrap_or_default().fill(0);
            self.touch(lost);
            self.make_holes_behind(size);
        }
        self.size = size;
        self.resized.push(Resized { number: self.first + self.log.len() as u64, size });
    }

    fn make_holes_behind(&mut self, size: u64) {
        for block in self.blocks.iter_mut().skip(size.div_ceil(BLOCK_BYTES) as usize) {
            if std::mem::replace(block, Block::Hole) != Block::Hole {
                self.backed -= 1;
            }
        }
    }

    /// Makes a change of the size durable, and cuts earlier changes in the log at the new end.
    fn settle_size(&mut self, Resized { number, size }: Resized) {
        if size < self.safe_size {
            self.safe.get_mut(size as usize..).unwrap_or_default().fill(0);
            let before = number.saturating_sub(self.first) as usize;
            for applied in self.log.iter_mut().take(before) {
                applied.len = applied.len.min((size as usize).saturating_sub(applied.pos));
            }
        }
        self.safe_size = size;
    }

    fn blocks_of(range: ByteRange) -> std::ops::Range<usize> {
        let end = range.end().div_ceil(BLOCK_BYTES).max(range.pos / BLOCK_BYTES);
        (range.pos / BLOCK_BYTES) as usize..end as usize
    }

    /// The present bytes of `range`; empty if it reaches behind the last block.
    pub(crate) fn read(&self, range: ByteRange) -> &[u8] {
        self.current.get(range.pos as usize..range.end() as usize).unwrap_or_default()
    }

    /// Whether a write to `range` would have to allocate a block. XFS and ext4 convert unwritten
    /// blocks at the end of a write, so that it need not wait for it.
    pub(crate) fn allocates(&self, range: ByteRange) -> bool {
        let blocks = self.blocks.get(Self::blocks_of(range)).unwrap_or_default();
        blocks.contains(&Block::Hole)
    }

    /// Allocates the blocks of `range` from its start on, as far as there is room; returns the
    /// bytes of it that can be written.
    fn back(&mut self, range: ByteRange, as_what: Block) -> u64 {
        for n in Self::blocks_of(range) {
            let Some(block) = self.blocks.get_mut(n) else { continue };
            if *block == Block::Hole {
                if self.backed >= self.capacity {
                    return (n as u64 * BLOCK_BYTES).saturating_sub(range.pos).min(range.len);
                }
                self.backed += 1;
                *block = as_what;
            } else if as_what == Block::Mapped {
                *block = Block::Mapped;
            }
        }
        range.len
    }

    /// Writes the `range.len` bytes that `fill` appends to its argument, as far as there is room.
    /// Returns the bytes written and the change's number.
    pub(crate) fn write(
        &mut self,
        range: ByteRange,
        durable: bool,
        fill: impl FnOnce(&mut Vec<u8>),
    ) -> (u64, u64) {
        let len = self.back(range, Block::Mapped) as usize;
        let at = self.bytes.len();
        fill(&mut self.bytes);
        self.bytes.truncate(at + len);
        let pos = range.pos as usize;
        if let (Some(now), Some(new)) = (self.current.get_mut(pos..pos + len), self.bytes.get(at..))
        {
            now.copy_from_slice(new);
        }
        (
            len as u64,
            self.push(AppliedWrite { offset: Some(at), durable, ..AppliedWrite::zeros(pos, len) }),
        )
    }

    /// Zeroes `range`. Its whole blocks are deallocated, or with `keep` all of its blocks
    /// allocated. Returns the change's number, or `None` when there is no room.
    pub(crate) fn zero(&mut self, range: ByteRange, keep: bool) -> Option<u64> {
        if keep && self.back(range, Block::Unwritten) < range.len {
            return None;
        }
        let (pos, len) = (range.pos as usize, range.len as usize);
        let metadata_only = !keep && self.was_never_written(range);
        self.current.get_mut(pos..pos + len)?.fill(0);
        let whole = range.pos.div_ceil(BLOCK_BYTES)..range.end() / BLOCK_BYTES;
        for n in whole {
            let Some(block) = self.blocks.get_mut(n as usize) else { continue };
            if keep {
                *block = Block::Unwritten;
            } else if *block != Block::Hole {
                *block = Block::Hole;
                self.backed -= 1;
            }
        }
        Some(self.push(AppliedWrite { metadata_only, ..AppliedWrite::zeros(pos, len) }))
    }

    fn touch(&mut self, range: ByteRange) {
        for n in Self::blocks_of(range) {
            if let Some(is_touched) = self.is_touched.get_mut(n)
                && !std::mem::replace(is_touched, true)
            {
                self.touched.push(n);
            }
        }
    }

    fn push(&mut self, applied: AppliedWrite) -> u64 {
        self.times.clock += 1;
        self.times.current = self.times.clock;
        self.touch(ByteRange::new(applied.pos as u64, applied.len as u64));
        self.log.push(applied);
        self.first + self.log.len() as u64 - 1
    }

    /// Marks change `n` as reported to the caller.
    pub(crate) fn reported(&mut self, n: u64) {
        if let Some(applied) =
            n.checked_sub(self.first).and_then(|index| self.log.get_mut(index as usize))
        {
            applied.reported = true;
        }
        if self.bytes.len() > CACHE_BYTES {
            self.flush();
        }
    }

    /// Makes every reported change durable, and also the unreported ones that precede the last of
    /// them.
    pub(crate) fn flush(&mut self) {
        std::mem::take(&mut self.resized).into_iter().for_each(|it| self.settle_size(it));
        self.times.safe = self.times.current;
        let last = self.log.iter().rposition(|applied| applied.reported || applied.durable);
        let count = last.map_or(0, |last| last + 1);
        for applied in self.log.iter().take(count).filter(|applied| !applied.lost) {
            apply(applied, applied.pos, applied.len, &self.bytes, &mut self.safe);
        }
        self.log.drain(..count);
        self.first += count as u64;
        let kept = self.log.iter().find_map(|applied| applied.offset).unwrap_or(self.bytes.len());
        self.bytes.drain(..kept);
        self.log.iter_mut().for_each(|applied| applied.offset = applied.offset.map(|at| at - kept));
    }

    /// Simulates a failed flush: some of the changes that it covers never become durable, even if
    /// later flushes succeed.
    pub(crate) fn lose(&mut self, random: &mut Random) {
        for applied in self.log.iter_mut().filter(|applied| applied.reported && !applied.durable) {
            applied.lost |= random.below(2) == 0;
        }
    }

    /// Forgets what a failed flush has lost: reads return what is durable, and what can still become so.
    pub(crate) fn forget_lost(&mut self) {
        let Self { log, bytes, current, safe, touched, .. } = self;
        for &n in touched.iter() {
            let at = n * BLOCK_BYTES as usize..(n + 1) * BLOCK_BYTES as usize;
            if let (Some(now), Some(safe)) = (current.get_mut(at.clone()), safe.get(at)) {
                now.copy_from_slice(safe);
            }
        }
        for applied in log.iter().filter(|applied| !applied.lost) {
            apply(applied, applied.pos, applied.len, bytes, current);
        }
    }

    /// Cuts the power. Of the changes of each unit that are not durable, any subset is applied in
    /// any order, or the unit becomes garbage, `rot` times in 65536. Returns the ranges of garbage.
    pub(crate) fn cut(&mut self, random: &mut Random, rot: u16) -> Vec<ByteRange> {
        self.cut_sizes(random);
        // No number is drawn: seeds go on as they were.
        let lost = self.times.clock % (self.times.current - self.times.safe + 1);
        self.times.current -= lost;
        self.times.safe = self.times.current;
        let mut parts = Vec::new();
        for (index, applied) in self.log.iter().enumerate().filter(|(_, applied)| !applied.lost) {
            let units = applied.pos / self.unit..(applied.pos + applied.len).div_ceil(self.unit);
            parts.extend(units.map(|unit| (unit, index)));
        }
        parts.sort_unstable();
        let mut rotten = Vec::new();
        for unit in parts.chunk_by_mut(|one, other| one.0 == other.0) {
            self.cut_unit(unit, random, rot, &mut rotten);
        }
        self.log.clear();
        self.bytes.clear();
        let end = self.size as usize;
        self.safe.get_mut(end..).unwrap_or_default().fill(0);
        for n in std::mem::take(&mut self.touched) {
            self.lose_power(n, random);
        }
        self.make_holes_behind(self.size);
        rotten
    }

    /// Decides which changes of the size survive: a prefix, as in a file system's journal, and at
    /// least those before the last durable write.
    fn cut_sizes(&mut self, random: &mut Random) {
        let resized = std::mem::take(&mut self.resized);
        if resized.is_empty() {
            return;
        }
        let durable = self.log.iter().rposition(|applied| applied.durable);
        let durable = durable.map_or(0, |last| self.first + last as u64);
        let certain = resized.iter().take_while(|it| it.number <= durable).count();
        let count = certain + random.below((resized.len() - certain) as u64 + 1) as usize;
        resized.into_iter().take(count).for_each(|it| self.settle_size(it));
        self.size = self.safe_size;
    }

    /// Decides which changes of one unit survive.
    fn cut_unit(
        &mut self,
        parts: &mut [(usize, usize)],
        random: &mut Random,
        rot: u16,
        rotten: &mut Vec<ByteRange>,
    ) {
        let Self { log, bytes, safe, unit, .. } = self;
        let mut rest = parts;
        while !rest.is_empty() {
            let durable =
                rest.iter().position(|&(_, n)| log.get(n).is_some_and(|applied| applied.durable));
            let (loose, later) = rest.split_at_mut(durable.unwrap_or(rest.len()));
            for count in 0..random.below(loose.len() as u64 + 1) as usize {
                let other = count + random.below((loose.len() - count) as u64) as usize;
                loose.swap(count, other);
                let Some((pos, len, applied)) = part(log, loose.get(count), *unit) else {
                    continue;
                };
                apply(applied, pos, len, bytes, safe);
                if durable.is_none() && !applied.metadata_only && random.chance(rot) {
                    if let Some(bytes) = safe.get_mut(pos..pos + len) {
                        bytes.fill_with(|| random.next() as u8);
                    }
                    rotten.push(ByteRange::new(pos as u64, len as u64));
                }
            }
            if let Some((pos, len, applied)) = part(log, later.first(), *unit) {
                apply(applied, pos, len, bytes, safe);
            }
            rest = later.get_mut(1..).unwrap_or_default();
        }
    }

    /// Resets a block to its durable bytes. A block that is not zero is mapped; the allocation of a
    /// zero block that was no hole is random.
    fn lose_power(&mut self, n: usize, random: &mut Random) {
        let at = n * BLOCK_BYTES as usize;
        let bytes = at..at + BLOCK_BYTES as usize;
        let (Some(now), Some(safe), Some(block), Some(touched)) = (
            self.current.get_mut(bytes.clone()),
            self.safe.get(bytes),
            self.blocks.get_mut(n),
            self.is_touched.get_mut(n),
        ) else {
            return;
        };
        *touched = false;
        now.copy_from_slice(safe);
        let was = *block;
        if safe != ZEROS {
            *block = Block::Mapped;
        } else if was != Block::Hole {
            let kinds = [Block::Hole, Block::Unwritten, Block::Mapped];
            *block = random.pick(&kinds).unwrap_or(Block::Hole);
        }
        match (was, *block) {
            (Block::Hole, Block::Unwritten | Block::Mapped) => self.backed += 1,
            (Block::Unwritten | Block::Mapped, Block::Hole) => self.backed -= 1,
            _ => {}
        }
    }

    /// The first byte from `pos` on that is data, or a hole, as lseek(2) returns it; `None` if
    /// there is none.
    pub(crate) fn seek(&self, pos: u64, data: bool) -> Option<u64> {
        if pos >= self.size {
            return None;
        }
        let from = (pos / BLOCK_BYTES) as usize;
        let blocks = self.blocks.get(from..).unwrap_or_default();
        let found = blocks.iter().position(|&block| (block == Block::Mapped) == data);
        match found {
            Some(n) => {
                let found = ((from + n) as u64 * BLOCK_BYTES).max(pos);
                if found < self.size { Some(found) } else { self.end_of(data) }
            }
            None => self.end_of(data),
        }
    }

    /// The result of a search that reaches the end, which counts as a hole.
    fn end_of(&self, data: bool) -> Option<u64> {
        (!data).then_some(self.size)
    }
}

impl AppliedWrite {
    fn zeros(pos: usize, len: usize) -> Self {
        Self {
            pos,
            len,
            offset: None,
            reported: false,
            durable: false,
            lost: false,
            metadata_only: false,
        }
    }
}

/// The part of a change that lies in a unit: position, length and the change.
fn part<'a>(
    log: &'a [AppliedWrite],
    which: Option<&(usize, usize)>,
    unit: usize,
) -> Option<(usize, usize, &'a AppliedWrite)> {
    let &(number, index) = which?;
    let applied = log.get(index)?;
    let pos = applied.pos.max(number * unit);
    let end = (applied.pos + applied.len).min((number + 1) * unit);
    Some((pos, end.saturating_sub(pos), applied))
}

/// Copies the bytes `pos..pos + len` of a change to `to`.
fn apply(applied: &AppliedWrite, pos: usize, len: usize, bytes: &[u8], to: &mut [u8]) {
    let Some(to) = to.get_mut(pos..pos + len) else { return };
    match applied.offset.map(|at| at + pos - applied.pos).and_then(|at| bytes.get(at..at + len)) {
        Some(from) => to.copy_from_slice(from),
        None => to.fill(0),
    }
}
