//! A place that keeps the files of a chain: named files, each written once from its begin to its end.
//!
//! Invariant: names are made of numbers by this module, so that nothing in a file leads to another place.

use std::fmt;

/// The use of a chain that is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Points are listed.
    List,
    /// Points are read, and may not be removed meanwhile.
    Read,
    /// A point is added; the place is made if it is absent.
    Add,
    /// Points are removed.
    Remove,
}

/// Whether a file that is put takes the place of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Put {
    New,
    Replaces,
}

/// The least bytes at which another data file begins.
const MIN_FILE_BYTES: u64 = 64 << 20;
/// The most data files of a whole disk.
/// Beyond it: they are longer than 64 MiB; 128 GiB for 128 TiB.
const MAX_FILES_OF_DISK: u64 = 1024;
/// The most data files that are kept open.
/// Beyond it: they are closed, and opened again where they are needed.
const MAX_OPEN: usize = 64;

/// A place for the files of a chain. Errors are messages of one line, which do not name the place.
pub(crate) trait Place: Send + Sync + fmt::Debug {
    /// The files of the chain, with their lengths in bytes.
    fn list(&self) -> Result<Vec<(FileName, u64)>, String>;

    /// Opens a file to read.
    fn open(&self, name: FileName) -> Result<Box<dyn StoredFile>, String>;

    /// Begins a file that is appended to, of `most` bytes at most.
    fn create(&self, name: FileName, most: u64) -> Result<Box<dyn NewFile>, String>;

    /// Makes a file of these bytes as one step that is durable. One that is there is replaced only by [`Put::Replaces`].
    fn put(&self, name: FileName, bytes: &[u8], put: Put) -> Result<(), String>;

    /// Removes a file.
    fn remove(&self, name: FileName) -> Result<(), String>;

    /// The most bytes of a data file for a disk of `size` bytes.
    fn file_bytes(&self, size: u64) -> u64 {
        let bytes = size.div_ceil(MAX_FILES_OF_DISK).next_multiple_of(1 << 20);
        bytes.max(MIN_FILE_BYTES)
    }

    /// The most files that are kept open by who reads.
    fn max_open(&self) -> usize {
        MAX_OPEN
    }

    /// The recipients that files are encrypted for; none where they are not encrypted.
    fn encrypts_for(&self) -> Vec<String> {
        Vec::new()
    }

    /// Encrypts files for `recipients`, too.
    fn learn(&self, _recipients: &[String]) {}
}

/// A file that is read.
pub(crate) trait StoredFile: Send + Sync {
    /// Its length in bytes.
    fn len(&self) -> u64;

    /// Fills `bytes` with those from `pos` on.
    fn read_at(&self, pos: u64, bytes: &mut [u8]) -> Result<(), String>;
}

/// A file that is being written. It is removed if it is dropped before [`NewFile::keep`].
pub(crate) trait NewFile: Send + fmt::Debug {
    /// Adds `bytes` at its end.
    fn append(&mut self, bytes: &[u8]) -> Result<(), String>;

    /// Makes all of it durable; nothing is appended after that.
    fn complete(&mut self) -> Result<(), String>;

    /// Lets it stay.
    fn keep(self: Box<Self>);
}

/// The name of a file of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FileName {
    /// The manifest of a point.
    Point(u32),
    /// A manifest that is not complete.
    Partial(u32),
    /// Stored blocks.
    Data(u64),
    /// The blocks of a data file with this number, until a point has them: a manifest of these.
    Index(u64),
    /// Such a manifest that is not complete.
    PartialIndex(u64),
}

impl FileName {
    /// The name that `text` is, if it is one.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let id = |text| u64::from_str_radix(text, 16).ok();
        let name = match text.split_once('-')? {
            ("point", number) => match number.strip_suffix(".partial") {
                Some(number) => Self::Partial(number.parse().ok()?),
                None => Self::Point(number.parse().ok()?),
            },
            ("data", number) => Self::Data(id(number)?),
            ("index", number) => match number.strip_suffix(".partial") {
                Some(number) => Self::PartialIndex(id(number)?),
                None => Self::Index(id(number)?),
            },
            _ => return None,
        };
        (name.to_string() == text).then_some(name)
    }
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Point(number) => write!(f, "point-{number:06}"),
            Self::Partial(number) => write!(f, "point-{number:06}.partial"),
            Self::Data(id) => write!(f, "data-{id:016x}"),
            Self::Index(id) => write!(f, "index-{id:016x}"),
            Self::PartialIndex(id) => write!(f, "index-{id:016x}.partial"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Nowhere;

    impl Place for Nowhere {
        fn list(&self) -> Result<Vec<(FileName, u64)>, String> {
            Ok(Vec::new())
        }

        fn open(&self, _: FileName) -> Result<Box<dyn StoredFile>, String> {
            Err("nowhere".into())
        }

        fn create(&self, _: FileName, _: u64) -> Result<Box<dyn NewFile>, String> {
            Err("nowhere".into())
        }

        fn put(&self, _: FileName, _: &[u8], _: Put) -> Result<(), String> {
            Err("nowhere".into())
        }

        fn remove(&self, _: FileName) -> Result<(), String> {
            Ok(())
        }
    }

    #[test]
    fn data_files_become_longer_with_the_disk_so_that_there_are_not_too_many() {
        for (size, mib) in
            [(0, 64), (64 << 30, 64), ((64 << 30) + 1, 65), (1 << 40, 1024), (128 << 40, 128 << 10)]
        {
            assert_eq!(Nowhere.file_bytes(size), mib << 20, "{size}");
        }
    }

    #[test]
    fn names_are_numbers_and_nothing_else() {
        for name in [
            FileName::Point(1),
            FileName::Point(u32::MAX),
            FileName::Partial(7),
            FileName::Data(0),
            FileName::Data(u64::MAX),
            FileName::Index(15),
            FileName::PartialIndex(16),
        ] {
            assert_eq!(FileName::parse(&name.to_string()), Some(name));
        }
        for text in
            ["", "point-1", "point-+00001", "point-../../x", "data-1", "data-", "index-1", "lock"]
        {
            assert_eq!(FileName::parse(text), None, "{text}");
        }
    }
}
