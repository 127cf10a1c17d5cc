//! Cache of decompressed clusters, for reads of their other parts.
//!
//! Invariant: the cache is bounded in bytes. A compressed cluster is never changed in place, so a
//! cached copy stays valid.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};

/// Most bytes in the cache.
const MAX_BYTES: usize = 16 << 20;

/// The position of a compressed cluster: the file's number, and the byte in it.
pub(crate) type Key = (u8, u64);

/// The clusters, the most recently used one at the end.
#[derive(Default)]
pub(crate) struct DecompressedCache(Mutex<VecDeque<(Key, Arc<[u8]>)>>);

impl DecompressedCache {
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

/// Decompresses a cluster of `bytes` bytes from the beginning of `compressed`, which may have other
/// bytes behind it. `None` if the data is invalid or too short.
pub(crate) fn decompress_cluster(compressed: &[u8], bytes: u64) -> Option<Arc<[u8]>> {
    let mut cluster = vec![0; bytes as usize];
    let (status, _, got) =
        decompress(&mut DecompressorOxide::new(), compressed, &mut cluster, 0, 0);
    let whole = matches!(status, TINFLStatus::Done | TINFLStatus::HasMoreOutput);
    (whole && got == cluster.len()).then(|| cluster.into())
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
