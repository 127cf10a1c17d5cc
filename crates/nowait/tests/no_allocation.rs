//! In steady state a request costs no allocation: the allocator counts, in all threads.
//!
//! Invariant: this program has one test function, so that nothing else allocates while it counts.

use std::future::{Future, poll_fn};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use nowait::{
    AsyncFile, BlockDevice, BlockingFile, ByteRange, Config, Error, Flags, IoBuffer, IoQueue,
    LinearMap, LocalAsyncFile, LocalDriver, Op, OpenOptions, PooledBuffer, Request, SingleDisk,
    WorkerPool,
};
use nowait_testkit::allocations::{Counting, allocations};
use nowait_testkit::{TestQueueKind, WaitForRequests};

const BLOCK: u64 = 4096;
const SIZE: u64 = 4 << 20;
/// Requests before the count begins; by then every list and pool has its final size.
const WARM_UP: u64 = 2_000;
const REQUESTS: u64 = 5_000;
const DEPTH: usize = 16;

#[global_allocator]
static COUNTING: Counting = Counting;

/// The bytes of request `n`: whole blocks, or a part of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    Aligned,
    /// Blocks that touch, so that requests share transfers.
    Neighbours,
    Unaligned,
}

impl Shape {
    fn range(self, n: u64) -> ByteRange {
        let pos = n * if self == Self::Neighbours { 1 } else { 7 } * BLOCK % (SIZE - BLOCK);
        match self {
            Self::Aligned | Self::Neighbours => ByteRange::new(pos, BLOCK),
            Self::Unaligned => ByteRange::new(pos + 100, BLOCK - 300),
        }
    }
}

/// Allocations of all threads during `REQUESTS` requests, after `WARM_UP` others.
fn counted(mut run: impl FnMut(u64)) -> u64 {
    run(WARM_UP);
    let before = allocations();
    run(REQUESTS);
    allocations() - before
}

fn image() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("disk.img");
    std::fs::write(&path, vec![0x5a; SIZE as usize]).unwrap();
    (dir, path)
}

/// Fails if a request allocates. How long the lists of the workers become, and how many merged
/// transfers are in flight simultaneously, depends on the order in which threads and devices work, so one
/// may still be added after the warm-up.
fn check(counted: u64, varies: bool, label: &str) {
    let most = if varies { REQUESTS / 100 } else { 0 };
    assert!(counted <= most, "{label}: {counted} allocations");
}

/// Runs `count` requests, reads and writes in turn (neighbours by 64), with all of `bufs` in flight.
fn run<Q: IoQueue>(
    engine: &mut SingleDisk<Q, LinearMap>,
    shape: Shape,
    bufs: &mut Vec<PooledBuffer>,
    count: u64,
) {
    let (mut submitted, mut done) = (0, 0);
    while done < count {
        while submitted < count
            && let Some(buf) = bufs.pop()
        {
            let turn = if shape == Shape::Neighbours { submitted / 64 } else { submitted };
            let op = if turn % 2 == 0 { Op::Read } else { Op::Write };
            let range = shape.range(submitted);
            let io = Request { op, flags: Flags::NONE, range };
            assert!(engine.submit(io, buf, submitted).is_ok());
            submitted += 1;
        }
        engine.wait_once();
        while let Some(completion) = engine.next() {
            assert_eq!(completion.result(), Ok(completion.io.range.len));
            bufs.extend(completion.buf);
            done += 1;
        }
    }
}

/// Allocations of an engine on a fully mapped image.
fn of_engine(kind: TestQueueKind, config: Config, shape: Shape) -> Option<u64> {
    let (_dir, path) = image();
    let disk = Arc::new(BlockDevice::open_mapped(&path, OpenOptions::default()).unwrap());
    let mut engine = kind.engine(&disk, 2, config)?;
    let range = ByteRange::new(if shape == Shape::Unaligned { 100 } else { 0 }, BLOCK);
    let mut bufs: Vec<PooledBuffer> = (0..DEPTH).map(|_| engine.buffer(range).unwrap()).collect();
    let counted = counted(|count| run(&mut engine, shape, &mut bufs, count));
    let stats = engine.stats();
    let all = WARM_UP + REQUESTS;
    let is_simple = config.simple && config.nowait_first && shape != Shape::Unaligned;
    assert_eq!(stats.simple, if is_simple { all } else { 0 }, "{stats:?}");
    let merges = is_simple && shape == Shape::Neighbours;
    assert_eq!(stats.merged > 0, merges, "{stats:?}");
    Some(counted)
}

/// Allocations of the blocking API.
fn of_blocking(path: &Path, shape: Shape) -> u64 {
    let file = BlockingFile::open(path, OpenOptions::default()).unwrap();
    let mut memory = IoBuffer::zeroed(BLOCK as usize).unwrap();
    counted(|count| {
        for n in 0..count {
            let ByteRange { pos, len } = shape.range(n);
            let memory = &mut memory[..len as usize];
            let done = match n % 2 {
                0 => file.read_at(memory, pos),
                _ => file.write_at(memory, pos, Flags::NONE),
            };
            assert_eq!(done, Ok(len as usize));
        }
    })
}

/// Runs `count` requests, of which `request` makes the futures, with all of `bufs` in flight.
fn run_futures<F>(
    driver: &LocalDriver,
    bufs: &mut [Option<IoBuffer>],
    futures: &mut [Option<F>],
    count: u64,
    request: impl Fn(u64, IoBuffer) -> F,
) where
    F: Future<Output = (Result<usize, Error>, IoBuffer)> + Unpin,
{
    let (mut sent, mut done) = (0, 0);
    driver.block_on(poll_fn(|context| {
        for (place, buf) in futures.iter_mut().zip(bufs.iter_mut()) {
            loop {
                if sent < count
                    && let Some(buf) = buf.take()
                {
                    *place = Some(request(sent, buf));
                    sent += 1;
                }
                let Some(future) = place else { break };
                let Poll::Ready((result, back)) = Pin::new(future).poll(context) else { break };
                assert_eq!(result, Ok(back.len()));
                (*place, *buf) = (None, Some(back));
                done += 1;
            }
        }
        if done == count { Poll::Ready(()) } else { Poll::Pending }
    }));
}

fn of_futures<F>(len: u64, request: impl Fn(u64, IoBuffer) -> F) -> u64
where
    F: Future<Output = (Result<usize, Error>, IoBuffer)> + Unpin,
{
    let driver = LocalDriver::new().unwrap();
    let mut bufs: Vec<_> =
        (0..DEPTH).map(|_| Some(IoBuffer::zeroed(len as usize).unwrap())).collect();
    let mut futures: Vec<Option<F>> = (0..DEPTH).map(|_| None).collect();
    counted(|count| run_futures(&driver, &mut bufs, &mut futures, count, &request))
}

/// Allocations of reads and of writes by the async API of one thread.
fn of_one_thread(path: &Path, kind: TestQueueKind, shape: Shape) -> Option<[u64; 2]> {
    let disk = Arc::new(BlockDevice::open_mapped(path, OpenOptions::default()).unwrap());
    let config = Config::default();
    let queue = kind.queue(config.slots)?;
    let workers = WorkerPool::new(2);
    let file = LocalAsyncFile::with_queue(disk, workers, queue, config).unwrap();
    let (pos, len) = (|n| shape.range(n).pos, shape.range(0).len);
    let reads = of_futures(len, |n, buffer| file.read_at(buffer, pos(n)));
    let writes = of_futures(len, |n, buffer| file.write_at(buffer, pos(n), Flags::NONE));
    Some([reads, writes])
}

/// Allocations of reads by the async API of several threads.
fn of_several_threads(path: &Path, kind: TestQueueKind, shape: Shape) -> Option<u64> {
    let options = OpenOptions::new().cache_holes(true);
    let disk = Arc::new(BlockDevice::open(path, options).unwrap());
    disk.scan();
    let workers = WorkerPool::new(2);
    let config = Config::default();
    kind.queue(config.slots)?;
    let make = move || kind.try_queue(config.slots);
    let file = AsyncFile::with_queue(disk, workers, config, make).unwrap();
    Some(of_futures(shape.range(0).len, |n, buffer| file.read_at(buffer, shape.range(n).pos)))
}

/// Allocations of reads of a file of a shared thread, one at a time: its callers submit them.
fn of_a_shared_thread(path: &Path) -> u64 {
    let file = AsyncFile::open(path, OpenOptions::default()).unwrap();
    let mut buffer = Some(IoBuffer::zeroed(BLOCK as usize).unwrap());
    counted(|count| {
        pollster::block_on(async {
            for n in 0..count {
                let pos = Shape::Aligned.range(n).pos;
                let (read, back) = file.read_at(buffer.take().unwrap(), pos).await;
                assert_eq!(read, Ok(BLOCK as usize));
                buffer = Some(back);
            }
        })
    })
}

#[test]
fn a_request_of_4_kib_allocates_nothing_in_any_api_of_one_thread() {
    let on = Config::default();
    let configs = [
        ("simple", on),
        ("general", Config { simple: false, ..on }),
        ("workers", Config { nowait_first: false, ..on }),
        ("completed by workers", Config { inline_completion: false, ..on }),
    ];
    let (_dir, path) = image();
    for shape in [Shape::Aligned, Shape::Neighbours, Shape::Unaligned] {
        for (name, config) in configs {
            for kind in TestQueueKind::ALL {
                let counted = of_engine(kind, config, shape).unwrap_or(0);
                let varies = name.contains("workers") || shape != Shape::Aligned;
                check(counted, varies, &format!("{kind:?}, {name}, {shape:?}"));
            }
        }
        for kind in TestQueueKind::REAL {
            let label = format!("{kind:?}, {shape:?}");
            for counted in of_one_thread(&path, kind, shape).unwrap_or_default() {
                check(counted, shape != Shape::Aligned, &format!("LocalAsyncFile, {label}"));
            }
            // Messages between the threads are allocated.
            let counted = of_several_threads(&path, kind, shape).unwrap_or_default();
            assert!(counted <= 2 * REQUESTS, "AsyncFile, {label}: {counted}");
        }
        check(of_blocking(&path, shape), false, &format!("BlockingFile, {shape:?}"));
    }
    // The counter works: with the pool off every request allocates its slot.
    let config = Config { pool: false, ..Config::default() };
    assert_eq!(of_engine(TestQueueKind::Null, config, Shape::Aligned), Some(REQUESTS));
    // One that the kernel has refused to its caller costs another one. The library's thread goes on for a while after this.
    let counted = of_a_shared_thread(&path);
    assert!(counted <= 2 * REQUESTS + REQUESTS / 10, "AsyncFile, one request at a time: {counted}");
}
