//! A file of a chain as a storage of imago, which does mapping and decompression.
//!
//! Invariant: imago never sees a header that was not checked here, nor any part of one that it does
//! not need (names, extensions, feature bits): its header is made from the checked numbers. Behind
//! the end of a file there are zeros; behind the last cluster of a qcow2 image, whose file was then
//! cut off, a read is an error. No file is written.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::{fmt, io};

use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::drivers::CommonStorageHelper;
use nowait::ReadCursor;

use crate::error::os_error;
use crate::formats::mapped_disk::DiskReader;
use crate::image_file::ImageFile;

/// One file, read by imago.
#[derive(Debug)]
pub(crate) struct ImagoStorage {
    file: Arc<ImageFile>,
    /// Bytes that replace the file's at its beginning.
    header_bytes: Vec<u8>,
    /// Bytes of a cluster, for a qcow2 image: the missing part of its last cluster is zeros, and a
    /// read behind that fails.
    cluster: Option<u64>,
    /// The disk to be read in place of the file.
    mapped: Option<Box<dyn DiskReader>>,
    helper: CommonStorageHelper,
}

impl ImagoStorage {
    /// A file without a header: raw, or with a qcow2 image's data.
    pub(crate) fn data(file: &Arc<ImageFile>) -> Self {
        let helper = CommonStorageHelper::default();
        Self {
            file: Arc::clone(file),
            header_bytes: Vec::new(),
            cluster: None,
            mapped: None,
            helper,
        }
    }

    /// A file whose first bytes are replaced by `header_bytes`, and that ends after whole clusters of
    /// `cluster` bytes.
    pub(crate) fn behind_header(
        file: &Arc<ImageFile>,
        header_bytes: Vec<u8>,
        cluster: u64,
    ) -> Self {
        Self { header_bytes, cluster: Some(cluster), ..Self::data(file) }
    }

    /// A disk that is read here, as if it were a raw file.
    pub(crate) fn mapped(file: &Arc<ImageFile>, disk: Box<dyn DiskReader>) -> Self {
        Self { mapped: Some(disk), ..Self::data(file) }
    }

    fn read(&self, pos: u64, memory: &mut [u8]) -> io::Result<()> {
        if let Some(disk) = &self.mapped {
            return disk.read(pos, ReadCursor::from(memory)).map_err(os_error);
        }
        if let Some(cluster) = self.cluster
            && pos >= self.file.size()?.next_multiple_of(cluster)
        {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let from_header = self.header_bytes.get(pos as usize..).unwrap_or_default();
        let len = from_header.len().min(memory.len());
        let (head, rest) = memory.split_at_mut(len);
        head.copy_from_slice(&from_header[..len]);
        self.file.read_at(pos.saturating_add(len as u64), rest)
    }
}

impl fmt::Display for ImagoStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.path().display())
    }
}

impl imago::Storage for ImagoStorage {
    fn size(&self) -> io::Result<u64> {
        self.mapped.as_ref().map_or_else(|| self.file.size(), |disk| Ok(disk.size()))
    }

    // SAFETY: the trait leaves the serialization of overlapping requests to the caller; this code
    // does not rely on it.
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
