//! The dirty bitmaps of an export: what was changed since each of them was added or cleared.
//!
//! Invariant: a change that a client was told of is in every bitmap that was enabled when it ended. It is marked when
//! the engine has ended the request, whatever its result, and before the answer: a bit that was set when the request
//! began could be cleared while its data are on their way, and who has cleared it would never copy them.

use std::fs::File;
use std::io::Read;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use nowait::{ByteRange, Request};
use nowait_image::{BitmapBits, BitmapStore};

use crate::dirty_bitmaps::bitmap_spec::{
    BitmapError, BitmapSpec, BitmapStatus, MAX_BIT_BYTES, MAX_BITMAPS, RestoreError,
};
use crate::dirty_bitmaps::dirty_bitmap::{BitmapId, DirtyBitmap};
use crate::dirty_bitmaps::granule_bits::bytes_for;
use crate::locking::lock;

pub(crate) mod bitmap_spec;
mod granule_bits;
pub(crate) mod dirty_bitmap;
#[cfg(test)]
mod tests;

/// A bitmap by its name, as a client has selected it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BitmapName {
    pub(crate) id: BitmapId,
    pub(crate) name: Arc<str>,
}

impl BitmapName {
    /// The name of a bitmap that is there no more.
    pub(crate) fn removed(name: &str) -> Self {
        Self { id: BitmapId(u64::MAX), name: name.into() }
    }
}

/// Granules of a tracker, in bytes: those of a disk whose bits have at most [`TRACKER_BITS`].
const TRACKER_GRANULARITY: u64 = 64 << 10;
/// Bits of a tracker at most, 4 MiB of memory.
const TRACKER_BITS: u64 = 32 << 20;

/// Bytes of a granule of a tracker of a disk of `size` bytes.
fn tracker_granularity(size: u64) -> u64 {
    let least = size.div_ceil(TRACKER_BITS).next_power_of_two();
    least.max(TRACKER_GRANULARITY)
}

/// The bitmaps of an export.
#[derive(Default)]
pub(crate) struct DirtyBitmaps {
    /// Twice the number of changes of what is enabled, and one more if something is.
    state: AtomicU64,
    list: Mutex<List>,
}

#[derive(Default)]
struct List {
    all: Vec<Arc<DirtyBitmap>>,
    /// Those that were frozen for a backup that has not ended; each has the id of the one that has taken its place.
    frozen: Vec<Arc<DirtyBitmap>>,
    /// Bits of copies that are made meanwhile; no client and no user sees them.
    trackers: Vec<Arc<DirtyBitmap>>,
    next: u64,
}

impl List {
    /// Those in which changes are marked.
    fn enabled(&self) -> impl Iterator<Item = &Arc<DirtyBitmap>> {
        let is_enabled = |bitmap: &&Arc<DirtyBitmap>| bitmap.is_enabled.load(Ordering::Relaxed);
        self.all.iter().chain(&self.trackers).filter(is_enabled)
    }

    fn find(&self, name: &str) -> Result<&Arc<DirtyBitmap>, BitmapError> {
        self.all.iter().find(|bitmap| &*bitmap.name == name).ok_or(BitmapError::NoBitmap)
    }

    /// Checks that there may be one more of this name with `bytes` of bits.
    fn check_new(&self, name: &str, bytes: u64) -> Result<(), BitmapError> {
        if self.find(name).is_ok() {
            return Err(BitmapError::Exists);
        }
        if self.all.len() >= MAX_BITMAPS {
            return Err(BitmapError::TooMany);
        }
        self.check_bytes(bytes)
    }

    /// Checks that the bits may have `more` bytes of memory.
    fn check_bytes(&self, more: u64) -> Result<(), BitmapError> {
        let bytes: u64 = self.all.iter().map(|bitmap| bitmap.bytes()).sum();
        match bytes.saturating_add(more) {
            0..=MAX_BIT_BYTES => Ok(()),
            bytes => Err(BitmapError::TooLarge(bytes - MAX_BIT_BYTES)),
        }
    }

    /// Gives `bitmap` the bits that it lacks for a disk of `size` bytes.
    fn cover(&self, bitmap: &DirtyBitmap, size: u64) -> Result<(), BitmapError> {
        let missing = bitmap.missing(size);
        if missing == 0 {
            return Ok(());
        }
        let wanted = bitmap.growth(missing);
        let count = if self.check_bytes(bytes_for(wanted)).is_ok() { wanted } else { missing };
        self.check_bytes(bytes_for(count))?;
        bitmap.grow(count).map_err(|()| BitmapError::NoMemory)
    }
}

impl DirtyBitmaps {
    /// Whether a bitmap is enabled.
    #[inline(always)]
    fn is_on(&self) -> bool {
        self.state.load(Ordering::Acquire) & 1 != 0
    }

    /// Tells the threads which bitmaps are enabled now.
    fn publish(&self, list: &List) {
        let is_on = list.enabled().next().is_some();
        let before = self.state.load(Ordering::Relaxed);
        self.state.store((before | 1) + 1 + u64::from(is_on), Ordering::Release);
    }

    /// Adds a bitmap without a dirty granule to a disk of `size` bytes, whose blocks have `block` bytes.
    ///
    /// # Errors
    /// All but [`BitmapError::NoExport`] and [`BitmapError::NoBitmap`].
    pub(crate) fn add(&self, spec: &BitmapSpec, size: u64, block: u64) -> Result<(), BitmapError> {
        spec.check()?;
        if spec.granularity < block {
            return Err(BitmapError::SmallGranularity(block));
        }
        let bytes = bytes_for(size.div_ceil(spec.granularity));
        lock(&self.list).check_new(&spec.name, bytes)?;
        // Without the lock: a client that asks for a map takes it, too.
        let mut bitmap = DirtyBitmap::new(BitmapId(0), &spec.name, spec.granularity, spec.enabled);
        match bitmap.missing(size) {
            0 => {}
            missing => bitmap.grow(missing).map_err(|()| BitmapError::NoMemory)?,
        }
        let mut list = lock(&self.list);
        list.check_new(&spec.name, bytes)?;
        bitmap.id = list.next_id();
        list.all.push(Arc::new(bitmap));
        self.publish(&list);
        Ok(())
    }

    /// Adds a bitmap whose bits are in `content`, as [`DirtyBitmaps::save`] has written them for a disk of `size`
    /// bytes. If that cannot be, all of it is dirty.
    ///
    /// # Errors
    /// It was added with all dirty, for this reason; or, if it says so, it was not added.
    pub(crate) fn restore(
        &self,
        spec: &BitmapSpec,
        content: Option<&mut dyn Read>,
        size: u64,
    ) -> Result<(), RestoreError> {
        spec.check().map_err(RestoreError::NotAdded)?;
        let added = self.add(&BitmapSpec { enabled: false, ..spec.clone() }, size, 1);
        let loaded = match added {
            Err(why @ (BitmapError::TooLarge(_) | BitmapError::NoMemory)) => {
                self.add_all_dirty(spec).map_err(RestoreError::NotAdded)?;
                Err(why.to_string())
            }
            Err(why) => return Err(RestoreError::NotAdded(why)),
            Ok(()) => {
                let bitmap = lock(&self.list).find(&spec.name).cloned();
                let bitmap = bitmap.map_err(RestoreError::NotAdded)?;
                let loaded = match content {
                    Some(content) => bitmap.load(content, size).map_err(|error| error.to_string()),
                    None => Err("its bits were not sent".to_owned()),
                };
                if loaded.is_err() {
                    bitmap.set(ByteRange::new(0, size));
                }
                loaded
            }
        };
        let enabled = self.set_enabled(&spec.name, spec.enabled);
        enabled.map_err(RestoreError::NotAdded)?;
        loaded.map_err(RestoreError::AllDirty)
    }

    /// Adds a bitmap that has no bits: all is dirty, until it is cleared.
    fn add_all_dirty(&self, spec: &BitmapSpec) -> Result<(), BitmapError> {
        let mut list = lock(&self.list);
        list.check_new(&spec.name, 0)?;
        let bitmap = DirtyBitmap::new(list.next_id(), &spec.name, spec.granularity, false);
        bitmap.set_rest();
        list.all.push(Arc::new(bitmap));
        Ok(())
    }

    /// Removes a bitmap.
    ///
    /// # Errors
    /// [`BitmapError::NoBitmap`], as for all methods here with a name.
    pub(crate) fn remove(&self, name: &str) -> Result<(), BitmapError> {
        let mut list = lock(&self.list);
        let id = list.find(name)?.id;
        list.all.retain(|bitmap| bitmap.id != id);
        self.publish(&list);
        Ok(())
    }

    /// Marks all of a bitmap as clean.
    ///
    /// # Errors
    /// Like [`DirtyBitmaps::remove`].
    pub(crate) fn clear(&self, name: &str) -> Result<(), BitmapError> {
        self.named(name)?.clear_from(0);
        Ok(())
    }

    /// Marks all of a bitmap of a disk of `size` bytes as dirty.
    ///
    /// # Errors
    /// Like [`DirtyBitmaps::remove`].
    pub(crate) fn set_all(&self, name: &str, size: u64) -> Result<(), BitmapError> {
        let bitmap = self.named(name)?;
        if !bitmap.set(ByteRange::new(0, size)) {
            bitmap.set_rest();
        }
        Ok(())
    }

    /// Has changes marked from now on, or no more.
    ///
    /// # Errors
    /// Like [`DirtyBitmaps::remove`].
    pub(crate) fn set_enabled(&self, name: &str, enabled: bool) -> Result<(), BitmapError> {
        let list = lock(&self.list);
        list.find(name)?.is_enabled.store(enabled, Ordering::Relaxed);
        self.publish(&list);
        Ok(())
    }

    /// Marks in `target` what is dirty in any of `sources`, of a disk of `size` bytes; these stay as they are.
    ///
    /// # Errors
    /// Like [`DirtyBitmaps::remove`], of any of the names: then nothing was merged.
    pub(crate) fn merge(
        &self,
        target: &str,
        sources: &[String],
        size: u64,
    ) -> Result<(), BitmapError> {
        let target = self.named(target)?;
        let sources = sources.iter().map(|name| self.named(name));
        let sources: Vec<_> = sources.collect::<Result<_, _>>()?;
        // A part without bits is dirty as a whole then, if it has to be.
        let _ = lock(&self.list).cover(&target, size);
        sources.iter().for_each(|source| target.merge(source, size));
        Ok(())
    }

    /// All of them, of a disk of `size` bytes, in the order of their addition.
    pub(crate) fn status(&self, size: u64) -> Vec<BitmapStatus> {
        let all = lock(&self.list).all.clone();
        let status = |bitmap: Arc<DirtyBitmap>| BitmapStatus {
            spec: bitmap.spec(),
            dirty_bytes: bitmap.dirty_bytes(size),
            persistent: false,
        };
        all.into_iter().map(status).collect()
    }

    /// Has `store`, that of the image, keep those of them that are stored in it. No request is in flight.
    pub(crate) fn attach(&self, store: Option<&Arc<BitmapStore>>) {
        let Some(store) = store else { return };
        let list = lock(&self.list);
        for bitmap in &list.all {
            let frozen = list.frozen.iter().find(|frozen| frozen.id == bitmap.id);
            let bits: Arc<dyn BitmapBits> = match frozen {
                Some(frozen) => Arc::new(WithFrozen(bitmap.clone(), frozen.clone())),
                None => bitmap.clone(),
            };
            store.attach(&bitmap.name, &bits);
        }
    }

    /// Their properties, in the order of their addition.
    pub(crate) fn specs(&self) -> Vec<BitmapSpec> {
        lock(&self.list).all.iter().map(|bitmap| bitmap.spec()).collect()
    }

    /// Writes the bits of a bitmap of a disk of `size` bytes to an empty file. No request is in flight.
    ///
    /// # Errors
    /// Why the file does not have them.
    pub(crate) fn save(&self, name: &str, size: u64, file: &File) -> Result<(), String> {
        let bitmap = self.named(name).map_err(|error| error.to_string())?;
        match bitmap.covers(size) {
            true => bitmap.save(file, size).map_err(|error| error.to_string()),
            false => Err("it has no bits for a part of the disk".into()),
        }
    }

    /// Gives the bitmaps the bits that they lack for a disk of `size` bytes, which it is about to have.
    ///
    /// # Errors
    /// [`BitmapError::TooLarge`], [`BitmapError::NoMemory`].
    pub(crate) fn cover(&self, size: u64) -> Result<(), BitmapError> {
        let list = lock(&self.list);
        list.all.iter().try_for_each(|bitmap| list.cover(bitmap, size))
    }

    /// The disk has `size` bytes now, maybe fewer than before: what is behind them is clean if they come back.
    pub(crate) fn truncate(&self, size: u64) {
        lock(&self.list).all.iter().for_each(|bitmap| bitmap.clear_from(size));
    }

    /// The bitmaps that clients can select.
    pub(crate) fn names(&self) -> Vec<BitmapName> {
        let name = |it: &Arc<DirtyBitmap>| BitmapName { id: it.id, name: it.name.clone() };
        lock(&self.list).all.iter().map(name).collect()
    }

    /// A bitmap that a client has selected, unless it was removed.
    pub(crate) fn get(&self, id: BitmapId) -> Option<Arc<DirtyBitmap>> {
        lock(&self.list).all.iter().find(|bitmap| bitmap.id == id).cloned()
    }

    /// The bitmaps of a backup: none but the one that was frozen for it.
    pub(crate) fn of_frozen(frozen: Option<Arc<DirtyBitmap>>) -> Self {
        let list = List { all: frozen.into_iter().collect(), ..List::default() };
        Self { state: AtomicU64::new(0), list: Mutex::new(list) }
    }

    /// Bitmap `name`, and a clean one that can take its place.
    ///
    /// # Errors
    /// [`BitmapError::NoBitmap`]; there is no memory for the bits of both.
    pub(crate) fn prepare_successor(
        &self,
        name: &str,
        size: u64,
    ) -> Result<(Arc<DirtyBitmap>, DirtyBitmap), BitmapError> {
        let frozen = self.named(name)?;
        let (id, enabled) = (frozen.id, frozen.spec().enabled);
        let successor = DirtyBitmap::new(id, name, frozen.granularity(), enabled);
        let missing = successor.missing(size);
        lock(&self.list).check_bytes(bytes_for(missing))?;
        match missing {
            0 => {}
            missing => successor.grow(missing).map_err(|()| BitmapError::NoMemory)?,
        }
        Ok((frozen, successor))
    }

    /// Whether `bitmap` is one of them.
    pub(crate) fn has(&self, bitmap: &Arc<DirtyBitmap>) -> bool {
        lock(&self.list).all.iter().any(|it| Arc::ptr_eq(it, bitmap))
    }

    /// Changes are marked in `successor` instead of `frozen` from now on, for the same clients. No request is in flight.
    pub(crate) fn succeed(&self, frozen: &Arc<DirtyBitmap>, successor: DirtyBitmap) {
        let mut list = lock(&self.list);
        let place = list.all.iter_mut().find(|bitmap| Arc::ptr_eq(bitmap, frozen));
        if let Some(place) = place {
            *place = Arc::new(successor);
            list.frozen.push(frozen.clone());
        }
        frozen.is_enabled.store(false, Ordering::Relaxed);
        self.publish(&list);
    }

    /// Marks what is dirty in `frozen` in the bitmap that has taken its place.
    pub(crate) fn merge_back(&self, frozen: &DirtyBitmap, size: u64) {
        let bitmap = self.get(frozen.id);
        bitmap.iter().for_each(|bitmap| bitmap.merge(frozen, size));
    }

    /// The backup that `frozen` was frozen for has ended.
    pub(crate) fn thaw(&self, frozen: &Arc<DirtyBitmap>) {
        lock(&self.list).frozen.retain(|it| !Arc::ptr_eq(it, frozen));
    }

    /// Adds bits that have no name, for a disk of `size` bytes: changes that end from now on are marked in them.
    ///
    /// # Errors
    /// [`BitmapError::NoMemory`].
    pub(crate) fn add_tracker(&self, size: u64) -> Result<Arc<DirtyBitmap>, BitmapError> {
        let bitmap = DirtyBitmap::new(BitmapId(u64::MAX), "", tracker_granularity(size), true);
        match bitmap.missing(size) {
            0 => {}
            missing => bitmap.grow(missing).map_err(|()| BitmapError::NoMemory)?,
        }
        let (bitmap, mut list) = (Arc::new(bitmap), lock(&self.list));
        list.trackers.push(bitmap.clone());
        self.publish(&list);
        Ok(bitmap)
    }

    /// Marks no more in `tracker`.
    pub(crate) fn remove_tracker(&self, tracker: &Arc<DirtyBitmap>) {
        let mut list = lock(&self.list);
        list.trackers.retain(|it| !Arc::ptr_eq(it, tracker));
        self.publish(&list);
    }

    fn named(&self, name: &str) -> Result<Arc<DirtyBitmap>, BitmapError> {
        lock(&self.list).find(name).cloned()
    }

    /// Marks `range` of `bitmap`.
    #[inline(never)]
    fn set(&self, bitmap: &DirtyBitmap, range: ByteRange) {
        if !bitmap.set(range) {
            self.set_beyond(bitmap, range);
        }
    }

    /// Sets bits of a range that is partly behind the bitmap: the disk has grown without a word. If there is no memory for more,
    /// all behind the bits is dirty from now on.
    #[cold]
    fn set_beyond(&self, bitmap: &DirtyBitmap, range: ByteRange) {
        let end = range.pos.saturating_add(range.len);
        if let Err(error) = lock(&self.list).cover(bitmap, end) {
            let name = &bitmap.name;
            tracing::warn!(
                "bitmap {name:?}: its disk has grown, all that is new is dirty: {error}"
            );
            bitmap.set_rest();
        }
        if !bitmap.set(range) {
            bitmap.set_rest();
        }
    }
}

/// A bitmap, and the one whose place it has taken, for as long as it may have to get the other's bits back.
struct WithFrozen(Arc<DirtyBitmap>, Arc<DirtyBitmap>);

impl BitmapBits for WithFrozen {
    fn is_enabled(&self) -> bool {
        BitmapBits::is_enabled(&*self.0)
    }

    fn copy(&self, at: u64, memory: &mut [u8]) {
        self.0.copy(at, memory);
        let mut frozen = vec![0; memory.len()];
        self.1.copy(at, &mut frozen);
        memory.iter_mut().zip(frozen).for_each(|(byte, frozen)| *byte |= frozen);
    }
}

impl List {
    fn next_id(&mut self) -> BitmapId {
        self.next += 1;
        BitmapId(self.next)
    }
}

/// The enabled bitmaps of an export, as a thread knows them.
#[derive(Default)]
pub(crate) struct EnabledBitmaps {
    /// The state of [`DirtyBitmaps`] that they are of.
    state: u64,
    bitmaps: Vec<Arc<DirtyBitmap>>,
}

impl EnabledBitmaps {
    /// Marks what `io`, a request that has ended, may have changed, in the bitmaps of `all` that are enabled.
    #[inline(always)]
    pub(crate) fn mark(&mut self, all: &DirtyBitmaps, io: Request) {
        if io.op.changes() && all.is_on() {
            self.mark_range(all, io.range);
        }
    }

    /// Out of line: within the completion of every request it would cost reads 25 instructions.
    #[inline(never)]
    fn mark_range(&mut self, all: &DirtyBitmaps, range: ByteRange) {
        self.update(all);
        for bitmap in &self.bitmaps {
            if !bitmap.is_dirty_granule(range) {
                all.set(bitmap, range);
            }
        }
    }

    /// Looks at which of `all` are enabled.
    #[inline]
    pub(crate) fn update(&mut self, all: &DirtyBitmaps) {
        if self.state != all.state.load(Ordering::Acquire) {
            self.reload(all);
        }
    }

    #[cold]
    fn reload(&mut self, all: &DirtyBitmaps) {
        let list = lock(&all.list);
        self.state = all.state.load(Ordering::Acquire);
        self.bitmaps = list.enabled().cloned().collect();
    }
}
