//! Where the bytes of a disk are, as far as it is known: asked for every request, without a lock.
//!
//! Invariant: what is known is true. A place that may be written to stays what it is for as long as
//! the image is in use; all else may only become such a place, or zeros. So whoever was given an
//! extent may use it after it was forgotten here.
//! Knows: nothing of this crate. Known by: image.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use nowait::{Extent, Intent, Range};

/// Granules that are learnt and forgotten together.
pub(crate) const WINDOW_GRANULES: u64 = 512;
/// Windows that are known at once: with 4 KiB for each, 32 MiB at most.
const MAX_PAGES: u64 = 8192;
/// A window's number has to fit half a stamp.
const MAX_WINDOWS: u64 = 1 << 31;
const MIN_SHIFT: u32 = 9;

const STATE: u64 = 3;
const UNKNOWN: u64 = 0;
const HOLE: u64 = 1;
const DATA: u64 = 2;
const WRITABLE: u64 = 3;
const FILE_SHIFT: u32 = 56;
const POSITION: u64 = (1 << FILE_SHIFT) - (1 << MIN_SHIFT);

/// What backs a granule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Nothing; it reads as zeros.
    Hole,
    /// The bytes from `pos` on in a file that is numbered as in [`Extent::file`].
    Data { file: u8, pos: u64 },
    /// The bytes from `pos` on in the first file, and of nobody else.
    Writable { pos: u64 },
}

impl Place {
    /// As a number: never 0. `pos` is a multiple of 512.
    fn entry(self) -> u64 {
        match self {
            Self::Hole => HOLE,
            Self::Data { file, pos } => u64::from(file) << FILE_SHIFT | pos & POSITION | DATA,
            Self::Writable { pos } => pos & POSITION | WRITABLE,
        }
    }
}

/// A window's entries, and which window it is: its number and 1 in the upper half of the stamp,
/// in the lower half how often that was changed.
struct Page {
    stamp: AtomicU64,
    entries: OnceLock<Box<[AtomicU64; WINDOW_GRANULES as usize]>>,
}

/// What is known, in granules of one size.
pub(crate) struct Known {
    pages: Box<[Page]>,
    shift: u32,
    /// Held by whoever changes something.
    writer: Mutex<()>,
    enabled: bool,
}

/// That a window is being learnt, and that nobody else has taken its place since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    window: u64,
    stamp: u64,
}

impl Known {
    /// For a disk of `size` bytes in granules of at least 1 << `shift` bytes. With `enabled` false
    /// nothing is ever learnt (the switch `hint`).
    pub(crate) fn new(size: u64, shift: u32, enabled: bool) -> Self {
        let mut shift = shift.max(MIN_SHIFT);
        while (size >> shift) / WINDOW_GRANULES >= MAX_WINDOWS {
            shift += 1;
        }
        let windows = (size >> shift) / WINDOW_GRANULES + 1;
        let pages = windows.next_power_of_two().min(MAX_PAGES);
        let page = |_| Page { stamp: AtomicU64::new(0), entries: OnceLock::new() };
        Self { pages: (0..pages).map(page).collect(), shift, writer: Mutex::new(()), enabled }
    }

    /// Bytes of a granule.
    pub(crate) fn granule(&self) -> u64 {
        1 << self.shift
    }

    /// Bytes of a window.
    pub(crate) fn window(&self) -> u64 {
        WINDOW_GRANULES << self.shift
    }

    /// The extent at the start of `range`, if it is known and is what `intent` needs.
    #[inline]
    pub(crate) fn extent(&self, range: Range, intent: Intent) -> Option<Extent> {
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

    /// How many bytes of `range` go on as they begin: with `first`, which holds for `len`.
    #[inline(never)]
    fn run(&self, range: Range, first: u64, mut len: u64) -> u64 {
        let step = if first == HOLE { 0 } else { self.granule() };
        let (mut granule, mut entry) = (range.pos >> self.shift, first);
        while len < range.len {
            granule += 1;
            // A file's number or a state would be carried into only behind 2^56.
            entry += step;
            if self.entry(granule) != entry {
                break;
            }
            len += self.granule();
        }
        len.min(range.len)
    }

    /// What is known of a granule.
    #[inline]
    fn entry(&self, granule: u64) -> u64 {
        let window = granule / WINDOW_GRANULES;
        let Some(page) = self.pages.get(self.slot(window)) else { return UNKNOWN };
        let Some(entries) = page.entries.get() else { return UNKNOWN };
        let stamp = page.stamp.load(Ordering::Acquire);
        if stamp >> 32 != window + 1 {
            return UNKNOWN;
        }
        let entry = &entries[(granule % WINDOW_GRANULES) as usize];
        let entry = entry.load(Ordering::Acquire);
        // If it is another window's, the stamp was changed before.
        fence(Ordering::Acquire);
        if page.stamp.load(Ordering::Relaxed) == stamp { entry } else { UNKNOWN }
    }

    #[inline]
    fn slot(&self, window: u64) -> usize {
        (window & (self.pages.len() as u64 - 1)) as usize
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the window around `pos` one of which something can be known. `None` if it is that
    /// already, or nothing is ever learnt. To be called before the image is asked: what changes
    /// from then on comes in by [`Known::publish`], and is not overwritten by [`Known::learn`].
    pub(crate) fn claim(&self, pos: u64) -> Option<Claim> {
        let window = pos / self.window();
        let page = self.pages.get(self.slot(window)).filter(|_| self.enabled)?;
        if page.stamp.load(Ordering::Relaxed) >> 32 == window + 1 {
            return None;
        }
        let _guard = self.lock();
        let old = page.stamp.load(Ordering::Relaxed);
        if old >> 32 == window + 1 {
            return None;
        }
        let new = || Box::new([const { AtomicU64::new(UNKNOWN) }; WINDOW_GRANULES as usize]);
        let entries = page.entries.get_or_init(new);
        let changes = old.wrapping_add(1) & u64::from(u32::MAX);
        page.stamp.store(changes, Ordering::Relaxed);
        fence(Ordering::Release);
        for entry in entries.iter() {
            entry.store(UNKNOWN, Ordering::Relaxed);
        }
        let stamp = (window + 1) << 32 | changes;
        page.stamp.store(stamp, Ordering::Release);
        Some(Claim { window, stamp })
    }

    /// Keeps the `places` of a window's granules, from its first one on, where nothing is known
    /// yet.
    pub(crate) fn learn(&self, claim: Claim, places: &[Option<Place>]) {
        let _guard = self.lock();
        let Some(page) = self.pages.get(self.slot(claim.window)) else { return };
        if page.stamp.load(Ordering::Relaxed) != claim.stamp {
            return;
        }
        let Some(entries) = page.entries.get() else { return };
        for (entry, place) in entries.iter().zip(places) {
            if let Some(place) = place
                && entry.load(Ordering::Relaxed) == UNKNOWN
            {
                entry.store(place.entry(), Ordering::Release);
            }
        }
    }

    /// The bytes of `range`, which are whole granules, are at `place` from now on. To be called
    /// when the image itself says so already.
    pub(crate) fn publish(&self, range: Range, place: Place) {
        let _guard = self.lock();
        let step = if place == Place::Hole { 0 } else { self.granule() };
        let mut entry = place.entry();
        for granule in range.pos >> self.shift..range.end() >> self.shift {
            let window = granule / WINDOW_GRANULES;
            if let Some(page) = self.pages.get(self.slot(window))
                && page.stamp.load(Ordering::Relaxed) >> 32 == window + 1
                && let Some(entries) = page.entries.get()
            {
                entries[(granule % WINDOW_GRANULES) as usize].store(entry, Ordering::Release);
            }
            entry += step;
        }
    }
}
