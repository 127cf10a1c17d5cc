//! Requests that wait for an allocation and requests that must not, while the test holds an
//! allocation up.
//!
//! Invariant: the engine's thread pool has exactly the size that the test gives.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use nowait::{
    AioThreadQueue, BlockingFile, ByteRange, Config, Direct, Flags, Op, Request, SingleDisk,
    WorkerPool,
};

use crate::offline::create::{CreateOptions, create};
use crate::qcow2_disk::tests::gate;
use crate::qcow2_disk::tests::gate::Gate;
use crate::qcow2_disk::{OpenImage, Qcow2Map, ServeOptions, open};
use crate::{Chain, ChainOptions, Format};
use nowait_testkit::Random;
use nowait_testkit::{Finished, require_tool, tool};

const CLUSTER: u64 = 65536;
const CLUSTERS: u64 = 64;
const BLOCK: u64 = 4096;
/// Longer than any request takes that is not blocked.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The cluster whose allocation is held up.
const SLOW: u64 = 30;
/// Clusters of the overlay: one written, one made zeros.
const WRITTEN: u64 = 10;
const ZEROS: u64 = 20;

struct Scene {
    _scratch: tempfile::TempDir,
    base: Vec<u8>,
    disk: Arc<nowait::BlockDevice<Qcow2Map>>,
    open_image: OpenImage,
    gate: Arc<Gate>,
}

/// An overlay whose backing file is behind a gate.
fn scene() -> Scene {
    let scratch = tempfile::tempdir().unwrap();
    let base = Random::from_seed(7).bytes((CLUSTER * CLUSTERS) as usize);
    let below = scratch.path().join("base");
    fs::write(&below, &base).unwrap();
    // Dirty pages would have to be written before a direct read of them.
    fs::File::open(&below).unwrap().sync_all().unwrap();
    let create = ["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "top"];
    tool("qemu-img").current_dir(scratch.path()).args(create).succeeds();
    let options =
        ChainOptions { format: Some(Format::Qcow2), writable: true, ..ChainOptions::default() };
    let chain = Chain::open(&scratch.path().join("top"), &options).unwrap();
    let gate = gate::before(chain.layers()[1].file.fd().unwrap());
    let options = ServeOptions { writable: true, direct: Direct::Auto, cache_holes: true };
    let (disk, open_image) = open(chain, options).unwrap();
    let disk = Arc::new(disk);
    let file = BlockingFile::new(disk.clone());
    file.write_at(&[1; CLUSTER as usize], WRITTEN * CLUSTER, Flags::NONE).unwrap();
    file.zero(ByteRange::new(ZEROS * CLUSTER, CLUSTER), Flags::NONE).unwrap();
    Scene { _scratch: scratch, base, disk, open_image, gate }
}

/// An engine and the tags of its completed requests, in order.
struct Player {
    gate: Arc<Gate>,
    engine: SingleDisk<AioThreadQueue, Qcow2Map>,
    done: Vec<u64>,
}

impl Player {
    fn new(disk: &Arc<nowait::BlockDevice<Qcow2Map>>, gate: &Arc<Gate>, workers: u32) -> Self {
        let config = Config { slots: 32, ..Config::default() };
        let queue = AioThreadQueue::new(config.slots).unwrap();
        // One disk gets three quarters of the threads.
        let workers = WorkerPool::new(workers + workers / 2);
        let engine = SingleDisk::new(disk.clone(), workers, queue, config).unwrap();
        Self { gate: gate.clone(), engine, done: Vec::new() }
    }

    /// Sends a request for a block.
    fn submit(&mut self, op: Op, cluster: u64, block: u64, tag: u64) {
        self.send(op, ByteRange::new(cluster * CLUSTER + block * BLOCK, BLOCK), tag);
    }

    /// Sends a request. A write's bytes are the tag's low byte.
    fn send(&mut self, op: Op, range: ByteRange, tag: u64) {
        let mut buf = self.engine.buffer(range).unwrap();
        if op == Op::Write {
            buf.fill(tag as u8);
        }
        let io = Request { op, flags: Flags::NONE, range };
        self.engine.submit(io, buf, tag).map_err(|rejected| rejected.error).unwrap();
        self.engine.poll().unwrap();
    }

    /// Runs until `count` requests have completed. A read has to return the bytes that `read` gives for
    /// its tag.
    fn until_done(&mut self, count: usize, read: impl Fn(u64) -> Vec<u8>) {
        while self.done.len() < count {
            while let Some(completion) = self.engine.next() {
                assert_eq!(completion.result().unwrap(), completion.io.range.len);
                if completion.io.op == Op::Read {
                    let buf = completion.buf.expect("a read gives its buffer back");
                    let expected = read(completion.tag);
                    assert!(buf[..] == expected, "{}", completion.tag);
                }
                self.done.push(completion.tag);
            }
            if self.done.len() < count {
                self.engine.wait(Some(TIMEOUT), &mut |_, _| {}).unwrap();
                if !self.engine.has_done() {
                    // Dropping the engine waits for its requests.
                    self.gate.open();
                    panic!("{:?} have ended, and no more do", self.done);
                }
            }
        }
    }
}

#[test]
fn requests_that_need_no_allocation_are_served_while_one_is_held_up() {
    nowait_testkit::needs!(require_tool("qemu-img"));
    let Scene { base, disk, open_image, gate, _scratch } = scene();
    // The pool's only thread is the one that is held up.
    let mut player = Player::new(&disk, &gate, 1);
    gate.shut();
    player.submit(Op::Write, SLOW, 3, 1);
    gate.wait_for_reader();
    player.submit(Op::Read, WRITTEN, 0, 2);
    player.submit(Op::Read, ZEROS, 0, 3);
    player.submit(Op::Read, SLOW + 1, 0, 4);
    player.submit(Op::Read, SLOW, 0, 5);
    player.submit(Op::Write, WRITTEN, 5, 6);
    let below = |cluster: u64| {
        let pos = (cluster * CLUSTER) as usize;
        base[pos..pos + BLOCK as usize].to_vec()
    };
    let read = |tag: u64| match tag {
        2 => vec![1; BLOCK as usize],
        3 => vec![0; BLOCK as usize],
        4 => below(SLOW + 1),
        _ => below(SLOW),
    };
    player.until_done(5, read);
    assert_eq!(gate.waiting(), 1, "the allocation is still held up");
    player.done.sort_unstable();
    assert_eq!(player.done, [2, 3, 4, 5, 6]);
    gate.open();
    player.until_done(6, read);
    drop((player, disk));
    open_image.close().unwrap();
}

#[test]
fn c54_a_read_of_a_block_in_which_the_backing_file_ends_is_not_torn_by_a_concurrent_write() {
    let scratch = tempfile::tempdir().unwrap();
    fs::write(scratch.path().join("base"), [7; 100]).unwrap();
    let top = scratch.path().join("top");
    let options = CreateOptions {
        backing: Some("base".into()),
        backing_format: Some(Format::Raw),
        ..CreateOptions::new(Format::Qcow2, Some(CLUSTER))
    };
    create(&top, &options).unwrap();
    let options =
        ChainOptions { format: Some(Format::Qcow2), writable: true, ..ChainOptions::default() };
    let chain = Chain::open(&top, &options).unwrap();
    let gate = gate::before(chain.layers()[1].file.fd().unwrap());
    let options = ServeOptions { writable: true, direct: Direct::Off, cache_holes: true };
    let (disk, open_image) = open(chain, options).unwrap();
    let disk = Arc::new(disk);
    let mut block = vec![1; BLOCK as usize];
    std::thread::scope(|scope| {
        let before = gate.shut();
        assert_eq!(before, 0);
        let reader =
            scope.spawn(|| BlockingFile::new(disk.clone()).read_at(&mut block, 0).unwrap());
        gate.wait_for_reader();
        // The write covers the cluster, so that no byte has to be copied through the gate.
        let all = [2; CLUSTER as usize];
        BlockingFile::new(disk.clone()).write_at(&all, 0, Flags::NONE).unwrap();
        gate.open();
        assert_eq!(reader.join().unwrap(), BLOCK as usize);
    });
    assert!(block[..100] == [7; 100] && block[100..].iter().all(|&byte| byte == 0));
    drop(disk);
    open_image.close().unwrap();
}

#[test]
fn another_cluster_is_allocated_while_one_is_held_up() {
    nowait_testkit::needs!(require_tool("qemu-img"));
    let Scene { disk, open_image, gate, _scratch, .. } = scene();
    let mut player = Player::new(&disk, &gate, 2);
    gate.shut();
    player.submit(Op::Write, SLOW, 3, 1);
    gate.wait_for_reader();
    // The write covers the cluster, so that no byte has to be copied through the gate.
    player.send(Op::Write, ByteRange::new((SLOW + 1) * CLUSTER, CLUSTER), 2);
    player.until_done(1, |_| Vec::new());
    assert_eq!(player.done, [2]);
    assert_eq!(gate.waiting(), 1, "the first one is still held up");
    gate.open();
    player.until_done(2, |_| Vec::new());
    drop((player, disk));
    open_image.close().unwrap();
}

#[test]
fn neighbours_that_wait_for_one_cluster_are_served_by_one_allocation_and_one_copy() {
    nowait_testkit::needs!(require_tool("qemu-img"));
    let Scene { base, disk, open_image, gate, _scratch } = scene();
    let mut player = Player::new(&disk, &gate, 4);
    let before = gate.shut();
    let file_bytes = || fs::metadata(_scratch.path().join("top")).unwrap().len();
    for block in 0..4 {
        player.submit(Op::Write, SLOW, block * 2, block + 1);
    }
    gate.wait_for_reader();
    gate.open();
    player.until_done(4, |_| Vec::new());
    // The first request copied all bytes but its own.
    assert_eq!(gate.bytes() - before, CLUSTER - BLOCK, "bytes copied from the backing file");
    let file = BlockingFile::new(disk.clone());
    let mut all = vec![0; CLUSTER as usize];
    file.read_at(&mut all, SLOW * CLUSTER).unwrap();
    let mut expected = base[(SLOW * CLUSTER) as usize..][..CLUSTER as usize].to_vec();
    for (block, tag) in (0..8).step_by(2).zip(1..) {
        expected[block * BLOCK as usize..][..BLOCK as usize].fill(tag);
    }
    assert!(all == expected, "each block is as it was written, or as it was below");
    drop((file, player, disk));
    open_image.close().unwrap();
    // Header, refcount table and block, L1 table, L2 table, and the two clusters that were written.
    assert_eq!(file_bytes(), (5 + 2) * CLUSTER, "as many clusters as are needed");
}
