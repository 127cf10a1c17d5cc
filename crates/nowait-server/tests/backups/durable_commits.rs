//! Commits, which forget no change of which the disk could lose the bytes.
//!
//! Invariant: the storage tells of each sync what the bitmap had at that moment.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use nowait::{
    BlockDevice, Error, FileStorage, Flags, OpenOptions, Operation, Storage, StorageProperties,
};
use nowait_server::{
    BackupEnd, BackupRefusal, BackupSpec, BitmapSpec, ExportError, ExportId, Exports,
};
use nowait_testkit::Scratch;

use crate::scene::{BLOCK, SIZE, Scene};

/// A file whose syncs are looked at, and fail on demand.
struct WatchedStorage {
    file: FileStorage,
    fails: AtomicBool,
    syncs: AtomicUsize,
    /// Syncs while a backup had its bits.
    syncs_before_the_end: AtomicUsize,
    exports: OnceLock<Exports>,
}

impl Storage for WatchedStorage {
    fn properties(&self) -> StorageProperties {
        self.file.properties()
    }

    fn size(&self) -> Result<u64, Error> {
        self.file.size()
    }

    fn read(&self, bufs: &mut [IoSliceMut<'_>], pos: u64) -> Result<usize, Error> {
        self.file.read(bufs, pos)
    }

    fn write(&self, bufs: &[IoSlice<'_>], pos: u64, flags: Flags) -> Result<usize, Error> {
        self.file.write(bufs, pos, flags)
    }

    fn sync(&self) -> Result<(), Error> {
        if self.fails.load(Ordering::SeqCst) {
            return Err(Error::new(libc::EIO, Operation::Flush));
        }
        let has_backup = self.exports.get().is_some_and(|exports| !exports.backups().is_empty());
        self.syncs.fetch_add(1, Ordering::SeqCst);
        self.syncs_before_the_end.fetch_add(usize::from(has_backup), Ordering::SeqCst);
        self.file.sync()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.file.descriptor()
    }
}

/// A server of a watched disk with a bitmap, and a backup of it that froze a change.
fn scene() -> (Scene, Arc<WatchedStorage>, ExportId) {
    let directory = Scratch::new();
    let path = directory.join("disk");
    std::fs::File::create(&path).and_then(|file| file.set_len(SIZE)).expect("a sparse file");
    let storage = Arc::new(WatchedStorage {
        file: FileStorage::open(&path, OpenOptions::default()).expect("the file"),
        fails: AtomicBool::new(false),
        syncs: AtomicUsize::new(0),
        syncs_before_the_end: AtomicUsize::new(0),
        exports: OnceLock::new(),
    });
    let disk = BlockDevice::raw(storage.clone(), OpenOptions::default()).expect("a disk");
    let scene = Scene::serving(directory, vec![Arc::new(disk)], Vec::new());
    assert!(storage.exports.set(scene.exports.clone()).is_ok());
    let id = scene.id("0");
    scene.exports.add_bitmap(id, &BitmapSpec::new("b".into())).expect("a bitmap");
    scene.connect("0").write(0, &[1; 512]).expect("a write");
    scene.begin(BackupSpec { bitmap: Some("b".into()), ..scene.spec("0") }).expect("a backup");
    (scene, storage, id)
}

fn dirty(scene: &Scene, id: ExportId) -> u64 {
    scene.exports.bitmaps(id).expect("the export")[0].dirty_bytes
}

#[test]
fn c80_a_commit_forgets_bits_only_when_their_changes_are_durable() {
    let (scene, storage, id) = scene();
    assert_eq!(storage.syncs.load(Ordering::SeqCst), 0, "no client has flushed");
    scene.end("0", BackupEnd::Commit).expect("its end");
    assert_eq!(storage.syncs_before_the_end.load(Ordering::SeqCst), 1);
    assert_eq!(dirty(&scene, id), 0);
}

#[test]
fn c80_a_commit_of_a_disk_that_cannot_be_flushed_is_refused_and_nothing_is_forgotten() {
    let (scene, storage, id) = scene();
    storage.fails.store(true, Ordering::SeqCst);
    let refused = scene.end("0", BackupEnd::Commit).expect_err("no flush").why;
    let is_flush = matches!(&refused, BackupRefusal::Export(ExportError::Storage(error))
        if error.errno() == libc::EIO);
    assert!(is_flush, "{refused:?}");
    assert_eq!(scene.exports.backups().len(), 1);
    scene.end("0", BackupEnd::Abort).expect("its end");
    assert_eq!(dirty(&scene, id), BLOCK);
    storage.fails.store(false, Ordering::SeqCst);
}
