//! How often a request asks the map, and how often it locks its range.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::*;
use crate::block::image_format::ImageFormat;
use crate::blocking::worker_pool::WorkerPool;
use crate::engine::Engine;
use crate::queue::Null;
use crate::storage::file::FileStorage;
use crate::storage::open_options::OpenOptions;
use crate::types::config::Config;
use crate::types::error::Error;
use crate::types::io_cursor::{ReadCursor, WriteCursor};
use crate::types::request::ExtentStatus;

const BLOCK: u64 = 4096;

/// A map that counts its lookups. A write has to wait until the first one has ended.
struct Counting {
    lookups: Arc<AtomicU32>,
    mapped: AtomicBool,
    /// An image format allocates, and extents for writes stay valid.
    allocates: bool,
}

impl BlockMap for Counting {
    fn map_extent(&self, range: ByteRange, _: Intent) -> Result<Extent, WouldBlock> {
        self.lookups.fetch_add(1, Ordering::Relaxed);
        let mapped = self.mapped.load(Ordering::Relaxed);
        mapped.then_some(Extent::identical(range, range.len, false)).ok_or(WouldBlock)
    }

    fn keeps_write_extents(&self) -> bool {
        self.allocates
    }

    fn caches_holes(&self) -> bool {
        !self.allocates
    }

    fn is_mapped(&self, _: ByteRange) -> bool {
        self.mapped.load(Ordering::Relaxed)
    }

    fn mark_allocated(&self, _: ByteRange) {
        self.mapped.store(true, Ordering::Relaxed);
    }

    fn image(&self) -> Option<&dyn ImageFormat> {
        if self.allocates { Some(self) } else { None }
    }
}

impl ImageFormat for Counting {
    fn read(&self, _: u64, _: ReadCursor<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn write(&self, _: u64, _: WriteCursor<'_>) -> Result<(), Error> {
        self.mapped.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn discard(&self, _: ByteRange) -> Result<(), Error> {
        Ok(())
    }

    fn zero(&self, _: ByteRange, _: Flags) -> Result<(), Error> {
        Ok(())
    }

    fn flush(&self) -> Result<(), Error> {
        Ok(())
    }

    fn status(&self, _: ByteRange, _: usize, _: &mut Vec<ExtentStatus>) -> Result<(), Error> {
        Ok(())
    }
}

/// For a write that allocates, for the same write again, and for an unaligned one: the lookups and
/// the locks that each takes.
fn lookups_and_locks(allocates: bool) -> [(u32, u32); 3] {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let storage = FileStorage::open(file.path(), OpenOptions::default()).unwrap();
    let lookups = Arc::new(AtomicU32::new(0));
    let map = Counting { lookups: lookups.clone(), mapped: AtomicBool::new(false), allocates };
    let disk = Arc::new(BlockDevice::mapped(Arc::new(storage), Vec::new(), 1 << 20, false, map));
    let queue = Null::new().unwrap();
    let mut engine = Engine::new(queue, WorkerPool::new(1), Config::default()).unwrap();
    let device = engine.attach(disk.clone()).unwrap();
    [BLOCK, BLOCK, BLOCK - 1].map(|len| {
        let range = ByteRange::new(BLOCK, len);
        let buf = engine.buffer(&device, range).unwrap();
        let io = Request { op: Op::Write, flags: Flags::NONE, range };
        engine.submit(&device, io, buf, 0).map_err(|rejected| rejected.error).unwrap();
        while engine.in_flight() > 0 {
            engine.wait(None, &mut |_, _| {}).unwrap();
            while let Some(done) = engine.next() {
                assert_eq!(done.result(), Ok(len));
            }
        }
        let locked = disk.ranges.locked.swap(0, Ordering::Relaxed);
        (lookups.swap(0, Ordering::Relaxed), locked)
    })
}

#[test]
fn a_write_to_an_image_asks_the_map_once_and_locks_its_range_once_also_when_it_allocates() {
    let [allocating, again, _] = lookups_and_locks(true);
    assert_eq!([allocating, again], [(1, 1); 2]);
}

#[test]
fn a_write_into_a_hole_of_a_file_asks_and_locks_once_on_each_thread() {
    let [allocating, again, _] = lookups_and_locks(false);
    assert_eq!([allocating, again], [(2, 2), (1, 1)]);
}

#[test]
fn an_unaligned_write_locks_its_range_once() {
    for allocates in [false, true] {
        let [.., (_, locks)] = lookups_and_locks(allocates);
        assert_eq!(locks, 1, "{allocates}");
    }
}
