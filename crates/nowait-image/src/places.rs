//! Where an image's other files may be: what a name in a header is allowed to lead to.
//!
//! Invariant: a file that a header names is opened only if its real place, links resolved, is
//! below a directory that the user named, or below the image's own. A guest that can write a
//! header must not be able to have any file of the host served to it.
//! Knows: error. Known by: chain.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::error::ImageError;

/// Directories that files named in headers may be below.
#[derive(Clone, Debug, Default)]
pub(crate) struct Places(Vec<PathBuf>);

/// A file that a header names.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// As it is named. What its own header names is relative to this, as in QEMU.
    pub(crate) named: PathBuf,
    /// Without links: what is opened.
    pub(crate) real: PathBuf,
}

impl Places {
    /// The directory that `image` is in, and `more`.
    pub(crate) fn new(image: &Path, more: &[PathBuf]) -> Result<Self, ImageError> {
        let mut places = Vec::new();
        for directory in [directory_of(image)].into_iter().chain(more.iter().map(PathBuf::as_path))
        {
            let real = directory
                .canonicalize()
                .map_err(|error| ImageError::os(directory, "find the directory", &error))?;
            places.push(real);
        }
        Ok(Self(places))
    }

    /// Where the file is that the header of `image` calls `name` (`what` it is to it).
    pub(crate) fn resolve(
        &self,
        image: &Path,
        name: &OsStr,
        what: &str,
    ) -> Result<Place, ImageError> {
        let shown = shown(name);
        let Some(plain) = plain_name(name) else {
            return Err(ImageError::refused(
                image,
                format!("its {what} '{shown}' is no file name, which is all that is supported"),
            ));
        };
        let path = directory_of(image).join(plain);
        let real = path.canonicalize().map_err(|error| {
            let reason = match error.kind() {
                std::io::ErrorKind::NotFound => "is missing".to_owned(),
                _ => format!("cannot be found: {error}"),
            };
            ImageError::refused(image, format!("its {what} '{shown}' {reason}"))
        })?;
        if self.0.iter().any(|place| real.starts_with(place)) {
            return Ok(Place { named: path, real });
        }
        let parent = directory_of(&real).display();
        Err(ImageError::refused(
            image,
            format!(
                "its {what} '{shown}' is outside the image's directory \
                 (allow it with --backing-dir {parent})"
            ),
        ))
    }
}

/// The directory that `path` is in.
fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => path,
    }
}

/// `name` for people: no control characters, which could move a terminal's cursor.
fn shown(name: &OsStr) -> String {
    name.to_string_lossy().chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// The file name in `name`, as QEMU takes it: `file:` before it is dropped, any other protocol
/// (`json:`, `nbd:`, …) is none.
fn plain_name(name: &OsStr) -> Option<&Path> {
    let bytes = name.as_bytes();
    let protocol = bytes
        .iter()
        .position(|&byte| byte == b':' || byte == b'/')
        .filter(|&at| bytes[at] == b':' && at > 0)
        .map(|at| &bytes[..at]);
    match protocol {
        None => Some(Path::new(name)),
        Some(b"file") => Some(Path::new(OsStr::from_bytes(&bytes[5..]))),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names_and_file_names_are_files() {
        let plain = |name| plain_name(OsStr::new(name));
        assert_eq!(plain("base.raw"), Some(Path::new("base.raw")));
        assert_eq!(plain("file:../base.raw"), Some(Path::new("../base.raw")));
        assert_eq!(plain("./odd:name"), Some(Path::new("./odd:name")));
        for name in ["json:{}", "nbd:unix:/x", "nbd+unix:///?socket=x", "https://a/b"] {
            assert_eq!(plain(name), None, "{name}");
        }
    }

    #[test]
    fn a_name_that_leads_out_of_the_directory_is_refused_through_links_too() {
        let scratch = tempfile::tempdir().unwrap();
        let (inside, outside) = (scratch.path().join("in"), scratch.path().join("out"));
        for directory in [&inside, &outside] {
            std::fs::create_dir(directory).unwrap();
            std::fs::write(directory.join("base"), "x").unwrap();
        }
        std::os::unix::fs::symlink(outside.join("base"), inside.join("link")).unwrap();
        let image = inside.join("top.qcow2");
        let places = Places::new(&image, &[]).unwrap();
        let found = |places: &Places, name: &str| {
            places.resolve(&image, OsStr::new(name), "backing file").map(|place| place.real)
        };
        assert!(found(&places, "base").unwrap().ends_with("in/base"));
        for name in ["link", "../out/base", outside.join("base").to_str().unwrap()] {
            let error = found(&places, name).unwrap_err().to_string();
            assert!(error.contains("outside the image's directory"), "{error}");
        }
        assert!(found(&places, "none").unwrap_err().to_string().ends_with("'none' is missing"));
        let places = Places::new(&image, &[outside]).unwrap();
        assert!(found(&places, "link").unwrap().ends_with("out/base"));
    }
}
