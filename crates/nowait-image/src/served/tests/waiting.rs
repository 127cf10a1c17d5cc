//! Who waits for an allocation, and who does not: one is held up for as long as the test likes.
//!
//! Invariant: the engine has as many threads that may block as the test says, and no more.
//! Knows: gate, and the crate. Known by: nobody.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use nowait::{Config, Direct, Engine, File, Flags, Io, Op, Range, Threads, Workers};

use super::gate::{self, Gate};
use super::random::Random;
use super::tool::{Finished, require_tool, tool};
use crate::create::{CreateOptions, Preallocation, create};
use crate::served::{Keeper, Qcow2, ServeOptions, open};
use crate::{Chain, ChainOptions, Format};

const CLUSTER: u64 = 65536;
const CLUSTERS: u64 = 64;
const BLOCK: u64 = 4096;
/// Longer than anything takes that does not wait for ever.
const PATIENCE: Duration = Duration::from_secs(20);

/// The cluster that is allocated while others do something else.
const SLOW: u64 = 30;
/// Clusters of the overlay: written, and made zeros.
const WRITTEN: u64 = 10;
const ZEROS: u64 = 20;

struct Scene {
    _scratch: tempfile::TempDir,
    base: Vec<u8>,
    disk: Arc<nowait::Disk<Qcow2>>,
    keeper: Keeper,
    gate: Arc<Gate>,
}

/// An overlay whose backing file is behind a gate.
fn scene() -> Scene {
    let scratch = tempfile::tempdir().unwrap();
    let base = Random::from_seed(7).bytes((CLUSTER * CLUSTERS) as usize);
    let below = scratch.path().join("base");
    fs::write(&below, &base).unwrap();
    // What is only in the page cache would have to be written before it can be read past that.
    fs::File::open(&below).unwrap().sync_all().unwrap();
    let create = ["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "top"];
    tool("qemu-img").current_dir(scratch.path()).args(create).succeeds();
    let options =
        ChainOptions { format: Some(Format::Qcow2), writable: true, ..ChainOptions::default() };
    let chain = Chain::open(&scratch.path().join("top"), &options).unwrap();
    let gate = gate::before(chain.layers()[1].file.fd());
    let options = ServeOptions { writable: true, direct: Direct::Auto, hint: true };
    let (disk, keeper) = open(chain, options).unwrap();
    let disk = Arc::new(disk);
    let file = File::new(disk.clone());
    file.write_at(&[1; CLUSTER as usize], WRITTEN * CLUSTER, Flags::NONE).unwrap();
    file.zero(Range::new(ZEROS * CLUSTER, CLUSTER), Flags::NONE).unwrap();
    Scene { _scratch: scratch, base, disk, keeper, gate }
}

/// An engine and what it has given back, in order.
struct Player {
    gate: Arc<Gate>,
    engine: Engine<Threads, Qcow2>,
    done: Vec<u64>,
}

impl Player {
    fn new(disk: &Arc<nowait::Disk<Qcow2>>, gate: &Arc<Gate>, workers: u32) -> Self {
        let config = Config { slots: 32, ..Config::default() };
        let queue = Threads::for_files(&disk.files(), config.slots, !disk.is_direct()).unwrap();
        let workers = Workers::new(disk, workers);
        let engine = Engine::new(disk.clone(), workers, queue, config).unwrap();
        Self { gate: gate.clone(), engine, done: Vec::new() }
    }

    /// Sends a request for a block.
    fn submit(&mut self, op: Op, cluster: u64, block: u64, tag: u64) {
        self.send(op, Range::new(cluster * CLUSTER + block * BLOCK, BLOCK), tag);
    }

    /// Sends a request; what is written is the tag's low byte.
    fn send(&mut self, op: Op, range: Range, tag: u64) {
        let mut buf = self.engine.buffer(range).unwrap();
        if op == Op::Write {
            buf.fill(tag as u8);
        }
        let io = Io { op, flags: Flags::NONE, range };
        self.engine.submit(io, buf, tag).map_err(|rejected| rejected.error).unwrap();
        self.engine.poll().unwrap();
    }

    /// Runs until `count` requests have ended, reads with these bytes.
    fn until_done(&mut self, count: usize, read: impl Fn(u64) -> Vec<u8>) {
        while self.done.len() < count {
            while let Some(completion) = self.engine.next() {
                assert_eq!(completion.result().unwrap(), completion.io.range.len);
                if completion.io.op == Op::Read {
                    let start = self.engine.start(completion.io.range.pos);
                    let buf = completion.buf.expect("a read gives its buffer back");
                    let expected = read(completion.tag);
                    assert!(buf[start..start + BLOCK as usize] == expected, "{}", completion.tag);
                }
                self.done.push(completion.tag);
            }
            if self.done.len() < count {
                self.engine.wait(Some(PATIENCE), &mut |_, _| {}).unwrap();
                if !self.engine.has_done() {
                    // An engine does not end before its requests have.
                    self.gate.open();
                    panic!("{:?} have ended, and no more do", self.done);
                }
            }
        }
    }
}

#[test]
fn whoever_needs_no_allocation_is_served_while_one_is_held_up() {
    if !require_tool("qemu-img") {
        return;
    }
    let Scene { base, disk, keeper, gate, _scratch } = scene();
    // The only thread that may block is the one that is held up.
    let mut player = Player::new(&disk, &gate, 1);
    gate.shut();
    player.submit(Op::Write, SLOW, 3, 1);
    gate.until_somebody_waits();
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
    keeper.close().unwrap();
}

#[test]
fn c54_a_block_that_is_written_while_it_is_read_from_a_file_that_ends_in_it_is_no_mixture() {
    let scratch = tempfile::tempdir().unwrap();
    fs::write(scratch.path().join("base"), [7; 100]).unwrap();
    let top = scratch.path().join("top");
    let options = CreateOptions {
        size: Some(CLUSTER),
        format: Format::Qcow2,
        backing: Some("base".into()),
        backing_format: Some(Format::Raw),
        backing_dirs: Vec::new(),
        cluster_bytes: None,
        preallocation: Preallocation::Off,
    };
    create(&top, &options).unwrap();
    let options =
        ChainOptions { format: Some(Format::Qcow2), writable: true, ..ChainOptions::default() };
    let chain = Chain::open(&top, &options).unwrap();
    let gate = gate::before(chain.layers()[1].file.fd());
    let options = ServeOptions { writable: true, direct: Direct::Off, hint: true };
    let (disk, keeper) = open(chain, options).unwrap();
    let disk = Arc::new(disk);
    let mut block = vec![1; BLOCK as usize];
    std::thread::scope(|scope| {
        let before = gate.shut();
        assert_eq!(before, 0);
        let reader = scope.spawn(|| File::new(disk.clone()).read_at(&mut block, 0).unwrap());
        gate.until_somebody_waits();
        // All of the cluster is written, so that nothing has to be copied from behind the gate.
        let all = [2; CLUSTER as usize];
        File::new(disk.clone()).write_at(&all, 0, Flags::NONE).unwrap();
        gate.open();
        assert_eq!(reader.join().unwrap(), BLOCK as usize);
    });
    assert!(block[..100] == [7; 100] && block[100..].iter().all(|&byte| byte == 0));
    drop(disk);
    keeper.close().unwrap();
}

#[test]
fn another_cluster_is_allocated_while_one_is_held_up() {
    if !require_tool("qemu-img") {
        return;
    }
    let Scene { disk, keeper, gate, _scratch, .. } = scene();
    let mut player = Player::new(&disk, &gate, 2);
    gate.shut();
    player.submit(Op::Write, SLOW, 3, 1);
    gate.until_somebody_waits();
    // All of its bytes are written, so that nothing has to be copied from behind the gate.
    player.send(Op::Write, Range::new((SLOW + 1) * CLUSTER, CLUSTER), 2);
    player.until_done(1, |_| Vec::new());
    assert_eq!(player.done, [2]);
    assert_eq!(gate.waiting(), 1, "the first one is still held up");
    gate.open();
    player.until_done(2, |_| Vec::new());
    drop((player, disk));
    keeper.close().unwrap();
}

#[test]
fn neighbours_that_wait_for_one_cluster_are_served_by_one_allocation_and_one_copy() {
    if !require_tool("qemu-img") {
        return;
    }
    let Scene { base, disk, keeper, gate, _scratch } = scene();
    let mut player = Player::new(&disk, &gate, 4);
    let before = gate.shut();
    let file_bytes = || fs::metadata(_scratch.path().join("top")).unwrap().len();
    for block in 0..4 {
        player.submit(Op::Write, SLOW, block * 2, block + 1);
    }
    gate.until_somebody_waits();
    gate.open();
    player.until_done(4, |_| Vec::new());
    // The first one copied all but what it brought itself.
    assert_eq!(gate.bytes() - before, CLUSTER - BLOCK, "bytes copied from the backing file");
    let file = File::new(disk.clone());
    let mut all = vec![0; CLUSTER as usize];
    file.read_at(&mut all, SLOW * CLUSTER).unwrap();
    let mut expected = base[(SLOW * CLUSTER) as usize..][..CLUSTER as usize].to_vec();
    for (block, tag) in (0..8).step_by(2).zip(1..) {
        expected[block * BLOCK as usize..][..BLOCK as usize].fill(tag);
    }
    assert!(all == expected, "each block is as it was written, or as it was below");
    drop((file, player, disk));
    keeper.close().unwrap();
    // Header, refcount table and block, L1 table, L2 table, and the two clusters that were written.
    assert_eq!(file_bytes(), (5 + 2) * CLUSTER, "as many clusters as are needed");
}
