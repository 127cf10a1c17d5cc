//! Tests of merged neighbours on a simulated device: which requests share a transfer, and that each
//! is answered once with its own result.

use std::sync::Arc;

use crate::block::allocation_cache::AllocationCache;
use crate::block::device::BlockDevice;
use crate::blocking::worker_pool::WorkerPool;
use crate::engine::Engine;
use crate::engine::attached_device::DeviceHandle;
use crate::sim::{Fault, Faults, SimDevice, SimOptions, SimQueue};
use crate::storage::open_options::OpenOptions;
use crate::storage::sim::SimStorage;
use crate::types::byte_range::ByteRange;
use crate::types::config::Config;
use crate::types::request::{Flags, Op, Request};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 256;

struct Rig {
    device: Arc<SimDevice>,
    workers: WorkerPool,
    engine: Engine<SimQueue, AllocationCache>,
    handle: DeviceHandle<AllocationCache>,
}

impl Rig {
    /// A device on which block `n` is mapped and has the byte `n`.
    fn new(config: Config) -> Self {
        let device = Arc::new(SimDevice::new(SimOptions::able(BLOCKS * BLOCK)));
        let bytes: Vec<u8> = (0..BLOCKS * BLOCK).map(|at| (at / BLOCK) as u8).collect();
        device.put_on_top(&bytes);
        let storage = SimStorage::open(&device, 0, OpenOptions::default());
        let disk = Arc::new(
            BlockDevice::raw(Arc::new(storage), OpenOptions::new().cache_holes(true)).unwrap(),
        );
        let workers = WorkerPool::simulated();
        let queue = SimQueue::new(device.clone()).unwrap();
        let mut engine = Engine::new(queue, workers.clone(), config).unwrap();
        let handle = engine.attach(disk).unwrap();
        Self { device, workers, engine, handle }
    }

    fn submit(&mut self, op: Op, flags: Flags, block: u64, byte: u8) {
        let range = ByteRange::new(block * BLOCK, BLOCK);
        let mut buf = self.engine.buffer(&self.handle, range).unwrap();
        buf.fill(byte);
        assert!(self.engine.submit(&self.handle, Request { op, flags, range }, buf, block).is_ok());
    }

    /// Runs all requests to their ends. Returns for each, in the order of the tags, its tag and the
    /// byte that its buffer is filled with.
    fn settle(&mut self) -> Vec<(u64, u8)> {
        let mut ended = Vec::new();
        while self.engine.in_flight() > 0 {
            self.engine.wait(None, &mut |_, _| {}).unwrap();
            while let Some(item) = self.workers.take_simulated(0) {
                self.workers.run(item);
            }
            while let Some(done) = self.engine.next() {
                assert_eq!(done.result().unwrap(), BLOCK, "{}", done.tag);
                let buf = done.buf.unwrap();
                assert!(buf.iter().all(|byte| *byte == buf[0]), "{}", done.tag);
                ended.push((done.tag, buf[0]));
            }
        }
        assert_eq!(self.device.take_violations(), Vec::<String>::new());
        ended.sort_unstable();
        ended
    }

    /// The transfers that `run` makes, and the requests that it merges.
    fn counted(&mut self, run: impl FnOnce(&mut Self)) -> (u64, u64) {
        let counts = |rig: &Self| (rig.device.operations(), rig.engine.stats().merged);
        let before = counts(self);
        run(self);
        let after = counts(self);
        (after.0 - before.0, after.1 - before.1)
    }

    /// Reads `blocks` in one burst; each read has the bytes of its own block.
    fn read(&mut self, blocks: std::ops::Range<u64>) {
        blocks.clone().for_each(|n| self.submit(Op::Read, Flags::NONE, n, 0xee));
        assert!(self.settle().into_iter().eq(blocks.map(|n| (n, n as u8))));
    }
}

#[test]
fn reads_of_one_burst_that_touch_are_one_transfer_and_each_has_its_own_bytes() {
    let mut rig = Rig::new(Config::default());
    // The first read of a stream makes its own transfer; a later burst continues the stream.
    assert_eq!(rig.counted(|rig| rig.read(10..26)), (2, 15));
    assert_eq!(rig.counted(|rig| rig.read(26..42)), (1, 16));
    // Apart, and backwards.
    let apart = |rig: &mut Rig| {
        [100, 102, 90, 89].into_iter().for_each(|n| rig.submit(Op::Read, Flags::NONE, n, 0xee));
        assert_eq!(rig.settle(), [(89, 89), (90, 90), (100, 100), (102, 102)]);
    };
    assert_eq!(rig.counted(apart), (4, 0));
}

#[test]
fn writes_of_one_burst_that_touch_are_one_transfer_and_each_writes_its_own_bytes() {
    let mut rig = Rig::new(Config::default());
    let writes = |rig: &mut Rig| {
        (10..26).for_each(|n| rig.submit(Op::Write, Flags::NONE, n, 200 + n as u8));
        assert!(rig.settle().into_iter().eq((10..26).map(|n| (n, 200 + n as u8))));
    };
    assert_eq!(rig.counted(writes), (2, 15));
    for n in 9..27 {
        rig.submit(Op::Read, Flags::NONE, n, 0xee);
        let byte = if (10..26).contains(&n) { 200 + n as u8 } else { n as u8 };
        assert_eq!(rig.settle(), [(n, byte)]);
    }
}

#[test]
fn a_lone_request_of_a_sequential_stream_makes_its_own_transfer() {
    let mut rig = Rig::new(Config::default());
    assert_eq!(rig.counted(|rig| (10..20).for_each(|n| rig.read(n..n + 1))), (10, 0));
}

#[test]
fn a_merged_transfer_is_limited_in_size() {
    let mut rig = Rig::new(Config::default());
    assert_eq!(rig.counted(|rig| rig.read(0..65)), (2, 64));
    assert_eq!(rig.counted(|rig| rig.read(65..194)), (3, 128));
}

#[test]
fn requests_that_differ_in_kind_or_must_be_durable_are_not_merged() {
    let mut rig = Rig::new(Config::default());
    let alternate = |rig: &mut Rig| {
        for n in 10..20 {
            let op = if n % 2 == 0 { Op::Read } else { Op::Write };
            rig.submit(op, Flags::NONE, n, n as u8);
        }
        assert_eq!(rig.settle().len(), 10);
    };
    assert_eq!(rig.counted(alternate), (10, 0));
    for flags in [Flags::DSYNC, Flags::HIPRI] {
        let flagged = |rig: &mut Rig| {
            (10..20).for_each(|n| rig.submit(Op::Write, flags, n, n as u8));
            assert_eq!(rig.settle().len(), 10);
        };
        assert_eq!(rig.counted(flagged).1, 0, "{flags:?}");
    }
    let waits = |rig: &mut Rig| {
        for n in 10..20 {
            let flags = if n % 2 == 0 { Flags::NOWAIT } else { Flags::NONE };
            rig.submit(Op::Read, flags, n, n as u8);
        }
        assert_eq!(rig.settle().len(), 10);
    };
    assert_eq!(rig.counted(waits), (10, 0));
    let mut off = Rig::new(Config { merge: false, ..Config::default() });
    assert_eq!(off.counted(|rig| rig.read(10..26)), (16, 0));
}

#[test]
fn the_requests_of_a_merged_transfer_that_fails_or_is_short_are_done_one_by_one() {
    let faults = [libc::EIO, libc::EAGAIN, libc::EINTR].map(Fault::Errno);
    for op in [Op::Read, Op::Write] {
        for fault in faults.into_iter().chain([Fault::Short]) {
            let mut rig = Rig::new(Config::default());
            rig.read(9..10);
            let merged = rig.device.operations() + 1;
            rig.device.set_faults(Faults { once: Some((merged, fault)), ..Faults::default() });
            let run = |rig: &mut Rig| {
                if op == Op::Read {
                    return rig.read(10..26);
                }
                (10..26).for_each(|n| rig.submit(Op::Write, Flags::NONE, n, 200));
                assert!(rig.settle().into_iter().eq((10..26).map(|n| (n, 200))));
            };
            assert_eq!(rig.counted(run), (17, 0), "{op:?}, {fault:?}");
            // Adjacent reads are not merged at first; later they are.
            assert_eq!(rig.counted(|rig| rig.read(26..42)), (16, 0));
            (0..4).for_each(|_| rig.read(42..58));
            assert_eq!(rig.counted(|rig| rig.read(58..74)), (1, 16));
        }
    }
}

#[test]
fn a_request_of_a_merged_transfer_that_fails_on_its_own_too_fails_alone() {
    let mut rig = Rig::new(Config::default());
    rig.read(9..10);
    // Each merged transfer reaches the end of the device, which has moved.
    rig.device.shrink(18 * BLOCK);
    (10..26).for_each(|n| rig.submit(Op::Read, Flags::NONE, n, 0xee));
    let mut results = Vec::new();
    while rig.engine.in_flight() > 0 {
        rig.engine.wait(None, &mut |_, _| {}).unwrap();
        while let Some(item) = rig.workers.take_simulated(0) {
            rig.workers.run(item);
        }
        while let Some(done) = rig.engine.next() {
            results.push((done.tag, done.result().unwrap()));
        }
    }
    results.sort_unstable();
    let wanted = (10..26).map(|n| (n, if n < 18 { BLOCK } else { 0 }));
    assert!(results.iter().copied().eq(wanted), "{results:?}");
}

#[test]
fn a_run_for_which_the_queue_has_no_room_is_done_all_the_same() {
    let mut rig = Rig::new(Config::default());
    rig.read(9..10);
    rig.device.set_faults(Faults { full: u16::MAX, ..Faults::default() });
    rig.read(10..26);
    rig.read(40..56);
}

#[test]
fn c39_merged_transfers_count_for_the_back_off_as_their_requests_would() {
    // A file that refuses everything is left alone with merging as without.
    let mut rig = Rig::new(Config::default());
    rig.device.set_faults(Faults { refusals: u16::MAX, ..Faults::default() });
    (0..1000).for_each(|n| rig.read(n * 16 % 240..n * 16 % 240 + 16));
    assert!(rig.engine.stats().backed_off > 0);
}
