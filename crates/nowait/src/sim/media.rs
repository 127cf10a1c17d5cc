//! What a simulated device holds: as it reads now, as it would read after a power cut, and every
//! write between the two.
//!
//! Invariant: `safe` with the landed changes of `log` applied in order is `now`, but for what was
//! lost; a change that was acknowledged before a flush is in `safe` after it. Bytes behind the
//! device's end, up to a whole block, are zero.
//! Knows: random. Known by: device. Kernel counterpart: dm-log-writes, which records what a
//! file system sent so that each state between can be looked at.

use super::random::Random;
use crate::error::Range;

/// Bytes that are allocated at once, as a file system does it.
pub(crate) const BLOCK_BYTES: u64 = 4096;
const ZEROS: [u8; BLOCK_BYTES as usize] = [0; BLOCK_BYTES as usize];
/// Bytes of volatile cache; a fuller one is written back as if it were flushed.
const CACHE_BYTES: usize = 4 << 20;

/// What backs a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    Hole,
    /// Allocated, reads as zeros.
    Unwritten,
    Mapped,
}

/// A change that reads see and a power cut may undo.
struct Landed {
    pos: usize,
    len: usize,
    /// Where its bytes begin in `Media::bytes`; `None` for zeros.
    at: Option<usize>,
    /// It was reported to whoever asked for it.
    reported: bool,
    /// It was written through.
    durable: bool,
    /// A flush that failed has dropped it.
    lost: bool,
}

/// A change of the size that a power cut may undo.
#[derive(Clone, Copy)]
struct Resized {
    /// The number that the change after it has.
    number: u64,
    size: u64,
}

/// The contents of a device.
pub(crate) struct Media {
    size: u64,
    /// Bytes of it that are durable; changes of the size after that are in `resized`.
    safe_size: u64,
    resized: Vec<Resized>,
    /// Bytes that a power cut does not tear.
    unit: usize,
    now: Vec<u8>,
    safe: Vec<u8>,
    blocks: Vec<Block>,
    /// Blocks that can be backed at the same time.
    capacity: u64,
    backed: u64,
    log: Vec<Landed>,
    /// The number of the first change in the log, counted from the beginning of time.
    first: u64,
    bytes: Vec<u8>,
    /// Blocks that were changed since the power failed last: of the others, `safe` is `now`.
    touched: Vec<usize>,
    is_touched: Vec<bool>,
}

impl Media {
    /// A device of `size` bytes, all of it a hole, of which `capacity` blocks can be backed.
    pub(crate) fn new(size: u64, unit: u32, capacity: u64) -> Self {
        let padded = size.next_multiple_of(BLOCK_BYTES) as usize;
        Self {
            size,
            safe_size: size,
            resized: Vec::new(),
            unit: unit as usize,
            now: vec![0; padded],
            safe: vec![0; padded],
            blocks: vec![Block::Hole; padded / BLOCK_BYTES as usize],
            capacity,
            backed: 0,
            log: Vec::new(),
            first: 0,
            bytes: Vec::new(),
            touched: Vec::new(),
            is_touched: vec![false; padded / BLOCK_BYTES as usize],
        }
    }

    /// The same, which holds `bytes` for good; whole blocks of zeros in them are holes.
    pub(crate) fn holding(bytes: &[u8], size: u64, unit: u32, capacity: u64) -> Self {
        let mut media = Self::new(size, unit, capacity);
        for (block, at) in bytes.chunks(BLOCK_BYTES as usize).zip((0..).step_by(ZEROS.len())) {
            if !ZEROS.starts_with(block) {
                let range = Range::new(at, block.len() as u64);
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

    /// The device ends earlier from now on.
    pub(crate) fn shrink(&mut self, size: u64) {
        self.size = self.size.min(size);
        self.safe_size = self.size;
    }

    /// The device has `size` bytes from now on. What it grows by is a hole; what it loses is gone,
    /// unless the power fails before a flush.
    pub(crate) fn resize(&mut self, size: u64) {
        let padded = size.next_multiple_of(BLOCK_BYTES) as usize;
        if padded > self.now.len() {
            self.now.resize(padded, 0);
            self.safe.resize(padded, 0);
            self.blocks.resize(padded / ZEROS.len(), Block::Hole);
            self.is_touched.resize(padded / ZEROS.len(), false);
        }
        if size < self.size {
            let lost = Range::new(size, self.size - size);
            self.now.get_mut(size as usize..self.size as usize).unwrap_or_default().fill(0);
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

    /// A change of the size is durable: what came before it does not reach behind it any more.
    fn settle_size(&mut self, Resized { number, size }: Resized) {
        if size < self.safe_size {
            self.safe.get_mut(size as usize..).unwrap_or_default().fill(0);
            let before = number.saturating_sub(self.first) as usize;
            for landed in self.log.iter_mut().take(before) {
                landed.len = landed.len.min((size as usize).saturating_sub(landed.pos));
            }
        }
        self.safe_size = size;
    }

    fn blocks_of(range: Range) -> std::ops::Range<usize> {
        let end = range.end().div_ceil(BLOCK_BYTES).max(range.pos / BLOCK_BYTES);
        (range.pos / BLOCK_BYTES) as usize..end as usize
    }

    /// The bytes of `range`, as they read now; none behind the last block.
    pub(crate) fn read(&self, range: Range) -> &[u8] {
        self.now.get(range.pos as usize..range.end() as usize).unwrap_or_default()
    }

    /// Whether a write to `range` would have to allocate or convert anything.
    pub(crate) fn allocates(&self, range: Range) -> bool {
        let blocks = self.blocks.get(Self::blocks_of(range)).unwrap_or_default();
        blocks.iter().any(|&block| block != Block::Mapped)
    }

    /// Backs the blocks of `range` from its start on, as far as there is room; returns the bytes
    /// of it that can be written.
    fn back(&mut self, range: Range, as_what: Block) -> u64 {
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

    /// Writes what `fill` appends to its argument, `range.len` bytes, as far as there is room.
    /// Returns the bytes written and the change's number.
    pub(crate) fn write(
        &mut self,
        range: Range,
        durable: bool,
        fill: impl FnOnce(&mut Vec<u8>),
    ) -> (u64, u64) {
        let len = self.back(range, Block::Mapped) as usize;
        let at = self.bytes.len();
        fill(&mut self.bytes);
        self.bytes.truncate(at + len);
        let pos = range.pos as usize;
        if let (Some(now), Some(new)) = (self.now.get_mut(pos..pos + len), self.bytes.get(at..)) {
            now.copy_from_slice(new);
        }
        (len as u64, self.push(Landed { at: Some(at), durable, ..Landed::zeros(pos, len) }))
    }

    /// Zeros `range`; whole blocks of it lose their storage, or with `keep` get some. Returns the
    /// change's number, or `None` when there is no room.
    pub(crate) fn zero(&mut self, range: Range, keep: bool) -> Option<u64> {
        if keep && self.back(range, Block::Unwritten) < range.len {
            return None;
        }
        let (pos, len) = (range.pos as usize, range.len as usize);
        self.now.get_mut(pos..pos + len)?.fill(0);
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
        Some(self.push(Landed::zeros(pos, len)))
    }

    fn touch(&mut self, range: Range) {
        for n in Self::blocks_of(range) {
            if let Some(known) = self.is_touched.get_mut(n)
                && !std::mem::replace(known, true)
            {
                self.touched.push(n);
            }
        }
    }

    fn push(&mut self, landed: Landed) -> u64 {
        self.touch(Range::new(landed.pos as u64, landed.len as u64));
        self.log.push(landed);
        self.first + self.log.len() as u64 - 1
    }

    /// Whoever asked for change `n` has been told that it is done.
    pub(crate) fn reported(&mut self, n: u64) {
        if let Some(landed) =
            n.checked_sub(self.first).and_then(|index| self.log.get_mut(index as usize))
        {
            landed.reported = true;
        }
        if self.bytes.len() > CACHE_BYTES {
            self.flush();
        }
    }

    /// Makes every reported change durable. What was not reported yet may go with it.
    pub(crate) fn flush(&mut self) {
        std::mem::take(&mut self.resized).into_iter().for_each(|it| self.settle_size(it));
        let last = self.log.iter().rposition(|landed| landed.reported || landed.durable);
        let count = last.map_or(0, |last| last + 1);
        for landed in self.log.iter().take(count).filter(|landed| !landed.lost) {
            apply(landed, landed.pos, landed.len, &self.bytes, &mut self.safe);
        }
        self.log.drain(..count);
        self.first += count as u64;
        let kept = self.log.iter().find_map(|landed| landed.at).unwrap_or(self.bytes.len());
        self.bytes.drain(..kept);
        self.log.iter_mut().for_each(|landed| landed.at = landed.at.map(|at| at - kept));
    }

    /// A flush has failed: some of what it was to make durable never will be, however often
    /// another one succeeds.
    pub(crate) fn lose(&mut self, random: &mut Random) {
        for landed in self.log.iter_mut().filter(|landed| landed.reported && !landed.durable) {
            landed.lost |= random.below(2) == 0;
        }
    }

    /// The power fails: of each unit's changes that are not durable any subset is there, in any
    /// order, or garbage, `rot` times in 65536; what is garbage now is returned.
    pub(crate) fn cut(&mut self, random: &mut Random, rot: u16) -> Vec<Range> {
        self.cut_sizes(random);
        let mut parts = Vec::new();
        for (index, landed) in self.log.iter().enumerate().filter(|(_, landed)| !landed.lost) {
            let units = landed.pos / self.unit..(landed.pos + landed.len).div_ceil(self.unit);
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

    /// Decides which changes of the size are there: the first ones, as a file system's journal has
    /// them, and with what was written through all that came before it.
    fn cut_sizes(&mut self, random: &mut Random) {
        let resized = std::mem::take(&mut self.resized);
        if resized.is_empty() {
            return;
        }
        let durable = self.log.iter().rposition(|landed| landed.durable);
        let durable = durable.map_or(0, |last| self.first + last as u64);
        let sure = resized.iter().take_while(|it| it.number <= durable).count();
        let count = sure + random.below((resized.len() - sure) as u64 + 1) as usize;
        resized.into_iter().take(count).for_each(|it| self.settle_size(it));
        self.size = self.safe_size;
    }

    /// Decides what of the changes of one unit is there.
    fn cut_unit(
        &mut self,
        parts: &mut [(usize, usize)],
        random: &mut Random,
        rot: u16,
        rotten: &mut Vec<Range>,
    ) {
        let Self { log, bytes, safe, unit, .. } = self;
        let mut rest = parts;
        while !rest.is_empty() {
            let durable =
                rest.iter().position(|&(_, n)| log.get(n).is_some_and(|landed| landed.durable));
            let (loose, later) = rest.split_at_mut(durable.unwrap_or(rest.len()));
            for count in 0..random.below(loose.len() as u64 + 1) as usize {
                let other = count + random.below((loose.len() - count) as u64) as usize;
                loose.swap(count, other);
                let Some((pos, len, landed)) = part(log, loose.get(count), *unit) else { continue };
                apply(landed, pos, len, bytes, safe);
                if durable.is_none() && random.chance(rot) {
                    if let Some(bytes) = safe.get_mut(pos..pos + len) {
                        bytes.fill_with(|| random.next() as u8);
                    }
                    rotten.push(Range::new(pos as u64, len as u64));
                }
            }
            if let Some((pos, len, landed)) = part(log, later.first(), *unit) {
                apply(landed, pos, len, bytes, safe);
            }
            rest = later.get_mut(1..).unwrap_or_default();
        }
    }

    /// A block holds what is safe of it; if that is not zero it is backed, else it may be anything.
    fn lose_power(&mut self, n: usize, random: &mut Random) {
        let at = n * BLOCK_BYTES as usize;
        let bytes = at..at + BLOCK_BYTES as usize;
        let (Some(now), Some(safe), Some(block), Some(touched)) = (
            self.now.get_mut(bytes.clone()),
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

    /// The first byte from `pos` on that is data, or hole, as lseek(2) tells it; `None` behind the
    /// last data.
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

    /// What is found where nothing is any more: the end is a hole.
    fn end_of(&self, data: bool) -> Option<u64> {
        (!data).then_some(self.size)
    }
}

impl Landed {
    fn zeros(pos: usize, len: usize) -> Self {
        Self { pos, len, at: None, reported: false, durable: false, lost: false }
    }
}

/// The part of a change that lies in a unit.
fn part<'a>(
    log: &'a [Landed],
    which: Option<&(usize, usize)>,
    unit: usize,
) -> Option<(usize, usize, &'a Landed)> {
    let &(number, index) = which?;
    let landed = log.get(index)?;
    let pos = landed.pos.max(number * unit);
    let end = (landed.pos + landed.len).min((number + 1) * unit);
    Some((pos, end.saturating_sub(pos), landed))
}

/// Makes the bytes `pos..pos + len` of a change those of `to`.
fn apply(landed: &Landed, pos: usize, len: usize, bytes: &[u8], to: &mut [u8]) {
    let Some(to) = to.get_mut(pos..pos + len) else { return };
    match landed.at.map(|at| at + pos - landed.pos).and_then(|at| bytes.get(at..at + len)) {
        Some(from) => to.copy_from_slice(from),
        None => to.fill(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(media: &mut Media, pos: u64, len: u64, byte: u8, durable: bool) -> u64 {
        let fill = |bytes: &mut Vec<u8>| bytes.extend(std::iter::repeat_n(byte, len as usize));
        let (done, n) = media.write(Range::new(pos, len), durable, fill);
        assert_eq!(done, len);
        media.reported(n);
        n
    }

    /// What each of the first sectors holds after each of many power cuts.
    fn cuts(make: impl Fn(&mut Media), sectors: usize) -> Vec<Vec<u8>> {
        (0..200)
            .map(|seed| {
                let mut media = Media::new(1 << 16, 512, 100);
                make(&mut media);
                media.cut(&mut Random::new(seed), 0);
                (0..sectors).map(|n| media.read(Range::new(n as u64 * 512, 1))[0]).collect()
            })
            .collect()
    }

    #[test]
    fn a_power_cut_leaves_any_subset_of_what_was_not_flushed_torn_at_the_unit() {
        let make = |media: &mut Media| {
            write(media, 0, 1024, 1, false);
            write(media, 0, 1024, 2, false);
        };
        let mut seen = cuts(make, 2);
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), 9, "each of two sectors is old, first or second: {seen:?}");
    }

    /// Its size, and whether each of its blocks holds something, after each of many power cuts.
    fn sizes(make: impl Fn(&mut Media)) -> Vec<(u64, Vec<u8>)> {
        let mut seen: Vec<_> = (0..200)
            .map(|seed| {
                let mut media = Media::new(8192, 512, 100);
                make(&mut media);
                media.cut(&mut Random::new(seed), 0);
                let first = |at| media.read(Range::new(at * BLOCK_BYTES, 1))[0];
                (media.size(), (0..media.size() / BLOCK_BYTES).map(first).collect())
            })
            .collect();
        seen.sort();
        seen.dedup();
        seen
    }

    #[test]
    fn what_a_device_grows_by_is_zeros_and_is_there_for_sure_after_a_flush_only() {
        let grown = |media: &mut Media| {
            write(media, 4096, 4096, 1, true);
            media.resize(4096);
            media.resize(12288);
        };
        let all = [(4096, vec![0]), (8192, vec![0, 1]), (12288, vec![0, 0, 0])];
        assert_eq!(sizes(grown), all);
        let flushed = |media: &mut Media| {
            grown(media);
            media.flush();
            media.resize(4096);
        };
        assert_eq!(sizes(flushed), [all[0].clone(), all[2].clone()]);
    }

    #[test]
    fn c28_what_was_written_through_behind_the_old_end_is_there_and_so_is_the_new_end() {
        let make = |media: &mut Media| {
            media.resize(12288);
            write(media, 8192, 4096, 1, true);
        };
        assert_eq!(sizes(make), [(12288, vec![0, 0, 1])]);
    }

    #[test]
    fn what_was_written_before_the_end_was_cut_off_is_not_there_after_growing_again() {
        let make = |media: &mut Media| {
            write(media, 4096, 4096, 1, false);
            media.resize(4096);
            media.resize(8192);
            media.flush();
        };
        assert_eq!(sizes(make), [(8192, vec![0, 0])]);
    }

    #[test]
    fn c49_what_was_reported_before_a_flush_is_there_after_a_power_cut() {
        let make = |media: &mut Media| {
            write(media, 0, 512, 1, false);
            media.flush();
            write(media, 512, 512, 2, false);
        };
        let seen = cuts(make, 2);
        assert!(seen.iter().all(|sectors| sectors[0] == 1 && [0, 2].contains(&sectors[1])));
    }

    #[test]
    fn c28_what_was_written_through_is_there_and_what_came_before_it_never_covers_it() {
        let make = |media: &mut Media| {
            write(media, 0, 1024, 1, false);
            write(media, 0, 512, 2, true);
        };
        let seen = cuts(make, 2);
        assert!(seen.iter().all(|sectors| sectors[0] == 2 && [0, 1].contains(&sectors[1])));
    }

    #[test]
    fn c51_what_a_failed_flush_has_dropped_no_later_one_brings_back() {
        let make = |media: &mut Media| {
            for n in 0..8 {
                write(media, n * 512, 512, 1, false);
            }
            media.lose(&mut Random::new(5));
            media.flush();
        };
        let seen = cuts(make, 8);
        assert!(seen[0].contains(&0) && seen[0].contains(&1) && seen.iter().all(|s| s == &seen[0]));
    }

    #[test]
    fn garbage_lies_only_where_something_was_not_durable_and_is_told() {
        for seed in 0..50 {
            let mut media = Media::new(1 << 16, 512, 100);
            write(&mut media, 0, 4096, 1, true);
            write(&mut media, 1024, 1024, 2, false);
            let rotten = media.cut(&mut Random::new(seed), 30_000);
            assert!(rotten.iter().all(|range| range.pos >= 1024 && range.end() <= 2048));
            let told = |pos: u64| rotten.iter().any(|range| range.pos <= pos && pos < range.end());
            for pos in (0..4096).filter(|&pos| !told(pos)) {
                assert!([1, 2].contains(&media.read(Range::new(pos, 1))[0]));
            }
        }
    }

    #[test]
    fn storage_runs_out_is_given_back_and_is_found_by_seeking() {
        let mut media = Media::new(5 * 4096 + 100, 512, 2);
        write(&mut media, 4096, 512, 1, false);
        let (done, _) = media.write(Range::new(8192, 8192), false, |to| to.resize(8192 + 4, 7));
        assert_eq!(done, 4096);
        assert!(media.zero(Range::new(0, 4096), true).is_none());
        assert_eq!((media.seek(0, true), media.seek(5000, false)), (Some(4096), Some(12288)));
        assert_eq!((media.seek(12288, true), media.seek(20490, false)), (None, Some(20490)));
        media.zero(Range::new(4096, 8192), false).unwrap();
        assert_eq!(media.seek(0, true), None);
        assert!(media.zero(Range::new(0, 4096), true).is_some());
        assert!(media.allocates(Range::new(0, 1)));
    }
}
