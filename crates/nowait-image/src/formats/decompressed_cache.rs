//! Cache of decompressed clusters, for reads of their other parts.
//!
//! Invariant: the cache is bounded in bytes. A compressed cluster is never changed in place, so a
//! cached copy stays valid.

use std::collections::VecDeque;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nowait::{Error, IoBuffer, Operation, ReadCursor, Storage};
use tracing::error;

use crate::formats::decompress::{Packing, decompress_cluster};

/// The most bytes of decompressed clusters in memory.
/// Beyond it: the one that was used longest ago goes.
const MAX_BYTES: usize = 16 << 20;

/// The position of a compressed cluster: the file's number, and the byte in it.
pub(crate) type Key = (u8, u64);

type Clusters = VecDeque<(Key, Arc<[u8]>)>;

/// The decompressed clusters of an image and of all below it.
pub(crate) struct DecompressedCache {
    /// The path of the image, for messages.
    path: PathBuf,
    /// Whether a user was told of damaged data.
    has_told: AtomicBool,
    /// The most recently used one is at the end.
    clusters: Mutex<Clusters>,
}

impl fmt::Debug for DecompressedCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DecompressedCache").field("path", &self.path).finish_non_exhaustive()
    }
}

impl DecompressedCache {
    /// An empty one, for the image at `path`.
    pub(crate) fn of(path: &Path) -> Self {
        Self { path: path.to_owned(), has_told: AtomicBool::new(false), clusters: Mutex::default() }
    }

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
        let damaged = || {
            self.tell_of_damage(key);
            Error::new(libc::EIO, Operation::Read)
        };
        let cluster = decompress_cluster(&compressed, packing).ok_or_else(damaged)?;
        self.insert(key, cluster.clone());
        Ok(cluster)
    }

    /// Says once that data is damaged: a damaged image would else fill the log.
    fn tell_of_damage(&self, (file, pos): Key) {
        if self.has_told.swap(true, Ordering::Relaxed) {
            return;
        }
        let place = if file == 0 { "" } else { " of a file that it stands on or consists of" };
        error!(
            "{}: the compressed data at byte {pos}{place} is damaged, or needs too much memory to be \
             decompressed: reads of it fail",
            self.path.display()
        );
    }

    fn lock(&self) -> MutexGuard<'_, Clusters> {
        self.clusters.lock().unwrap_or_else(PoisonError::into_inner)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_bounded_and_the_least_recently_used_cluster_is_evicted_first() {
        let cached = DecompressedCache::of(Path::new("disk"));
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
