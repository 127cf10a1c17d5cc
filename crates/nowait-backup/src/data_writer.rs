//! The blocks of a new manifest, appended to data files of a bounded length.
//!
//! Invariant: a file is complete, and durable, before the next one begins. Files that do not stay are
//! removed when the writer is dropped.

use std::fmt;
use std::sync::Arc;

use crate::manifest::DataFile;
use crate::place::{FileName, NewFile, Place};

/// A writer of data files.
pub(crate) struct DataWriter {
    place: Arc<dyn Place>,
    /// The most bytes of a file.
    file_bytes: u64,
    files: Vec<DataFile>,
    /// The last of these files, those that do not stay yet.
    written: Vec<Box<dyn NewFile>>,
    /// Whether the last file is not complete.
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
        if self.is_full_for(len) {
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

    /// Whether a block of `len` bytes begins another file than the last one.
    pub(crate) fn is_full_for(&self, len: u64) -> bool {
        self.files.last().is_some_and(|file| file.bytes + len > self.file_bytes)
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

    /// Lets the files stay that are complete.
    pub(crate) fn keep(&mut self) {
        let complete = self.written.len() - usize::from(self.is_open);
        self.written.drain(..complete).for_each(|file| file.keep());
    }
}
