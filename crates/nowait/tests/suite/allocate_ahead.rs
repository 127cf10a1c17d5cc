//! Allocate ahead: how much storage a sparse file takes, what is given back, and what clients see.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nowait::{
    AllocationCache, BlockDevice, ByteRange, Config, ExtentStatus, Flags, Op, OpenOptions, Request,
    SingleDisk, Stats,
};
use nowait_testkit::engines::TestQueue;
use nowait_testkit::model::Model;
use nowait_testkit::{Random, TestQueueKind, WaitForRequests, skip};

const BLOCK: u64 = 4096;
const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;

type Disk = Arc<BlockDevice<AllocationCache>>;

struct Image {
    _dir: tempfile::TempDir,
    path: PathBuf,
}

impl Image {
    fn sparse() -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = dir.path().join("disk.img");
        File::create(&path).unwrap().set_len(SIZE).unwrap();
        Self { _dir: dir, path }
    }

    /// The open image, and an engine on it; `None` where there is no direct I/O, or no extents.
    fn open(&self, on: bool) -> Option<(Disk, SingleDisk<TestQueue, AllocationCache>)> {
        let options = OpenOptions::new().cache_holes(true).allocate_ahead(on);
        let disk = Arc::new(BlockDevice::open(&self.path, options).unwrap());
        disk.scan();
        if !disk.is_direct() || !disk.is_hole(ByteRange::new(0, SIZE)) {
            skip("the file system has no direct I/O or reports no holes");
            return None;
        }
        let engine = TestQueueKind::Uring.engine(&disk, 4, Config::default())?;
        Some((disk, engine))
    }
}

fn allocated(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

fn run(engine: &mut SingleDisk<TestQueue, AllocationCache>, op: Op, range: ByteRange) {
    let io = Request { op, flags: Flags::NONE, range };
    if matches!(op, Op::Read | Op::Write) {
        let mut buf = engine.buffer(range).unwrap();
        buf.fill(7);
        engine.submit(io, buf, 1).map_err(|rejected| rejected.error).unwrap();
    } else {
        engine.submit_no_data(io, 1).map_err(|rejected| rejected.error).unwrap();
    }
    engine.only().result().unwrap();
}

/// Writes `bytes` from `pos` on, one block after the other.
fn write_blocks(
    engine: &mut SingleDisk<TestQueue, AllocationCache>,
    pos: u64,
    bytes: u64,
) -> Stats {
    for at in (pos..pos + bytes).step_by(BLOCK as usize) {
        run(engine, Op::Write, ByteRange::new(at, BLOCK));
    }
    engine.stats()
}

#[test]
fn sequential_writes_into_holes_need_few_workers_and_the_rest_is_given_back() {
    let image = Image::sparse();
    let Some((disk, mut engine)) = image.open(true) else { return };
    let mut workers = 0;
    for written in 1..=8 {
        let stats = write_blocks(&mut engine, (written - 1) * MIB, MIB);
        let taken = allocated(&image.path);
        // A file system takes a few blocks for its own tables.
        assert!(taken <= written * MIB * 11 / 10 + 16 * BLOCK, "{taken} after {written} MiB");
        workers = stats.worker;
    }
    let blocks = 8 * MIB / BLOCK;
    assert!(workers < blocks / 4, "{workers} of {blocks} writes went to a worker");
    // Unused room is a hole to clients.
    assert!(allocated(&image.path) > 8 * MIB + 16 * BLOCK);
    let behind = ByteRange::new(8 * MIB, SIZE - 8 * MIB);
    assert!(disk.is_hole(behind));
    engine
        .submit_no_data(Request { op: Op::Status, flags: Flags::NONE, range: behind }, 9)
        .map_err(|rejected| rejected.error)
        .unwrap();
    engine.wait_once();
    let extents = engine.take_extents(9);
    assert_eq!(extents, [ExtentStatus::top(behind.len, true)]);
    while engine.next().is_some() {}
    drop((engine, disk));
    wait_for_release(&image.path, 8 * MIB);
    let bytes = fs::read(&image.path).unwrap();
    assert!(bytes[..8 << 20].iter().all(|&byte| byte == 7));
    assert!(bytes[8 << 20..].iter().all(|&byte| byte == 0));
}

/// Waits until the last worker has closed the device, so that the file takes `bytes`.
fn wait_for_release(path: &Path, bytes: u64) {
    nowait_testkit::wait_until("the storage is given back", || {
        allocated(path) <= bytes + 16 * BLOCK
    });
}

#[test]
fn off_allocates_what_is_written_and_nothing_else() {
    let image = Image::sparse();
    let Some((disk, mut engine)) = image.open(false) else { return };
    let stats = write_blocks(&mut engine, 0, 4 * MIB);
    assert_eq!(stats.worker, 4 * MIB / BLOCK);
    assert!(allocated(&image.path) <= 4 * MIB + 16 * BLOCK);
    drop((engine, disk));
}

#[test]
fn isolated_writes_allocate_nothing_ahead() {
    let image = Image::sparse();
    let Some((disk, mut engine)) = image.open(true) else { return };
    for at in (0..SIZE).step_by(1 << 17) {
        run(&mut engine, Op::Write, ByteRange::new(at, BLOCK));
    }
    assert!(allocated(&image.path) <= SIZE / (1 << 17) * BLOCK + 16 * BLOCK);
    drop((engine, disk));
}

#[test]
fn storage_that_the_file_had_before_is_kept() {
    let image = Image::sparse();
    let file = File::options().write(true).open(&image.path).unwrap();
    let mode = rustix::fs::FallocateFlags::KEEP_SIZE;
    if rustix::fs::fallocate(&file, mode, 0, SIZE).is_err() {
        skip("no fallocate(2)");
        return;
    }
    let Some((disk, mut engine)) = image.open(true) else { return };
    let stats = write_blocks(&mut engine, 0, 4 * MIB);
    assert!(stats.worker < 4 * MIB / BLOCK / 2, "{stats:?}");
    drop((engine, disk));
    assert!(allocated(&image.path) >= SIZE);
}

#[test]
fn bytes_of_a_second_opener_survive_the_close_of_the_first() {
    let image = Image::sparse();
    let Some((disk, mut engine)) = image.open(true) else { return };
    write_blocks(&mut engine, 0, 8 * MIB);
    let before = allocated(&image.path);
    assert!(before > 8 * MIB + 16 * BLOCK, "nothing was allocated ahead");
    // Through the page cache, and not synced: the file system has to write it before it answers.
    let other = File::options().write(true).open(&image.path).unwrap();
    let pos = 8 * MIB + 8 * BLOCK;
    other.write_all_at(&[9; BLOCK as usize], pos).unwrap();
    assert_eq!(allocated(&image.path), before, "the write was not to storage allocated ahead");
    drop((engine, disk));
    wait_for_release(&image.path, 8 * MIB + BLOCK);
    let bytes = fs::read(&image.path).unwrap();
    let (from, to) = (pos as usize, (pos + BLOCK) as usize);
    assert!(bytes[..8 << 20].iter().all(|&byte| byte == 7));
    assert!(bytes[8 << 20..from].iter().all(|&byte| byte == 0));
    assert!(bytes[from..to].iter().all(|&byte| byte == 9));
    assert!(bytes[to..].iter().all(|&byte| byte == 0));
}

#[test]
fn a_discard_takes_away_what_was_allocated_ahead() {
    let image = Image::sparse();
    let Some((disk, mut engine)) = image.open(true) else { return };
    write_blocks(&mut engine, 0, 4 * MIB);
    let behind = ByteRange::new(4 * MIB, SIZE - 4 * MIB);
    run(&mut engine, Op::Discard, behind);
    assert!(allocated(&image.path) <= 4 * MIB + 16 * BLOCK && disk.is_hole(behind));
    write_blocks(&mut engine, 5 * MIB, BLOCK);
    assert!(!disk.is_hole(ByteRange::new(5 * MIB, BLOCK)));
}

#[test]
fn a_device_that_grows_gives_back_what_was_allocated_ahead() {
    let image = Image::sparse();
    let Some((disk, mut engine)) = image.open(true) else { return };
    write_blocks(&mut engine, 0, 8 * MIB);
    assert!(allocated(&image.path) > 8 * MIB + 16 * BLOCK, "nothing was allocated ahead");
    disk.grow(2 * SIZE).unwrap();
    assert!(allocated(&image.path) <= 8 * MIB + 16 * BLOCK);
    drop((engine, disk));
}

#[test]
fn random_requests_on_a_dense_sparse_file_agree_with_the_model() {
    for seed in 1..=3 {
        let image = Image::sparse();
        let Some((disk, mut engine)) = image.open(true) else { return };
        write_blocks(&mut engine, 0, 2 * MIB);
        let mut bytes = vec![0; SIZE as usize];
        bytes[..2 << 20].fill(7);
        let mut model = Model::new(Random::from_seed(seed), bytes, format!("seed {seed}"));
        model.play(&mut engine, 1500);
        drop((engine, disk));
        assert!(fs::read(&image.path).unwrap() == model.bytes, "seed {seed}: the image");
    }
}
