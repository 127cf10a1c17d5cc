//! The blocks of a new manifest, appended to data files of a bounded length.
//!
//! Invariant: a file is complete, and durable, before the next one begins. All are removed if the writer is dropped
//! before they are kept.

use std::fmt;
use std::sync::Arc;

use crate::manifest::DataFile;
use crate::place::{FileName, NewFile, Place};

/// The least bytes at which another data file begins.
const MIN_FILE_BYTES: u64 = 64 << 20;
/// The most data files of a whole disk.
/// Beyond it: they are longer than 64 MiB; 128 GiB for 128 TiB.
const MAX_FILES_OF_DISK: u64 = 1024;

/// The most bytes of a data file for a disk of `size` bytes.
pub(crate) const fn file_bytes_of(size: u64) -> u64 {
    let bytes = size.div_ceil(MAX_FILES_OF_DISK).next_multiple_of(1 << 20);
    if bytes > MIN_FILE_BYTES { bytes } else { MIN_FILE_BYTES }
}

/// A writer of data files.
pub(crate) struct DataWriter {
    place: Arc<dyn Place>,
    /// The most bytes of a file.
    file_bytes: u64,
    /// The last file is open until it is full.
    files: Vec<DataFile>,
    /// The same.
    written: Vec<Box<dyn NewFile>>,
    is_open: bool,
}

impl fmt::Debug for DataWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.files.fmt(f)
    }
}

impl DataWriter {
    /// A writer of files with `file_bytes` at most, which have longer blocks each in a file of its own.
    pub(crate) fn new(place: Arc<dyn Place>, file_bytes: u64) -> Self {
        Self { place, file_bytes, files: Vec::new(), written: Vec::new(), is_open: false }
    }

    /// Appends a block. Returns the index of its file, and its position there.
    ///
    /// # Errors
    /// The place refuses it.
    pub(crate) fn append(&mut self, stored: &[u8]) -> Result<(u32, u64), String> {
        let len = stored.len() as u64;
        let is_full = self.files.last().is_some_and(|file| file.bytes + len > self.file_bytes);
        if is_full {
            self.complete()?;
        }
        if !self.is_open {
            let id = fastrand::u64(..);
            self.written.push(self.place.create(FileName::Data(id), self.file_bytes.max(len))?);
            self.files.push(DataFile { id, bytes: 0 });
            self.is_open = true;
        }
        let index = self.files.len().saturating_sub(1) as u32;
        let (Some(file), Some(written)) = (self.files.last_mut(), self.written.last_mut()) else {
            return Err("there is no data file".into());
        };
        written.append(stored)?;
        let position = file.bytes;
        file.bytes += len;
        Ok((index, position))
    }

    /// Makes all files durable.
    ///
    /// # Errors
    /// The place refuses the last one.
    pub(crate) fn complete(&mut self) -> Result<&[DataFile], String> {
        if std::mem::take(&mut self.is_open)
            && let Some(last) = self.written.last_mut()
        {
            last.complete()?;
        }
        Ok(&self.files)
    }

    /// Lets the files stay.
    pub(crate) fn keep(self) {
        self.written.into_iter().for_each(|file| file.keep());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_become_longer_with_the_disk_so_that_there_are_not_too_many() {
        for (size, mib) in
            [(0, 64), (64 << 30, 64), ((64 << 30) + 1, 65), (1 << 40, 1024), (128 << 40, 128 << 10)]
        {
            assert_eq!(file_bytes_of(size), mib << 20, "{size}");
        }
    }
}
