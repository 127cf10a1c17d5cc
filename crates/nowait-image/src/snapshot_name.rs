//! The names of disks as of internal snapshots: IMAGE@SNAPSHOT.
//!
//! Invariant: a file that has the whole name is meant before a snapshot of another file.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The file and the snapshot that `path` names; `None` where there is a file of that name, or none of which
/// it could be a snapshot. The snapshot itself is not looked for.
#[must_use]
pub fn snapshot_in(path: &Path) -> Option<(PathBuf, OsString)> {
    let (file, snapshot) = split(path.as_os_str(), Path::new(""))?;
    Some((file.into(), snapshot.to_owned()))
}

/// The file that `path` names, or has a snapshot of.
#[must_use]
pub fn file_in(path: &Path) -> PathBuf {
    snapshot_in(path).map_or_else(|| path.to_owned(), |(file, _)| file)
}

/// Like [`snapshot_in`], for a name that is relative to `directory`.
pub(crate) fn split<'a>(name: &'a OsStr, directory: &Path) -> Option<(&'a OsStr, &'a OsStr)> {
    let bytes = name.as_bytes();
    if !bytes.contains(&b'@') || directory.join(name).symlink_metadata().is_ok() {
        return None;
    }
    let at_signs = (1..bytes.len()).rev().filter(|&at| bytes.get(at) == Some(&b'@'));
    let parts = at_signs.filter_map(|at| Some((bytes.get(..at)?, bytes.get(at + 1..)?)));
    let mut parts = parts.map(|(file, rest)| (OsStr::from_bytes(file), OsStr::from_bytes(rest)));
    parts.find(|(file, rest)| {
        !rest.is_empty() && directory.join(file).metadata().is_ok_and(|found| !found.is_dir())
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_with_the_whole_name_is_meant_first_and_else_the_longest_one() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let split = |name: &str| {
            let found = snapshot_in(&at(name));
            found.map(|(file, snapshot)| (file, snapshot.into_string().unwrap()))
        };
        assert_eq!(split("a@b"), None);
        fs::write(at("a"), "").unwrap();
        assert_eq!(split("a@b"), Some((at("a"), "b".into())));
        assert_eq!(split("a@b@c/d"), Some((at("a"), "b@c/d".into())));
        assert_eq!(split("a@"), None);
        assert_eq!(split("a"), None);
        fs::write(at("a@b"), "").unwrap();
        assert_eq!(split("a@b"), None);
        assert_eq!(split("a@b@c"), Some((at("a@b"), "c".into())));
        fs::create_dir(at("d")).unwrap();
        assert_eq!(split("d@b"), None);
    }
}
