//! Opens an image as a block device: its format, its chain, its locks, and how its bytes are reached.
//!
//! Invariant: an image is not changed before it is locked. A raw image whose format was guessed
//! refuses the writes that would make it begin like qcow2, so that no client decides its format.

use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;

use nowait::internal::GuardedMap;
use nowait::{
    AllocationCache, BlockDevice, BlockMap, BlockingFile, Direct, Error, OpenOptions, Storage,
};

use crate::chain::{Chain, ChainOptions, Locking};
use crate::error::{ImageError, os_error};
use crate::formats::format::Format;
use crate::formats::layer::Layer;
use crate::formats::qcow2::bitmaps::{Bitmap, Entry};
use crate::formats::qcow2::header::{Header, MAGIC};
use crate::formats::qcow2::stored_bits::StoredBits;
use crate::formats::signature::{Signature, mark_raw};
use crate::formats::table::DRIVERS;
use crate::image_file::{FileId, ImageFile};
use crate::lock::LockError;
use crate::open_bitmaps::{OpenBitmaps, RawBitmaps};
use crate::qcow2_disk::bitmap_store::BitmapStore;
use crate::qcow2_disk::{self, Descriptions, OpenImage, Qcow2Map, ServeOptions};
use crate::raw_bitmaps::BitmapsPlace;
use crate::read_only_disk::{self, ReadOnlyMap};
use crate::warning::Warning;

/// An open image: its device, and the locks on its files. To be dropped after the last request.
pub struct Image {
    content: Content,
    warnings: Vec<Warning>,
}

enum Content {
    Raw(Box<RawImage>),
    Qcow2 { device: Arc<BlockDevice<Qcow2Map>>, open_image: OpenImage },
    ReadOnly { device: Arc<BlockDevice<ReadOnlyMap>>, chain: Chain },
}

/// A raw image that is open.
struct RawImage {
    device: Arc<BlockDevice<AllocationCache>>,
    /// The device for requests, if there are bitmaps in which each change has to be first.
    guarded: Option<Arc<BlockDevice<GuardedMap>>>,
    chain: Chain,
    bitmaps: RawBitmaps,
}

impl RawImage {
    fn store(&self) -> Option<&Arc<BitmapStore>> {
        self.bitmaps.open.as_ref().and_then(|open| open.store.as_ref())
    }

    fn device(&self) -> Arc<BlockDevice<dyn BlockMap>> {
        match &self.guarded {
            Some(guarded) => guarded.clone(),
            None => self.device.clone(),
        }
    }
}

/// Opens and locks the image at `path`, in the format of `options` or else in the detected one: a
/// file's by its first bytes, a block device is raw.
///
/// # Errors
/// One line that names the file and what is wrong with it, and the errno of a failed system call:
/// `EISDIR` for a directory, `EINVAL` for other refusals. No file was changed.
pub fn open(path: &Path, options: &ChainOptions) -> Result<Image, ImageError> {
    // The claims of devices are handed over, too.
    let allow_mounted = options.allow_mounted || options.handed_over.is_some();
    let options = &ChainOptions { allow_mounted, ..options.clone() };
    let mut files = options.clone();
    if !options.allow_mounted && is_raw_device(path, options) {
        // The device is claimed by the descriptor that zeroes it: while another one has the claim,
        // the kernel refuses that where pages are dirty. Here a device in use is only detected.
        ImageFile::open(path, options.writable)?;
        files.allow_mounted = true;
    }
    of_chain(Chain::open(path, &files)?, options)
}

/// Opens the image in `storage`, which is called `name`; raw unless the options say otherwise. Nothing
/// locks it here.
///
/// # Errors
/// Like [`open`].
pub fn open_storage(
    name: &Path,
    storage: Arc<dyn Storage>,
    options: &ChainOptions,
) -> Result<Image, ImageError> {
    of_chain(Chain::open_storage(name, storage, options)?, options)
}

fn of_chain(chain: Chain, options: &ChainOptions) -> Result<Image, ImageError> {
    let path = chain.top().file.path().to_owned();
    let mut warnings = chain.warnings().to_vec();
    if chain.top().header().is_some_and(|header| header.has_stale_bitmaps) {
        warnings.push(Warning::StaleBitmaps(path.clone()));
    }
    let ChainOptions { writable, direct, cache_holes, .. } = *options;
    let serve = ServeOptions { writable, direct, cache_holes };
    let content = match chain.top() {
        top if top.format().is_raw() => open_raw(chain, options, &mut warnings)?,
        top if top.table().is_some() => {
            let device = Arc::new(read_only_disk::open(&chain, serve)?);
            Content::ReadOnly { device, chain }
        }
        _ => {
            let (device, open_image) = qcow2_disk::open(chain, serve)?;
            Content::Qcow2 { device: Arc::new(device), open_image }
        }
    };
    let mut image = Image { content, warnings };
    if options.direct == Direct::Auto && !image.is_direct() && !image.is_remote() {
        image.warnings.push(Warning::PageCache(path));
    }
    Ok(image)
}

fn is_raw_device(path: &Path, options: &ChainOptions) -> bool {
    let is_device = path.metadata().is_ok_and(|it| it.file_type().is_block_device());
    is_device && options.format.is_none_or(Format::is_raw)
}

fn open_raw(
    chain: Chain,
    options: &ChainOptions,
    warnings: &mut Vec<Warning>,
) -> Result<Content, ImageError> {
    let file = &chain.top().file;
    let ChainOptions { writable, direct, cache_holes, allocate_ahead, allow_mounted, .. } =
        *options;
    let read_only = !writable;
    // Before anything changes the times of the file.
    let bitmaps = RawBitmaps::open(chain.top(), options, warnings)?;
    // Others may write to a remote disk, to one without a lock, and to a device that is mounted, so
    // what is learned about it does not stay true.
    let is_alone = file.remote().is_none()
        && options.locking == Locking::Locked
        && !(allow_mounted && file.is_block_device());
    let options_of_file = OpenOptions::new()
        .read_only(read_only)
        .direct(direct)
        .allow_mounted(allow_mounted)
        .cache_holes(cache_holes && is_alone)
        .allocate_ahead(allocate_ahead);
    let storage = qcow2_disk::storage_with(file, options_of_file, Descriptions::Shared)?;
    let is_device = storage.properties().device;
    let device = BlockDevice::raw(storage, options_of_file);
    let mut device = device.map_err(|e| ImageError::os(file.path(), "open", &os_error(e)))?;
    device.scan();
    if options.format.is_none() && !is_device {
        device = device.with_forbidden_prefix(&MAGIC);
    }
    if let Ok(Some(signature)) = Signature::probe(file) {
        warnings.push(Warning::BeginsLike(file.path().to_owned(), signature));
    }
    // Without a mark one that was guessed is refused at the next start if a guest has made it begin like another format, and
    // so much is told then. One that was named raw could begin like qcow2.
    let is_marked = writable && !is_device && file.fd().and_then(mark_raw).is_ok();
    if writable && !is_device && !is_marked && options.format.is_none() {
        // A client could make it begin like the format that its name tells, and be that at the next start.
        let guessed = DRIVERS
            .iter()
            .find(|it| it.guessed_ending.is_some() && it.is_guessed_by_name(file.path()));
        if let Some(driver) = guessed {
            let why =
                format!("its first bytes are not those of a {} image (say -f raw)", driver.name);
            return Err(ImageError::refused(file.path(), why));
        }
    }
    if writable && !is_device && !is_marked && options.format.is_some() {
        warnings.push(Warning::NotMarked(file.path().to_owned()));
    }
    let device = Arc::new(device);
    let guarded = match bitmaps.open.as_ref().and_then(|open| open.store.clone()) {
        Some(store) => {
            let plain: Arc<BlockDevice<dyn BlockMap>> = device.clone();
            let guarded = plain.always_guarded(store);
            Some(guarded.map_err(|e| ImageError::os(file.path(), "open", &os_error(e)))?)
        }
        None => None,
    };
    let guarded = guarded.map(Arc::new);
    Ok(Content::Raw(Box::new(RawImage { device, guarded, chain, bitmaps })))
}

/// The persistent dirty bitmaps of the image of `layer`, which is not written to, with the bits of those that are usable.
///
/// # Errors
/// `EINVAL`: the list of bitmaps is damaged. Those of pread(2).
pub fn bitmaps_of(layer: &Layer) -> Result<Vec<(Bitmap, Option<StoredBits>)>, ImageError> {
    let Some(header) = layer.content::<Header>() else { return Ok(Vec::new()) };
    let all = Bitmap::with_entries(&layer.file, header)?;
    let with_bits = |(entry, bitmap): (Entry, Bitmap)| {
        let bits = bitmap.is_usable().then(|| StoredBits::new(&layer.file, header, &entry));
        (bitmap, bits)
    };
    Ok(all.into_iter().map(with_bits).collect())
}

impl Image {
    /// The format of the image.
    #[must_use]
    pub fn format(&self) -> Format {
        self.top().format()
    }

    /// Warnings that a user should know about the image.
    #[must_use]
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// Size of the device in bytes, as of now.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.device().size()
    }

    /// Whether writes are refused.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.device().is_read_only()
    }

    /// Whether the page cache is bypassed.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.device().is_direct()
    }

    /// Whether it is in a storage without a descriptor, as one behind a network is.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        self.device().is_remote()
    }

    /// The storage of the top image, if that is one without a descriptor.
    #[must_use]
    pub fn top_storage(&self) -> Option<Arc<dyn Storage>> {
        self.top().file.remote().cloned()
    }

    /// The device and the inode of the top image's open file (stat(2)); `None` if it has none.
    #[must_use]
    pub fn top_file(&self) -> Option<(u64, u64)> {
        let FileId { device, inode } = self.top().file.identity().ok()?;
        Some((device, inode))
    }

    /// The persistent dirty bitmaps that a qcow2 image has itself, of one that is only read with the bits of those that
    /// are usable. For one that is written to see [`Image::bitmap_store`].
    ///
    /// # Errors
    /// `EINVAL`: the list of bitmaps is damaged. Those of pread(2).
    pub fn stored_bitmaps(&self) -> Result<Vec<(Bitmap, Option<StoredBits>)>, ImageError> {
        if let Some(store) = self.bitmap_store() {
            let with_bits = |bitmap: Bitmap| {
                let bits = store.stored_bits(&bitmap.name);
                (bitmap, bits)
            };
            return Ok(store.bitmaps().into_iter().map(with_bits).collect());
        }
        match &self.content {
            Content::Raw(raw) => {
                raw.bitmaps.open.as_ref().map_or(Ok(Vec::new()), OpenBitmaps::read_only)
            }
            Content::Qcow2 { .. } | Content::ReadOnly { .. } => bitmaps_of(self.top()),
        }
    }

    /// The persistent dirty bitmaps of a qcow2 image that is written to, if it has any.
    #[must_use]
    pub fn bitmap_store(&self) -> Option<&Arc<BitmapStore>> {
        match &self.content {
            Content::Qcow2 { open_image, .. } => open_image.bitmaps(),
            Content::Raw(raw) => raw.store(),
            Content::ReadOnly { .. } => None,
        }
    }

    /// Where the bitmaps of a raw disk are, or can be.
    #[must_use]
    pub fn bitmaps_place(&self) -> Option<&BitmapsPlace> {
        match &self.content {
            Content::Raw(raw) => raw.bitmaps.place.as_ref(),
            Content::Qcow2 { .. } | Content::ReadOnly { .. } => None,
        }
    }

    /// Whether bitmaps can be added to the image itself, as it is open now.
    #[must_use]
    pub fn can_store_bitmaps(&self) -> bool {
        let header = self.top().header();
        !self.is_read_only() && !self.is_remote() && header.is_some_and(|it| it.version >= 3)
    }

    /// Stores the bits of its bitmaps, after which any program may write to it. No request is in flight.
    ///
    /// # Errors
    /// Like [`BitmapStore::release`].
    pub fn release_bitmaps(&self) -> Result<(), Error> {
        self.bitmap_store().map_or(Ok(()), |store| store.release())
    }

    /// Requests follow after [`Image::release_bitmaps`].
    ///
    /// # Errors
    /// Like [`BitmapStore::take_up`].
    pub fn take_up_bitmaps(&self) -> Result<(), Error> {
        self.bitmap_store().map_or(Ok(()), |store| store.take_up())
    }

    /// Stores its bitmaps after they were changed in memory by another than a write. No request is in flight.
    ///
    /// # Errors
    /// Like [`BitmapStore::store`].
    pub fn store_bitmaps(&self) -> Result<(), Error> {
        self.bitmap_store().map_or(Ok(()), |store| store.store())
    }

    fn top(&self) -> &Layer {
        match &self.content {
            Content::Raw(raw) => raw.chain.top(),
            Content::ReadOnly { chain, .. } => chain.top(),
            Content::Qcow2 { open_image, .. } => open_image.chain().top(),
        }
    }

    /// Like [`BlockDevice::polling_refusal`].
    ///
    /// # Errors
    /// Like [`BlockDevice::polling_refusal`].
    pub fn polling_refusal(&self) -> Result<Option<&'static str>, Error> {
        self.device().polling_refusal()
    }

    /// The descriptors whose open file descriptions hold the image's locks and claims: what
    /// [`crate::HandedOver`] takes in another process. First come those with locks.
    #[must_use]
    pub fn held_files(&self) -> Vec<BorrowedFd<'_>> {
        match &self.content {
            Content::Raw(raw) => {
                let mut files = raw.chain.held_files();
                files.extend(raw.device.claims());
                files.extend(raw.bitmaps.open.iter().flat_map(OpenBitmaps::held_files));
                files
            }
            Content::Qcow2 { open_image, .. } => open_image.held_files(),
            Content::ReadOnly { chain, .. } => chain.held_files(),
        }
    }

    /// Lets other programs read the images below, one of which this process wrote to before it opened
    /// this image above it ([`crate::HandedOver::below`]).
    ///
    /// # Errors
    /// Like [`crate::lock::lower`].
    pub fn lower_locks_below(&self) -> Result<(), LockError> {
        match &self.content {
            Content::Raw(_) | Content::ReadOnly { .. } => Ok(()),
            Content::Qcow2 { open_image, .. } => open_image.lower_locks_below(),
        }
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> Arc<BlockDevice<dyn BlockMap>> {
        match &self.content {
            Content::Raw(raw) => raw.device(),
            Content::Qcow2 { device, .. } => device.clone(),
            Content::ReadOnly { device, .. } => device.clone(),
        }
    }

    /// Makes every write durable that has completed. Requests may be in flight.
    ///
    /// # Errors
    /// The errno of a write of metadata or of fdatasync(2); after a failed flush always `EIO`.
    pub fn flush(&self) -> Result<(), Error> {
        if self.is_read_only() { Ok(()) } else { BlockingFile::new(self.device()).flush() }
    }

    /// Like [`Image::close`], but the image stays open: another process opens it
    /// ([`crate::HandedOver`]), or requests follow if that fails. No request may be in flight.
    ///
    /// # Errors
    /// Like [`Image::flush`].
    pub fn settle(&self) -> Result<(), Error> {
        if let Content::Raw(raw) = &self.content {
            raw.device().give_back();
        }
        self.flush()?;
        match &self.content {
            Content::Raw(_) | Content::ReadOnly { .. } => Ok(()),
            Content::Qcow2 { open_image, .. } => open_image.settle(),
        }
    }

    /// Flushes, and frees clusters that are no longer used, or of a raw file what was allocated ahead
    /// ([`nowait::OpenOptions::allocate_ahead`]). No request may be in flight.
    ///
    /// # Errors
    /// Like [`Image::flush`].
    pub fn close(self) -> Result<(), Error> {
        if let Content::Raw(raw) = &self.content {
            raw.device().give_back();
        }
        self.flush()?;
        match self.content {
            Content::Raw(raw) => raw.store().map_or(Ok(()), |store| store.release()),
            Content::ReadOnly { .. } => Ok(()),
            Content::Qcow2 { open_image, .. } => open_image.close(),
        }
    }
}
