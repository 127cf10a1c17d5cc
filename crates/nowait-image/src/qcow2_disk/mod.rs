//! A qcow2 image that is served: opening it with its backing chain for reads and writes.
//!
//! Invariant: a power cut at any moment leaves an image that `qemu-img check` accepts, leaked
//! clusters apart, and that has all flushed data; no image below the top one is ever written to.

mod yielding_lock;
pub(crate) mod extent_cache;
mod damage;
mod metadata_cache;
mod metadata_clusters;
mod metadata_survey;
mod refcount_allocator;
mod metadata;
mod writeback;
pub(crate) mod open_regions;
pub(crate) mod bitmap_store;
pub(crate) mod backing_chain;
pub(crate) mod status_scan;
mod cluster_locks;
pub(crate) mod disk;
mod allocate;
#[cfg(feature = "sim")]
mod sim_image;
#[cfg(test)]
mod tests;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use nowait::{Alignment, BlockDevice, Direct, Error, FileStorage, OpenOptions, Storage};

use crate::chain::Chain;
use crate::error::{ImageError, os_error};
use crate::formats::layer::Layer;
use crate::formats::mapped_disk::MAX_FILES;
use crate::formats::qcow2::backing_tables::BackingTables;
use crate::formats::qcow2::content::header_of;
use crate::formats::qcow2::header::Header;
use crate::formats::qcow2::lookup::read_table;
use crate::image_file::{FileId, ImageFile, NO_MEDIUM};
use crate::lock::LockError;
use crate::mounts::in_use;

pub use disk::Qcow2Map;
#[cfg(feature = "sim")]
pub use sim_image::{new_simulated, open_simulated};

use backing_chain::{BackingChain, BackingImage, Kind};
use bitmap_store::BitmapStore;
use extent_cache::ExtentCache;
use metadata::Metadata;
use metadata_cache::MetadataCache;
use metadata_clusters::MetadataClusters;
use refcount_allocator::RefcountAllocator;
use writeback::MetadataWriteback;

/// Metadata is read and written in blocks of this many bytes, or of a cluster if that is smaller,
/// or of the alignment of direct I/O if that is larger.
const BLOCK_BYTES: u64 = 4096;

/// How an image is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServeOptions {
    /// Whether the image may be written to. The chain must have been opened for that.
    pub writable: bool,
    /// Whether the page cache is bypassed, for all files of the chain alike.
    pub direct: Direct,
    /// Whether mappings are cached ([`nowait::OpenOptions::cache_holes`]).
    pub cache_holes: bool,
}

/// Handle of a served image: holds the locks on its files and the flusher thread. Drop it only
/// after the last request has completed.
pub struct OpenImage {
    /// Holds the locks until it is dropped.
    chain: Chain,
    writeback: Arc<MetadataWriteback>,
    /// Of an image that is written to.
    bitmaps: Option<Arc<BitmapStore>>,
    writable: bool,
    cluster_bytes: u64,
    /// None in a simulation.
    thread: Option<JoinHandle<()>>,
}

impl OpenImage {
    /// Flushes, frees the clusters that are no longer used, truncates the file and stores the bitmaps. No request may
    /// be in flight. An image that is dropped instead is consistent, too, but may have leaked
    /// clusters, and more bits than were changed.
    ///
    /// # Errors
    /// The error of the write or the sync.
    pub fn close(mut self) -> Result<(), Error> {
        self.end_thread();
        self.settle()?;
        self.bitmaps.as_ref().map_or(Ok(()), |bitmaps| bitmaps.release())
    }

    /// The bitmaps of an image that is written to, if it has any.
    #[must_use]
    pub fn bitmaps(&self) -> Option<&Arc<BitmapStore>> {
        self.bitmaps.as_ref()
    }

    /// Flushes and unlocks, but the image stays open, and requests may follow.
    pub(crate) fn settle(&self) -> Result<(), Error> {
        if self.writable {
            self.writeback.flush()?;
            self.writeback.free_deferred(self.cluster_bytes)?;
        }
        Ok(())
    }

    pub(crate) fn chain(&self) -> &Chain {
        &self.chain
    }

    /// The descriptors that hold the locks and claims of its files.
    pub(crate) fn held_files(&self) -> Vec<BorrowedFd<'_>> {
        self.chain.held_files()
    }

    /// Like [`Chain::lower_locks_below`].
    pub(crate) fn lower_locks_below(&self) -> Result<(), LockError> {
        self.chain.lower_locks_below()
    }

    fn end_thread(&mut self) {
        self.writeback.stop_flusher();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

impl Drop for OpenImage {
    fn drop(&mut self) {
        self.end_thread();
    }
}

/// Opens the top image of `chain`, which must be qcow2, to be served.
///
/// # Errors
/// The errno of the open or read; a refusal where direct I/O was required and is not possible, or
/// where the image is not qcow2.
pub fn open(
    chain: Chain,
    options: ServeOptions,
) -> Result<(BlockDevice<Qcow2Map>, OpenImage), ImageError> {
    let Opened { top, below, size, map, mut open_image } = open_all(chain, options)?;
    let disk = BlockDevice::mapped(top, below, size, !options.writable, map);
    if options.writable {
        let failed = |e| ImageError::os(open_image.chain.top().file.path(), "serve", &e);
        open_image.thread = Some(open_image.writeback.spawn_flusher().map_err(failed)?);
    }
    Ok((disk, open_image))
}

/// The open files and the map of a disk.
pub struct Opened {
    /// The file with the image's own data.
    pub top: Arc<dyn Storage>,
    /// The other files that extents may lie in, numbered from 1 as in [`nowait::Extent::file`].
    pub below: Vec<Arc<dyn Storage>>,
    /// Size of the disk in bytes.
    pub size: u64,
    /// The map of the disk.
    pub map: Qcow2Map,
    /// The handle, without a flusher thread.
    pub open_image: OpenImage,
}

fn open_all(chain: Chain, options: ServeOptions) -> Result<Opened, ImageError> {
    let image = chain.top();
    let direct = agree_on_direct(&chain, options)?;
    let options = ServeOptions { direct, ..options };
    let ServeOptions { writable, .. } = options;
    let (map, writeback) = open_map(&chain, options)?;
    let bitmaps = map.0.bitmaps.clone();
    let (size, cluster_bytes) = (image.size, image.header().map_or(1, Header::cluster_bytes));
    let top = writeback.data().clone();
    let below = map.0.images.files_below().cloned().collect();
    let open_image = OpenImage { chain, writeback, bitmaps, writable, cluster_bytes, thread: None };
    Ok(Opened { top, below, size, map, open_image })
}

/// The map of the top image of `chain`, and the writeback of its metadata.
fn open_map(
    chain: &Chain,
    options: ServeOptions,
) -> Result<(Qcow2Map, Arc<MetadataWriteback>), ImageError> {
    let top = chain.top();
    let header = &match options.writable {
        true => bitmap_store::prepare(&top.file, header_of(top)?)?,
        false => header_of(top)?.clone(),
    };
    let writeback = Arc::new(open_writeback(top, header, options)?);
    let bitmaps = open_bitmaps(top, header, &writeback, options)?;
    let mut below = Vec::new();
    let mut shift = header.unit_bits();
    let mut files = 1;
    for layer in files_below(chain) {
        below.push(open_below(layer, files, options)?);
        files += layer.data.len();
        shift = shift.min(layer.content.unit().map_or(shift, u64::ilog2));
    }
    if files > MAX_FILES {
        let why = format!("it and the images below it are more than {MAX_FILES} files");
        return Err(ImageError::refused(top.file.path(), why));
    }
    let extents = ExtentCache::new(header.size, shift, options.cache_holes);
    let images = BackingChain::new(writeback.clone(), header.clone(), below);
    Ok((Qcow2Map::new(images, extents, bitmaps), writeback))
}

/// The bitmaps of the image of `layer`, if it is written to and has any.
fn open_bitmaps(
    layer: &Layer,
    header: &Header,
    writeback: &Arc<MetadataWriteback>,
    options: ServeOptions,
) -> Result<Option<Arc<BitmapStore>>, ImageError> {
    if !options.writable || header.bitmaps.is_none() {
        return Ok(None);
    }
    let bitmaps = BitmapStore::open(&layer.file, header, writeback, None)?;
    Ok(Some(Arc::new(bitmaps)))
}

/// The images below the top one, down to one of size 0: images below that are not visible.
fn files_below(chain: &Chain) -> impl Iterator<Item = &Layer> {
    chain.layers().iter().skip(1).take_while(|layer| layer.size > 0)
}

/// Decides whether all files of the chain are opened for direct I/O: all of them, or none. Direct
/// I/O is possible where no cluster is smaller than the alignment of any file.
pub(crate) fn agree_on_direct(chain: &Chain, options: ServeOptions) -> Result<Direct, ImageError> {
    if options.direct == Direct::Off {
        return Ok(Direct::Off);
    }
    let mut smallest = u64::MAX;
    let mut block = 1;
    for layer in std::iter::once(chain.top()).chain(files_below(chain)) {
        smallest = smallest.min(layer.content.unit().unwrap_or(u64::MAX));
        for file in layer.files() {
            let align = storage_of(file, true, options.direct)?.properties().align;
            if align == Alignment::NONE {
                return Ok(Direct::Off);
            }
            block = block.max(u64::from(align.offset));
        }
    }
    match (block <= smallest, options.direct) {
        (true, direct) => Ok(direct),
        (false, Direct::On) => {
            let what = format!(
                "direct I/O needs clusters, and subclusters, of at least {block} bytes, not {smallest} \
                 (try --direct auto)"
            );
            Err(ImageError::refused(chain.top().file.path(), what))
        }
        (false, _) => Ok(Direct::Off),
    }
}

/// The refusal of a path that leads to another file than before.
const REPLACED: &str = "another file has taken its place";

/// Opens `file` a second time, for requests.
pub(crate) fn storage_of(
    file: &ImageFile,
    read_only: bool,
    direct: Direct,
) -> Result<Arc<dyn Storage>, ImageError> {
    // The chain already holds its block devices exclusively.
    let options = OpenOptions::new().read_only(read_only).direct(direct).allow_mounted(true);
    // Syncs of the chain's own writes do not take away what those of requests have to report.
    storage_with(file, options, Descriptions::Own)
}

/// The open file descriptions of a storage.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Descriptions {
    /// All are opened for the storage alone.
    Own,
    /// The descriptor of a regular image file serves as one of them, which needs a descriptor less.
    Shared,
}

/// Like [`storage_of`], with other options.
pub(crate) fn storage_with(
    file: &ImageFile,
    options: OpenOptions,
    descriptions: Descriptions,
) -> Result<Arc<dyn Storage>, ImageError> {
    let path = file.path();
    let os = |error: &std::io::Error| ImageError::os(path, "open", error);
    #[cfg(feature = "sim")]
    if let Some(file) = file.as_simulated() {
        return Ok(Arc::new(file.reopen(options)));
    }
    if let Some(storage) = file.remote() {
        return Ok(storage.clone());
    }
    let is_shared = descriptions == Descriptions::Shared && !file.is_block_device();
    let opened = match file.open_file().filter(|_| is_shared) {
        Some(open) => FileStorage::of_open_file(open.clone(), path, options),
        None => FileStorage::open(path, options),
    };
    let storage = opened.map_err(|error| match error.errno() {
        libc::EOPNOTSUPP => {
            ImageError::refused(path, "its file system does no direct I/O (try --direct auto)")
        }
        libc::EBUSY => ImageError::refused(path, in_use(path)),
        libc::ENOMEDIUM => ImageError::refused(path, NO_MEDIUM),
        libc::ESTALE => ImageError::refused(path, REPLACED),
        _ => os(&os_error(error)),
    })?;
    let opened = FileId::of(storage.lock_fd()).map_err(|error| os(&error))?;
    let locked = file.identity().map_err(|error| os(&error))?;
    if opened != locked {
        return Err(ImageError::refused(path, REPLACED));
    }
    #[cfg(test)]
    let storage = tests::file_observer::observed(storage);
    Ok(Arc::new(storage))
}

fn open_writeback(
    layer: &Layer,
    header: &Header,
    options: ServeOptions,
) -> Result<MetadataWriteback, ImageError> {
    let file = &layer.file;
    let ServeOptions { writable, direct, .. } = options;
    let data = storage_of(layer.data_file(), !writable, direct)?;
    let separate = match header.has_data_file() {
        true => Some(storage_of(file, !writable, direct)?),
        false => None,
    };
    writeback_on(file, header, data, separate, writable)
}

/// The writeback of the metadata in `file`. I/O goes through `separate`, or through `data` where
/// the two are one file.
pub(crate) fn writeback_on(
    file: &Arc<ImageFile>,
    header: &Header,
    data: Arc<dyn Storage>,
    separate: Option<Arc<dyn Storage>>,
    writable: bool,
) -> Result<MetadataWriteback, ImageError> {
    let failed = |error: std::io::Error| ImageError::os(file.path(), "read its tables", &error);
    if writable && let Some(autoclear) = header.autoclear_to_write() {
        file.write_at(Header::AUTOCLEAR_AT, &autoclear.to_be_bytes()).map_err(failed)?;
        file.sync().map_err(failed)?;
    }
    let bytes = file.size().map_err(failed)?;
    let l1 = read_table(file, header.l1_pos, u64::from(header.l1_entries)).map_err(failed)?;
    let (pos, entries) = (header.refcount_table_pos, header.refcount_table_entries());
    let table = read_table(file, pos, entries).map_err(failed)?;
    let reserved = MetadataClusters::new(header, &l1, &table, bytes);
    let allocator = writable.then(|| RefcountAllocator::new(header, table, reserved.file_end()));
    let align = separate.as_ref().unwrap_or(&data).properties().align;
    let block = BLOCK_BYTES.min(header.cluster_bytes()).max(u64::from(align.offset));
    let metadata =
        Metadata::new(header.clone(), MetadataCache::new(block), l1, allocator, reserved);
    Ok(MetadataWriteback::new(file.clone(), metadata, data, separate, bytes))
}

/// Opens an image below the top one, whose first data file gets the number `first_file`.
fn open_below(
    layer: &Layer,
    first_file: usize,
    options: ServeOptions,
) -> Result<BackingImage, ImageError> {
    let files = layer.data.iter().map(|file| storage_of(file, true, options.direct));
    let files = files.collect::<Result<_, _>>()?;
    let first_file = u8::try_from(first_file).unwrap_or(u8::MAX);
    let kind = match (layer.header(), layer.table()) {
        (None, None) => Kind::Raw,
        (None, Some(table)) => Kind::Mapped(table.clone()),
        (Some(header), _) => {
            let failed = |error| ImageError::os(layer.file.path(), "find its size", &error);
            let bytes = layer.file.size().map_err(failed)?;
            let header = Box::new(header.clone());
            Kind::Qcow2(BackingTables::new(header, layer.file.clone(), bytes))
        }
    };
    Ok(BackingImage { kind, files, first_file, size: layer.size })
}
