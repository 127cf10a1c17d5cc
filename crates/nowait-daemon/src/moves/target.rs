//! The new place of a disk: a new file, a block device, or an export of another server.
//!
//! Invariant: it is where the user has allowed it, it is locked from its first byte on, and a new file has another name
//! until it is complete.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use nowait_control::{ControlError, StartMove};
use nowait_image::bitmap_changes::{self, NewBitmap};
use nowait_image::create::{CreateOptions, create_unnamed};
use nowait_image::{AtomicFile, ChainOptions, Format, HandedOver, Image, Locking, formats};
use nowait_remote::Location;
use tracing::warn;

use crate::config::export_spec::NamedExport;
use crate::disks::allowed_places::{AllowedPlaces, absolute};
use crate::disks::open_disk::{Common, ImageIdentity, OpenedDisk};

const PRIVATE_MODE: u32 = 0o600;
/// The unit of the size of a qcow2 disk.
const SECTOR_BYTES: u64 = 512;

/// The disk that moves, as it is served.
pub(crate) struct MovedDisk {
    /// The name of its export, and its image.
    pub(crate) named: NamedExport,
    pub(crate) options: ChainOptions,
    pub(crate) description: Option<String>,
    pub(crate) size: u64,
    /// The bitmaps that its image stores.
    pub(crate) bitmaps: Vec<NewBitmap>,
}

/// The new place, open and empty.
pub(crate) struct MoveTarget {
    disk: OpenedDisk,
    /// The file without its final name, and that name.
    file: Option<(AtomicFile, PathBuf)>,
    bitmaps: Option<MadeBitmaps>,
    /// Its name in messages.
    pub(crate) name: String,
}

/// The file with the bitmaps of a raw disk that was made for a move. It is removed if the move does not complete.
struct MadeBitmaps {
    path: PathBuf,
    stays: bool,
}

impl MadeBitmaps {
    /// Has the raw disk in `image` store `bitmaps`, if it has no file with bitmaps, and one is `allowed` there. All of them is
    /// dirty until the exchange. The image is to be opened again then.
    ///
    /// # Errors
    /// The file cannot be made.
    fn make(
        image: &Image,
        bitmaps: &[NewBitmap],
        allowed: &AllowedPlaces,
    ) -> Result<Option<Self>, ControlError> {
        let place = image.bitmaps_place().filter(|_| !bitmaps.is_empty());
        let Some(place) = place.filter(|it| !it.is_there() && allowed.allows_bitmaps(it.path()))
        else {
            return Ok(None);
        };
        place.make_dirty(bitmaps).map_err(conflict)?;
        Ok(Some(Self { path: place.path().to_owned(), stays: false }))
    }
}

impl Drop for MadeBitmaps {
    fn drop(&mut self) {
        if !self.stays
            && let Err(error) = fs::remove_file(&self.path)
        {
            warn!("{}: left over from a move: {error}", self.path.display());
        }
    }
}

impl MoveTarget {
    /// Makes or opens the place that `start` names, for the disk `moved`.
    ///
    /// # Errors
    /// Why the disk cannot move there: then nothing has changed, and no file was made.
    pub(crate) fn open(
        start: &StartMove,
        moved: &MovedDisk,
        allowed: &AllowedPlaces,
        common: &Common,
    ) -> Result<Self, ControlError> {
        let location = Location::parse(&start.target.clone().into());
        let target = match location.map_err(ControlError::Invalid)? {
            Location::File(path) if is_block_device(&path) => {
                let path = allowed.image(&absolute(&path)?.to_string_lossy())?;
                if !start.overwrite_device {
                    return Err(conflict(format!(
                        "{}: it is a block device (to overwrite what is on it: --overwrite-device)",
                        path.display()
                    )));
                }
                check_raw(start)?;
                let options = options(moved, Some(Format::Raw), true);
                Self::in_place(path, options, moved, (common, allowed))?
            }
            Location::File(_) => Self::new_file(start, moved, allowed)?,
            Location::Nbd(_) | Location::Rbd(_) => {
                let name = allowed.image(&start.target)?;
                check_raw(start)?;
                let options = options(moved, Some(Format::Raw), false);
                Self::in_place(name, options, moved, (common, allowed))?
            }
            Location::Object(_) => {
                let why = "an object of a store is not written in place (a disk moves to a file, a block device, or an \
                           NBD export)";
                return Err(ControlError::Invalid(why.into()));
            }
        };
        let (found, wanted) = (target.disk.image.size(), moved.size);
        if found != wanted {
            return Err(conflict(format!(
                "{}: it has {found} bytes, and the disk {wanted}: a disk moves to one of its size",
                target.name
            )));
        }
        Ok(target)
    }

    fn in_place(
        image: PathBuf,
        options: ChainOptions,
        moved: &MovedDisk,
        (common, allowed): (&Common, &AllowedPlaces),
    ) -> Result<Self, ControlError> {
        let name = image.to_string_lossy().into_owned();
        let named = NamedExport { image, ..moved.named.clone() };
        let open = || {
            let (named, description) = (named.clone(), moved.description.clone());
            OpenedDisk::open_anywhere(named, options.clone(), description, common).map_err(conflict)
        };
        let mut disk = open()?;
        let bitmaps = match disk.image.size() == moved.size {
            true => MadeBitmaps::make(&disk.image, &moved.bitmaps, allowed)?,
            false => None,
        };
        if bitmaps.is_some() {
            drop(disk);
            disk = open()?;
        }
        Ok(Self { disk, file: None, bitmaps, name })
    }

    fn new_file(
        start: &StartMove,
        moved: &MovedDisk,
        allowed: &AllowedPlaces,
    ) -> Result<Self, ControlError> {
        let path = allowed.new_image(&start.target)?;
        let format = format_of(start, &path)?;
        if !format.is_raw() && !moved.size.is_multiple_of(SECTOR_BYTES) {
            return Err(conflict(format!(
                "{}: the disk has {} bytes, and a qcow2 image whole sectors of 512 bytes (move it with --format raw, or make it \
                 larger first, with nowait export resize)",
                path.display(),
                moved.size
            )));
        }
        let options = CreateOptions {
            backing_locking: Locking::Unlocked,
            ..CreateOptions::new(format, Some(moved.size))
        };
        let (file, _) = create_unnamed(&path, &options).map_err(conflict)?;
        let file = file.with_mode(mode_of(moved));
        if !format.is_raw() {
            bitmap_changes::add_to_new(file.path(), &moved.bitmaps).map_err(conflict)?;
        }
        // The format of a raw image that was not given is looked at the next time, too.
        let given = start.format.is_some() || moved.options.format.is_some() || !format.is_raw();
        let options = self::options(moved, Some(format).filter(|_| given), true);
        let open = || {
            let fd = file.file().fd().and_then(|fd| fd.try_clone_to_owned()).map_err(failed)?;
            let (handed_over, final_path) = (HandedOver::new(vec![fd]), Some(path.clone()));
            let open = ChainOptions { handed_over, final_path, ..options.clone() };
            let named = NamedExport { image: file.path().to_owned(), ..moved.named.clone() };
            OpenedDisk::open(named, open, moved.description.clone()).map_err(conflict)
        };
        let mut disk = open()?;
        let bitmaps = MadeBitmaps::make(&disk.image, &moved.bitmaps, allowed)?;
        if bitmaps.is_some() {
            drop(disk);
            disk = open()?;
        }
        let name = path.to_string_lossy().into_owned();
        let disk = OpenedDisk { options, ..disk };
        Ok(Self { disk, file: Some((file, path)), bitmaps, name })
    }

    /// The open image.
    pub(crate) const fn disk(&self) -> &OpenedDisk {
        &self.disk
    }

    /// Whether it is a new file, all of whose disk reads as zeros.
    pub(crate) const fn is_new(&self) -> bool {
        self.file.is_some()
    }

    /// Whether the new image has the bitmap `name`, for the bits of the exchange.
    pub(crate) fn stores_bitmap(&self, name: &str) -> bool {
        self.disk.image.bitmap_store().is_some_and(|store| store.keeps(name))
    }

    /// Gives a complete file its name, durably. Returns what is served from then on.
    ///
    /// # Errors
    /// It has no name: the file is removed.
    pub(crate) fn complete(self) -> Result<OpenedDisk, String> {
        let Self { mut disk, file, mut bitmaps, name } = self;
        if let Some((file, path)) = file {
            file.finish().map_err(|why| format!("{name}: {why}"))?;
            disk.identity = ImageIdentity::of(&path);
            disk.named.image = path;
        }
        bitmaps.iter_mut().for_each(|made| made.stays = true);
        Ok(disk)
    }
}

/// How the new place of `moved` is opened.
fn options(moved: &MovedDisk, format: Option<Format>, no_links: bool) -> ChainOptions {
    ChainOptions {
        format,
        no_links,
        settled_raw: false,
        writable: true,
        allow_mounted: false,
        handed_over: HandedOver::default(),
        ..moved.options.clone()
    }
}

/// The permission bits for a new file: those of the file before. What was no file is for the user of the server only.
fn mode_of(moved: &MovedDisk) -> u32 {
    let before = fs::metadata(&moved.named.image).ok().filter(fs::Metadata::is_file);
    before.map_or(PRIVATE_MODE, |before| before.mode())
}

fn is_block_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device())
}

/// Refuses a format of a place that has none.
fn check_raw(start: &StartMove) -> Result<(), ControlError> {
    match start.format.as_deref() {
        None | Some("raw") => Ok(()),
        Some(_) => Err(ControlError::Invalid(
            "only a new file has a format: a block device or an export gets the disk itself".into(),
        )),
    }
}

/// The format of the new file `path`.
fn format_of(start: &StartMove, path: &Path) -> Result<Format, ControlError> {
    let by_name =
        |name: &str| formats::by_name(name).filter(|it| it.is_raw() || *it == Format::Qcow2);
    match start.format.as_deref() {
        Some(name) => by_name(name).ok_or_else(|| {
            ControlError::Invalid("the formats of a new file are raw and qcow2".into())
        }),
        None if path.extension().is_some_and(|it| it == "qcow2") => Ok(Format::Qcow2),
        None => Ok(Format::Raw),
    }
}

fn conflict(error: impl ToString) -> ControlError {
    ControlError::Conflict(error.to_string())
}

fn failed(error: impl ToString) -> ControlError {
    ControlError::Failed(error.to_string())
}
