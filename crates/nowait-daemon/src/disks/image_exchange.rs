//! Changes of an export for which its image is reopened: an overlay above it, or another size.
//!
//! Invariant: at no moment is a file of the image without its lock. An export that is served again has
//! all that was acknowledged before.

use std::cell::Cell;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io};

use crate::error::{CliError, os_message};
use nowait_control::{ControlError, SnapshotReport};
use nowait_image::bitmap_changes::{self, NewBitmap};
use nowait_image::create::{CreateOptions, create};
use nowait_image::resize::resize;
use nowait_image::{
    Bitmap, BitmapsPlace, Chain, ChainOptions, Format, HandedOver, Image, ImageError, Locking,
};
use nowait_server::{ExportError, ExportId, Exports, PausedExport};
use tracing::{error, info, warn};

use crate::config::export_spec::NamedExport;
use crate::disks::allowed_places::AllowedPlaces;
use crate::disks::open_disk::{OpenedDisk, check_blocks};
use crate::disks::served_disks::{ServedDisk, ServedDisks};

/// How long requests in flight may take to end for a snapshot or a new size.
/// Beyond it: the export goes on as it was.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Why the file with the bitmaps of a raw disk cannot be made.
const NO_PLACE: &str = "it is not in a directory of --allow-dir (or give the server --bitmap-dir)";

/// The export whose image is reopened.
pub(crate) struct ImageExchange<'a> {
    pub(crate) exports: &'a Exports,
    pub(crate) disks: &'a ServedDisks,
    pub(crate) id: ExportId,
}

impl ImageExchange<'_> {
    /// Serves the new image `overlay`, a path without symbolic links, whose backing image is the
    /// present one. From then on that is not written to.
    ///
    /// # Errors
    /// Why it cannot be done: then there is no overlay, and the export goes on as it was.
    pub(crate) fn snapshot(&self, overlay: &Path) -> Result<SnapshotReport, ControlError> {
        let (named, options) = self.current()?;
        let (base, backing_dirs) = check_base(&named, &options)?;
        let mut backing_storages = options.backing_storages.clone();
        let storage = self.with(|served| served.disk.image.top_storage())?;
        storage
            .into_iter()
            .for_each(|it| backing_storages.add(named.image.display().to_string(), it));
        let create_options = CreateOptions {
            backing: Some(base.clone()),
            backing_format: Some(self.with(|served| served.disk.image.format())?),
            backing_dirs: backing_dirs.clone(),
            backing_storages: backing_storages.clone(),
            data_files: options.data_files.clone(),
            backing_locking: Locking::Unlocked,
            ..CreateOptions::new(Format::Qcow2, Some(self.with(|served| served.disk.image.size())?))
        };
        create(overlay, &create_options).map_err(conflict)?;
        let remove_overlay = || {
            if let Err(error) = fs::remove_file(overlay) {
                warn!("{}: left over from a snapshot: {error}", overlay.display());
            }
        };
        self.add_bitmaps_to(overlay).inspect_err(|_| remove_overlay())?;
        let format = Some(Format::Qcow2);
        let no_links = true;
        let options = ChainOptions { format, backing_dirs, backing_storages, no_links, ..options };
        let named = NamedExport { image: overlay.to_owned(), ..named };
        let pause = self.serve_overlay(named, options).inspect_err(|_| remove_overlay())?;
        info!("{} is unchanged from now on, {} is written to", base.display(), overlay.display());
        Ok(SnapshotReport {
            image: overlay.to_string_lossy().into_owned(),
            backing: base.to_string_lossy().into_owned(),
            pause_ms: pause.as_secs_f64() * 1e3,
        })
    }

    /// Gives the new image `overlay` the bitmaps that are stored in the present one, for the bits of then.
    fn add_bitmaps_to(&self, overlay: &Path) -> Result<(), ControlError> {
        let all = self.exports.bitmaps(self.id).map_err(failed)?;
        let stored = all.into_iter().filter(|status| status.persistent);
        let new = stored.map(|status| NewBitmap::from(&status.spec)).collect::<Vec<_>>();
        bitmap_changes::add_to_new(overlay, &new).map_err(conflict)
    }

    /// Returns how long no request was served.
    fn serve_overlay(
        &self,
        named: NamedExport,
        options: ChainOptions,
    ) -> Result<Duration, ControlError> {
        // The flush of the pause has little left to do.
        self.exports.flush(self.id)?;
        let begin = Instant::now();
        let paused = self.pause()?;
        self.with(|served| {
            let image = &served.disk.image;
            image.settle().map_err(failed)?;
            // The bitmaps of the image below stay as they are now.
            image.release_bitmaps().map_err(failed)?;
            let replaced = copies(image).and_then(|files| {
                let handed_over = HandedOver::below(files);
                let options = ChainOptions { handed_over, ..options };
                let disk = reopened(&served.disk, named, &options)?;
                paused.replace(disk.export())?;
                Ok(disk)
            });
            let disk = replaced.inspect_err(|_| {
                if let Err(error) = image.take_up_bitmaps() {
                    warn!("its bitmaps are not marked as in use: {error}");
                }
            })?;
            let stored = disk.image.store_bitmaps();
            drop(paused);
            if let Err(error) = stored {
                warn!("{}: its bitmaps are not stored: {error}", disk.named.image.display());
            }
            let pause = begin.elapsed();
            if let Err(error) = disk.image.lower_locks_below() {
                warn!("{}: its backing image stays locked: {error}", disk.named.image.display());
            }
            served.disk = disk;
            Ok(pause)
        })?
    }

    /// Serves the disk that `last_copy` returns, which has then all that the present one has, and closes nothing: returns
    /// how long no request was served, and the image before. `last_copy` gets the moment at which no request has been
    /// served for `max_pause`; if it returns `None` then, the export goes on as it was, and so does this.
    ///
    /// # Errors
    /// Why it cannot be done, or that of `last_copy`: the export goes on as it was.
    pub(crate) fn pivot(
        &self,
        max_pause: Duration,
        last_copy: impl FnOnce(Instant) -> Result<Option<OpenedDisk>, ControlError>,
    ) -> Result<Option<(Duration, OpenedDisk)>, ControlError> {
        // A disk whose flush has failed stays where it is: the kernel may have dropped what was written.
        self.exports.flush(self.id)?;
        let begin = Instant::now();
        let paused = match self.exports.pause_export(self.id, max_pause) {
            Err(ExportError::DoesNotEnd) => return Ok(None),
            paused => paused?,
        };
        self.with(|served| served.disk.image.settle().map_err(failed))??;
        let Some(disk) = last_copy(begin + max_pause)? else { return Ok(None) };
        self.with(|served| {
            let before = &served.disk;
            if let Err(error) = before.image.release_bitmaps() {
                warn!("{}: its bitmaps are left in use: {error}", before.named.image.display());
            }
            let disk = OpenedDisk { block_size: before.block_size, ..disk };
            paused.replace(disk.export())?;
            if let Err(error) = disk.image.store_bitmaps() {
                warn!("{}: its bitmaps are not stored: {error}", disk.named.image.display());
            }
            let before = std::mem::replace(&mut served.disk, disk);
            drop(paused);
            Ok(Some((begin.elapsed(), before)))
        })?
    }

    /// Makes the disk `size` bytes large; smaller only if `shrink`. The file with its bitmaps is made again, if it has one,
    /// where that is `allowed`.
    ///
    /// # Errors
    /// Why it cannot be done: the disk has its old size.
    pub(crate) fn resize(
        &self,
        size: u64,
        shrink: bool,
        allowed: &AllowedPlaces,
    ) -> Result<(), ControlError> {
        let (named, options) = self.current()?;
        let (format, current) =
            self.with(|served| (served.disk.image.format(), served.disk.image.size()))?;
        if size < current && !shrink {
            return Err(conflict(format!(
                "it would shrink from {current} to {size} bytes, and lose what is behind that \
                 (if that is meant: shrink)"
            )));
        }
        if size == current {
            return Ok(());
        }
        let block_size = self.with(|served| served.disk.block_size)?;
        check_blocks(block_size, size).map_err(conflict)?;
        if !options.writable {
            return Err(conflict("it is read-only"));
        }
        if named.is_remote() {
            return Err(conflict("its size is that of the server behind it"));
        }
        let is_device = fs::metadata(&named.image).is_ok_and(|meta| !meta.is_file());
        let bitmaps = self.bitmaps_place()?;
        let has_bitmaps = self.with(|served| served.disk.image.bitmap_store().is_some())?;
        let bitmaps = bitmaps.filter(|_| has_bitmaps);
        if is_device || (format.is_raw() && size > current && bitmaps.is_none()) {
            return self.grow_in_place(size);
        }
        if let Some(place) = bitmaps.as_ref().filter(|it| !allowed.allows_bitmaps(it.path())) {
            let why = format!("{} cannot be made again: {NO_PLACE}", place.path().display());
            return Err(conflict(why));
        }
        self.edit(|chain| {
            resize(chain, size, shrink)?;
            bitmaps.as_ref().map_or(Ok(()), BitmapsPlace::resize)
        })
    }

    /// Has `change` change the file of the image, and serves it again.
    ///
    /// # Errors
    /// Why it cannot be done: the image is served as it is then.
    fn edit(
        &self,
        change: impl FnOnce(&Chain) -> Result<(), ImageError>,
    ) -> Result<(), ControlError> {
        let (named, options) = self.current()?;
        self.exports.flush(self.id)?;
        let paused = self.pause()?;
        self.with(|served| {
            served.disk.image.settle().map_err(failed)?;
            served.disk.image.release_bitmaps().map_err(failed)?;
            let handed_over = || copies(&served.disk.image).map(HandedOver::new);
            let open = ChainOptions { handed_over: handed_over()?, ..options.clone() };
            let changed = Chain::open(&named.image, &open).and_then(|chain| change(&chain));
            // The open image may have outdated metadata of its file now, also if this has failed.
            let reopened = handed_over()
                .and_then(|handed_over| {
                    let open = ChainOptions { handed_over, ..options.clone() };
                    reopened(&served.disk, named.clone(), &open)
                })
                .and_then(|disk| {
                    paused.replace(disk.export())?;
                    Ok(disk)
                });
            match reopened {
                Ok(disk) => served.disk = disk,
                Err(error) => {
                    let why = format!("it cannot be served after the change: {error}");
                    error!("{}: {why}", named.image.display());
                    paused.give_up();
                    return Err(ControlError::Failed(why));
                }
            }
            let stored = served.disk.image.store_bitmaps();
            drop(paused);
            changed.map_err(conflict)?;
            stored.map_err(failed)
        })?
    }

    /// Checks that bitmaps can be stored in the image, or beside a raw one, where that is `allowed`. The inner error says
    /// why not.
    ///
    /// # Errors
    /// There is no such export.
    pub(crate) fn can_store_bitmaps(
        &self,
        allowed: &AllowedPlaces,
    ) -> Result<Result<(), &'static str>, ControlError> {
        self.with(|served| {
            let image = &served.disk.image;
            match image.bitmaps_place() {
                _ if image.is_read_only() => Err("it is only read"),
                Some(place) if place.is_there() || allowed.allows_bitmaps(place.path()) => {
                    Ok(())
                }
                Some(_) => Err(NO_PLACE),
                None if image.can_store_bitmaps() => Ok(()),
                None if image.format().is_raw() && !image.is_remote() => {
                    Err("the server was started without --bitmap-dir, or nothing tells this device from others")
                }
                None => Err("it is neither raw nor qcow2 of version 3 in a file or a block device"),
            }
        })
    }

    /// Where the bitmaps of a raw disk are, or can be.
    fn bitmaps_place(&self) -> Result<Option<BitmapsPlace>, ControlError> {
        self.with(|served| served.disk.image.bitmaps_place().cloned())
    }

    /// Has `in_image` or, of a raw disk, `beside` change the stored bitmaps.
    fn edit_bitmaps(
        &self,
        in_image: impl FnOnce(&Chain) -> Result<(), ImageError>,
        beside: impl FnOnce(&BitmapsPlace) -> Result<(), ImageError>,
    ) -> Result<(), ControlError> {
        match self.bitmaps_place()? {
            Some(place) => self.edit(|_| beside(&place)),
            None => self.edit(in_image),
        }
    }

    /// The bitmaps of the image whose bits are lost.
    ///
    /// # Errors
    /// There is no such export; the list of bitmaps cannot be read.
    pub(crate) fn lost_bitmaps(&self) -> Result<Vec<Bitmap>, ControlError> {
        let all = self.with(|served| served.disk.image.stored_bitmaps())?.map_err(failed)?;
        Ok(all.into_iter().map(|(bitmap, _)| bitmap).filter(|it| !it.is_usable()).collect())
    }

    /// Stores bitmap `bitmap`, which the export has in memory, in the image from now on.
    ///
    /// # Errors
    /// Like [`ImageExchange::edit`].
    pub(crate) fn add_bitmap(&self, bitmap: &NewBitmap) -> Result<(), ControlError> {
        self.edit_bitmaps(|chain| bitmap_changes::add(chain, bitmap, None), |it| it.add(bitmap))
    }

    /// Clears bitmap `name`, in the image and by `clear` in memory.
    ///
    /// # Errors
    /// Like [`ImageExchange::edit`].
    pub(crate) fn clear_bitmap(
        &self,
        name: &str,
        clear: impl FnOnce(),
    ) -> Result<(), ControlError> {
        let clear = Cell::new(Some(clear));
        let then = |()| clear.take().into_iter().for_each(|clear| clear());
        self.edit_bitmaps(
            |chain| bitmap_changes::clear(chain, name).map(then),
            |place| place.clear(name).map(then),
        )
    }

    /// Removes bitmap `name` from the image.
    ///
    /// # Errors
    /// Like [`ImageExchange::edit`].
    pub(crate) fn remove_bitmap(&self, name: &str) -> Result<(), ControlError> {
        self.edit_bitmaps(|chain| bitmap_changes::remove(chain, name), |it| it.remove(name))
    }

    /// Has `change` change the bitmaps in memory, and stores them. No request is in flight meanwhile, and all that was written is
    /// durable: a loss of power could change it later, which a bitmap that is enabled now would not note.
    ///
    /// # Errors
    /// That of `change`; why they cannot be stored.
    pub(crate) fn change_bitmaps<T>(
        &self,
        change: impl FnOnce() -> Result<T, ControlError>,
    ) -> Result<T, ControlError> {
        self.exports.flush(self.id)?;
        let paused = self.pause()?;
        self.with(|served| served.disk.image.settle().map_err(failed))??;
        let changed = change();
        let stored = self.with(|served| served.disk.image.store_bitmaps())?;
        drop(paused);
        let changed = changed?;
        stored.map_err(|error| {
            failed(format!("it is changed in this server, but not stored in the image: {error}"))
        })?;
        Ok(changed)
    }

    fn grow_in_place(&self, size: u64) -> Result<(), ControlError> {
        self.exports.grow(self.id, size).map_err(|error| match error {
            ExportError::Storage(error) => {
                failed(format!("cannot resize it: {}", os_message(&error.into())))
            }
            other => other.into(),
        })
    }

    fn pause(&self) -> Result<PausedExport, ControlError> {
        Ok(self.exports.pause_export(self.id, DRAIN_TIMEOUT)?)
    }

    /// The image, and how it was opened.
    fn current(&self) -> Result<(NamedExport, ChainOptions), ControlError> {
        self.with(|served| (served.disk.named.clone(), served.disk.options.clone()))
    }

    fn with<T>(&self, act: impl FnOnce(&mut ServedDisk) -> T) -> Result<T, ControlError> {
        let mut disks = self.disks.lock();
        let served = disks.iter_mut().find(|served| served.id == self.id);
        served.map(act).ok_or_else(|| ExportError::NotFound.into())
    }
}

/// Whether there can be an overlay above the image. Returns the path of the image without symbolic
/// links, or its URI, and where the images below the overlay may be.
fn check_base(
    named: &NamedExport,
    options: &ChainOptions,
) -> Result<(PathBuf, Vec<PathBuf>), ControlError> {
    if !options.writable {
        return Err(conflict("it is read-only, so it does not change anyway"));
    }
    if named.is_remote() {
        return Ok((named.image.clone(), options.backing_dirs.clone()));
    }
    let told = |error: io::Error| failed(CliError::at(&named.image, os_message(&error)));
    let base = named.image.canonicalize().map_err(told)?;
    if !fs::metadata(&base).map_err(told)?.is_file() {
        return Err(conflict("a block device cannot be below a snapshot"));
    }
    let mut directories = options.backing_dirs.clone();
    directories.extend(base.parent().map(Path::to_owned));
    Ok((base, directories))
}

/// Opens `named` in place of `disk`.
fn reopened(
    disk: &OpenedDisk,
    named: NamedExport,
    options: &ChainOptions,
) -> Result<OpenedDisk, ControlError> {
    let description = disk.description.clone();
    let opened = OpenedDisk::open(named, options.clone(), description).map_err(conflict)?;
    // Its locks are held by now; an image that is opened later takes its own.
    let options = ChainOptions { handed_over: HandedOver::default(), ..opened.options };
    Ok(OpenedDisk { options, block_size: disk.block_size, ..opened })
}

/// Copies of the descriptors that hold the locks of `image`.
fn copies(image: &Image) -> Result<Vec<OwnedFd>, ControlError> {
    let copy = |fd: std::os::fd::BorrowedFd<'_>| fd.as_fd().try_clone_to_owned();
    image.held_files().into_iter().map(copy).collect::<Result<_, _>>().map_err(failed)
}

fn failed(error: impl ToString) -> ControlError {
    ControlError::Failed(error.to_string())
}

fn conflict(error: impl ToString) -> ControlError {
    ControlError::Conflict(error.to_string())
}
