//! Where a file is found that is replaced while it is in use: credentials and certificates.
//!
//! Landlock has rules for files and for what is below directories. A new file that gets the name, or a new link on the
//! way to it, has none of the old file's. So the directories with these names are read.
//!
//! Invariant: no directory is listed that by its place has files of other kinds: one directly below the root, a home
//! directory or one above it, one for temporary files.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// The most links on the way to a file that is read again, as the kernel counts them (path_resolution(7)).
/// Beyond it: the file is refused.
const MAX_LINKS: usize = 40;
/// Directories for temporary files. Their mode does not tell them: a volume of Kubernetes has the same (1777).
const TEMPORARY: [&str; 2] = ["/var/tmp", "/dev/shm"];

/// The directories that have the name of the file `path`, and the links that lead to it.
pub(crate) fn directories_of_file(path: &Path) -> Vec<PathBuf> {
    let (mut directories, file) = led_to(path);
    directories.extend(file.parent().map(Path::to_owned));
    own(directories)
}

/// The directory `path` itself, the directories with the links to it, the links in it, and the directories that these lead
/// to or through.
pub(crate) fn paths_of_directory(path: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let links = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_symlink()));
    let mut paths: Vec<PathBuf> = links.map(|link| link.path()).collect();
    let directories: Vec<_> = paths.iter().flat_map(|link| directories_of_file(link)).collect();
    paths.extend(directories);
    paths.extend(own(led_to(path).0));
    paths.push(path.to_owned());
    paths
}

/// The directories with the links that lead to the file of `path`, and that file.
fn led_to(path: &Path) -> (Vec<PathBuf>, PathBuf) {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut rest = names(&absolute);
    let (mut at, mut directories) = (PathBuf::from("/"), Vec::new());
    while let Some(name) = rest.pop_front() {
        if name == ".." {
            at.pop();
            continue;
        }
        let next = at.join(name);
        let link = fs::read_link(&next).ok().filter(|_| directories.len() < MAX_LINKS);
        let Some(target) = link else {
            at = next;
            continue;
        };
        directories.push(at.clone());
        if target.is_absolute() {
            at = PathBuf::from("/");
        }
        rest = names(&target).into_iter().chain(rest).collect();
    }
    (directories, at)
}

/// The parts of `path` without those that change nothing.
fn names(path: &Path) -> VecDeque<OsString> {
    let parts = path.components();
    let names = parts.filter(|it| matches!(it, Component::Normal(_) | Component::ParentDir));
    names.map(|it| it.as_os_str().to_owned()).collect()
}

/// The `directories` without those that have files of other kinds by their place.
fn own(mut directories: Vec<PathBuf>) -> Vec<PathBuf> {
    let home = std::env::home_dir();
    directories.retain(|directory| {
        // The root and its name are the first two.
        directory.components().count() > 2
            && directory.parent() != Some(Path::new("/home"))
            && !home.as_ref().is_some_and(|home| home.starts_with(directory))
            && !TEMPORARY.iter().any(|temporary| directory == Path::new(temporary))
    });
    directories
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_renewed_file_is_found_where_its_name_and_its_links_are() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path().canonicalize().unwrap();
        let at = |name: &str| root.join(name);
        for directory in ["pod/..1", "tls", "live", "archive"] {
            fs::create_dir_all(at(directory)).unwrap();
        }
        fs::write(at("pod/..1/token"), "").unwrap();
        symlink("..1", at("pod/..data")).unwrap();
        symlink("..data/token", at("pod/token")).unwrap();
        let of = |name| {
            let mut found = directories_of_file(&at(name));
            found.sort();
            found.dedup();
            found
        };
        assert_eq!(of("pod/token"), [at("pod"), at("pod/..1")]);
        assert_eq!(of("pod/absent"), [at("pod")]);
        fs::write(at("archive/cert"), "").unwrap();
        symlink(at("archive/cert"), at("live/cert")).unwrap();
        symlink("../live/cert", at("tls/cert")).unwrap();
        let mut found = paths_of_directory(&at("tls"));
        found.sort();
        found.dedup();
        assert_eq!(found, [at("archive"), at("live"), at("tls"), at("tls/cert")]);
        symlink("loop", at("tls/loop")).unwrap();
        assert!(directories_of_file(&at("tls/loop")).iter().all(|it| *it == at("tls")));
    }

    #[test]
    fn no_directory_with_files_of_other_kinds_is_read() {
        let home = std::env::home_dir().unwrap();
        for path in ["/etc/hosts", "/token", "/var/run/token", "/tmp/token", "/var/tmp/token"] {
            let found = directories_of_file(Path::new(path));
            assert!(found.is_empty(), "{path}: {found:?}");
        }
        let other_home = Path::new("/home").join("user");
        assert!(directories_of_file(&other_home.join("token")).is_empty());
        assert!(directories_of_file(&home.join("token")).is_empty());
    }
}
