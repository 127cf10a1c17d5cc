//! A file of a chain as imago sees it, for the mapping and the unpacking that it does.
//!
//! Invariant: imago never sees a header that was not checked here, nor any part of one that it has
//! no need of (names, extensions, feature bits): it is shown one made of the checked numbers.
//! Behind the end of a file there are zeros. Nothing is written.
//! Knows: header, host. Known by: reader.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::sync::Arc;

use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::drivers::CommonStorageHelper;

use crate::header::{Header, MAGIC};
use crate::host::HostFile;

const SHOWN_HEADER_BYTES: usize = 112;
const V3_HEADER_BYTES: u32 = 104;
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

/// A header of version 2 or 3 without names and extensions, and with no bit set but the one for a
/// data file.
fn shown(header: &Header) -> Vec<u8> {
    let mut bytes = vec![0; SHOWN_HEADER_BYTES];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0, &MAGIC);
    put(4, &header.version.to_be_bytes());
    put(20, &header.cluster_bits.to_be_bytes());
    put(24, &header.size.to_be_bytes());
    put(36, &header.l1_entries.to_be_bytes());
    put(40, &header.l1_pos.to_be_bytes());
    put(48, &header.refcount_table_pos.to_be_bytes());
    put(56, &header.refcount_table_clusters.to_be_bytes());
    if header.version >= 3 {
        let incompatible = if header.has_data_file() { INCOMPATIBLE_DATA_FILE } else { 0 };
        put(72, &incompatible.to_be_bytes());
        put(96, &header.refcount_order.to_be_bytes());
        put(100, &V3_HEADER_BYTES.to_be_bytes());
    }
    bytes
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
