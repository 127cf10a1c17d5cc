//! A temporary directory for one test, and the images in it.
//!
//! Invariant: the directory is removed at the end of the test, unless the process is killed.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::random::Random;

/// Bytes in one unit of `st_blocks` (stat(2)).
const STAT_BLOCK_BYTES: u64 = 512;

/// A private temporary directory.
pub struct Scratch(tempfile::TempDir);

#[allow(clippy::new_without_default, reason = "a new one is not a default")]
impl Scratch {
    /// An empty directory under `$TMPDIR`.
    pub fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary directory"))
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// The path of `name` in it.
    pub fn join(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// A file of `bytes` that is one hole.
    pub fn sparse(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.join(name);
        File::create_new(&path).expect("a new file").set_len(bytes).expect("a sparse file");
        path
    }

    /// A file of `bytes` filled with random data by `seed`.
    pub fn random(&self, name: &str, bytes: u64, seed: u64) -> PathBuf {
        let path = self.join(name);
        fs::write(
            &path,
            Random::from_seed(seed).bytes(usize::try_from(bytes).expect("fits memory")),
        )
        .expect("a file");
        path
    }

    /// A file of `bytes` with `piece` random bytes at the start of each `stride`, holes between them.
    pub fn dotted(&self, name: &str, bytes: u64, piece: usize, stride: u64) -> PathBuf {
        let path = self.sparse(name, bytes);
        let file = File::options().write(true).open(&path).expect("the new file");
        let mut random = Random::from_seed(bytes);
        for offset in (0..bytes).step_by(usize::try_from(stride).expect("fits usize")) {
            file.write_all_at(&random.bytes(piece), offset).expect("room for test data");
        }
        file.sync_all().expect("test data on disk");
        path
    }
}

/// Bytes of storage that back the file.
pub fn allocated(path: &Path) -> u64 {
    fs::metadata(path).expect("the file's size").blocks() * STAT_BLOCK_BYTES
}
