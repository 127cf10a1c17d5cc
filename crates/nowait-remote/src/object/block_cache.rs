//! The blocks of one version of an object on this host's disk: files of 16 blocks, each with a
//! table of checksums before them.
//!
//! Invariant: a block is returned only if its checksum is right, which covers the object's name and
//! version, the number and the bytes of the block. So a write may be torn by a crash, made by several
//! servers simultaneously, or lost.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use crc_fast::{CrcAlgorithm, Digest};

use crate::object::cache_directory::{CacheDirectory, CacheOptions};
use crate::policy::BLOCK_BYTES;

/// Blocks of one file, and the bytes before them.
const FILE_BLOCKS: u64 = 16;
const TABLE_BYTES: u64 = 4096;
/// The bytes of a checksum.
const SUM_BYTES: usize = 8;
const TABLE_USED: usize = FILE_BLOCKS as usize * SUM_BYTES;
/// The use of a file is noted once in this time.
const USE_NOTED: Duration = Duration::from_secs(60);
/// Nothing is written for this time after a write has failed.
const PAUSE: Duration = Duration::from_secs(60);

/// The state of a block in a cache.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Cached {
    Absent,
    /// Bytes are there, but not those that were written.
    Corrupt,
    Block(Vec<u8>),
}

/// The cache of one object.
pub(super) struct BlockCache {
    directory: CacheDirectory,
    /// The beginning of its lines in the log.
    place: String,
    /// Bytes of the object.
    size: u64,
    written: AtomicU64,
    uses: Mutex<HashMap<u64, Instant>>,
    /// When a write has failed.
    failed: Mutex<Option<Instant>>,
}

impl BlockCache {
    /// The cache of the object at `place`, whose version is `identity`.
    ///
    /// # Errors
    /// Like [`CacheDirectory::open`].
    pub(super) fn open(
        options: &CacheOptions,
        place: &str,
        identity: &str,
        size: u64,
    ) -> Result<Self, String> {
        let directory = CacheDirectory::open(options, &format!("{place}\n{identity}"))?;
        directory.trim();
        Ok(Self {
            directory,
            place: place.to_owned(),
            size,
            written: AtomicU64::new(0),
            uses: Mutex::default(),
            failed: Mutex::default(),
        })
    }

    /// Bytes of `block`.
    fn len(&self, block: u64) -> usize {
        (self.size - (block * BLOCK_BYTES).min(self.size)).min(BLOCK_BYTES) as usize
    }

    #[cfg(any(test, feature = "fuzz"))]
    pub(super) fn path(&self, file: u64) -> std::path::PathBuf {
        self.directory.path.join(name(file))
    }

    /// The checksum of `block`; never 0, which says that there is none.
    fn sum(&self, block: u64, data: &[u8]) -> u64 {
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        digest.update(&self.directory.key);
        digest.update(&block.to_le_bytes());
        digest.update(data);
        digest.finalize().max(1)
    }

    /// Reads `block`. It waits for the disk.
    pub(super) fn read(&self, block: u64) -> Cached {
        let (file, at) = (block / FILE_BLOCKS, block % FILE_BLOCKS);
        let Ok(open) = self.directory.file(&name(file), false) else { return Cached::Absent };
        let mut sum = [0; SUM_BYTES];
        let table = open.read_exact_at(&mut sum, at * SUM_BYTES as u64);
        let sum = u64::from_le_bytes(sum);
        if table.is_err() || sum == 0 {
            return Cached::Absent;
        }
        let mut data = vec![0; self.len(block)];
        let read = open.read_exact_at(&mut data, TABLE_BYTES + at * BLOCK_BYTES);
        if read.is_err() || self.sum(block, &data) != sum {
            return Cached::Corrupt;
        }
        self.note_use(file, &open);
        Cached::Block(data)
    }

    fn note_use(&self, file: u64, open: &File) {
        let mut uses = self.uses.lock().unwrap_or_else(PoisonError::into_inner);
        if uses.get(&file).is_none_or(|noted| noted.elapsed() > USE_NOTED) {
            uses.insert(file, Instant::now());
            // The time of the last use is that of the last change.
            let _ = open.set_modified(SystemTime::now());
        }
    }

    /// Writes the blocks from `first` on, whose bytes are `data`, and returns how many it has written.
    /// It waits for the disk. A block that cannot be written is not in the cache; that is logged once.
    pub(super) fn write(&self, first: u64, data: &[u8]) -> u64 {
        let paused = || *self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        if paused().is_some_and(|since| since.elapsed() < PAUSE) {
            return 0;
        }
        let mut count = 0;
        let blocks = (first..).zip(data.chunks(BLOCK_BYTES as usize));
        let result = blocks
            .into_iter()
            .try_for_each(|(block, data)| self.write_block(block, data).inspect(|()| count += 1));
        let now = result.as_ref().err().map(|_| Instant::now());
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *failed, now);
        drop(failed);
        if let (Err(error), None) = (result, before) {
            tracing::warn!("{}: the cache cannot be written: {error}; serving without", self.place);
        }
        let written = self.written.fetch_add(data.len() as u64, Ordering::Relaxed);
        if written + data.len() as u64 > self.directory.slack() {
            self.written.store(0, Ordering::Relaxed);
            self.directory.trim();
        }
        count
    }

    fn write_block(&self, block: u64, data: &[u8]) -> io::Result<()> {
        let (file, at) = (block / FILE_BLOCKS, block % FILE_BLOCKS);
        let open = self.directory.file(&name(file), true)?;
        if open.metadata()?.len() < TABLE_BYTES {
            // Sums that were never written are zero.
            open.write_all_at(&[0; SUM_BYTES], TABLE_BYTES - SUM_BYTES as u64)?;
        }
        debug_assert!(TABLE_USED as u64 <= TABLE_BYTES);
        open.write_all_at(data, TABLE_BYTES + at * BLOCK_BYTES)?;
        open.write_all_at(&self.sum(block, data).to_le_bytes(), at * SUM_BYTES as u64)
    }
}

/// The name of a file.
fn name(file: u64) -> String {
    format!("{file:x}")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::{Path, PathBuf};

    use rustix::fs::{CWD, Mode, mkfifoat};

    use super::*;
    use crate::object::cache_directory::MIN_CACHE_BYTES;

    const SIZE: u64 = 40 * BLOCK_BYTES + 100;

    fn options(scratch: &tempfile::TempDir) -> CacheOptions {
        CacheOptions { directory: scratch.path().join("cache"), bytes: MIN_CACHE_BYTES }
    }

    fn open(scratch: &tempfile::TempDir, identity: &str) -> BlockCache {
        BlockCache::open(&options(scratch), "s3://b/k", identity, SIZE).unwrap()
    }

    fn data(block: u64) -> Vec<u8> {
        let len = (SIZE - block * BLOCK_BYTES).min(BLOCK_BYTES);
        (0..len).map(|at| (at / 7 + block) as u8).collect()
    }

    /// The files of the cache.
    fn files(scratch: &tempfile::TempDir) -> Vec<PathBuf> {
        let list = |path: PathBuf| fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
        list(scratch.path().join("cache")).flat_map(list).collect()
    }

    #[test]
    fn a_link_a_pipe_and_a_directory_in_place_of_a_file_are_left_alone() {
        let scratch = tempfile::tempdir().unwrap();
        let cache = open(&scratch, "1");
        let outside = scratch.path().join("outside");
        let make: [&dyn Fn(&Path); 3] = [
            &|path| std::os::unix::fs::symlink(&outside, path).unwrap(),
            &|path| mkfifoat(CWD, path, Mode::RUSR | Mode::WUSR).unwrap(),
            &|path| fs::create_dir(path).unwrap(),
        ];
        for make in make {
            fs::write(&outside, "of another").unwrap();
            make(&cache.path(0));
            assert_eq!(cache.read(0), Cached::Absent);
            assert!(cache.write_block(0, &data(0)).is_err());
            cache.directory.trim();
            assert_eq!(fs::read(&outside).unwrap(), b"of another");
            let _ = fs::remove_file(cache.path(0)).or_else(|_| fs::remove_dir(cache.path(0)));
        }
        cache.write_block(0, &data(0)).unwrap();
        assert_eq!(cache.read(0), Cached::Block(data(0)));
    }

    #[test]
    fn the_directory_of_an_object_is_no_link_and_no_pipe_is_waited_for() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = open(&scratch, "1").directory.path.clone();
        let outside = scratch.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("0"), "of another").unwrap();
        fs::remove_dir(&directory).unwrap();
        std::os::unix::fs::symlink(&outside, &directory).unwrap();
        let refused = BlockCache::open(&options(&scratch), "s3://b/k", "1", SIZE).err();
        assert!(refused.unwrap().contains("cannot be used"));
        let pipe = options(&scratch).directory.join("a");
        mkfifoat(CWD, pipe, Mode::RUSR | Mode::WUSR).unwrap();
        open(&scratch, "2").directory.trim();
        assert_eq!(fs::read(outside.join("0")).unwrap(), b"of another");
    }

    #[test]
    fn what_was_written_is_there_for_another_server_and_no_other_version() {
        let scratch = tempfile::tempdir().unwrap();
        let cache = open(&scratch, "one");
        let both = [data(15), data(16)].concat();
        cache.write(15, &both);
        cache.write(40, &data(40));
        let again = open(&scratch, "one");
        for block in [15, 16, 40] {
            assert_eq!(again.read(block), Cached::Block(data(block)));
        }
        assert_eq!(again.read(14), Cached::Absent);
        assert_eq!(open(&scratch, "two").read(15), Cached::Absent);
    }

    #[test]
    fn a_byte_that_is_not_what_was_written_is_never_returned() {
        let scratch = tempfile::tempdir().unwrap();
        let cache = open(&scratch, "one");
        cache.write(0, &data(0));
        let [path] = files(&scratch).try_into().unwrap();
        let whole = fs::read(&path).unwrap();
        for at in [0, 7, TABLE_BYTES as usize, TABLE_BYTES as usize + 40_000, whole.len() - 1] {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(&path, &damaged).unwrap();
            assert_eq!(cache.read(0), Cached::Corrupt, "{at}");
        }
        for len in [TABLE_BYTES as usize, whole.len() - 1] {
            fs::write(&path, &whole[..len]).unwrap();
            assert_eq!(cache.read(0), Cached::Corrupt, "{len}");
        }
        // The file of another version, and another part of the object.
        let other = open(&scratch, "two");
        fs::write(other.path(0), &whole).unwrap();
        assert_eq!(other.read(0), Cached::Corrupt);
        fs::write(cache.path(1), &whole).unwrap();
        assert_eq!(cache.read(16), Cached::Corrupt);
        cache.write(0, &data(0));
        assert_eq!(cache.read(0), Cached::Block(data(0)));
    }

    #[test]
    fn what_was_used_longest_ago_goes_when_there_is_too_much() {
        let scratch = tempfile::tempdir().unwrap();
        let blocks = 2 * MIN_CACHE_BYTES / BLOCK_BYTES;
        let size = blocks * BLOCK_BYTES;
        let cache = BlockCache::open(&options(&scratch), "s3://b/k", "one", size).unwrap();
        let data = vec![7; (FILE_BLOCKS * BLOCK_BYTES) as usize];
        for first in (0..blocks).step_by(FILE_BLOCKS as usize) {
            cache.write(first, &data);
            // The times of files differ by more than the clock's step.
            let seconds = Duration::from_secs(1000 + first);
            let file = File::open(cache.path(first / FILE_BLOCKS)).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + seconds).unwrap();
        }
        cache.directory.trim();
        let bytes: u64 = files(&scratch).iter().map(|path| path.metadata().unwrap().len()).sum();
        assert!(bytes <= MIN_CACHE_BYTES && bytes > MIN_CACHE_BYTES / 2, "{bytes}");
        assert_eq!(cache.read(0), Cached::Absent);
        assert!(matches!(cache.read(blocks - 1), Cached::Block(_)));
    }

    #[test]
    fn a_directory_of_others_and_what_is_none_are_refused() {
        let scratch = tempfile::tempdir().unwrap();
        let options = options(&scratch);
        let refusal = |options: &CacheOptions| {
            BlockCache::open(options, "s3://b/k", "one", SIZE).err().unwrap_or_default()
        };
        assert_eq!(refusal(&options), "");
        fs::set_permissions(&options.directory, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(refusal(&options).contains("chmod 700"));
        let mut of_another = PathBuf::from("/");
        if rustix::process::geteuid().is_root() {
            const NOBODY: u32 = 65534;
            of_another.clone_from(&options.directory);
            std::os::unix::fs::chown(&of_another, Some(NOBODY), None).unwrap();
        }
        let refused = refusal(&CacheOptions { directory: of_another, ..options.clone() });
        assert!(refused.contains("is another user's"), "{refused}");
        let file = scratch.path().join("file");
        fs::write(&file, "").unwrap();
        let no_directory = CacheOptions { directory: file, ..options };
        assert!(refusal(&no_directory).contains("cannot be used"));
    }

    #[test]
    fn a_cache_that_cannot_be_written_costs_nothing_but_itself() {
        let scratch = tempfile::tempdir().unwrap();
        let cache = open(&scratch, "one");
        fs::remove_dir_all(&cache.directory.path).unwrap();
        cache.write(0, &data(0));
        assert_eq!(cache.read(0), Cached::Absent);
    }
}
