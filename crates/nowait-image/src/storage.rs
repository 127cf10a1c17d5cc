//! A file of a chain as imago sees it, for the mapping and the unpacking that it does.
//!
//! Invariant: imago never sees a header that was not checked here, nor any part of one that it has
//! no need of (names, extensions, feature bits): it is shown one made of the checked numbers.
//! Behind the end of a file there are zeros. Nothing is written.
//! Knows: encode, header, host. Known by: reader.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::sync::Arc;

use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::drivers::CommonStorageHelper;

use crate::encode::encode;
use crate::header::Header;
use crate::host::HostFile;

const INCOMPATIBLE_DATA_FILE: u64 = 1 << 2;

/// One file, read for imago.
#[derive(Debug)]
pub(crate) struct Below {
    file: Arc<HostFile>,
    /// What stands at the beginning instead of what does in the file.
    shown: Vec<u8>,
    helper: CommonStorageHelper,
}

impl Below {
    /// A file without a header: raw, or with a qcow2 image's data.
    pub(crate) fn data(file: &Arc<HostFile>) -> Self {
        Self { file: Arc::clone(file), shown: Vec::new(), helper: CommonStorageHelper::default() }
    }

    /// The file of a qcow2 image.
    pub(crate) fn qcow2(file: &Arc<HostFile>, header: &Header) -> Self {
        Self { shown: shown(header), ..Self::data(file) }
    }

    fn read(&self, pos: u64, memory: &mut [u8]) -> io::Result<()> {
        let from_header = self.shown.get(pos as usize..).unwrap_or_default();
        let len = from_header.len().min(memory.len());
        let (head, rest) = memory.split_at_mut(len);
        head.copy_from_slice(&from_header[..len]);
        self.file.read_at(pos.saturating_add(len as u64), rest)
    }
}

/// A header without names and extensions, and with no bit set but the one for a data file.
fn shown(header: &Header) -> Vec<u8> {
    encode(&Header {
        incompatible: header.incompatible & INCOMPATIBLE_DATA_FILE,
        autoclear: 0,
        backing: None,
        snapshots: 0,
        snapshots_pos: 0,
        ..header.clone()
    })
}

impl fmt::Display for Below {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.path().display())
    }
}

impl imago::Storage for Below {
    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    // SAFETY: the trait leaves to the caller what makes overlapping requests wait for each other;
    // nothing here relies on it.
    unsafe fn pure_readv(&self, memory: IoVectorMut<'_>, mut pos: u64) -> io::Result<()> {
        for mut piece in memory.into_inner() {
            self.read(pos, &mut piece)?;
            pos += piece.len() as u64;
        }
        Ok(())
    }

    // SAFETY: as above.
    unsafe fn pure_writev(&self, _: IoVector<'_>, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    // SAFETY: there is no cache here.
    unsafe fn invalidate_cache(&self) -> io::Result<()> {
        Ok(())
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        &self.helper
    }
}
