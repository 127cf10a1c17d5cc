//! The bitmaps of a disk that is written to, in its qcow2 image or in a file beside a raw disk: their bits on storage while it is, and at its end.
//!
//! Invariant: as long as the image is open for writing, the bits on storage are those of all changes or more: before the
//! first write to a region of the disk, all bits of the region are set and durable in each bitmap that records. They are exact again only
//! after all writes that were admitted to it are in the bits in memory. Nothing is allocated for that: each bitmap has a cluster for
//! each of its bits.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use nowait::internal::{ReadDevice, WriteGuard};
use nowait::{ByteRange, Error, IoBuffer, Operation, ReadCursor, Storage, WriteCursor};

use crate::error::ImageError;
use crate::formats::qcow2::bitmap_editor::edit;
use crate::formats::qcow2::bitmap_slot::settle_bitmaps;
use crate::formats::qcow2::bitmaps::{Bitmap, Entry, FLAG_AUTO, FLAG_IN_USE, FLAGS_AT};
use crate::formats::qcow2::header::Header;
use crate::formats::qcow2::lookup::read_table;
use crate::formats::qcow2::stored_bits::{POSITION, StoredBits};
use crate::image_file::ImageFile;
use crate::injected_bug::{self, ImageBug};
use crate::qcow2_disk::open_regions::{Regions, SomeRegions};
use crate::qcow2_disk::refcount_allocator::ClusterRun;
use crate::qcow2_disk::writeback::MetadataWriteback;
use crate::qcow2_disk::yielding_lock::lock_for_io;
use crate::raw_bitmaps::bitmaps_file::write_record;
use crate::raw_bitmaps::disk_record::{DiskRecord, RawDisk};

/// Bytes of bits that are written together.
const PIECE_BYTES: u64 = 64 << 10;

/// The bits of a bitmap as they are in memory.
pub trait BitmapBits: Send + Sync {
    /// Whether changes are recorded now.
    fn is_enabled(&self) -> bool;

    /// Fills `memory` with the bits from byte `at` on, a multiple of 8: one for each granule of the disk, of each byte the
    /// lowest first. Those behind the end of the disk do not matter.
    fn copy(&self, at: u64, memory: &mut [u8]);
}

/// A bitmap of the image.
struct StoredBitmap {
    /// The bitmap as it was when the image was opened.
    bitmap: Bitmap,
    /// Where its entry and its table are in the file.
    entry: Entry,
    /// Where its clusters are in the file; none of one that is not usable.
    clusters: Vec<u64>,
    /// The bitmap in memory; without one it keeps its bits, and gets those of all regions that are written to.
    bits: RwLock<Option<Arc<dyn BitmapBits>>>,
}

impl StoredBitmap {
    fn bits(&self) -> Option<Arc<dyn BitmapBits>> {
        self.bits.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether changes are recorded in it.
    fn is_recording(&self) -> bool {
        self.bitmap.is_usable() && self.bits().map_or(self.bitmap.auto, |bits| bits.is_enabled())
    }

    fn flags(&self) -> u32 {
        if self.is_recording() { FLAG_AUTO } else { 0 }
    }
}

/// The raw disk that bitmaps are of, for the note of its state that is kept with them.
pub(crate) struct Noting {
    pub(crate) disk: RawDisk,
    /// Where it may have been changed without them: all is dirty.
    pub(crate) dirty: ByteRange,
    /// Whether the note that is there is of this disk.
    pub(crate) is_noted: bool,
}

/// Regions to which no write was admitted for a while.
pub struct RestingRegions(SomeRegions);

/// The bitmaps of an image that is open for writing.
pub struct BitmapStore {
    file: Arc<ImageFile>,
    header: Header,
    writeback: Arc<MetadataWriteback>,
    /// The file again, for all transfers beside requests.
    storage: Arc<dyn Storage>,
    /// Bytes of a block, which transfers begin and end with.
    block: u64,
    bitmaps: Vec<StoredBitmap>,
    /// The disk, if it is a raw one that knows nothing of its bitmaps.
    disk: Option<RawDisk>,
    /// Held while bits are written.
    writing: Mutex<()>,
    /// Regions do not cool.
    is_held: AtomicBool,
    pub(crate) regions: Regions,
}

/// Prepares the bitmaps of the image in `file` for writing. Returns its header, which may be another one then.
///
/// # Errors
/// A refusal of damaged bitmaps; those of the file.
pub(crate) fn prepare(file: &ImageFile, header: &Header) -> Result<Header, ImageError> {
    settle_bitmaps(file, header)?;
    if header.bitmaps.is_none() {
        return Ok(header.clone());
    }
    edit(file, header, |bitmaps| bitmaps.fit(header.size))?;
    Header::read(file)
}

impl BitmapStore {
    /// The bitmaps of the prepared image in `file`, which is open for writing. From now on they are in use.
    ///
    /// # Errors
    /// Those of the file.
    pub(crate) fn open(
        file: &Arc<ImageFile>,
        header: &Header,
        writeback: &Arc<MetadataWriteback>,
        noting: Option<Noting>,
    ) -> Result<Self, ImageError> {
        let ((storage, block), writeback) = (writeback.metadata_storage(), writeback.clone());
        let failed = |error: io::Error| ImageError::os(file.path(), "read its bitmaps", &error);
        let mut bitmaps = Vec::new();
        for (entry, bitmap) in Bitmap::with_entries(file, header)? {
            let entries = if bitmap.is_usable() { entry.table_entries } else { 0 };
            let table = read_table(file, entry.table_pos, u64::from(entries)).map_err(failed)?;
            let clusters = table.iter().map(|entry| entry & POSITION).collect();
            bitmaps.push(StoredBitmap { bitmap, entry, clusters, bits: RwLock::default() });
        }
        let (file, header) = (file.clone(), header.clone());
        let regions = Regions::new(header.size);
        let store = Self {
            file,
            header,
            writeback,
            storage,
            block,
            bitmaps,
            disk: noting.as_ref().map(|noting| noting.disk.clone()),
            writing: Mutex::new(()),
            is_held: AtomicBool::new(false),
            regions,
        };
        if !store.writeback.reserve_bitmaps(&store.clusters()) {
            let why = "its bitmaps are in clusters with another use, and it is only read (look at it with nowait check)";
            return Err(ImageError::refused(store.file.path(), why));
        }
        let failed = |error: Error| {
            ImageError::os(store.file.path(), "mark its bitmaps", &io::Error::from(error))
        };
        let noted = noting.map_or(Ok(()), |noting| store.begin_noting(&noting));
        noted.map_err(|error| match error.raw_os_error() {
            Some(_) => ImageError::os(store.file.path(), "mark its bitmaps", &error),
            // The header is damaged.
            None => ImageError::refused(store.file.path(), error.to_string()),
        })?;
        store.begin(store.header.kept_bitmaps()).map_err(failed)?;
        Ok(store)
    }

    /// Makes dirty what may be, and notes which disk the bitmaps are of.
    fn begin_noting(&self, noting: &Noting) -> io::Result<()> {
        if noting.dirty.len > 0 {
            for stored in self.bitmaps.iter().filter(|stored| stored.bitmap.is_usable()) {
                self.set_bits(stored, noting.dirty)?;
            }
            self.sync()?;
        }
        if noting.is_noted { Ok(()) } else { self.note_disk(|disk| Ok(disk.record()?.in_use())) }
    }

    /// Notes the state of a raw disk, durably.
    fn note_disk(&self, record: impl FnOnce(&RawDisk) -> io::Result<DiskRecord>) -> io::Result<()> {
        let Some(disk) = &self.disk else { return Ok(()) };
        record(disk).and_then(|it| write_record(&self.file, &self.header, &it))
    }

    /// Notes the state of a raw disk that is not written to any more, durably.
    fn note_settled(&self) -> Result<(), Error> {
        let noted = self.note_disk(RawDisk::settled_record);
        noted.map_err(|error| Error::from_io(&error, Operation::Write))
    }

    /// The clusters of the list, and of the tables and bits of the usable bitmaps, by their numbers and in runs.
    fn clusters(&self) -> Vec<ClusterRun> {
        let bits = self.header.cluster_bits;
        let run = |pos: u64, len: u64| ClusterRun {
            first: pos >> bits,
            count: len.div_ceil(self.header.cluster_bytes()),
        };
        let mut all: Vec<_> = self.header.bitmaps.iter().map(|it| run(it.pos, it.len)).collect();
        for stored in self.bitmaps.iter().filter(|stored| stored.bitmap.is_usable()) {
            all.push(run(stored.entry.table_pos, u64::from(stored.entry.table_entries) * 8));
            all.extend(stored.clusters.iter().map(|pos| run(*pos, 1)));
        }
        all
    }

    /// The bitmaps of the image, in the order of its list.
    #[must_use]
    pub fn bitmaps(&self) -> Vec<Bitmap> {
        self.bitmaps.iter().map(|stored| stored.bitmap.clone()).collect()
    }

    /// The bits of the usable bitmap `name` on storage. The image has not been written to yet.
    #[must_use]
    pub fn stored_bits(&self, name: &str) -> Option<StoredBits> {
        let mut usable = self.bitmaps.iter().filter(|it| it.bitmap.is_usable());
        let stored = usable.find(|it| it.bitmap.name == name)?;
        Some(StoredBits::new(&self.file, &self.header, &stored.entry))
    }

    /// Has `bits` be what the usable bitmap `name` is in memory. Returns whether there is one. No request is in flight.
    pub fn attach(&self, name: &str, bits: &Arc<dyn BitmapBits>) -> bool {
        let named = self.bitmaps.iter().find(|it| it.bitmap.name == name && it.bitmap.is_usable());
        if let Some(stored) = named {
            *stored.bits.write().unwrap_or_else(PoisonError::into_inner) = Some(bits.clone());
            self.restart();
        }
        named.is_some()
    }

    /// Whether `name` is a bitmap that is kept in the image.
    #[must_use]
    pub fn keeps(&self, name: &str) -> bool {
        self.bitmaps.iter().any(|it| it.bitmap.name == name && it.bitmap.is_usable())
    }

    /// Closes all regions, because other bitmaps record from now on.
    fn restart(&self) {
        self.regions.close_all(self.bitmaps.iter().any(StoredBitmap::is_recording));
    }

    /// The usable ones, as a bit for each.
    fn usable(&self) -> u32 {
        let all = self.bitmaps.iter().zip(0..u32::BITS);
        all.filter(|(stored, _)| stored.bitmap.is_usable()).fold(0, |bits, (_, at)| bits | 1 << at)
    }

    /// Marks the usable bitmaps as in use, and before that as kept by this program, where only `kept` ones are. Nothing
    /// is written where both is so.
    fn begin(&self, kept: u32) -> Result<(), Error> {
        let usable = self.usable();
        if usable != kept {
            self.write_autoclear(usable)?;
        }
        let unmarked = |stored: &&StoredBitmap| {
            stored.bitmap.is_usable() && (usable != kept || !stored.bitmap.in_use)
        };
        let mut is_changed = false;
        for stored in self.bitmaps.iter().filter(unmarked) {
            let flags = FLAG_IN_USE | if stored.bitmap.auto { FLAG_AUTO } else { 0 };
            self.change(stored.entry.at + FLAGS_AT, &flags.to_be_bytes(), |_, new| new)?;
            is_changed = true;
        }
        if is_changed {
            self.sync()?;
        }
        self.restart();
        Ok(())
    }

    /// Marks the bitmaps as in use again, after [`BitmapStore::release`].
    ///
    /// # Errors
    /// Those of the file.
    pub fn take_up(&self) -> Result<(), Error> {
        let _writing = lock_for_io(&self.writing);
        // All are marked again, whatever they were.
        self.begin(0)?;
        self.store_flags(FLAG_IN_USE)
    }

    fn write_autoclear(&self, kept: u32) -> Result<(), Error> {
        let bits = self.header.autoclear_with(kept);
        self.change(Header::AUTOCLEAR_AT, &bits.to_be_bytes(), |_, new| new)?;
        self.sync()
    }

    /// Makes what was written durable, by a flush of the image: of two syncs of a file side by side only one would see that
    /// a write was lost.
    fn sync(&self) -> Result<(), Error> {
        self.writeback.flush_with_bits()
    }

    /// Sets the flags of the usable bitmaps, and `more` of them, durably.
    fn store_flags(&self, more: u32) -> Result<(), Error> {
        for stored in self.bitmaps.iter().filter(|stored| stored.bitmap.is_usable()) {
            let flags = more | stored.flags();
            self.change(stored.entry.at + FLAGS_AT, &flags.to_be_bytes(), |_, new| new)?;
        }
        self.sync()
    }

    /// Stores the bits, after which no bitmap is in use: any program may write to the image then. No request is in flight,
    /// and all writes are durable. To go on, see [`BitmapStore::take_up`].
    ///
    /// # Errors
    /// Those of the file: then requests may go on.
    pub fn release(&self) -> Result<(), Error> {
        let _writing = lock_for_io(&self.writing);
        if self.usable() == 0 {
            return Ok(());
        }
        let stored = self.store_bits().and_then(|()| self.note_settled());
        let stored = stored.and_then(|()| self.store_flags(0));
        let released = stored.and_then(|()| self.write_autoclear(0));
        match released {
            Ok(()) => self.regions.close_all(false),
            Err(_) => self.restart(),
        }
        released
    }

    /// Stores the bits and flags of all bitmaps as they are now in memory, durably, after they were changed by another than a
    /// write. No request is in flight.
    ///
    /// # Errors
    /// Those of the file: then the bitmaps on storage may be those of before.
    pub fn store(&self) -> Result<(), Error> {
        let _writing = lock_for_io(&self.writing);
        let stored = self.store_bits().and_then(|()| self.store_flags(FLAG_IN_USE));
        self.restart();
        stored
    }

    fn store_bits(&self) -> Result<(), Error> {
        let cluster = self.header.cluster_bytes();
        let piece = PIECE_BYTES.min(cluster);
        let mut bits_now = IoBuffer::zeroed(piece as usize)?;
        for stored in &self.bitmaps {
            let Some(bits) = stored.bits() else { continue };
            for (&pos, number) in stored.clusters.iter().zip(0..) {
                for at in (0..cluster).step_by(piece as usize) {
                    bits.copy(number * cluster + at, &mut bits_now);
                    let granules = self.header.size.div_ceil(stored.bitmap.granularity);
                    clear_from(granules, number * cluster + at, &mut bits_now);
                    self.change(pos + at, &bits_now, |_, new| new)?;
                }
            }
        }
        self.sync()
    }

    /// The part of `range` that has bits: a device may have grown since it was opened.
    #[inline]
    fn inside(&self, range: ByteRange) -> ByteRange {
        let pos = range.pos.min(self.header.size);
        ByteRange::new(pos, range.len.min(self.header.size - pos))
    }

    /// Opens the regions of `range`, a range of the disk, for writes: its bits are on storage when this returns. A request
    /// to it has not begun yet.
    ///
    /// # Errors
    /// Those of the file: then nothing may be written to the range.
    #[inline]
    pub(crate) fn admit(&self, range: ByteRange) -> Result<(), Error> {
        if range.len == 0 || self.regions.admit(range) { Ok(()) } else { self.open_regions(range) }
    }

    #[cold]
    fn open_regions(&self, range: ByteRange) -> Result<(), Error> {
        if injected_bug::injected(ImageBug::BitAfterWrite) {
            self.regions.open(range);
            return Ok(());
        }
        let _writing = lock_for_io(&self.writing);
        self.regions.open_resting(range);
        while let Some(closed) = self.regions.first_closed(range) {
            let end = closed.end().min(self.header.size);
            if closed.pos >= end {
                return Err(Error::new(libc::EINVAL, Operation::Write));
            }
            let inside = ByteRange::new(closed.pos, end - closed.pos);
            for stored in self.bitmaps.iter().filter(|stored| stored.is_recording()) {
                self.set_bits(stored, inside)?;
            }
            self.sync()?;
            self.regions.open(closed);
        }
        Ok(())
    }

    /// The regions that no write was admitted to between the last two calls of this; to be given to
    /// [`BitmapStore::cool`] with the changes that are in flight after that. One thread calls the two.
    pub fn rest(&self) -> Option<RestingRegions> {
        let _writing = lock_for_io(&self.writing);
        let resting = self.regions.resting();
        self.regions.rest();
        Some(RestingRegions(resting)).filter(|resting| !resting.0.is_empty())
    }

    /// Closes the regions of `resting` but those of the changes `in_flight`, and stores their exact bits, in batches of one
    /// sync each. All other changes are in the bits in memory. A write to a closed region opens it again.
    ///
    /// # Errors
    /// Those of the file: then the bits of some regions are more than those of their changes.
    pub fn cool(&self, resting: RestingRegions, in_flight: &[ByteRange]) -> Result<(), Error> {
        let RestingRegions(mut cooling) = resting;
        if !injected_bug::injected(ImageBug::CoolInFlight) {
            in_flight.iter().for_each(|range| cooling.take_out(*range));
        }
        while let Some(mut batch) = cooling.split_batch() {
            let _writing = lock_for_io(&self.writing);
            // The image may have been released meanwhile.
            if !self.regions.is_recording() || self.is_held.load(Ordering::Acquire) {
                return Ok(());
            }
            self.regions.close(&mut batch);
            let ranges = batch.ranges();
            if ranges.is_empty() {
                continue;
            }
            for stored in self.bitmaps.iter().filter(|stored| stored.is_recording()) {
                self.store_exact(stored, &ranges)?;
            }
            self.sync()?;
        }
        Ok(())
    }

    /// Clears the bits of `ranges`, closed regions, that are not set in memory, in the clusters of `stored`. A granule that
    /// is larger than a region, and so in open ones, too, is left dirty.
    fn store_exact(&self, stored: &StoredBitmap, ranges: &[ByteRange]) -> Result<(), Error> {
        let granularity = stored.bitmap.granularity;
        let Some(bits) = stored.bits().filter(|_| granularity <= self.regions.bytes()) else {
            return Ok(());
        };
        let (cluster, piece) =
            (self.header.cluster_bytes(), PIECE_BYTES.min(self.header.cluster_bytes()));
        let granules = |range: &ByteRange| {
            range.pos / granularity..range.end().min(self.header.size).div_ceil(granularity)
        };
        let mut rest = ranges.iter().map(granules).peekable();
        while let Some(first) = rest.peek() {
            // All runs that begin in this piece of the bits; one that goes on in the next is cut there.
            let at = first.start / 8 / piece * piece;
            let mut memory = IoBuffer::zeroed(piece as usize)?;
            bits.copy(at, &mut memory);
            let mut kept = vec![u8::MAX; piece as usize];
            while let Some(run) = rest.peek_mut() {
                let end = (at + piece) * 8;
                if run.start >= end {
                    break;
                }
                clear_bits(&mut kept, run.start - at * 8..run.end.min(end) - at * 8);
                if run.end > end {
                    run.start = end;
                    break;
                }
                rest.next();
            }
            let Some(pos) = stored.clusters.get((at / cluster) as usize) else { break };
            let changed = |byte: &u8| *byte != u8::MAX;
            let begin = kept.iter().position(changed).unwrap_or(0);
            let end = kept.iter().rposition(changed).map_or(begin, |last| last + 1);
            kept.iter_mut().zip(memory.iter()).for_each(|(kept, bits)| *kept |= bits);
            let exact = kept.get(begin..end).unwrap_or_default();
            self.change(pos + at % cluster + begin as u64, exact, |old, exact| old & exact)?;
        }
        Ok(())
    }

    /// Only bits of writes are stored from now on, because another process goes on with the bitmaps; or all again.
    pub fn hold(&self, held: bool) {
        let _writing = lock_for_io(&self.writing);
        self.is_held.store(held, Ordering::Release);
    }

    /// Sets the bits of `range` of the disk in the clusters of `stored`.
    fn set_bits(&self, stored: &StoredBitmap, range: ByteRange) -> Result<(), Error> {
        let shift = stored.bitmap.granularity.trailing_zeros();
        let (first, last) = (range.pos >> shift, (range.end() - 1) >> shift);
        let cluster = self.header.cluster_bytes();
        let mut at = first / 8;
        while at <= last / 8 {
            let inside = at % cluster;
            let len = (last / 8 + 1 - at).min(cluster - inside).min(PIECE_BYTES);
            let Some(pos) = stored.clusters.get((at / cluster) as usize) else { break };
            let mut set = vec![u8::MAX; len as usize];
            if at == first / 8
                && let Some(byte) = set.first_mut()
            {
                *byte &= u8::MAX << (first % 8);
            }
            if at + len > last / 8
                && let Some(byte) = set.last_mut()
            {
                *byte &= u8::MAX >> (7 - last % 8);
            }
            self.change(pos + inside, &set, |old, new| old | new)?;
            at += len;
        }
        Ok(())
    }

    /// Writes what `change` makes of the bytes at `pos` and of `new`, in whole blocks.
    fn change(&self, pos: u64, new: &[u8], change: impl Fn(u8, u8) -> u8) -> Result<(), Error> {
        let begin = pos / self.block * self.block;
        let end = (pos + new.len() as u64).next_multiple_of(self.block);
        let mut bytes = IoBuffer::zeroed((end - begin) as usize)?;
        let mut cursor = ReadCursor::from(&mut bytes[..]);
        self.storage.read_at(begin, &mut cursor)?;
        let at = (pos - begin) as usize;
        let mut is_changed = false;
        for (old, new) in bytes.iter_mut().skip(at).zip(new) {
            let changed = change(*old, *new);
            is_changed |= *old != changed;
            *old = changed;
        }
        if !is_changed {
            return Ok(());
        }
        self.storage.write_at(begin, &mut WriteCursor::from(&bytes[..]), None)
    }
}

impl WriteGuard for BitmapStore {
    #[inline]
    fn is_open(&self, range: ByteRange) -> bool {
        let inside = self.inside(range);
        inside.len == 0 || self.regions.admit(inside)
    }

    fn before_change(&self, range: ByteRange, _: ReadDevice<'_>) -> Result<(), Error> {
        self.admit(self.inside(range))
    }
}

/// Clears the bits of `memory` from number `granules` on; `at` is the number of its first byte.
fn clear_from(granules: u64, at: u64, memory: &mut [u8]) {
    let inside = granules.saturating_sub(at * 8);
    let Ok(byte) = usize::try_from(inside / 8) else { return };
    let Some([first, rest @ ..]) = memory.get_mut(byte..) else { return };
    *first &= !(u8::MAX << (inside % 8));
    rest.fill(0);
}

/// Clears the bits `range` of `memory`, of each byte the lowest first.
fn clear_bits(memory: &mut [u8], range: Range<u64>) {
    for at in range.start / 8..range.end.div_ceil(8) {
        let Some(byte) = memory.get_mut(at as usize) else { return };
        let first = range.start.saturating_sub(at * 8).min(8) as u32;
        let end = range.end.saturating_sub(at * 8).min(8) as u32;
        let inside = (u16::from(u8::MAX) << first) & !(u16::MAX << end);
        *byte &= !(inside as u8);
    }
}
