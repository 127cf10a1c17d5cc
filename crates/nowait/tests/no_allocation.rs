//! In steady state a request costs no allocation: the allocator counts, in all threads.
//!
//! Invariant: this program has one test function, so that nothing else allocates while it counts.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nowait::{
    AioThreadQueue, BlockDevice, ByteRange, Config, Engine, Error, Flags, IoQueue, LinearMap, Null,
    Op, OpenOptions, PooledBuffer, Request, Uring, WorkerPool,
};

const BLOCK: u64 = 4096;
const SIZE: u64 = 4 << 20;
/// Requests before the count begins; by then every list and pool has its final size.
const WARM_UP: u64 = 2_000;
const REQUESTS: u64 = 10_000;
/// Requests in flight on a queue that is not tried at depth 1.
const DEPTH: usize = 16;

/// The system's allocator, counting.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    // SAFETY: the caller's promise is passed on.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: the caller's promise is passed on.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.alloc_zeroed(layout) }
    }

    // SAFETY: the caller's promise is passed on.
    unsafe fn realloc(&self, old: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { System.realloc(old, layout, bytes) }
    }

    // SAFETY: the caller's promise is passed on.
    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(old, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// A fully mapped image.
fn image(dir: &tempfile::TempDir) -> Arc<BlockDevice<LinearMap>> {
    let path = dir.path().join("disk.img");
    std::fs::write(&path, vec![0x5a; SIZE as usize]).unwrap();
    Arc::new(BlockDevice::open_mapped(&path, OpenOptions::default()).unwrap())
}

/// Runs `count` requests, reads and writes in turn, with all of `bufs` in flight.
fn run<Q: IoQueue>(engine: &mut Engine<Q, LinearMap>, bufs: &mut Vec<PooledBuffer>, count: u64) {
    let (mut submitted, mut done) = (0, 0);
    while done < count {
        while submitted < count
            && let Some(buf) = bufs.pop()
        {
            let op = if submitted % 2 == 0 { Op::Read } else { Op::Write };
            let range = ByteRange::new(submitted * 7 * BLOCK % SIZE, BLOCK);
            let io = Request { op, flags: Flags::NONE, range };
            assert!(engine.submit(io, buf, submitted).is_ok());
            submitted += 1;
        }
        engine.wait(None, &mut |_, _| {}).unwrap();
        while let Some(completion) = engine.next() {
            assert_eq!(completion.result(), Ok(BLOCK));
            bufs.extend(completion.buf);
            done += 1;
        }
    }
}

/// Allocations of all threads during `REQUESTS` requests.
fn count<Q: IoQueue>(
    make: impl Fn(&BlockDevice<LinearMap>) -> Result<Q, Error>,
    config: Config,
    depth: usize,
) -> Option<u64> {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let disk = image(&dir);
    let queue = match make(&disk) {
        Ok(queue) => queue,
        Err(error) => {
            println!("skipped a queue: {error}");
            return None;
        }
    };
    let workers = WorkerPool::new(&disk, 1);
    let mut engine = Engine::new(disk, workers, queue, config).unwrap();
    let range = ByteRange::new(0, BLOCK);
    let mut bufs: Vec<PooledBuffer> = (0..depth).map(|_| engine.buffer(range).unwrap()).collect();
    run(&mut engine, &mut bufs, WARM_UP);
    let before = ALLOCATIONS.load(Ordering::SeqCst);
    run(&mut engine, &mut bufs, REQUESTS);
    let allocations = ALLOCATIONS.load(Ordering::SeqCst) - before;
    let stats = engine.stats();
    let by_path = (stats.simple, stats.general);
    let all = WARM_UP + REQUESTS;
    assert_eq!(by_path, if config.simple { (all, 0) } else { (0, all) }, "{stats:?}");
    Some(allocations)
}

#[test]
fn a_request_of_4_kib_allocates_nothing_on_either_path() {
    let threads =
        |disk: &BlockDevice<LinearMap>| AioThreadQueue::new(disk.fd()?, 4096, !disk.is_direct());
    for simple in [true, false] {
        let path = if simple { "simple" } else { "general" };
        let config = Config { simple, ..Config::default() };
        let counts = [
            ("null", count(|_| Null::new(), config, DEPTH)),
            ("uring", count(|disk| Uring::new(disk.fd()?), config, DEPTH)),
            ("threads", count(threads, config, 1)),
        ];
        for (queue, allocations) in counts {
            assert_eq!(allocations.unwrap_or(0), 0, "{queue}, {path}");
        }
    }
    // The counter works: with the pool off every request allocates its slot.
    let config = Config { pool: false, ..Config::default() };
    assert_eq!(count(|_| Null::new(), config, DEPTH), Some(REQUESTS));
}
