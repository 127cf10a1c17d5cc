//! How a file or block device is opened.
//!
//! Invariant: by default nothing is assumed that another handle, process or descriptor could change.

use crate::storage::write_life::WriteLife;
use crate::types::error::{Error, Operation};

/// Whether the page cache is bypassed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direct {
    /// Yes, or the open fails.
    On,
    /// No.
    Off,
    /// Yes where the file system can.
    #[default]
    Auto,
}

/// How a file or block device is opened: for reading and writing, unless it is `read_only`.
///
/// ```
/// use nowait::OpenOptions;
/// let log = OpenOptions::new().create(true).append(true).mode(0o600);
/// assert!(log.create && log.append && !log.truncate);
/// assert_eq!(log.mode, 0o600);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[allow(clippy::struct_excessive_bools, reason = "independent options, as those of open(2)")]
pub struct OpenOptions {
    /// Writes, discards and zeroes fail with `EROFS`.
    pub read_only: bool,
    /// Whether the page cache is bypassed.
    pub direct: Direct,
    /// A block device is opened for writing even if it is in use, by a mounted file system for
    /// example. Otherwise the kernel refuses that (open(2), `O_EXCL`).
    pub allow_mounted: bool,
    /// Which ranges are mapped and which are holes is cached, so that reading a hole needs no I/O, and
    /// a write to one goes to a worker without a try (C38). Only for a disk without other writers, such as one
    /// that is locked: another handle of this process is one, too. What they write may read as
    /// zeros.
    pub cache_holes: bool,
    /// A worker that writes sequentially into a hole of a disk also allocates storage behind what it
    /// writes, so that the next writes need no worker. What is not used is given back when the device
    /// is closed. It needs `cache_holes`. On by default.
    pub allocate_ahead: bool,
    /// Sequential and strided reads of at most 256 KiB are found, and what they will read next is read
    /// into memory before, so that a scan is as fast as one with large requests (C81 to C86). For a file or
    /// disk that only this process changes, and by this library: a read may miss for up to one second what
    /// another process, a buffered writer or a mapping has changed. Off by default; without direct I/O
    /// the kernel reads ahead, and the option does nothing.
    pub read_ahead: bool,
    /// Writes with [`crate::Flags::UNTORN`] are needed: `EOPNOTSUPP` if the file has none. Without the option a
    /// file may have them, too ([`crate::BlockDevice::untorn_limits`]).
    pub untorn: bool,
    /// How long what is written will stay; a hint for the device. It is a property of the file, which its
    /// other handles have as well.
    pub write_life: Option<WriteLife>,
    /// A file that is missing is made (open(2), `O_CREAT`).
    pub create: bool,
    /// The file is made; one that is there already is `EEXIST`.
    pub create_new: bool,
    /// The file is cut off to 0 bytes, once nothing else of the open can fail.
    pub truncate: bool,
    /// Each write goes to the end of the file, whatever its position (C26).
    pub append: bool,
    /// The path is that of a directory, in which a file without a name is made (open(2), `O_TMPFILE`).
    /// It is gone with its last handle, unless it is given a name ([`crate::BlockingFile::link`]).
    pub unnamed: bool,
    /// The mode of a file that is made, before the process's umask(2): 0 to 0o7777, by default 0o666.
    pub mode: u32,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            direct: Direct::Auto,
            allow_mounted: false,
            cache_holes: false,
            allocate_ahead: true,
            read_ahead: false,
            untorn: false,
            write_life: None,
            create: false,
            create_new: false,
            truncate: false,
            append: false,
            unnamed: false,
            mode: 0o666,
        }
    }
}

/// Each method sets the field of its name.
#[allow(missing_docs, reason = "the fields are documented")]
impl OpenOptions {
    /// The default options.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    #[must_use]
    pub const fn read_only(self, read_only: bool) -> Self {
        Self { read_only, ..self }
    }

    #[must_use]
    pub const fn direct(self, direct: Direct) -> Self {
        Self { direct, ..self }
    }

    #[must_use]
    pub const fn allow_mounted(self, allow_mounted: bool) -> Self {
        Self { allow_mounted, ..self }
    }

    #[must_use]
    pub const fn cache_holes(self, cache_holes: bool) -> Self {
        Self { cache_holes, ..self }
    }

    #[must_use]
    pub const fn allocate_ahead(self, allocate_ahead: bool) -> Self {
        Self { allocate_ahead, ..self }
    }

    #[must_use]
    pub const fn read_ahead(self, read_ahead: bool) -> Self {
        Self { read_ahead, ..self }
    }

    #[must_use]
    pub const fn untorn(self, untorn: bool) -> Self {
        Self { untorn, ..self }
    }

    #[must_use]
    pub const fn write_life(self, write_life: Option<WriteLife>) -> Self {
        Self { write_life, ..self }
    }

    #[must_use]
    pub const fn create(self, create: bool) -> Self {
        Self { create, ..self }
    }

    #[must_use]
    pub const fn create_new(self, create_new: bool) -> Self {
        Self { create_new, ..self }
    }

    #[must_use]
    pub const fn truncate(self, truncate: bool) -> Self {
        Self { truncate, ..self }
    }

    #[must_use]
    pub const fn append(self, append: bool) -> Self {
        Self { append, ..self }
    }

    #[must_use]
    pub const fn unnamed(self, unnamed: bool) -> Self {
        Self { unnamed, ..self }
    }

    #[must_use]
    pub const fn mode(self, mode: u32) -> Self {
        Self { mode, ..self }
    }

    /// Refuses options that contradict each other, those of files for a disk, and those of disks for a
    /// file.
    ///
    /// # Errors
    /// `EINVAL`.
    pub(crate) fn check(self, is_disk: bool) -> Result<(), Error> {
        let makes = self.create || self.create_new || self.unnamed;
        let changes = makes || self.truncate || self.append;
        let contradict = self.unnamed && (self.create || self.create_new || self.truncate);
        let caches_file = !is_disk && self.cache_holes;
        if changes && (self.read_only || is_disk) || contradict || caches_file || self.mode > 0o7777
        {
            return Err(Error::new(libc::EINVAL, Operation::Open));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_contradict_each_other_are_refused() {
        let new = OpenOptions::new;
        for (options, file, disk) in [
            (new(), true, true),
            (new().create(true).truncate(true).append(true), true, false),
            (new().create(true).create_new(true), true, false),
            (new().unnamed(true), true, false),
            (new().unnamed(true).create(true), false, false),
            (new().unnamed(true).truncate(true), false, false),
            (new().read_only(true), true, true),
            (new().read_only(true).create(true), false, false),
            (new().read_only(true).truncate(true), false, false),
            (new().read_only(true).append(true), false, false),
            (new().cache_holes(true), false, true),
            (new().mode(0o7777), true, true),
            (new().mode(0o10000), false, false),
        ] {
            assert_eq!(options.check(false).is_ok(), file, "a file: {options:?}");
            assert_eq!(options.check(true).is_ok(), disk, "a disk: {options:?}");
        }
    }
}
