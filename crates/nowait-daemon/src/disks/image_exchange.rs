//! Changes of an export for which its image is reopened: an overlay above it, or another size.
//!
//! Invariant: at no moment is a file of the image without its lock. An export that is served again has
//! all that was acknowledged before.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io};

use crate::error::{CliError, os_message};
use nowait_control::{ControlError, SnapshotReport};
use nowait_image::create::{CreateOptions, create};
use nowait_image::resize::resize;
use nowait_image::{Chain, ChainOptions, Format, HandedOver, Image, Locking};
use nowait_server::{ExportError, ExportId, Exports, PausedExport};
use tracing::{error, info, warn};

use crate::config::export_spec::NamedExport;
use crate::disks::open_disk::{OpenedDisk, check_blocks};
use crate::disks::served_disks::{ServedDisk, ServedDisks};

/// How long requests in flight may take to end for a snapshot or a new size.
/// Beyond it: the export goes on as it was.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

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
        let format = Some(Format::Qcow2);
        let no_links = true;
        let options = ChainOptions { format, backing_dirs, backing_storages, no_links, ..options };
        let named = NamedExport { image: overlay.to_owned(), ..named };
        let pause = self.serve_overlay(named, options).inspect_err(|_| {
            if let Err(error) = fs::remove_file(overlay) {
                warn!("{}: left over from a snapshot: {error}", overlay.display());
            }
        })?;
        info!("{} is unchanged from now on, {} is written to", base.display(), overlay.display());
        Ok(SnapshotReport {
            image: overlay.to_string_lossy().into_owned(),
            backing: base.to_string_lossy().into_owned(),
            pause_ms: pause.as_secs_f64() * 1e3,
        })
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
            served.disk.image.settle().map_err(failed)?;
            let handed_over = HandedOver::below(copies(&served.disk.image)?);
            let disk = reopened(&served.disk, named, &ChainOptions { handed_over, ..options })?;
            paused.replace(disk.export())?;
            drop(paused);
            let pause = begin.elapsed();
            if let Err(error) = disk.image.lower_locks_below() {
                warn!("{}: its backing image stays locked: {error}", disk.named.image.display());
            }
            served.disk = disk;
            Ok(pause)
        })?
    }

    /// Makes the disk `size` bytes large; smaller only if `shrink`.
    ///
    /// # Errors
    /// Why it cannot be done: the disk has its old size.
    pub(crate) fn resize(&self, size: u64, shrink: bool) -> Result<(), ControlError> {
        let (named, options) = self.current()?;
        let (format, current) =
            self.with(|served| (served.disk.image.format(), served.disk.image.size()))?;
        if size < current && !shrink {
            return Err(conflict(format!(
                "it would become smaller, {size} of {current} bytes, and lose what is behind that \
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
            return Err(conflict("it has the size that its server gives it"));
        }
        let is_device = fs::metadata(&named.image).is_ok_and(|meta| !meta.is_file());
        if is_device || (format.is_raw() && size > current) {
            return self.grow_in_place(size);
        }
        self.exports.flush(self.id)?;
        let paused = self.pause()?;
        self.with(|served| {
            served.disk.image.settle().map_err(failed)?;
            let handed_over = || copies(&served.disk.image).map(HandedOver::new);
            let open = ChainOptions { handed_over: handed_over()?, ..options.clone() };
            let chain = Chain::open(&named.image, &open).map_err(conflict)?;
            let open = ChainOptions { handed_over: handed_over()?, ..options.clone() };
            let resized = resize(&chain, size, shrink);
            drop(chain);
            // What the open image knows of its file may be wrong now, also if this has failed.
            let reopened = reopened(&served.disk, named.clone(), &open).and_then(|disk| {
                paused.replace(disk.export())?;
                Ok(disk)
            });
            match reopened {
                Ok(disk) => served.disk = disk,
                Err(error) => {
                    let why = format!("it cannot be served with its new size: {error}");
                    error!("{}: {why}", named.image.display());
                    paused.give_up();
                    return Err(ControlError::Failed(why));
                }
            }
            drop(paused);
            resized.map(drop).map_err(conflict)
        })?
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
