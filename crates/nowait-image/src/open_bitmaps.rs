//! The bitmaps of a raw disk that is open.
//!
//! Invariant: where they may lack a change, all of each is dirty on storage before the disk is written to.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use nowait::ByteRange;

use crate::chain::{ChainOptions, Locking};
use crate::error::ImageError;
use crate::formats::layer::Layer;
use crate::formats::qcow2::bitmap_slot::settle_bitmaps;
use crate::formats::qcow2::bitmaps::Bitmap;
use crate::formats::qcow2::header::Header;
use crate::formats::qcow2::stored_bits::StoredBits;
use crate::image_file::{ImageFile, Opening};
use crate::injected_bug::{self, ImageBug};
use crate::lock::{Access, LockError};
use crate::qcow2_disk::bitmap_store::{self, BitmapStore, Noting};
use crate::qcow2_disk::writeback_on;
use crate::raw_bitmaps::bitmaps_place::BitmapsPlace;
use crate::raw_bitmaps::disk_record::DiskRecord;
use crate::warning::Warning;
use crate::{lock, lock_holder};

/// The bitmaps of a raw disk, as far as there are any.
#[derive(Default)]
pub(crate) struct RawBitmaps {
    /// Where they are, or can be.
    pub(crate) place: Option<BitmapsPlace>,
    pub(crate) open: Option<OpenBitmaps>,
}

/// The open file with bitmaps. It holds the lock.
pub(crate) struct OpenBitmaps {
    file: Arc<ImageFile>,
    header: Header,
    handed_over: Vec<OwnedFd>,
    /// The bitmaps of a disk that is written to, if there are any.
    pub(crate) store: Option<Arc<BitmapStore>>,
    /// Of a disk that is only read: whether they may lack a change.
    is_stale: bool,
}

impl RawBitmaps {
    /// The bitmaps of the raw disk of `layer`, which is open and locked. Nothing has been changed since.
    ///
    /// # Errors
    /// Of a disk that is written to: another process uses them; the errno of a failed system call. Of a block device also any
    /// refusal: nothing would tell later that it was written to without them.
    pub(crate) fn open(
        layer: &Layer,
        options: &ChainOptions,
        warnings: &mut Vec<Warning>,
    ) -> Result<Self, ImageError> {
        let (directory, later) = (options.bitmap_dir.as_deref(), options.final_path.as_deref());
        let place = BitmapsPlace::of(&layer.file, directory, later)?;
        Self::at(place, layer.file.is_block_device(), options, warnings)
    }

    /// The bitmaps in `place`, if there are any there.
    ///
    /// # Errors
    /// Like [`RawBitmaps::open`].
    pub(crate) fn at(
        place: Option<BitmapsPlace>,
        is_device: bool,
        options: &ChainOptions,
        warnings: &mut Vec<Warning>,
    ) -> Result<Self, ImageError> {
        let Some(there) = place.as_ref().filter(|place| place.is_there()) else {
            return Ok(Self { place, open: None });
        };
        let open = match OpenBitmaps::open(there, options, warnings) {
            Ok(open) => Some(open),
            Err(NotOpened { error, is_passing })
                if options.writable && (is_passing || is_device) =>
            {
                return Err(error);
            }
            Err(NotOpened { error, .. }) => {
                let (path, why) = (there.path().to_owned(), error.what().to_owned());
                warnings.push(Warning::UnusedBitmaps(path, why));
                None
            }
        };
        Ok(Self { place, open })
    }
}

/// Why bitmaps are not used.
struct NotOpened {
    error: ImageError,
    /// Whether that is not for what is in the file, and may be otherwise later.
    is_passing: bool,
}

impl NotOpened {
    const fn passing(error: ImageError) -> Self {
        Self { error, is_passing: true }
    }
}

impl From<ImageError> for NotOpened {
    fn from(error: ImageError) -> Self {
        Self { is_passing: error.errno() != libc::EINVAL, error }
    }
}

impl OpenBitmaps {
    fn open(
        place: &BitmapsPlace,
        options: &ChainOptions,
        warnings: &mut Vec<Warning>,
    ) -> Result<Self, NotOpened> {
        let opening = if options.writable { Opening::Shared } else { Opening::ReadOnly };
        let (file, header) = place.open(opening)?;
        let mut opened =
            Self { file, header, handed_over: Vec::new(), store: None, is_stale: false };
        opened.lock(options, warnings).map_err(NotOpened::passing)?;
        // Another process may have changed it before it was locked.
        opened.header = Header::read(&opened.file)?;
        if opened.header.has_stale_bitmaps {
            warnings.push(Warning::StaleBitmaps(place.path().to_owned()));
        }
        let failed = |error| NotOpened::passing(ImageError::os(place.path(), "read", &error));
        if opened.header.bitmaps.is_none() {
            if options.writable {
                settle_bitmaps(&opened.file, &opened.header).map_err(NotOpened::passing)?;
            }
            return Ok(opened);
        }
        let now = place.disk.record().map_err(failed)?;
        let size = place.disk_bytes().map_err(failed)?;
        let known = opened.header.disk_state.as_ref().and_then(DiskRecord::parse);
        let is_in_use = opened.header.kept_bitmaps() != 0;
        let is_same = known.is_some_and(|known| match is_in_use {
            _ if injected_bug::injected(ImageBug::TrustChangedDisk) => true,
            true => known.is_of_same_disk(&now),
            false => known.is_same(&now),
        });
        if !is_same {
            warnings.push(Warning::ChangedDisk(place.path().to_owned()));
        }
        if !options.writable {
            opened.is_stale = !is_same || opened.header.size != size;
            opened.read_only()?;
            return Ok(opened);
        }
        let before = opened.header.size;
        let dirty_from = if is_same { before.min(size) } else { 0 };
        if before != size {
            place.fit(size, Some(dirty_from))?;
            let (file, header) = place.open(opening)?;
            (opened.file, opened.header) = (file, header);
            opened.handed_over.clear();
            opened.lock(options, warnings).map_err(NotOpened::passing)?;
        }
        let dirty = ByteRange::new(dirty_from, size - dirty_from);
        opened.take_up(Noting { disk: place.disk.clone(), dirty, is_noted: is_same })?;
        Ok(opened)
    }

    fn lock(
        &mut self,
        options: &ChainOptions,
        warnings: &mut Vec<Warning>,
    ) -> Result<(), ImageError> {
        if options.locking == Locking::Unlocked {
            return Ok(());
        }
        self.handed_over = options.handed_over.take(&self.file).unwrap_or_default();
        let path = self.file.path();
        let own = self.file.fd().map_err(|error| ImageError::os(path, "lock it", &error))?;
        let fd = self.handed_over.first().map_or(own, AsFd::as_fd);
        let access = if options.writable { Access::Write } else { Access::Read };
        match lock::lock(fd, access) {
            Ok(()) => Ok(()),
            Err(LockError::Unsupported) => {
                warnings.push(Warning::NotLocked(path.to_owned()));
                Ok(())
            }
            Err(error) => Err(ImageError::refused(path, lock_holder::told(fd, error))),
        }
    }

    /// Has the bitmaps be in use.
    fn take_up(&mut self, noting: Noting) -> Result<(), ImageError> {
        self.header = bitmap_store::prepare(&self.file, &self.header)?;
        let storage = self.file.storage().clone();
        let writeback = Arc::new(writeback_on(&self.file, &self.header, storage, None, true)?);
        let store = BitmapStore::open(&self.file, &self.header, &writeback, Some(noting));
        self.store = Some(Arc::new(store?));
        Ok(())
    }

    /// The bitmaps of a disk that is only read, with the bits of those that are usable.
    ///
    /// # Errors
    /// `EINVAL`: the list of bitmaps is damaged. Those of pread(2).
    pub(crate) fn read_only(&self) -> Result<Vec<(Bitmap, Option<StoredBits>)>, ImageError> {
        let all = Bitmap::with_entries(&self.file, &self.header)?;
        let each = all.into_iter().map(|(entry, bitmap)| {
            let bitmap = match self.is_stale {
                true => Bitmap { in_use: true, kept: false, ..bitmap },
                false => bitmap,
            };
            let bits =
                bitmap.is_usable().then(|| StoredBits::new(&self.file, &self.header, &entry));
            (bitmap, bits)
        });
        Ok(each.collect())
    }

    /// The descriptors that hold the lock.
    pub(crate) fn held_files(&self) -> Vec<BorrowedFd<'_>> {
        match self.handed_over.is_empty() {
            true => self.file.fd().into_iter().collect(),
            false => self.handed_over.iter().map(AsFd::as_fd).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{self, Read};
    use std::path::{Path, PathBuf};
    use std::sync::Mutex;

    use nowait::internal::WriteGuard;

    use super::*;
    use crate::formats::qcow2::bitmap_editor::NewBitmap;
    use crate::qcow2_disk::open_regions::SMALL_SHIFT;
    use crate::raw_bitmaps::bitmaps_file_system::{BitmapsFileSystem, Fill, HostFileSystem};

    const REGION: u64 = 1 << SMALL_SHIFT;
    const GRANULARITY: u64 = 4096;
    const NAME: &str = "b";

    /// A file system on which a loss of power takes a name that was not made durable.
    #[derive(Debug, Default)]
    struct LosesNames {
        /// The file that a loss of power brings back.
        before: Mutex<Option<PathBuf>>,
    }

    impl BitmapsFileSystem for LosesNames {
        fn is_there(&self, path: &Path) -> bool {
            HostFileSystem.is_there(path)
        }

        fn open(&self, path: &Path, opening: Opening) -> Result<ImageFile, ImageError> {
            HostFileSystem.open(path, opening)
        }

        fn write(&self, path: &Path, replaces: bool, fill: Fill<'_>) -> Result<(), ImageError> {
            if replaces {
                let before = path.with_extension("before");
                fs::hard_link(path, &before).unwrap();
                *self.before.lock().unwrap() = Some(before);
            }
            HostFileSystem.write(path, replaces, fill)
        }

        fn sync_directory_of(&self, path: &Path) -> io::Result<()> {
            HostFileSystem.sync_directory_of(path)?;
            self.before.lock().unwrap().take().map_or(Ok(()), fs::remove_file)
        }
    }

    impl LosesNames {
        fn lose_power(&self, path: &Path) {
            let before = self.before.lock().unwrap().take();
            before.into_iter().for_each(|before| fs::rename(before, path).unwrap());
        }
    }

    /// The bitmaps in `place`, opened by a process that is killed later.
    fn open(place: &BitmapsPlace) -> Arc<BitmapStore> {
        let (writable, locking) = (true, Locking::Unlocked);
        let options = ChainOptions { writable, locking, ..ChainOptions::default() };
        let opened = RawBitmaps::at(Some(place.clone()), false, &options, &mut Vec::new());
        opened.unwrap().open.unwrap().store.unwrap()
    }

    /// The number of the first dirty granule of each region that has one.
    fn dirty_regions(store: &BitmapStore) -> Vec<u64> {
        let mut bits = Vec::new();
        store.stored_bits(NAME).unwrap().read_to_end(&mut bits).unwrap();
        let is_set = |granule: &u64| bits[(granule / 8) as usize] & 1 << (granule % 8) != 0;
        let granules = (0..bits.len() as u64 * 8).filter(is_set);
        let mut regions: Vec<_> = granules.map(|at| at * GRANULARITY / REGION).collect();
        regions.dedup();
        regions
    }

    #[test]
    fn a_loss_of_power_brings_back_no_older_file_below_bits_that_were_stored_since() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        let size = 4 * REGION;
        fs::File::create(&path).unwrap().set_len(size).unwrap();
        let file = Arc::new(ImageFile::open(&path, true).unwrap());
        let file_system = Arc::new(LosesNames::default());
        let place = BitmapsPlace::of(&file, None, None).unwrap().unwrap();
        let place = BitmapsPlace { file_system: file_system.clone(), ..place };
        let new = NewBitmap { name: NAME.into(), granularity: GRANULARITY, enabled: true };
        place.add(&new).unwrap();
        let write = |region: u64| {
            let store = open(&place);
            let range = ByteRange::new(region * REGION, 1);
            assert!(!store.is_open(range));
            store.admit(range).unwrap();
        };
        write(0);
        // The disk grows; the next process is killed when the file for it has its name.
        file.set_len(2 * size).unwrap();
        place.fit(2 * size, Some(size)).unwrap();
        write(2);
        file_system.lose_power(place.path());
        // A file whose process was killed before it used it is not known to have all changes. The older one would lack region 2.
        assert_eq!(dirty_regions(&open(&place)), [0, 1, 2, 3, 4, 5, 6, 7]);
    }
}
