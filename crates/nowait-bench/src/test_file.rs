//! The file that all servers serve in turn: a checked file of the user, or a temporary one.
//!
//! Invariant: a file of the user is opened for writing only if the caller permits overwriting;
//! otherwise it is served read-only and only reads are measured. A temporary file is removed after
//! the measurement.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use fastrand::Rng;
use rustix::fs::{Advice, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::error::Error;
use crate::image_kind::ImageKind;
use crate::workload::Caching;

const MIB: u64 = 1 << 20;
/// Smaller files fit into the cache of a processor, and random positions collide too often.
pub(crate) const BYTES_MIN: u64 = 64 * MIB;
const MADE_BYTES: u64 = 256 * MIB;
const COPY_BYTES: usize = MIB as usize;

/// The access that servers have to the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    ReadOnly,
    ReadWrite,
}

/// A directory in `parent`, or in `$TMPDIR`, or in /var/tmp: /tmp is often in memory, which is no
/// measure of storage; /var/tmp is on a disk by convention.
pub(crate) fn temporary_directory(parent: Option<PathBuf>) -> io::Result<TempDir> {
    let parent = parent.or_else(|| std::env::var_os("TMPDIR").map(PathBuf::from));
    let parent = parent.unwrap_or_else(|| PathBuf::from("/var/tmp"));
    tempfile::Builder::new().prefix("nowait-bench-").tempdir_in(parent)
}

/// Appends `bytes`, whole megabytes, of random data to `file`.
pub(crate) fn put_random(file: &mut File, bytes: u64) -> io::Result<()> {
    let mut random = Rng::with_seed(1);
    let mut data = vec![0; COPY_BYTES];
    for _ in 0..bytes / COPY_BYTES as u64 {
        random.fill(&mut data);
        file.write_all(&data)?;
    }
    file.sync_all()
}

/// The file to measure on.
pub(crate) struct Target {
    /// Absolute path.
    pub(crate) path: PathBuf,
    /// Whole megabytes; the rest of the file is not used.
    pub(crate) bytes: u64,
    pub(crate) image: ImageKind,
    pub(crate) access: Access,
    file: File,
    /// The directory of a temporary file; removed on drop.
    made: Option<TempDir>,
}

impl Target {
    /// Checks `file`, or creates one of 256 MiB of random data if there is none.
    pub(crate) fn open(
        file: Option<&Path>,
        overwrite: bool,
        direct: bool,
    ) -> Result<Target, Error> {
        let target = match file {
            Some(path) => Target::check(path, overwrite)
                .map_err(|problem| Error::File { path: path.to_owned(), problem })?,
            None => Target::make()
                .map_err(Error::system("making a file of 256 MiB (name one with --file)"))?,
        };
        if direct {
            open_direct(&target.path)
                .map_err(|problem| Error::File { path: target.path.clone(), problem })?;
        }
        Ok(target)
    }

    /// The image at `path`, created by the caller, which servers may write to. Its disk has `bytes`.
    pub(crate) fn of_image(path: PathBuf, image: ImageKind, bytes: u64) -> io::Result<Target> {
        let file = File::open(&path)?;
        Ok(Target { path, bytes, image, access: Access::ReadWrite, file, made: None })
    }

    /// Whether the file is a temporary one.
    pub(crate) fn was_made(&self) -> bool {
        self.made.is_some()
    }

    /// The lines about it in a report, of which `bytes` were measured.
    pub(crate) fn lines(&self, bytes: u64) -> String {
        let origin = if self.was_made() { ", made for this and removed afterwards" } else { "" };
        let mut text = format!("{}: {} MiB{origin}\n", self.path.display(), bytes >> 20);
        if self.access == Access::ReadOnly {
            text += "only reads: the file may not be overwritten (--overwrite allows it)\n";
        }
        text
    }

    pub(crate) fn to_json(&self, bytes: u64) -> Value {
        json!({
            "path": self.path.to_string_lossy(),
            "bytes": bytes,
            "temporary": self.was_made(),
            "written": self.access == Access::ReadWrite,
        })
    }

    fn check(path: &Path, overwrite: bool) -> Result<Target, String> {
        let cannot_open =
            |e: io::Error| format!("cannot open: {e} (name an existing file of 64 MiB or more)");
        let path = path.canonicalize().map_err(cannot_open)?;
        let kind = path.metadata().map_err(cannot_open)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err("neither a file nor a block device".to_owned());
        }
        let mut file = File::open(&path).map_err(cannot_open)?;
        let bytes =
            file.seek(SeekFrom::End(0)).map_err(|e| format!("cannot tell its size: {e}"))?;
        if bytes < BYTES_MIN {
            return Err(format!(
                "only {bytes} bytes (64 MiB is the least that can be measured on)"
            ));
        }
        let access = if overwrite { Access::ReadWrite } else { Access::ReadOnly };
        if access == Access::ReadWrite {
            // Exclusive, so that a mounted device is refused.
            let exclusive = if kind.is_block_device() { OFlags::EXCL } else { OFlags::empty() };
            open_as(&path, OFlags::RDWR | exclusive)
                .map_err(|e| format!("cannot be overwritten: {}", io::Error::from(e)))?;
        }
        let bytes = bytes / MIB * MIB;
        Ok(Target { path, bytes, image: ImageKind::Raw, access, file, made: None })
    }

    fn make() -> io::Result<Target> {
        let directory = temporary_directory(None)?;
        let path = directory.path().canonicalize()?.join("bench.img");
        let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, MADE_BYTES) {
            Ok(()) | Err(Errno::OPNOTSUPP) => {}
            Err(e) => return Err(e.into()),
        }
        put_random(&mut file, MADE_BYTES)?;
        Ok(Target {
            path,
            bytes: MADE_BYTES,
            image: ImageKind::Raw,
            access: Access::ReadWrite,
            file,
            made: Some(directory),
        })
    }

    /// Prepares the page cache for a measurement with `caching`: no dirty pages, and either no page
    /// of the file or the whole file.
    pub(crate) fn prepare(&self, caching: Caching) -> io::Result<()> {
        self.file.sync_all()?;
        match caching {
            Caching::Direct => {
                drop_cached(&self.file)?;
            }
            Caching::PageCache => {
                let mut file = &self.file;
                file.seek(SeekFrom::Start(0))?;
                let mut data = vec![0; COPY_BYTES];
                while file.read(&mut data)? > 0 {}
            }
        }
        Ok(())
    }
}

/// Drops the clean pages of `file` from the page cache. Remaining pages would slow down each direct
/// transfer.
pub(crate) fn drop_cached(file: &File) -> io::Result<()> {
    Ok(rustix::fs::fadvise(file, 0, None, Advice::DontNeed)?)
}

fn open_direct(path: &Path) -> Result<(), String> {
    match open_as(path, OFlags::RDONLY | OFlags::DIRECT) {
        Ok(_) => Ok(()),
        Err(Errno::INVAL) => {
            Err("its file system has no direct I/O (name a file on another one)".to_owned())
        }
        Err(e) => Err(format!("cannot open for direct I/O: {}", io::Error::from(e))),
    }
}

fn open_as(path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(file: &Path, overwrite: bool) -> String {
        match Target::open(Some(file), overwrite, false) {
            Ok(_) => String::new(),
            Err(e) => e.to_string(),
        }
    }

    #[test]
    fn a_missing_file_a_directory_and_a_small_file_are_refused_by_name() {
        let directory = TempDir::new().expect("a temporary directory");
        let missing = directory.path().join("missing");
        assert!(problem(&missing, true).contains("missing: cannot open"));
        assert!(!missing.exists());
        assert!(problem(directory.path(), true).contains("neither a file nor"));
        let small = directory.path().join("small");
        std::fs::write(&small, [0; 512]).expect("a small file");
        assert!(problem(&small, true).contains("only 512 bytes"));
    }

    #[test]
    fn a_file_that_may_not_be_overwritten_is_served_read_only() {
        let directory = TempDir::new().expect("a temporary directory");
        let path = directory.path().join("image");
        File::create(&path).and_then(|file| file.set_len(BYTES_MIN + 5)).expect("a sparse file");
        for (overwrite, access) in [(false, Access::ReadOnly), (true, Access::ReadWrite)] {
            let target = Target::open(Some(&path), overwrite, false).expect("a good file");
            assert_eq!((target.access, target.bytes), (access, BYTES_MIN));
            assert!(!target.was_made());
        }
    }
}
