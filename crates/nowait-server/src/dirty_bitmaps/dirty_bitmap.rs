//! One dirty bitmap: which granules of a disk were changed since it was added or cleared.
//!
//! Invariant: a granule that was changed is dirty until it is cleared, whatever has happened to the memory: what a
//! bitmap has no bits for is clean as long as it was not changed, and dirty as a whole from then on.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};

use nowait::ByteRange;
use nowait_image::BitmapBits;

use crate::dirty_bitmaps::bitmap_spec::BitmapSpec;
use crate::dirty_bitmaps::granule_bits::{CHUNK, GranuleBits, bytes_for};

/// The most parts of the bits of a bitmap: that which it was added with, and one for each growth of its disk.
/// Beyond it: all behind the last part counts as changed.
const MAX_PARTS: usize = 24;
/// Growths that get as many bits as they need; each later one doubles the bits at least.
const EXACT_PARTS: usize = 8;
/// Bytes of a word in a file, and of those that are read or written together.
const WORD_BYTES: usize = 8;
const PIECE_BYTES: usize = 64 << 10;

/// The number of a bitmap among those of its export; never used again for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BitmapId(pub(super) u64);

/// Bits of a part of the disk.
struct Part {
    /// Its first granule.
    first: u64,
    bits: GranuleBits,
}

impl Part {
    fn end(&self) -> u64 {
        self.first + self.bits.len()
    }
}

/// A run of the disk that is dirty or clean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DirtyExtent {
    /// Bytes.
    pub(crate) len: u64,
    pub(crate) is_dirty: bool,
}

/// A dirty bitmap.
pub(crate) struct DirtyBitmap {
    pub(crate) id: BitmapId,
    pub(crate) name: Arc<str>,
    /// The logarithm of the granularity.
    shift: u32,
    /// The bits from the first granule on; the parts that are there come first.
    parts: [OnceLock<Part>; MAX_PARTS],
    pub(super) is_enabled: AtomicBool,
    /// All that there are no bits for is dirty.
    is_rest_dirty: AtomicBool,
}

impl DirtyBitmap {
    /// A bitmap without bits, of granules of `granularity` bytes, a power of two.
    pub(super) fn new(id: BitmapId, name: &str, granularity: u64, is_enabled: bool) -> Self {
        Self {
            id,
            name: name.into(),
            shift: granularity.trailing_zeros(),
            parts: Default::default(),
            is_enabled: is_enabled.into(),
            is_rest_dirty: AtomicBool::new(false),
        }
    }

    /// Bytes of a granule.
    pub(crate) fn granularity(&self) -> u64 {
        1 << self.shift
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        self.parts.iter().map_while(OnceLock::get)
    }

    /// Granules that have a bit.
    fn granules(&self) -> u64 {
        self.parts().last().map_or(0, Part::end)
    }

    /// The granules of a disk of `size` bytes.
    fn granules_of(&self, size: u64) -> u64 {
        size.div_ceil(self.granularity())
    }

    /// Its name, granularity and state.
    pub(super) fn spec(&self) -> BitmapSpec {
        let enabled = self.is_enabled.load(SeqCst);
        BitmapSpec { name: self.name.to_string(), granularity: self.granularity(), enabled }
    }

    /// Whether its bits say all of a disk of `size` bytes.
    pub(super) fn covers(&self, size: u64) -> bool {
        self.granules_of(size) <= self.granules() || !self.is_rest_dirty.load(SeqCst)
    }

    /// Bytes of memory that its bits take.
    pub(super) fn bytes(&self) -> u64 {
        bytes_for(self.granules())
    }

    /// Granules of a disk of `size` bytes that have no bit, rounded up as bits are.
    pub(super) fn missing(&self, size: u64) -> u64 {
        self.granules_of(size).saturating_sub(self.granules()).next_multiple_of(CHUNK)
    }

    /// The number of granules that it gets bits for when `missing` ones are needed and there is memory for more.
    pub(super) fn growth(&self, missing: u64) -> u64 {
        match self.parts().count() {
            EXACT_PARTS.. => missing.max(self.granules()),
            _ => missing,
        }
    }

    /// Gives it bits for `count` more granules, which are clean. Not beside another call.
    ///
    /// # Errors
    /// There is not enough memory, or its disk has grown too often.
    pub(super) fn grow(&self, count: u64) -> Result<(), ()> {
        let free = self.parts.get(self.parts().count()).ok_or(())?;
        let bits = GranuleBits::new(count).map_err(drop)?;
        free.set(Part { first: self.granules(), bits }).map_err(drop)
    }

    /// Whether `range` is in one granule that is dirty already, as for most writes. It may be even if this says no.
    #[inline(always)]
    pub(super) fn is_dirty_granule(&self, range: ByteRange) -> bool {
        let first = range.pos >> self.shift;
        let last = (range.pos + range.len).wrapping_sub(1) >> self.shift;
        first == last && self.parts[0].get().is_some_and(|part| part.bits.has(first))
    }

    /// Marks what `range` touches as dirty. Returns false where a part of it has no bits, and is not marked.
    pub(crate) fn set(&self, range: ByteRange) -> bool {
        if range.len == 0 {
            return true;
        }
        let (first, last) = (range.pos >> self.shift, (range.pos + (range.len - 1)) >> self.shift);
        for part in self.parts() {
            let end = part.end();
            if first < end {
                let begin = first.max(part.first) - part.first;
                part.bits.set(begin..last.min(end - 1) + 1 - part.first);
            }
            if last < end {
                return true;
            }
        }
        self.is_rest_dirty.load(SeqCst)
    }

    /// From now on all that it has no bits for is dirty.
    pub(super) fn set_rest(&self) {
        self.is_rest_dirty.store(true, SeqCst);
    }

    /// Marks all as clean from byte `from` of the disk on; a granule that begins before stays as it is.
    pub(super) fn clear_from(&self, from: u64) {
        let from = self.granules_of(from);
        if from <= self.granules() {
            self.is_rest_dirty.store(false, SeqCst);
        }
        for part in self.parts().filter(|part| from < part.end()) {
            part.bits.clear_from(from.saturating_sub(part.first));
        }
    }

    /// At most `most` dirty ranges of a disk of `size` bytes, from byte `from` on, which are clean then. A change that
    /// ends after that is dirty again.
    pub(crate) fn take(&self, from: u64, size: u64, most: usize) -> Vec<ByteRange> {
        let (mut ranges, mut words) = (Vec::new(), u64::MAX);
        let mut at = from >> self.shift;
        while ranges.len() < most {
            let first = self.find(at, true, &mut words);
            let begin = self.position(first);
            if begin >= size {
                break;
            }
            at = self.find(first, false, &mut words);
            for part in self.parts() {
                let taken = first.max(part.first)..at.min(part.end());
                if !taken.is_empty() {
                    part.bits.clear_range(taken.start - part.first..taken.end - part.first);
                }
            }
            ranges.push(ByteRange::new(begin, self.position(at).min(size) - begin));
        }
        ranges
    }

    /// The first granule from `from` on that is dirty, or clean if not `dirty`; `u64::MAX` if there is none. As
    /// [`GranuleBits::find`].
    fn find(&self, from: u64, dirty: bool, words: &mut u64) -> u64 {
        let mut at = from;
        for part in self.parts() {
            if at >= part.end() {
                continue;
            }
            at = part.first + part.bits.find(at - part.first, dirty, words);
            if at < part.end() {
                return at;
            }
        }
        if self.is_rest_dirty.load(SeqCst) == dirty { at } else { u64::MAX }
    }

    /// At most `most` extents of `range`, dirty and clean in turn, from its begin on; together they are no longer than
    /// the range, and at least one granule long. They begin and end with blocks of `block` bytes as `range` does, a
    /// block that is dirty in a part is dirty. A search that has looked at more than `words` words ends before.
    pub(crate) fn extents(
        &self,
        range: ByteRange,
        block: u64,
        most: usize,
        words: u64,
    ) -> Vec<DirtyExtent> {
        let mut words = words.max(2);
        let (mut at, end) = (range.pos, range.pos + range.len);
        let mut extents: Vec<DirtyExtent> = Vec::new();
        while at < end && extents.len() < most {
            let dirty = self.find(at >> self.shift, true, &mut words);
            let clean_to = (self.position(dirty) / block * block).min(end);
            let (to, is_dirty) = match clean_to > at {
                true => (clean_to, false),
                false => {
                    let clean = self.position(self.find(dirty, false, &mut words));
                    (clean.checked_next_multiple_of(block).unwrap_or(end).min(end), true)
                }
            };
            if to <= at {
                break;
            }
            match extents.last_mut() {
                Some(last) if last.is_dirty == is_dirty => last.len += to - at,
                _ => extents.push(DirtyExtent { len: to - at, is_dirty }),
            }
            at = to;
        }
        extents
    }

    /// The first byte of a granule.
    fn position(&self, granule: u64) -> u64 {
        granule.saturating_mul(self.granularity())
    }

    /// Bytes of a disk of `size` bytes that are dirty.
    pub(crate) fn dirty_bytes(&self, size: u64) -> u64 {
        let known = self.position(self.granules()).min(size);
        let rest = if self.is_rest_dirty.load(SeqCst) { size - known } else { 0 };
        let granules: u64 = self.parts().map(|part| part.bits.count()).sum();
        // The last granule may be longer than what is left of the disk.
        let last = self.granules_of(size).saturating_sub(1);
        let has_last = known == size && self.find(last, true, &mut 1) == last;
        let beyond = if has_last { self.position(last + 1).saturating_sub(size) } else { 0 };
        (self.position(granules).saturating_sub(beyond) + rest).min(size)
    }

    /// Marks as dirty what is dirty in `other`, of a disk of `size` bytes.
    pub(super) fn merge(&self, other: &Self, size: u64) {
        let mut words = u64::MAX;
        let mut at = 0;
        loop {
            let begin = other.position(other.find(at, true, &mut words));
            if begin >= size {
                return;
            }
            at = other.find(begin >> other.shift, false, &mut words);
            let end = other.position(at).min(size);
            if !self.set(ByteRange::new(begin, end - begin)) {
                self.set_rest();
            }
        }
    }

    /// Writes its bits to an empty file, the lowest first, as many as a disk of `size` bytes needs at least.
    ///
    /// # Errors
    /// Those of the file.
    pub(super) fn save(&self, file: &File, size: u64) -> io::Result<()> {
        file.set_len(self.bytes().max(bytes_for(self.granules_of(size))))?;
        let mut piece = Vec::with_capacity(PIECE_BYTES);
        for part in self.parts() {
            let mut at = part.first / 8;
            let words = part.bits.len() / (8 * WORD_BYTES as u64);
            for first in (0..words).step_by(PIECE_BYTES / WORD_BYTES) {
                let snapshot = part.bits.snapshot(first).take(PIECE_BYTES / WORD_BYTES);
                piece.clear();
                piece.extend(snapshot.flat_map(u64::to_le_bytes));
                if piece.iter().any(|byte| *byte != 0) {
                    file.write_all_at(&piece, at)?;
                }
                at += piece.len() as u64;
            }
        }
        Ok(())
    }

    /// Marks as dirty what is dirty in `content`, which [`DirtyBitmap::save`] has written for a disk of `size` bytes.
    ///
    /// # Errors
    /// The errnos of reading; `UnexpectedEof`: bits of the disk are missing.
    pub(super) fn load(&self, content: &mut dyn Read, size: u64) -> io::Result<()> {
        let needed = self.granules_of(size).div_ceil(u64::from(u64::BITS));
        let mut piece = vec![0; PIECE_BYTES];
        let mut number = 0;
        while number < needed {
            let words = (needed - number).min((PIECE_BYTES / WORD_BYTES) as u64);
            let piece = piece.get_mut(..words as usize * WORD_BYTES).unwrap_or_default();
            content.read_exact(piece)?;
            for word in piece.as_chunks::<WORD_BYTES>().0 {
                self.set_word(number, u64::from_le_bytes(*word));
                number += 1;
            }
        }
        Ok(())
    }

    /// Its bits from word `first` on, also those that it has no memory for.
    fn words_from(&self, first: u64) -> impl Iterator<Item = u64> {
        let rest = if self.is_rest_dirty.load(SeqCst) { u64::MAX } else { 0 };
        let words = self.parts().flat_map(move |part| {
            let begin = part.first / u64::from(u64::BITS);
            let is_before = part.end() / u64::from(u64::BITS) <= first;
            let skipped = if is_before { part.bits.len() } else { first.saturating_sub(begin) };
            part.bits.snapshot(skipped)
        });
        words.chain(std::iter::repeat(rest))
    }

    fn set_word(&self, number: u64, bits: u64) {
        let granule = number * u64::from(u64::BITS);
        match self.parts().find(|part| granule < part.end()) {
            _ if bits == 0 => {}
            Some(part) => part.bits.set_word(number - part.first / u64::from(u64::BITS), bits),
            None => self.set_rest(),
        }
    }
}

impl BitmapBits for DirtyBitmap {
    fn is_enabled(&self) -> bool {
        self.is_enabled.load(SeqCst)
    }

    fn copy(&self, at: u64, memory: &mut [u8]) {
        let first = at / WORD_BYTES as u64;
        let words = self.words_from(first);
        for (slot, word) in memory.chunks_mut(WORD_BYTES).zip(words) {
            slot.copy_from_slice(word.to_le_bytes().get(..slot.len()).unwrap_or_default());
        }
    }
}
