//! Misuse by callers without `unsafe`: it ends in an errno or in wrong bytes of the caller's own,
//! and never in access to memory that is not the request's.
#![forbid(unsafe_code)]

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nowait::{
    BlockDevice, BlockMap, BlockingFile, ByteRange, Config, Error, Extent, ExtentStatus, FD_TOKEN,
    FileStorage, Flags, Intent, Interest, IoQueue, Op, OpenOptions, PooledBuffer, Request,
    SingleDisk, WouldBlock,
};
use nowait_testkit::{TestQueueKind, WaitForRequests};

const BLOCK: u64 = 4096;
const SIZE: u64 = 1 << 20;

fn image() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    std::fs::write(file.path(), vec![7; SIZE as usize]).unwrap();
    file
}

/// Runs one request; returns its result and its buffer.
fn run<Q: IoQueue, M: BlockMap>(
    engine: &mut SingleDisk<Q, M>,
    io: Request,
    buf: PooledBuffer,
) -> (Result<u64, i32>, PooledBuffer) {
    if let Err(rejected) = engine.submit(io, buf, 1) {
        return (Err(rejected.error.errno()), rejected.buf.unwrap());
    }
    let done = engine.only();
    (done.result().map_err(Error::errno), done.buf.unwrap())
}

fn refuses_tokens(kind: TestQueueKind) {
    let file = image();
    let open = || Arc::new(BlockDevice::open_mapped(file.path(), OpenOptions::default()).unwrap());
    let (socket, mut other) = std::os::unix::net::UnixStream::pair().unwrap();
    std::io::Write::write_all(&mut other, b"readable").unwrap();
    let Some(mut engine) = kind.engine(&open(), 2, Config::default()) else { return };
    let io = Request { op: Op::Write, flags: Flags::NONE, range: ByteRange::new(0, BLOCK) };
    let buf = engine.buffer(io.range).unwrap();
    assert!(engine.submit(io, buf, 1).is_ok());
    for token in [0, 1, FD_TOKEN - 1, FD_TOKEN | 1 << 60, FD_TOKEN | 1 << 61, FD_TOKEN | 1 << 62] {
        let watched = engine.watch(socket.as_fd(), token, Interest::Readable);
        assert_eq!(watched.unwrap_err().errno(), libc::EINVAL, "{token:#x}");
        // This ends neither the request nor the engine's own watches.
        engine.unwatch(socket.as_fd(), token);
    }
    assert_eq!(engine.only().result(), Ok(BLOCK));
    // A slot still returns from a worker to the engine.
    engine.submit_no_data(Request { op: Op::Flush, ..io }, 2).map_err(|it| it.error).unwrap();
    engine.finish();
    // The queue itself refuses such a token too.
    let Some(mut queue) = kind.queue(4096) else { return };
    let watched = queue.events_mut().watch(socket.as_fd(), 0, Interest::Readable);
    assert_eq!(watched.unwrap_err().errno(), libc::EINVAL);
}

#[test]
fn a_descriptor_watched_under_a_transfers_token_is_einval_and_ends_no_transfer() {
    TestQueueKind::ALL.into_iter().for_each(refuses_tokens);
}

/// A map that returns impossible extents in turn: too long, empty, in no file, past every end.
struct InvalidMap(AtomicU64);

impl InvalidMap {
    fn extent(&self, range: ByteRange, hole: bool) -> Extent {
        let n = self.0.fetch_add(1, Ordering::Relaxed);
        let len = [range.len * 64, u64::MAX, 0, range.len, range.len / 2, 1][(n % 6) as usize];
        let pos = [range.pos, u64::MAX - 1, range.pos + 17, SIZE * 9][(n / 6 % 4) as usize];
        let file = [0, 7, u16::MAX][(n / 24 % 3) as usize];
        Extent { file, pos, len, hole: hole && n.is_multiple_of(5) }
    }
}

impl BlockMap for InvalidMap {
    fn map_extent(&self, range: ByteRange, intent: Intent) -> Result<Extent, WouldBlock> {
        Ok(self.extent(range, intent == Intent::Read))
    }

    fn map_extent_blocking(&self, range: ByteRange, intent: Intent) -> Extent {
        self.extent(range, intent == Intent::Read)
    }

    fn is_mapped(&self, _: ByteRange) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed).is_multiple_of(2)
    }

    fn cached_extents(
        &self,
        range: ByteRange,
        limit: usize,
        extents: &mut Vec<ExtentStatus>,
    ) -> bool {
        extents
            .extend((0..limit as u64).map(|n| ExtentStatus::top(range.len * (n % 3), n % 2 == 0)));
        true
    }
}

fn disk_with_invalid_map(file: &tempfile::NamedTempFile) -> Arc<BlockDevice<InvalidMap>> {
    let storage = FileStorage::open(file.path(), OpenOptions::default()).unwrap();
    Arc::new(BlockDevice::mapped(
        Arc::new(storage),
        Vec::new(),
        SIZE,
        false,
        InvalidMap(AtomicU64::new(0)),
    ))
}

/// Positions and lengths of requests of up to a block and a half.
const RANGES: [(u64, u64); 6] =
    [(0, BLOCK), (BLOCK, 512), (BLOCK + 512, 4096), (8191, 2), (100, 6000), (SIZE - 700, 700)];

#[test]
fn a_request_touches_only_its_own_memory_whatever_the_map_returns() {
    const AROUND: usize = 1 << 17;
    let image = image();
    let file = BlockingFile::new(disk_with_invalid_map(&image));
    let mut memory = vec![1u8; 2 * AROUND];
    for round in 0..50 {
        for (pos, len) in RANGES {
            let here = AROUND + round * 8..AROUND + round * 8 + len as usize;
            let _ = file.read_at(&mut memory[here.clone()], pos);
            let _ = file.write_at(&memory[here.clone()], pos, Flags::NONE);
            memory[here].fill(1);
            assert!(memory.iter().all(|&byte| byte == 1), "{pos} {len}");
        }
    }
}

#[test]
fn every_request_of_an_engine_ends_inside_its_buffer_whatever_the_map_returns() {
    let image = image();
    let disk = disk_with_invalid_map(&image);
    for kind in TestQueueKind::REAL {
        let Some(mut engine) = kind.engine(&disk, 2, Config::default()) else { continue };
        for _ in 0..50 {
            for (pos, len) in RANGES {
                for op in [Op::Read, Op::Write] {
                    let io = Request { op, flags: Flags::NONE, range: ByteRange::new(pos, len) };
                    let buf = engine.buffer(io.range).unwrap();
                    let _ = run(&mut engine, io, buf);
                }
            }
        }
        let range = ByteRange::new(0, SIZE);
        let status = Request { op: Op::Status, flags: Flags::NONE, range };
        engine.submit_no_data(status, 9).map_err(|it| it.error).unwrap();
        engine.finish();
        let extents = engine.take_extents(9);
        assert!(extents.iter().all(|extent| extent.len > 0));
        let sum: u64 = extents.iter().map(|extent| extent.len).sum();
        assert!(!extents.is_empty() && sum <= SIZE);
    }
}

#[test]
fn positions_and_lengths_up_to_the_greatest_number_are_refused_and_overflow_nothing() {
    let image = image();
    let options = OpenOptions::new().cache_holes(true);
    let disk = Arc::new(BlockDevice::open(image.path(), options).unwrap());
    disk.scan();
    let file = BlockingFile::new(disk.clone());
    let mut engine = TestQueueKind::Null.engine(&disk, 2, Config::default()).unwrap();
    for pos in [u64::MAX, u64::MAX - 1, u64::MAX - 4095, u64::MAX - 4096, 1 << 63, (1 << 63) - 1] {
        for len in [u64::MAX, u64::MAX - 4095, 1 << 63, SIZE, BLOCK, 1] {
            let range = ByteRange::new(pos, len);
            let flags = Flags::NONE;
            for op in [Op::Read, Op::Write] {
                let buf = engine.buffer(ByteRange::new(0, BLOCK)).unwrap();
                let (result, _) = run(&mut engine, Request { op, flags, range }, buf);
                assert_eq!(result, Err(libc::EINVAL), "{op:?} {range:?}");
            }
            for op in [Op::Discard, Op::Zero, Op::Status] {
                let refused = engine.submit_no_data(Request { op, flags, range }, 1).err().unwrap();
                assert_eq!(refused.error.errno(), libc::EINVAL, "{op:?} {range:?}");
            }
            assert_eq!(file.zero(range, flags).unwrap_err().errno(), libc::EINVAL);
            assert_eq!(disk.cached_extent(range), ExtentStatus::top(len, false));
            assert!(!disk.is_hole(range));
        }
        assert_eq!(file.read_at(&mut [0; 2], pos).unwrap_err().errno(), libc::EINVAL);
        assert_eq!(file.write_at(&[0; 2], pos, Flags::NONE).unwrap_err().errno(), libc::EINVAL);
    }
}

#[test]
fn the_cached_extent_of_a_range_without_end_is_returned_at_once() {
    let image = image();
    let disk = BlockDevice::open(image.path(), OpenOptions::default()).unwrap();
    for pos in [0, SIZE - BLOCK, SIZE, 1 << 40] {
        for len in [u64::MAX - pos, u64::MAX, 1 << 62] {
            let extent = disk.cached_extent(ByteRange::new(pos, len));
            assert!(!extent.hole && extent.len == len, "{pos} {len}: {extent:?}");
        }
    }
}

#[test]
fn a_buffer_of_another_engine_serves_its_range() {
    let (one, two) = (image(), image());
    let disk = |file: &tempfile::NamedTempFile, direct| {
        let options = OpenOptions::new().direct(direct);
        Arc::new(BlockDevice::open(file.path(), options).unwrap())
    };
    let (plain, direct) = (disk(&one, nowait::Direct::Off), disk(&two, nowait::Direct::Auto));
    let engine = |disk| TestQueueKind::Threads.engine(&disk, 2, Config::default()).unwrap();
    let (mut plain, mut direct) = (engine(plain), engine(direct));
    for (pos, len) in RANGES {
        let range = ByteRange::new(pos, len);
        let Some(buf) = plain.buffer(range) else { panic!("no buffer") };
        let io = Request { op: Op::Read, flags: Flags::NONE, range };
        let (result, buf) = run(&mut direct, io, buf);
        assert_eq!(result, Ok(len), "{range:?}");
        assert!(buf.iter().all(|&byte| byte == 7));
    }
}

#[test]
fn a_buffer_serves_other_ranges_that_are_not_longer() {
    let image = image();
    let disk = Arc::new(BlockDevice::open(image.path(), OpenOptions::default()).unwrap());
    let mut engine = TestQueueKind::Threads.engine(&disk, 2, Config::default()).unwrap();
    for op in [Op::Read, Op::Write] {
        let mut buf = engine.buffer(ByteRange::new(100, 700)).unwrap();
        assert!(buf.len() == 700 && buf.capacity() >= 1024);
        for (pos, len) in [(50, 700), (0, 512), (511, 2), (612, 412), (SIZE - 1, 1)] {
            buf.fill(7);
            let io = Request { op, flags: Flags::NONE, range: ByteRange::new(pos, len) };
            let (result, given_back) = run(&mut engine, io, buf);
            assert_eq!(result, Ok(len), "{io:?}");
            assert!(given_back.iter().all(|&byte| byte == 7), "{io:?}");
            buf = given_back;
        }
        let io = Request { op, flags: Flags::NONE, range: ByteRange::new(0, 701) };
        assert_eq!(run(&mut engine, io, buf).0, Err(libc::EINVAL));
    }
    assert!(std::fs::read(image.path()).unwrap().iter().all(|&byte| byte == 7));
}
