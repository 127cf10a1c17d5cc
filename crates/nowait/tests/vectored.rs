//! Requests of several segments that one transfer serves, with the simple path off.
#![allow(unsafe_code)]

use std::sync::Arc;

use nowait::{
    BlockDevice, ByteRange, Config, Flags, IoQueue, IoSegment, LinearMap, Op, OpenOptions, Request,
    SingleDisk, Stats,
};
use nowait_testkit::{TestQueueKind, WaitForRequests};

const PAGE: usize = 4096;
const SIZE: u64 = 64 << 10;

#[derive(Clone)]
#[repr(align(4096))]
struct Page([u8; PAGE]);

/// Reads or writes the first three pages of the image, to or from every other page of `memory`;
/// returns the bytes done.
fn run<Q: IoQueue>(
    engine: &mut SingleDisk<Q, LinearMap>,
    op: Op,
    flags: Flags,
    memory: &mut [Page; 6],
) -> u64 {
    let segments = [0, 2, 4].map(|n| IoSegment { base: memory[n].0.as_mut_ptr(), len: PAGE });
    let io = Request { op, flags, range: ByteRange::new(0, 3 * PAGE as u64) };
    // SAFETY: the memory is borrowed until the request is given back below.
    assert!(unsafe { engine.submit_user_memory(io, &segments, 7) }.is_ok());
    let completion = engine.only();
    assert_eq!(completion.tag, 7);
    completion.result().unwrap()
}

#[test]
fn several_segments_are_one_transfer_and_a_short_one_is_resumed() {
    for kind in TestQueueKind::REAL {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = dir.path().join("disk.img");
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(SIZE).unwrap();
        let disk = Arc::new(BlockDevice::open_mapped(&path, OpenOptions::default()).unwrap());
        let config = Config { simple: false, ..Config::default() };
        let Some(mut engine) = kind.engine(&disk, 2, config) else { continue };
        let mut memory: [Page; 6] = std::array::from_fn(|n| Page([n as u8 + 1; PAGE]));
        assert_eq!(run(&mut engine, Op::Write, Flags::DSYNC, &mut memory), 3 * PAGE as u64);
        let image = std::fs::read(&path).unwrap();
        let pages: Vec<u8> = image.chunks(PAGE).map(|page| page[PAGE - 1]).collect();
        assert_eq!(pages[..4], [1, 3, 5, 0]);

        // The file is truncated without the engine's knowledge: the transfer is short, and a worker
        // finds the end.
        let cut = 2 * PAGE as u64 + 512;
        file.set_len(cut).unwrap();
        let mut memory: [Page; 6] = std::array::from_fn(|_| Page([9; PAGE]));
        assert_eq!(run(&mut engine, Op::Read, Flags::NONE, &mut memory), cut);
        assert_eq!([0, 2].map(|n| memory[n].0[PAGE - 1]), [1, 3]);
        assert_eq!((memory[4].0[511], memory[1].0[0], memory[5].0[0]), (5, 9, 9));
        let Stats { general, retried, pool, .. } = engine.stats();
        assert_eq!((general, pool.hit + pool.allocated), (2, 2), "one slot each: {kind:?}");
        assert!(retried >= 1, "the short read went to a worker: {kind:?}");
    }
}
