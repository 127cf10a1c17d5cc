//! A disk that is only read, and whose bytes are where a table of its format says.
//!
//! Invariant: no file is written. Behind the end of a file, where a table has let a position pass, there
//! are zeros.

use std::fmt;
use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;

use nowait::{Error, Operation, ReadCursor, Storage};

use crate::formats::decompress::Packing;
use crate::formats::decompressed_cache::DecompressedCache;

/// Most files that a disk and all below it have their data in: the number of a file has eight bits.
/// Beyond it: the image is refused.
pub(crate) const MAX_FILES: usize = 255;

/// Where the bytes of a run of the disk are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Nowhere: they are zeros. `present` if the image says so, and does not only lack them.
    Zeros { present: bool },
    /// At `pos` in the data file with this number, as they are.
    Data { file: u8, pos: u64 },
    /// `skip` bytes into what is compressed into at most `len` bytes at `pos`.
    Packed { file: u8, pos: u64, len: u64, skip: u64, packing: Packing },
}

/// The table of a format that is only read. It is shared by threads, and its memory is bounded.
pub(crate) trait RunTable: Debug + Send + Sync {
    /// Where the disk's bytes from `pos` on are, and for how many bytes: at least one, at most `len`,
    /// which is not 0 and inside the disk. Adds the reads that this took to `reads`.
    ///
    /// # Errors
    /// `EIO` where the table is damaged, or points to where no data is; the errno of a failed read.
    fn lookup(&self, pos: u64, len: u64, reads: &mut usize) -> Result<(Place, u64), Error>;
}

/// A disk that is only read.
pub(crate) trait DiskReader: Debug + Send + Sync {
    /// Bytes of the disk.
    fn size(&self) -> u64;

    /// Fills `memory` with the disk's bytes from `pos` on; with zeros behind its end.
    ///
    /// # Errors
    /// `EIO` for damaged tables or data; the errno of a failed read.
    fn read(&self, pos: u64, memory: ReadCursor<'_>) -> Result<(), Error>;
}

/// The error of a lookup in a damaged table.
pub(crate) fn damaged() -> Error {
    Error::new(libc::EIO, Operation::Read)
}

/// The table of a disk, and the files with its data.
pub(crate) struct MappedDisk {
    table: Arc<dyn RunTable>,
    files: Vec<Arc<dyn Storage>>,
    /// Bytes of the disk.
    size: u64,
    unpacked: DecompressedCache,
}

impl fmt::Debug for MappedDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MappedDisk").field("table", &self.table).finish_non_exhaustive()
    }
}

impl DiskReader for MappedDisk {
    fn size(&self) -> u64 {
        self.size
    }

    fn read(&self, pos: u64, memory: ReadCursor<'_>) -> Result<(), Error> {
        Self::read(self, pos, memory)
    }
}

impl MappedDisk {
    /// The disk of the image at `path`.
    pub(crate) fn new(
        path: &Path,
        table: Arc<dyn RunTable>,
        files: Vec<Arc<dyn Storage>>,
        size: u64,
    ) -> Self {
        Self { table, files, size, unpacked: DecompressedCache::of(path) }
    }

    pub(crate) fn table(&self) -> &dyn RunTable {
        &*self.table
    }

    pub(crate) fn files(&self) -> &[Arc<dyn Storage>] {
        &self.files
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// The file with this number.
    ///
    /// # Errors
    /// `EIO` if there is none.
    pub(crate) fn file(&self, file: u8) -> Result<&Arc<dyn Storage>, Error> {
        self.files.get(usize::from(file)).ok_or_else(damaged)
    }

    /// Fills `memory` with the disk's bytes from `pos` on; with zeros behind its end.
    ///
    /// # Errors
    /// Like [`RunTable::lookup`]; `EIO` for compressed data that cannot be decompressed.
    pub(crate) fn read(&self, mut pos: u64, mut memory: ReadCursor<'_>) -> Result<(), Error> {
        while !memory.is_empty() && pos < self.size {
            let most = memory.len().min(self.size - pos);
            let (place, len) = self.table.lookup(pos, most, &mut 0)?;
            let len = len.clamp(1, most);
            let mut part = memory.take(len);
            match place {
                Place::Zeros { .. } => {}
                Place::Data { file, pos } => self.file(file)?.read_at(pos, &mut part)?,
                Place::Packed { file, pos, len, skip, packing } => {
                    let storage = self.file(file)?;
                    let cluster = self.unpacked.read((file, pos), &**storage, len, packing)?;
                    part.copy_from(cluster.get(skip as usize..).unwrap_or_default());
                }
            }
            part.fill(0);
            pos += len;
        }
        memory.fill(0);
        Ok(())
    }
}
