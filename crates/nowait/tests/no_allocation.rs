//! In steady state a request costs no allocation: the allocator counts, in all threads.
//!
//! Invariant: this program has one test function, so that nothing else allocates while it counts.

use std::sync::Arc;

use nowait::{
    BlockDevice, ByteRange, Config, Engine, Flags, IoQueue, LinearMap, Op, OpenOptions,
    PooledBuffer, Request,
};
use nowait_testkit::allocations::{Counting, allocations};
use nowait_testkit::{TestQueueKind, WaitForRequests};

const BLOCK: u64 = 4096;
const SIZE: u64 = 4 << 20;
/// Requests before the count begins; by then every list and pool has its final size.
const WARM_UP: u64 = 2_000;
const REQUESTS: u64 = 10_000;
/// Requests in flight on a queue that is not tried at depth 1.
const DEPTH: usize = 16;

#[global_allocator]
static COUNTING: Counting = Counting;

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
        engine.wait_once();
        while let Some(completion) = engine.next() {
            assert_eq!(completion.result(), Ok(BLOCK));
            bufs.extend(completion.buf);
            done += 1;
        }
    }
}

/// Allocations of all threads during `REQUESTS` requests on a fully mapped image.
fn count(kind: TestQueueKind, config: Config, depth: usize) -> Option<u64> {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("disk.img");
    std::fs::write(&path, vec![0x5a; SIZE as usize]).unwrap();
    let disk = Arc::new(BlockDevice::open_mapped(&path, OpenOptions::default()).unwrap());
    let mut engine = kind.engine(&disk, 1, config)?;
    let range = ByteRange::new(0, BLOCK);
    let mut bufs: Vec<PooledBuffer> = (0..depth).map(|_| engine.buffer(range).unwrap()).collect();
    run(&mut engine, &mut bufs, WARM_UP);
    let before = allocations();
    run(&mut engine, &mut bufs, REQUESTS);
    let counted = allocations() - before;
    let stats = engine.stats();
    let by_path = (stats.simple, stats.general);
    let all = WARM_UP + REQUESTS;
    assert_eq!(by_path, if config.simple { (all, 0) } else { (0, all) }, "{stats:?}");
    Some(counted)
}

#[test]
fn a_request_of_4_kib_allocates_nothing_on_either_path() {
    for simple in [true, false] {
        let path = if simple { "simple" } else { "general" };
        let config = Config { simple, ..Config::default() };
        for kind in TestQueueKind::ALL {
            let depth = if kind == TestQueueKind::Threads { 1 } else { DEPTH };
            assert_eq!(count(kind, config, depth).unwrap_or(0), 0, "{kind:?}, {path}");
        }
    }
    // The counter works: with the pool off every request allocates its slot.
    let config = Config { pool: false, ..Config::default() };
    assert_eq!(count(TestQueueKind::Null, config, DEPTH), Some(REQUESTS));
}
