//! Where the bitmaps of a raw disk are: beside a file, or in a directory that the user has given.
//!
//! Invariant: two disks that are there simultaneously never have one place. The name in a given directory is the path of the
//! file, or a name of the block device that stays its own, with each character that is not plain escaped as systemd does.

use std::ffi::OsString;
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::ImageError;
use crate::image_file::{FileId, ImageFile};
use crate::raw_bitmaps::bitmaps_file_system::{BitmapsFileSystem, HostFileSystem};
use crate::raw_bitmaps::disk_record::{RawDisk, passing_name, stable_names};

/// The end of the file's name, behind that of the image.
const SUFFIX: &str = ".bitmaps.qcow2";
/// The most bytes of the name of the file with the bitmaps of a raw disk, in a given directory: its path, escaped.
/// Beyond it: the disk is refused.
const MAX_NAME: usize = 255;
/// The end of the name of an unfinished file.
const UNFINISHED: usize = ".partial".len();

/// The place of the bitmaps of a raw disk, whether they are there or not.
#[derive(Clone, Debug)]
pub struct BitmapsPlace {
    pub(crate) path: PathBuf,
    /// The absolute path of the disk, as the file names it.
    pub(crate) disk_path: PathBuf,
    pub(crate) disk: RawDisk,
    /// How the file is reached.
    pub(crate) file_system: Arc<dyn BitmapsFileSystem>,
}

impl BitmapsPlace {
    /// The place of the bitmaps of the disk in `file`, which is to get the path `later`, if that is given; `directory` is that
    /// of `--bitmap-dir`. `None` if it has none.
    ///
    /// # Errors
    /// Its name is too long for a file there. Those of fstat(2).
    pub(crate) fn of(
        file: &Arc<ImageFile>,
        directory: Option<&Path>,
        later: Option<&Path>,
    ) -> Result<Option<Self>, ImageError> {
        if file.fd().is_err() || file.remote().is_some() {
            return Ok(None);
        }
        if file.is_block_device() {
            return directory.map_or(Ok(None), |directory| Self::of_device(file, directory));
        }
        let disk_path = later.map(Path::to_owned).or_else(|| own_path(file));
        let Some(disk_path) = disk_path else { return Ok(None) };
        let disk = RawDisk::of_file(file);
        let disk = disk.map_err(|error| ImageError::os(file.path(), "look at it", &error))?;
        let mut beside = disk_path.clone().into_os_string();
        beside.push(SUFFIX);
        let file_system = file_system();
        let beside = Self { path: beside.into(), disk_path, disk, file_system };
        match directory {
            Some(directory) if !beside.is_there() => {
                let path = place_in(directory, &beside.disk_path, file.path())?;
                Ok(Some(Self { path, ..beside }))
            }
            _ => Ok(Some(beside)),
        }
    }

    fn of_device(file: &Arc<ImageFile>, directory: &Path) -> Result<Option<Self>, ImageError> {
        let mut first = None;
        for disk_path in stable_names(file) {
            let path = place_in(directory, &disk_path, file.path())?;
            let disk = RawDisk::of_device(file, &disk_path.to_string_lossy());
            let place = Self { path, disk_path, disk, file_system: file_system() };
            if place.is_there() {
                return Ok(Some(place));
            }
            first = first.or(Some(place));
        }
        if first.is_some() {
            return Ok(first);
        }
        let (Some(name), Some(disk_path)) = (passing_name(file), own_path(file)) else {
            return Ok(None);
        };
        let path = place_in(directory, &disk_path, file.path())?;
        let disk = RawDisk::of_device(file, &name);
        Ok(Some(Self { path, disk_path, disk, file_system: file_system() }))
    }

    /// The file with the bitmaps.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether there is something of that name.
    #[must_use]
    pub fn is_there(&self) -> bool {
        self.file_system.is_there(&self.path)
    }
}

fn file_system() -> Arc<dyn BitmapsFileSystem> {
    Arc::new(HostFileSystem)
}

/// The absolute path of `file`, without symbolic links; `None` if it has no name any more.
fn own_path(file: &ImageFile) -> Option<PathBuf> {
    let path = file.path().canonicalize().ok()?;
    let named = path.metadata().ok()?;
    let found = FileId { device: named.dev(), inode: named.ino() };
    (found == file.identity().ok()?).then_some(path)
}

/// The place in `directory` for the disk with the absolute path `disk`, which the user calls `image`.
fn place_in(directory: &Path, disk: &Path, image: &Path) -> Result<PathBuf, ImageError> {
    let mut name = escaped(disk);
    name.push(SUFFIX);
    if name.len() + UNFINISHED > MAX_NAME {
        let why = format!(
            "its path is too long for the name of a file in {} (leave out --bitmap-dir)",
            directory.display()
        );
        return Err(ImageError::refused(image, why));
    }
    Ok(directory.join(name))
}

/// An absolute path as a name, as `systemd-escape --path` has it.
fn escaped(path: &Path) -> OsString {
    let bytes = path.as_os_str().as_bytes();
    let mut name = String::new();
    for (at, &byte) in bytes.iter().skip(1).enumerate() {
        let is_plain = byte.is_ascii_alphanumeric() || b":_".contains(&byte);
        match byte {
            b'/' => name.push('-'),
            b'.' if at > 0 => name.push('.'),
            _ if is_plain => name.push(char::from(byte)),
            // It cannot fail: the memory of a string grows.
            _ => drop(write!(name, "\\x{byte:02x}")),
        }
    }
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_paths_have_one_name() {
        for (path, name) in [
            ("/srv/disk.img", "srv-disk.img"),
            ("/srv-disk.img", "srv\\x2ddisk.img"),
            ("/.hidden", "\\x2ehidden"),
            ("/a\\x2db", "a\\x5cx2db"),
            ("/dev/disk/by-id/wwn-0x5", "dev-disk-by\\x2did-wwn\\x2d0x5"),
            ("/a b/\u{e4}", "a\\x20b-\\xc3\\xa4"),
        ] {
            assert_eq!(escaped(Path::new(path)), name);
        }
    }

    #[test]
    fn a_path_that_is_too_long_for_a_name_is_refused() {
        let directory = Path::new("/bitmaps");
        let place = |len: usize| {
            let disk = PathBuf::from(format!("/{}", "d".repeat(len)));
            place_in(directory, &disk, Path::new("d"))
        };
        let most = MAX_NAME - UNFINISHED - SUFFIX.len();
        let name = place(most).unwrap();
        assert_eq!(name.file_name().unwrap().len() + UNFINISHED, MAX_NAME);
        assert!(place(most + 1).unwrap_err().to_string().contains("too long"));
    }

    #[test]
    fn the_place_of_a_file_is_beside_it_or_in_the_given_directory() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        let (image, link) = (root.join("disk.img"), root.join("link"));
        std::fs::write(&image, [0; 512]).unwrap();
        std::os::unix::fs::symlink(&image, &link).unwrap();
        let given = root.join("given");
        std::fs::create_dir(&given).unwrap();
        let place = |path: &Path, directory: Option<&Path>| {
            let file = Arc::new(ImageFile::open(path, false).unwrap());
            BitmapsPlace::of(&file, directory, None).unwrap().unwrap()
        };
        let beside = root.join("disk.img.bitmaps.qcow2");
        assert_eq!(place(&image, None).path(), beside);
        assert_eq!(place(&link, None).path(), beside, "one image, whatever its name is");
        let inside = place(&image, Some(&given));
        assert_eq!(inside.path().parent(), Some(&*given));
        assert!(!inside.is_there());
        // Bitmaps that are beside it already stay there.
        std::fs::write(&beside, "").unwrap();
        assert_eq!(place(&image, Some(&given)).path(), beside);
        // A file that has lost its name, or whose name is that of another one, has none.
        let file = Arc::new(ImageFile::open(&image, false).unwrap());
        std::fs::remove_file(&image).unwrap();
        assert!(BitmapsPlace::of(&file, None, None).unwrap().is_none());
        std::fs::write(&image, "another").unwrap();
        assert!(BitmapsPlace::of(&file, None, None).unwrap().is_none());
    }
}
