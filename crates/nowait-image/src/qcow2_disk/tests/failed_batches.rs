//! A storage that fails for a while and keeps what was written, as one behind a network does.
//!
//! Invariant: requests that the engine submits through its own queue do not fail.

use std::collections::HashMap;
use std::io::Read;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use nowait::{BlockingFile, Direct, Flags};
use nowait_testkit::{Random, seed};

use crate::image::bitmaps_of;
use crate::offline::bitmap_changes::{self, NewBitmap};
use crate::offline::create::{CreateOptions, create};
use crate::qcow2_disk::open_regions::SMALL_SHIFT;
use crate::qcow2_disk::{ServeOptions, open};
use crate::{Chain, ChainOptions, Format};

/// The changes and syncs of a file that succeed from now on; those after them fail.
pub(crate) struct Supply(AtomicI64);

type Supplies = Mutex<HashMap<(u64, u64), Arc<Supply>>>;

fn supplies() -> &'static Supplies {
    static SUPPLIES: OnceLock<Supplies> = OnceLock::new();
    SUPPLIES.get_or_init(Supplies::default)
}

fn key(fd: impl AsFd) -> (u64, u64) {
    let stat = rustix::fs::fstat(fd).unwrap();
    (stat.st_dev, stat.st_ino)
}

/// The supply of the file behind `fd`, if it has one.
pub(crate) fn of(fd: impl AsFd) -> Option<Arc<Supply>> {
    supplies().lock().unwrap().get(&key(fd)).cloned()
}

impl Supply {
    /// Whether the next change or sync fails.
    pub(crate) fn is_over(&self) -> bool {
        self.0.fetch_sub(1, Ordering::Relaxed) <= 0
    }

    fn set(&self, count: i64) {
        self.0.store(count, Ordering::Relaxed);
    }
}

#[test]
fn c51_a_batch_that_failed_on_a_storage_that_kept_all_is_written_by_a_later_flush() {
    const BYTES: u64 = 64 << 20;
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("disk");
    create(&path, &CreateOptions::new(Format::Qcow2, Some(BYTES))).unwrap();
    let chain = || {
        let format = Some(Format::Qcow2);
        Chain::open(&path, &ChainOptions { format, writable: true, ..ChainOptions::default() })
    };
    let serve = |chain| {
        open(chain, ServeOptions { writable: true, direct: Direct::Off, cache_holes: true })
            .unwrap()
    };
    let first = chain().unwrap();
    let supply = Arc::new(Supply(AtomicI64::new(i64::MAX)));
    let file = key(first.layers()[0].file.fd().unwrap());
    supplies().lock().unwrap().insert(file, supply.clone());
    let (disk, open_image) = serve(first);
    let disk = Arc::new(disk);
    let blocking = BlockingFile::new(disk.clone());
    let mut random = Random::from_seed(seed());
    let mut model = vec![0; BYTES as usize];
    let mut failures = 0;
    for round in 0..300u32 {
        for _ in 0..=random.below(3) {
            let pos = random.below(BYTES - 100_000);
            let data = vec![1 + round as u8 % 250; 1 + random.below(100_000) as usize];
            blocking.write_at(&data, pos, Flags::NONE).unwrap();
            model[pos as usize..][..data.len()].copy_from_slice(&data);
        }
        supply.set(random.below(8) as i64);
        let failed = blocking.flush().is_err();
        failures += u32::from(failed);
        supply.set(i64::MAX);
        // With changes before the next flush, and without.
        if random.below(2) == 0 {
            blocking.flush().unwrap();
        }
        assert!(!disk.has_failed_flush());
    }
    assert!(failures > 50, "{failures}");
    blocking.flush().unwrap();
    // The image as it is now, by another reader of the file.
    let (other, other_image) = serve(copied(&path, &scratch.path().join("copy")));
    let mut found = vec![0; BYTES as usize];
    BlockingFile::new(Arc::new(other)).read_at(&mut found, 0).unwrap();
    assert!(found == model, "seed {}", seed());
    other_image.close().unwrap();
    drop((blocking, disk));
    open_image.close().unwrap();
}

#[test]
fn c74_a_write_fails_whose_bits_cannot_be_stored() {
    const REGION: u64 = 1 << SMALL_SHIFT;
    let scratch = tempfile::tempdir().unwrap();
    let (path, copy) = (scratch.path().join("disk"), scratch.path().join("copy"));
    create(&path, &CreateOptions::new(Format::Qcow2, Some(64 * REGION))).unwrap();
    let chain = |path| {
        let format = Some(Format::Qcow2);
        Chain::open(path, &ChainOptions { format, writable: true, ..ChainOptions::default() })
    };
    let new = NewBitmap { name: "changes".into(), granularity: REGION, enabled: true };
    bitmap_changes::add(&chain(&path).unwrap(), &new, None).unwrap();
    let first = chain(&path).unwrap();
    let supply = Arc::new(Supply(AtomicI64::new(i64::MAX)));
    supplies().lock().unwrap().insert(key(first.layers()[0].file.fd().unwrap()), supply.clone());
    let options = ServeOptions { writable: true, direct: Direct::Off, cache_holes: true };
    let (disk, open_image) = open(first, options).unwrap();
    let blocking = BlockingFile::new(Arc::new(disk));
    let mut failed = 0;
    for region in 0..64 {
        supply.set(region as i64 % 8);
        let written = blocking.write_at(&[7; 512], region * REGION, Flags::NONE);
        supply.set(i64::MAX);
        failed += u32::from(written.is_err());
        std::fs::copy(&path, &copy).unwrap();
        let chain = chain(&copy).unwrap();
        let (_, bits) = bitmaps_of(chain.top()).unwrap().pop().unwrap();
        let mut all = [0; 8];
        bits.unwrap().read_exact(&mut all).unwrap();
        let is_dirty = all[region as usize / 8] & 1 << (region % 8) != 0;
        assert!(is_dirty || written.is_err(), "region {region}: {written:?}");
        let mut found = [0; 512];
        blocking.read_at(&mut found, region * REGION).unwrap();
        assert!(is_dirty || found == [0; 512], "region {region}");
    }
    assert!((16..64).contains(&failed), "{failed}");
    drop(blocking);
    open_image.close().unwrap();
}

fn copied(path: &std::path::Path, copy: &std::path::Path) -> Chain {
    std::fs::copy(path, copy).unwrap();
    let format = Some(Format::Qcow2);
    Chain::open(copy, &ChainOptions { format, writable: true, ..ChainOptions::default() }).unwrap()
}
