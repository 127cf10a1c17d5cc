//! Extent cache: the mapping of a disk's bytes, looked up by every request without a lock.
//!
//! Invariant: cached mappings are never wrong. A writable mapping is immutable while the image is
//! open; any other can only become writable or a hole. So an extent stays usable after its
//! eviction.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use nowait::{ByteRange, Extent, Intent};

/// Granules in a window, which are filled and evicted together.
pub(crate) const WINDOW_GRANULES: u64 = 512;
/// The most slots of the cache of extents of a qcow2 image, with 4 KiB each.
/// Beyond it: other slots are used again.
const MAX_SLOTS: u64 = 8192;
/// The windows of the cache of extents, whose numbers fit half a stamp.
/// Beyond it: the granules are twice as large.
const MAX_WINDOWS: u64 = 1 << 31;
const MIN_SHIFT: u32 = 9;

const STATE: u64 = 3;
const UNKNOWN: u64 = 0;
const HOLE: u64 = 1;
const DATA: u64 = 2;
const WRITABLE: u64 = 3;
const FILE_SHIFT: u32 = 56;
const POSITION: u64 = (1 << FILE_SHIFT) - (1 << MIN_SHIFT);

/// The mapping of a granule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CachedMapping {
    /// Without a position; it reads as zeros.
    Hole,
    /// The bytes from `pos` on in a file, numbered as in [`Extent::file`].
    Data { file: u8, pos: u64 },
    /// The bytes from `pos` on in the first file, exclusive to this granule.
    Writable { pos: u64 },
}

impl CachedMapping {
    /// Whether its position is by multiples of `align`, a power of two, from `pos` on the disk.
    pub(crate) fn is_aligned(self, pos: u64, align: u64) -> bool {
        match self {
            Self::Data { pos: host, .. } => host.wrapping_sub(pos).is_multiple_of(align),
            Self::Hole | Self::Writable { .. } => true,
        }
    }

    /// The entry as a number, never 0. `pos` is a multiple of 512.
    fn entry(self) -> u64 {
        match self {
            Self::Hole => HOLE,
            Self::Data { file, pos } => u64::from(file) << FILE_SHIFT | pos & POSITION | DATA,
            Self::Writable { pos } => pos & POSITION | WRITABLE,
        }
    }
}

/// A slot of the cache: a window's entries, and a stamp. The upper half of the stamp is the
/// window's number plus 1, the lower half counts the changes of the slot.
struct Slot {
    stamp: AtomicU64,
    entries: OnceLock<Box<[AtomicU64; WINDOW_GRANULES as usize]>>,
}

/// The cache of a disk, in granules of one size.
pub(crate) struct ExtentCache {
    slots: Box<[Slot]>,
    shift: u32,
    /// Held during changes.
    writer: Mutex<()>,
    enabled: bool,
}

/// Identifies the fill of a window; stale once another window has taken its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FillToken {
    window: u64,
    stamp: u64,
}

impl ExtentCache {
    /// For a disk of `size` bytes in granules of at least 1 << `shift` bytes. With `enabled` false
    /// the cache stays empty (the switch `hint`).
    pub(crate) fn new(size: u64, shift: u32, enabled: bool) -> Self {
        let mut shift = shift.max(MIN_SHIFT);
        while (size >> shift) / WINDOW_GRANULES >= MAX_WINDOWS {
            shift += 1;
        }
        let windows = (size >> shift) / WINDOW_GRANULES + 1;
        let slots = windows.next_power_of_two().min(MAX_SLOTS);
        let slot = |_| Slot { stamp: AtomicU64::new(0), entries: OnceLock::new() };
        Self { slots: (0..slots).map(slot).collect(), shift, writer: Mutex::new(()), enabled }
    }

    /// Bytes of a granule.
    pub(crate) fn granule(&self) -> u64 {
        1 << self.shift
    }

    /// Bytes of a window.
    pub(crate) fn window(&self) -> u64 {
        WINDOW_GRANULES << self.shift
    }

    /// The extent at the start of `range`, if it is cached and allows `intent`.
    #[inline]
    pub(crate) fn extent(&self, range: ByteRange, intent: Intent) -> Option<Extent> {
        let entry = self.entry(range.pos >> self.shift);
        if entry == UNKNOWN || intent == Intent::Write && entry & STATE != WRITABLE {
            return None;
        }
        let inside = range.pos & (self.granule() - 1);
        let len = self.granule() - inside;
        let extent = |len| Extent {
            file: (entry >> FILE_SHIFT) as u16,
            pos: if entry == HOLE { range.pos } else { (entry & POSITION) + inside },
            len,
            hole: entry == HOLE,
        };
        Some(extent(if range.len <= len { range.len } else { self.run(range, entry, len) }))
    }

    /// How many bytes of `range` continue the mapping at its start, which is `first` and holds for
    /// `len` bytes.
    #[inline(never)]
    fn run(&self, range: ByteRange, first: u64, mut len: u64) -> u64 {
        let step = if first == HOLE { 0 } else { self.granule() };
        let (mut granule, mut entry) = (range.pos >> self.shift, first);
        while len < range.len {
            granule += 1;
            // The addition would carry into the state or the file's number only behind 2^56.
            entry += step;
            if self.entry(granule) != entry {
                break;
            }
            len += self.granule();
        }
        len.min(range.len)
    }

    /// The cached entry of a granule.
    #[inline]
    fn entry(&self, granule: u64) -> u64 {
        let window = granule / WINDOW_GRANULES;
        let Some(slot) = self.slots.get(self.slot_index(window)) else { return UNKNOWN };
        let Some(entries) = slot.entries.get() else { return UNKNOWN };
        let stamp = slot.stamp.load(Ordering::Acquire);
        if stamp >> 32 != window + 1 {
            return UNKNOWN;
        }
        let entry = &entries[(granule % WINDOW_GRANULES) as usize];
        let entry = entry.load(Ordering::Acquire);
        // If the entry is another window's, the stamp was changed before.
        fence(Ordering::Acquire);
        if slot.stamp.load(Ordering::Relaxed) == stamp { entry } else { UNKNOWN }
    }

    #[inline]
    fn slot_index(&self, window: u64) -> usize {
        (window & (self.slots.len() as u64 - 1)) as usize
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Assigns a slot to the window around `pos`. `None` if it has one already, or the cache is
    /// disabled. To be called before the lookup in the image: changes from then on arrive by
    /// [`ExtentCache::update`] and are not overwritten by [`ExtentCache::fill`].
    pub(crate) fn begin_fill(&self, pos: u64) -> Option<FillToken> {
        let window = pos / self.window();
        let slot = self.slots.get(self.slot_index(window)).filter(|_| self.enabled)?;
        if slot.stamp.load(Ordering::Relaxed) >> 32 == window + 1 {
            return None;
        }
        let _guard = self.lock();
        let old = slot.stamp.load(Ordering::Relaxed);
        if old >> 32 == window + 1 {
            return None;
        }
        let new = || Box::new([const { AtomicU64::new(UNKNOWN) }; WINDOW_GRANULES as usize]);
        let entries = slot.entries.get_or_init(new);
        let change_count = old.wrapping_add(1) & u64::from(u32::MAX);
        slot.stamp.store(change_count, Ordering::Relaxed);
        fence(Ordering::Release);
        for entry in entries.iter() {
            entry.store(UNKNOWN, Ordering::Relaxed);
        }
        let stamp = (window + 1) << 32 | change_count;
        slot.stamp.store(stamp, Ordering::Release);
        Some(FillToken { window, stamp })
    }

    /// Caches the `mappings` of a window's granules, from its first one on, where none is cached
    /// yet. Does nothing if the token is stale.
    pub(crate) fn fill(&self, token: FillToken, mappings: &[Option<CachedMapping>]) {
        let _guard = self.lock();
        let Some(slot) = self.slots.get(self.slot_index(token.window)) else { return };
        if slot.stamp.load(Ordering::Relaxed) != token.stamp {
            return;
        }
        let Some(entries) = slot.entries.get() else { return };
        for (entry, mapping) in entries.iter().zip(mappings) {
            if let Some(mapping) = mapping
                && entry.load(Ordering::Relaxed) == UNKNOWN
            {
                entry.store(mapping.entry(), Ordering::Release);
            }
        }
    }

    /// Sets the mapping of `range`, which is whole granules. To be called when the image's tables
    /// have it already.
    pub(crate) fn update(&self, range: ByteRange, mapping: CachedMapping) {
        let _guard = self.lock();
        let step = if mapping == CachedMapping::Hole { 0 } else { self.granule() };
        let mut entry = mapping.entry();
        for granule in range.pos >> self.shift..range.end() >> self.shift {
            let window = granule / WINDOW_GRANULES;
            if let Some(slot) = self.slots.get(self.slot_index(window))
                && slot.stamp.load(Ordering::Relaxed) >> 32 == window + 1
                && let Some(entries) = slot.entries.get()
            {
                entries[(granule % WINDOW_GRANULES) as usize].store(entry, Ordering::Release);
            }
            entry += step;
        }
    }
}
