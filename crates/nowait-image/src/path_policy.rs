//! Path policy: the files that the header of an image may name.
//!
//! A guest that can write a header must not gain access to any file of the host. So a backing file
//! has to lie in the directory of the opened image, not below it, or in one of the directories
//! given by the user; its name must not begin with a dot; and a symbolic link has to lead to such a
//! file. For an image on a block device no directory is trusted, and a block device is accepted as
//! a backing file only in a directory given by the user. A data file is opened only if the user
//! gave that file, because it is written to.
//!
//! Invariant: a backing file is opened by its name in a directory that is open already, without
//! following a link: the file that was checked is the file that is opened, whatever is renamed
//! meanwhile.

use std::ffi::OsStr;
use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use crate::error::{ImageError, argument, plain};
use crate::file_name::plain_name;
use crate::image_file::{ImageFile, Opening};

/// The files that headers may name.
#[derive(Debug, Default)]
pub(crate) struct PathPolicy {
    /// The directory of the opened image, if that is a file.
    own_directory: Option<Directory>,
    allowed: Vec<Directory>,
    /// Data files, without symbolic links.
    data_files: Vec<PathBuf>,
}

#[derive(Debug)]
struct Directory {
    /// Without symbolic links.
    path: PathBuf,
    open: File,
}

impl Directory {
    fn open(path: &Path) -> Result<Self, ImageError> {
        let failed = |error| ImageError::os(path, "find the directory", &error);
        let real = path.canonicalize().map_err(failed)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = rustix::fs::open(&real, flags, Mode::empty()).map_err(|e| failed(e.into()))?;
        Ok(Self { path: real, open: open.into() })
    }
}

impl PathPolicy {
    /// The policy for the image at `path`: it may name files of its own directory, if
    /// `trust_directory`, of those in `directories`, and `data_files`.
    pub(crate) fn new(
        path: &Path,
        trust_directory: bool,
        directories: &[PathBuf],
        data_files: &[PathBuf],
    ) -> Result<Self, ImageError> {
        let own_directory =
            if trust_directory { Some(Directory::open(directory_of(path))?) } else { None };
        let allowed =
            directories.iter().map(|path| Directory::open(path)).collect::<Result<_, _>>();
        let real = |path: &PathBuf| {
            path.canonicalize().map_err(|e| ImageError::os(path, "find the data file", &e))
        };
        let data_files = data_files.iter().map(real).collect::<Result<_, _>>()?;
        Ok(Self { own_directory, allowed: allowed?, data_files })
    }

    /// Opens the backing file that the header of `image` calls `name`. The file's path is the one
    /// that QEMU would use: names in its own header are relative to that.
    pub(crate) fn backing_file(
        &self,
        image: &Path,
        name: &OsStr,
        opening: Opening,
    ) -> Result<ImageFile, ImageError> {
        self.file_beside(image, name, "backing file", opening)
    }

    /// Opens the file with a part of the disk that `image` calls `name`, for reading: under the rules for
    /// backing files, and with a name that is not a path.
    pub(crate) fn extent_file(&self, image: &Path, name: &OsStr) -> Result<ImageFile, ImageError> {
        if Path::new(name).file_name() != Some(name) || name.as_bytes().contains(&b'/') {
            let what = format!(
                "its extent '{}' is named by a path, and only a file in its directory is opened",
                shown(name)
            );
            return Err(ImageError::refused(image, what));
        }
        self.file_beside(image, name, "extent", Opening::ReadOnly)
    }

    /// Opens the file `name`, which is `what_for` for `image`, if it is in one of the directories.
    fn file_beside(
        &self,
        image: &Path,
        name: &OsStr,
        what_for: &str,
        opening: Opening,
    ) -> Result<ImageFile, ImageError> {
        let shown = shown(name);
        let refused = |what: String| {
            Err(ImageError::refused(image, format!("its {what_for} '{shown}' {what}")))
        };
        let (path, real) = find(image, name, what_for)?;
        let (Some(parent), Some(file_name)) = (real.parent(), real.file_name()) else {
            return refused("is not a file".into());
        };
        if is_hidden(&path) || is_hidden(&real) {
            return refused(
                "is hidden, and such are never opened (rename it, and record its new name with \
                 qemu-img rebase -u)"
                    .into(),
            );
        }
        let leave = leave("--backing-dir", parent.as_os_str());
        let allowed = self.allowed.iter().find(|directory| directory.path == parent);
        let own_directory =
            self.own_directory.as_ref().filter(|directory| directory.path == parent);
        let Some(directory) = allowed.or(own_directory) else {
            return refused(match self.own_directory {
                Some(_) => format!("is not in the image's own directory{leave}"),
                None => format!("is named on a block device, which trusts no directory{leave}"),
            });
        };
        let file = ImageFile::open_in(directory.open.as_fd(), file_name, &path, opening)?;
        if allowed.is_none() && file.is_block_device() {
            return refused(format!("is a block device{leave}"));
        }
        Ok(file)
    }

    /// Opens the data file that the header of `image` calls `name`.
    pub(crate) fn data_file(
        &self,
        image: &Path,
        name: &OsStr,
        opening: Opening,
    ) -> Result<ImageFile, ImageError> {
        let (path, real) = find(image, name, "data file")?;
        if !self.data_files.contains(&real) {
            let (name, leave) = (shown(name), leave("--data-file", real.as_os_str()));
            let what = format!(
                "its data is in another file, '{name}', which is opened only by leave{leave}"
            );
            return Err(ImageError::refused(image, what));
        }
        ImageFile::open_as(&real, &path, opening)
    }
}

/// The path of the file that the header of `image` calls `name`, as written and without symbolic
/// links.
fn find(image: &Path, name: &OsStr, what: &str) -> Result<(PathBuf, PathBuf), ImageError> {
    let shown = shown(name);
    let Some(plain) = plain_name(name) else {
        return Err(ImageError::refused(image, format!("its {what} '{shown}' is not a file name")));
    };
    let path = directory_of(image).join(plain);
    let real = path.canonicalize().map_err(|error| {
        let reason = match error.kind() {
            ErrorKind::NotFound => "is missing".to_owned(),
            _ => format!("cannot be found: {}", crate::error::os_message(&error)),
        };
        ImageError::refused(image, format!("its {what} '{shown}' {reason}"))
    })?;
    Ok((path, real))
}

/// The advice to give `option` with `value`, to follow a refusal; empty if no message can tell the value.
fn leave(option: &str, value: &OsStr) -> String {
    argument(value).map_or(String::new(), |value| format!(" (allow it with {option} {value})"))
}

fn is_hidden(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"."))
}

/// The directory that `path` is in.
fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => path,
    }
}
/// `name` for messages: control characters, which could move a terminal's cursor, are escaped.
fn shown(name: &OsStr) -> String {
    plain(&name.to_string_lossy())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    /// A user's directory with images and other files in it, beside another user's.
    struct UserDirectory {
        scratch: tempfile::TempDir,
    }

    impl UserDirectory {
        fn new() -> Self {
            let scratch = tempfile::tempdir().unwrap();
            for directory in ["home/.ssh", "home/vms", "other"] {
                fs::create_dir_all(scratch.path().join(directory)).unwrap();
            }
            for file in
                ["home/base", "home/.bashrc", "home/.ssh/id_rsa", "home/vms/base", "other/disk"]
            {
                fs::write(scratch.path().join(file), file).unwrap();
            }
            Self { scratch }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.scratch.path().join(name)
        }

        fn image(&self) -> PathBuf {
            self.path("home/top.qcow2")
        }

        fn policy(&self, directories: &[&str], data_files: &[&str]) -> PathPolicy {
            let all = |names: &[&str]| names.iter().map(|name| self.path(name)).collect::<Vec<_>>();
            PathPolicy::new(&self.image(), true, &all(directories), &all(data_files)).unwrap()
        }

        /// The content of the backing file `name`, or the refusal.
        fn backing(&self, policy: &PathPolicy, name: &str) -> Result<String, String> {
            policy
                .backing_file(&self.image(), OsStr::new(name), Opening::ReadOnly)
                .map(|file| content(&file))
                .map_err(|error| error.to_string())
        }
    }

    fn content(file: &ImageFile) -> String {
        let mut bytes = vec![0; file.size().unwrap() as usize];
        file.read_at(0, &mut bytes).unwrap();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn a_backing_file_lies_in_the_images_own_directory_not_below_it_and_is_not_hidden() {
        let user = UserDirectory::new();
        let policy = user.policy(&[], &[]);
        let own_file = user.path("home/base");
        for name in ["base", "./base", "file:base", "vms/../base", own_file.to_str().unwrap()] {
            assert_eq!(user.backing(&policy, name).unwrap(), "home/base", "{name}");
        }
        let other = user.path("other/disk");
        for name in ["vms/base", ".ssh/id_rsa", "../other/disk", other.to_str().unwrap()] {
            let error = user.backing(&policy, name).unwrap_err();
            assert!(error.contains("not in the image's own directory (allow it with"), "{error}");
        }
        let error = user.backing(&policy, ".bashrc").unwrap_err();
        assert!(error.contains("hidden"), "{error}");
        assert!(user.backing(&policy, "none").unwrap_err().ends_with("'none' is missing"));
    }

    #[test]
    fn a_link_is_followed_only_to_a_file_that_would_be_opened_by_its_own_name() {
        let user = UserDirectory::new();
        for (link, to) in
            [("in", "base"), ("below", "vms/base"), ("out", "../other/disk"), ("rc", ".bashrc")]
        {
            symlink(to, user.path("home").join(link)).unwrap();
        }
        symlink("base", user.path("home/.in")).unwrap();
        symlink("../other", user.path("home/others")).unwrap();
        let policy = user.policy(&[], &[]);
        assert_eq!(user.backing(&policy, "in").unwrap(), "home/base");
        for name in ["below", "out", "others/disk"] {
            let error = user.backing(&policy, name).unwrap_err();
            assert!(error.contains("not in the image's own directory"), "{error}");
        }
        for name in ["rc", ".in"] {
            assert!(user.backing(&policy, name).unwrap_err().contains("hidden"), "{name}");
        }
        let policy = user.policy(&["other"], &[]);
        assert_eq!(user.backing(&policy, "out").unwrap(), "other/disk");
        assert_eq!(user.backing(&policy, "others/disk").unwrap(), "other/disk");
    }

    #[test]
    fn a_directory_given_by_the_user_is_trusted_but_not_those_below_it() {
        let user = UserDirectory::new();
        let policy = user.policy(&["other"], &[]);
        assert_eq!(user.backing(&policy, "../other/disk").unwrap(), "other/disk");
        assert_eq!(user.backing(&policy, "base").unwrap(), "home/base");
        assert!(user.backing(&user.policy(&["."], &[]), "../other/disk").is_err());
        assert!(user.backing(&user.policy(&["home"], &[]), ".bashrc").is_err());
    }

    #[test]
    fn an_image_on_a_block_device_trusts_only_the_directories_given_by_the_user() {
        let user = UserDirectory::new();
        let none = PathPolicy::new(&user.image(), false, &[], &[]).unwrap();
        let error = user.backing(&none, "base").unwrap_err();
        assert!(error.contains("block device") && error.contains("--backing-dir"), "{error}");
        let allowed = PathPolicy::new(&user.image(), false, &[user.path("home")], &[]).unwrap();
        assert_eq!(user.backing(&allowed, "base").unwrap(), "home/base");
    }

    #[test]
    fn a_data_file_is_opened_only_if_the_user_gave_that_file() {
        let user = UserDirectory::new();
        let open = |policy: &PathPolicy, name: &str| {
            policy
                .data_file(&user.image(), OsStr::new(name), Opening::Exclusive)
                .map(|file| content(&file))
        };
        let policy = user.policy(&["home", "other"], &["other/disk"]);
        for name in ["base", ".bashrc", "vms/base"] {
            let error = open(&policy, name).unwrap_err().to_string();
            let path = user.path("home").canonicalize().unwrap().join(name);
            assert!(error.contains(&format!("--data-file {}", path.display())), "{error}");
        }
        assert_eq!(open(&policy, "../other/disk").unwrap(), "other/disk");
        assert!(open(&policy, "none").unwrap_err().to_string().ends_with("is missing"));
    }
}
