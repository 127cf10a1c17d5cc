//! Cache of decompressed clusters, for reads of their other parts.
//!
//! Invariant: the cache is bounded in bytes. A compressed cluster is never changed in place, so a
//! cached copy stays valid.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::{
    TINFL_FLAG_PARSE_ZLIB_HEADER, TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF,
};
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};
use nowait::{Error, IoBuffer, Operation, ReadCursor, Storage};

/// Most bytes in the cache.
const MAX_BYTES: usize = 16 << 20;

/// The position of a compressed cluster: the file's number, and the byte in it.
pub(crate) type Key = (u8, u64);

/// How a cluster is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packing {
    /// Bytes of the cluster.
    pub(crate) bytes: u64,
    /// Bytes of it that the compressed data has at least.
    pub(crate) least: u64,
    pub(crate) form: Form,
}

/// The form of compressed data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Deflate, without a header.
    Deflate,
    /// Deflate with the header of zlib, behind as many other bytes.
    Zlib { behind: usize },
}

/// The clusters, the most recently used one at the end.
#[derive(Default)]
pub(crate) struct DecompressedCache(Mutex<VecDeque<(Key, Arc<[u8]>)>>);

impl DecompressedCache {
    /// The cluster at `key` that is compressed into at most `len` bytes of `file`.
    ///
    /// # Errors
    /// `EIO` for data that cannot be decompressed; the errno of a failed read.
    pub(crate) fn read(
        &self,
        key: Key,
        file: &dyn Storage,
        len: u64,
        packing: Packing,
    ) -> Result<Arc<[u8]>, Error> {
        if let Some(cluster) = self.get(key) {
            return Ok(cluster);
        }
        let mut compressed = IoBuffer::zeroed(len as usize)?;
        file.read_at(key.1, &mut ReadCursor::from(&mut compressed[..]))?;
        let damaged = || Error::new(libc::EIO, Operation::Read);
        let cluster = decompress_cluster(&compressed, packing).ok_or_else(damaged)?;
        self.insert(key, cluster.clone());
        Ok(cluster)
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(Key, Arc<[u8]>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The cluster at `key`, if it is cached.
    pub(crate) fn get(&self, key: Key) -> Option<Arc<[u8]>> {
        let mut cached = self.lock();
        let at = cached.iter().rposition(|(other, _)| *other == key)?;
        let found = cached.remove(at)?;
        let bytes = found.1.clone();
        cached.push_back(found);
        Some(bytes)
    }

    /// Caches `bytes`, the decompressed cluster at `key`.
    pub(crate) fn insert(&self, key: Key, bytes: Arc<[u8]>) {
        let max_clusters = (MAX_BYTES / bytes.len().max(1)).max(1);
        let mut cached = self.lock();
        cached.retain(|(other, _)| *other != key);
        cached.push_back((key, bytes));
        while cached.len() > max_clusters {
            cached.pop_front();
        }
    }
}

/// Decompresses a cluster from `compressed`, which may have other bytes behind it. `None` if the data is
/// invalid or too short.
pub(crate) fn decompress_cluster(compressed: &[u8], packing: Packing) -> Option<Arc<[u8]>> {
    let mut cluster = vec![0; packing.bytes as usize];
    let (data, flags) = match packing.form {
        Form::Deflate => (compressed, 0),
        Form::Zlib { behind } => (compressed.get(behind..)?, TINFL_FLAG_PARSE_ZLIB_HEADER),
    };
    let flags = flags | TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let (status, _, got) = decompress(&mut DecompressorOxide::new(), data, &mut cluster, 0, flags);
    let whole = matches!(status, TINFLStatus::Done | TINFLStatus::HasMoreOutput);
    (whole && got as u64 >= packing.least).then(|| cluster.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_bounded_and_the_least_recently_used_cluster_is_evicted_first() {
        let cached = DecompressedCache::default();
        let cluster: Arc<[u8]> = vec![0; 2 << 20].into();
        for pos in 0..8 {
            cached.insert((0, pos), cluster.clone());
        }
        assert!(cached.get((0, 0)).is_some());
        cached.insert((1, 0), cluster);
        let here: Vec<_> = (0..8).filter(|&pos| cached.get((0, pos)).is_some()).collect();
        assert_eq!(here, [0, 2, 3, 4, 5, 6, 7]);
        assert!(cached.get((1, 0)).is_some());
    }
}
