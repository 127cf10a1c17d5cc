//! The data files of a table, opened as they are needed.
//!
//! Invariant: no more files than the place allows are kept open.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::block::unpack;
use crate::manifest::{DataFile, Entry};
use crate::place::{FileName, Place, StoredFile};

/// The files that have the blocks of a table.
pub(crate) struct DataFiles {
    place: Arc<dyn Place>,
    open: Mutex<BTreeMap<u64, Arc<dyn StoredFile>>>,
}

impl DataFiles {
    pub(crate) fn new(place: Arc<dyn Place>) -> Self {
        Self { place, open: Mutex::default() }
    }

    fn file(&self, id: u64) -> Result<Arc<dyn StoredFile>, String> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = open.get(&id) {
            return Ok(file.clone());
        }
        let file: Arc<dyn StoredFile> = self.place.open(FileName::Data(id))?.into();
        if open.len() >= self.place.max_open() {
            open.clear();
        }
        open.insert(id, file.clone());
        Ok(file)
    }

    /// The bytes of `entry` as they are stored; `files` is the list of its table.
    ///
    /// # Errors
    /// They cannot be read.
    pub(crate) fn stored(&self, files: &[DataFile], entry: &Entry) -> Result<Vec<u8>, String> {
        let file = files.get(entry.file as usize).ok_or("its file is missing")?;
        let mut stored = vec![0; entry.len as usize];
        self.file(file.id)?.read_at(entry.position, &mut stored)?;
        Ok(stored)
    }

    /// Fills `block` with the content of `entry`.
    ///
    /// # Errors
    /// It cannot be read, or is damaged.
    pub(crate) fn read(
        &self,
        files: &[DataFile],
        entry: &Entry,
        block: &mut [u8],
    ) -> Result<(), String> {
        let stored = self.stored(files, entry)?;
        unpack(&stored, &entry.sum, block).map_err(str::to_owned)
    }
}
