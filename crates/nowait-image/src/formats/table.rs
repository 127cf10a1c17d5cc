//! The table of the formats.
//!
//! Invariant: each format has one row, and each name leads to one format.

use std::ffi::OsStr;
use std::path::Path;

use crate::error::{ImageError, plain};
use crate::formats::decompress::Compression;
use crate::formats::driver::{Driver, ImageBuilder, ImageInfo, NewBuilder};
use crate::formats::format::Format;
use crate::formats::{qcow2, raw, vhdx, vmdk};
use crate::image_file::ImageFile;

/// A row for each format.
pub(crate) static DRIVERS: [Driver; 4] = [raw::DRIVER, qcow2::DRIVER, vmdk::DRIVER, vhdx::DRIVER];

/// The format that is called `name` on the command line.
#[must_use]
pub fn by_name(name: &str) -> Option<Format> {
    DRIVERS.iter().find(|driver| driver.name == name).map(|driver| driver.format)
}

/// The format that is called `name` in a header, where it may have other names.
pub(crate) fn by_recorded_name(name: &str) -> Option<Format> {
    let is_it = |driver: &&Driver| driver.aliases.contains(&name);
    by_name(name).or_else(|| DRIVERS.iter().find(is_it).map(|driver| driver.format))
}

/// The names of the formats, for messages: "raw and qcow2". With `made`, those that images are made in.
#[must_use]
pub fn names(made: bool) -> String {
    let names = DRIVERS.iter().filter(|driver| !made || driver.create.is_some());
    let names: Vec<_> = names.map(|driver| driver.name).collect();
    match names.split_last() {
        Some((last, [])) => (*last).to_owned(),
        Some((last, others)) => format!("{} and {last}", others.join(", ")),
        None => String::new(),
    }
}

/// The format of a new image by the ending of its file name, without the dot.
#[must_use]
pub fn by_ending(ending: &str) -> Format {
    let is_it = |driver: &&Driver| {
        driver.create.is_some() && driver.endings.iter().any(|it| it.eq_ignore_ascii_case(ending))
    };
    DRIVERS.iter().find(is_it).map_or(Format::Raw, |driver| driver.format)
}

impl Format {
    /// The format's row.
    #[must_use]
    pub fn driver(self) -> &'static Driver {
        let row = DRIVERS.iter().find(|driver| driver.format == self);
        row.unwrap_or(&DRIVERS[0])
    }

    /// The format's name on the command line and in headers.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.driver().name
    }

    /// Describes the image in `file`, which is called `path`, by its header; `None` if it has none. With
    /// `snapshot`, the name or ID of an internal one, its size is that of the disk then.
    ///
    /// # Errors
    /// A refusal of bytes that are not such a header, and of a snapshot that it does not have; the errno of a
    /// failed read.
    pub fn info(
        self,
        file: &ImageFile,
        path: &Path,
        snapshot: Option<&OsStr>,
    ) -> Result<Option<ImageInfo>, ImageError> {
        if let Some(snapshot) = snapshot {
            self.check_snapshot(file, snapshot)?;
        }
        (self.driver().info)(file, path, snapshot)
    }

    /// Refuses a snapshot of `file` where the format has none.
    ///
    /// # Errors
    /// The refusal.
    pub(crate) fn check_snapshot(
        self,
        file: &ImageFile,
        snapshot: &OsStr,
    ) -> Result<(), ImageError> {
        if self.driver().has_snapshots {
            return Ok(());
        }
        let shown = plain(&snapshot.to_string_lossy());
        let why = format!("a {} image has no internal snapshots such as '{shown}'", self.name());
        Err(ImageError::refused(file.path(), why))
    }

    /// Whether there is something in an image that can be checked.
    #[must_use]
    pub fn can_be_checked(self) -> bool {
        self.driver().check.is_some()
    }

    /// Whether images can be made in this format.
    #[must_use]
    pub fn can_be_made(self) -> bool {
        self.driver().create.is_some()
    }

    /// A builder of a new image of a disk of `size` bytes in clusters of `cluster_bytes`, which may be compressed
    /// by `compression`; `None` where the data is written to the file as it is.
    ///
    /// # Errors
    /// A message with the reason, to follow the image's name.
    pub fn builder(
        self,
        size: u64,
        cluster_bytes: Option<u64>,
        compression: Option<Compression>,
    ) -> Result<Option<Box<dyn ImageBuilder>>, String> {
        match &self.driver().create {
            Some(creation) => {
                let new = |new: NewBuilder| new(size, cluster_bytes, compression);
                creation.builder.map(new).transpose()
            }
            None => Err(self.cannot_be("made")),
        }
    }

    /// The refusal to do with an image what its format cannot, to follow the image's name: "a … image
    /// cannot be resized".
    #[must_use]
    pub fn cannot_be(self, done: &str) -> String {
        format!("a {} image cannot be {done}", self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_format_has_one_row_and_each_name_leads_to_one() {
        for (index, driver) in DRIVERS.iter().enumerate() {
            assert_eq!(driver.format.driver().name, driver.name);
            let names = driver.aliases.iter().chain([&driver.name]);
            for name in names {
                assert_eq!(by_recorded_name(name), Some(driver.format), "{name}");
                let others = DRIVERS.iter().enumerate().filter(|(other, _)| *other != index);
                for (_, other) in others {
                    assert!(other.name != *name && !other.aliases.contains(name), "{name}");
                }
            }
        }
        assert_eq!(by_recorded_name("vdi"), None);
        assert_eq!(by_name("host_device"), None);
        assert_eq!(by_ending("QCOW2"), Format::Qcow2);
        assert_eq!(by_ending("img"), Format::Raw);
    }
}
