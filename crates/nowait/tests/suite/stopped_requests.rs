//! Requests that are cancelled or late, on each queue: each completes once, and no memory is freed early (C84).
#![allow(unsafe_code)]

use std::future::Future;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::pin;
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use nowait::{
    AsyncFile, AsyncTransfers, BlockDevice, ByteRange, Config, Engine, Error, Flags, IoBuffer,
    LinearMap, LocalAsyncFile, LocalDriver, Op, OpenOptions, PendingTransfer, QueueKind, Request,
    Storage, StorageProperties, WorkerPool,
};
use nowait_testkit::{TestQueueKind, WaitForRequests};
use std::io::{IoSlice, IoSliceMut, Write};

const BLOCK: usize = 4096;

/// Whether calls to a storage return.
#[derive(Default)]
struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
    /// Calls that have begun.
    begun: std::sync::atomic::AtomicUsize,
    /// The bytes of each write, as its memory was when the gate had opened.
    written: Mutex<Vec<Vec<u8>>>,
    /// Transfers of a storage that makes them itself.
    transfers: Option<Arc<HeldTransfers>>,
}

/// Transfers that a storage has begun, as they were handed to it.
#[derive(Default)]
struct HeldTransfers(Mutex<Vec<Vec<PendingTransfer>>>);

impl AsyncTransfers for HeldTransfers {
    fn begin(&self, transfers: &mut Vec<PendingTransfer>) {
        self.0.lock().unwrap().push(std::mem::take(transfers));
    }
}

impl Gate {
    fn pass(&self) {
        self.begun.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        let mut is_open = self.is_open.lock().unwrap();
        while !*is_open {
            is_open = self.opened.wait(is_open).unwrap();
        }
    }

    fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }

    fn begun(&self) -> usize {
        self.begun.load(std::sync::atomic::Ordering::SeqCst)
    }
}

/// A disk of ones whose calls wait at a gate, and whose transfers workers make.
struct Gated(Arc<Gate>);

impl Storage for Gated {
    fn properties(&self) -> StorageProperties {
        StorageProperties::new(nowait::Alignment::NONE)
    }

    fn size(&self) -> Result<u64, Error> {
        Ok(1 << 20)
    }

    fn read(&self, bufs: &mut [IoSliceMut<'_>], _pos: u64) -> Result<usize, Error> {
        self.0.pass();
        bufs.iter_mut().for_each(|buf| buf.fill(1));
        Ok(bufs.iter().map(|buf| buf.len()).sum())
    }

    fn write(&self, bufs: &[IoSlice<'_>], _pos: u64, _flags: Flags) -> Result<usize, Error> {
        self.0.pass();
        let bytes: Vec<u8> = bufs.iter().flat_map(|buf| buf.iter().copied()).collect();
        let len = bytes.len();
        self.0.written.lock().unwrap().push(bytes);
        Ok(len)
    }

    fn sync(&self) -> Result<(), Error> {
        Ok(())
    }

    fn transfers(&self) -> Option<Arc<dyn AsyncTransfers>> {
        let held = self.0.transfers.clone()?;
        Some(held)
    }
}

fn gated(gate: &Arc<Gate>) -> Arc<BlockDevice<LinearMap>> {
    let storage: Arc<dyn Storage> = Arc::new(Gated(gate.clone()));
    Arc::new(BlockDevice::mapped(storage, Vec::new(), 1 << 20, false, LinearMap))
}

fn io(op: Op, n: u64) -> Request {
    Request { op, flags: Flags::NONE, range: ByteRange::new(2 * n * BLOCK as u64, BLOCK as u64) }
}

fn file_of_ones() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    std::fs::write(file.path(), vec![1; 1 << 20]).unwrap();
    file
}

/// The worker has one thread, which hangs at the gate: the requests behind it have not begun.
#[test]
fn c84_requests_that_wait_for_a_worker_end_when_they_are_cancelled_or_late() {
    let config = Config { slots: 64, nowait_first: false, merge: false, ..Config::default() };
    let gate = Arc::new(Gate::default());
    let queue = TestQueueKind::Null.queue(config.slots).unwrap();
    let mut engine = Engine::new(queue, WorkerPool::new(1), config).unwrap();
    let disk = engine.attach(gated(&gate)).unwrap();
    for n in 0..8 {
        let op = if n % 2 == 0 { Op::Write } else { Op::Read };
        let buf = engine.buffer(&disk, io(op, n).range).unwrap();
        assert!(engine.submit(&disk, io(op, n), buf, n).is_ok());
    }
    engine.poll().unwrap();
    nowait_testkit::wait_until("the first one has begun", || gate.begun() == 1);
    assert_eq!(engine.cancel(&disk, 3), 1);
    assert_eq!(engine.cancel(&disk, 99), 0);
    let deadline = Instant::now() + Duration::from_millis(1);
    assert_eq!(engine.set_deadline(&disk, 5, deadline + Duration::from_secs(3600)), 1);
    assert_eq!(engine.set_deadline(&disk, 5, deadline), 1, "it replaces the first one");
    assert_eq!(engine.set_deadline(&disk, 6, deadline + Duration::from_secs(3600)), 1);
    // The first one has begun: it ends with its result.
    assert_eq!(engine.cancel(&disk, 0), 1);
    while Instant::now() <= deadline {
        engine.wait(None, &mut |_, _| {}).unwrap();
    }
    engine.poll().unwrap();
    // The worker hangs at the first one: those that are stopped do not wait for it.
    let stopped: Vec<_> = std::iter::from_fn(|| engine.next()).collect();
    assert_eq!(stopped.len(), 2);
    gate.open();
    let mut results: Vec<_> = engine
        .finish()
        .into_iter()
        .chain(stopped)
        .map(|done| (done.tag, done.result().map_err(|it| it.errno())))
        .collect();
    results.sort_unstable();
    let expected = (0..8).map(|n| match n {
        3 => (n, Err(libc::ECANCELED)),
        5 => (n, Err(libc::ETIMEDOUT)),
        _ => (n, Ok(BLOCK as u64)),
    });
    assert_eq!(results, expected.collect::<Vec<_>>());
    assert_eq!(gate.begun(), 6, "two were not done");
}

#[test]
fn c84_a_request_that_the_device_has_completes_once_with_its_result_or_as_cancelled() {
    let file = file_of_ones();
    for kind in TestQueueKind::REAL {
        let config = Config { slots: 64, ..Config::default() };
        let Some(queue) = kind.queue(config.slots) else { continue };
        let disk = BlockDevice::open(file.path(), OpenOptions::new()).unwrap();
        let mut engine = Engine::new(queue, WorkerPool::new(2), config).unwrap();
        let disk = engine.attach(Arc::new(disk)).unwrap();
        for round in 0..50 {
            for n in 0..16 {
                let op = if n % 4 == 0 { Op::Write } else { Op::Read };
                let mut buf = engine.buffer(&disk, io(op, n).range).unwrap();
                buf.fill(1);
                assert!(engine.submit(&disk, io(op, n), buf, n).is_ok(), "{kind:?}");
            }
            if round % 2 == 0 {
                engine.poll().unwrap();
            }
            for n in 0..16 {
                match n % 3 {
                    0 => assert!(engine.cancel(&disk, n) <= 1),
                    1 => assert!(engine.set_deadline(&disk, n, Instant::now()) <= 1),
                    _ => {}
                }
            }
            let mut tags: Vec<_> = Vec::new();
            for done in engine.finish() {
                let errno = done.result().map_err(|error| error.errno());
                let expected = [Ok(BLOCK as u64), Err(libc::ECANCELED), Err(libc::ETIMEDOUT)];
                assert!(expected.contains(&errno), "{kind:?} {errno:?}");
                assert!(done.tag % 3 != 2 || errno == expected[0], "{kind:?}: not stopped");
                if done.io.op == Op::Read && errno.is_ok() {
                    assert!(done.buf.expect("its buffer")[..BLOCK].iter().all(|byte| *byte == 1));
                }
                tags.push(done.tag);
            }
            tags.sort_unstable();
            assert!(tags.into_iter().eq(0..16), "{kind:?}");
        }
    }
}

/// A future's time is over although the device does not answer; the memory is used later.
#[test]
fn c84_a_future_whose_time_is_over_ends_and_its_request_goes_on() {
    let config = Config { slots: 64, nowait_first: false, ..Config::default() };
    let driver = LocalDriver::new().unwrap();
    for local in [true, false] {
        let gate = Arc::new(Gate::default());
        let (disk, workers) = (gated(&gate), WorkerPool::new(2));
        let time = Duration::from_millis(2);
        let buffer = || IoBuffer::zeroed(BLOCK).unwrap();
        let data = || {
            let mut data = buffer();
            data.fill(0xab);
            data
        };
        // Memory that was freed would be used by one of these.
        let reuse = || {
            (0..64).for_each(|_| buffer().fill(0xee));
        };
        let late = |(done, buffer): (Result<usize, Error>, IoBuffer)| {
            assert_eq!(done.map_err(|error| error.errno()), Err(libc::ETIMEDOUT), "{local}");
            assert!(buffer.is_empty(), "the engine has it");
        };
        if local {
            let queue = TestQueueKind::Null.queue(config.slots).unwrap();
            let file = LocalAsyncFile::with_queue(disk, workers, queue, config).unwrap();
            let timed = file.clone().with_timeout(time);
            late(driver.block_on(timed.write_at(data(), 0, Flags::NONE)));
            late(driver.block_on(timed.read_at(buffer(), 0)));
            reuse();
            gate.open();
            assert_eq!(driver.block_on(file.read_at(buffer(), 0)).0, Ok(BLOCK));
            let long = file.with_timeout(Duration::from_secs(3600));
            assert_eq!(driver.block_on(long.read_at(buffer(), 0)).0, Ok(BLOCK));
        } else {
            let make = move || TestQueueKind::Null.try_queue(config.slots);
            let file = AsyncFile::with_queue(disk, workers, config, make).unwrap();
            let timed = file.clone().with_timeout(time);
            late(driver.block_on(timed.write_at(data(), 0, Flags::NONE)));
            late(driver.block_on(timed.read_at(buffer(), 0)));
            reuse();
            gate.open();
            assert_eq!(driver.block_on(file.read_at(buffer(), 0)).0, Ok(BLOCK));
            let long = file.with_timeout(Duration::MAX);
            assert_eq!(driver.block_on(long.read_at(buffer(), 0)).0, Ok(BLOCK));
        }
        nowait_testkit::wait_until("the late ones are done", || gate.begun() >= 4);
        nowait_testkit::wait_until("the write is made", || {
            !gate.written.lock().unwrap().is_empty()
        });
        assert!(*gate.written.lock().unwrap() == [[0xab; BLOCK]], "{local}: its memory was freed");
    }
}

#[test]
fn c84_a_future_that_is_dropped_frees_its_memory_only_when_the_request_has_ended() {
    let config = Config { slots: 64, nowait_first: false, ..Config::default() };
    let gate = Arc::new(Gate::default());
    let make = move || TestQueueKind::Null.try_queue(config.slots);
    let file = AsyncFile::with_queue(gated(&gate), WorkerPool::new(2), config, make).unwrap();
    {
        let mut read = pin!(file.read_at(IoBuffer::zeroed(BLOCK).unwrap(), 0));
        let mut context = Context::from_waker(Waker::noop());
        assert!(matches!(read.as_mut().poll(&mut context), Poll::Pending));
        nowait_testkit::wait_until("it has begun", || gate.begun() == 1);
    }
    // The worker still writes to the memory of the read; a freed one is found by the sanitizers.
    gate.open();
    let driver = LocalDriver::new().unwrap();
    assert_eq!(driver.block_on(file.read_at(IoBuffer::zeroed(BLOCK).unwrap(), 0)).0, Ok(BLOCK));
}

/// The errno of each request, or its bytes, by tag.
fn results(done: Vec<nowait::Completion>) -> Vec<(u64, Result<u64, i32>)> {
    let errno = |done: &nowait::Completion| done.result().map_err(|error| error.errno());
    let mut results: Vec<_> = done.iter().map(|done| (done.tag, errno(done))).collect();
    results.sort_unstable();
    results
}

#[test]
fn c89_requests_that_were_not_submitted_never_reach_the_file_when_they_are_cancelled() {
    for kind in TestQueueKind::REAL {
        for merge in [true, false] {
            let file = file_of_ones();
            let config = Config { slots: 64, merge, ..Config::default() };
            let Some(queue) = kind.queue(config.slots) else { continue };
            let disk = BlockDevice::open(file.path(), OpenOptions::new()).unwrap();
            let mut engine = Engine::new(queue, WorkerPool::new(2), config).unwrap();
            let disk = engine.attach(Arc::new(disk)).unwrap();
            // Transfers before, whose entries in the ring are used again.
            for tag in 0..16 {
                let buf = engine.buffer(&disk, io(Op::Read, tag).range).unwrap();
                assert!(engine.submit(&disk, io(Op::Read, tag), buf, tag).is_ok());
            }
            assert_eq!(engine.finish().len(), 16);
            // Neighbours, others, and parts of blocks.
            let ranges = (0..16).map(|n| match n {
                0..6 => ByteRange::new(n * BLOCK as u64, BLOCK as u64),
                6..12 => ByteRange::new((20 + 2 * n) * BLOCK as u64, BLOCK as u64),
                12..14 => ByteRange::new((60 + 4 * n) * BLOCK as u64, 3 * BLOCK as u64),
                _ => ByteRange::new((60 + 4 * n) * BLOCK as u64 + 100, 2 * BLOCK as u64),
            });
            for (tag, range) in (0..16).zip(ranges.clone()) {
                let io = Request { op: Op::Write, flags: Flags::NONE, range };
                let mut buf = engine.buffer(&disk, range).unwrap();
                buf.fill(2);
                assert!(engine.submit(&disk, io, buf, tag).is_ok(), "{kind:?}");
            }
            let is_cancelled = |tag: u64| tag % 3 == 1 || tag == 14;
            for tag in (0..16).filter(|&tag| is_cancelled(tag)) {
                assert_eq!(engine.cancel(&disk, tag), 1);
            }
            let expected =
                (0..16).zip(ranges.clone()).map(|(tag, range)| match is_cancelled(tag) {
                    true => (tag, Err(libc::ECANCELED)),
                    false => (tag, Ok(range.len)),
                });
            assert!(expected.eq(results(engine.finish())), "{kind:?} {merge}");
            let bytes = std::fs::read(file.path()).unwrap();
            for (tag, range) in (0..16).zip(ranges) {
                let written = &bytes[range.pos as usize..range.end() as usize];
                let wanted = if is_cancelled(tag) { 1 } else { 2 };
                assert!(written.iter().all(|&byte| byte == wanted), "{kind:?} {merge} {tag}");
            }
        }
    }
}

/// A storage that ends its transfers itself gets none that was cancelled before, and no empty list.
#[test]
fn c89_transfers_that_a_storage_has_not_begun_end_when_they_are_cancelled() {
    for kind in [QueueKind::Uring, QueueKind::Threads] {
        let config = Config { slots: 64, ..Config::default() };
        let Ok(queue) = kind.open(config.slots) else {
            nowait_testkit::skip("no io_uring");
            continue;
        };
        let held = Arc::new(HeldTransfers::default());
        let gate = Arc::new(Gate { transfers: Some(held.clone()), ..Gate::default() });
        let mut engine = Engine::new(queue, WorkerPool::new(1), config).unwrap();
        let disk = engine.attach(gated(&gate)).unwrap();
        for (tags, cancelled) in [(0..4, 0..4), (4..8, 5..6)] {
            for tag in tags {
                let buf = engine.buffer(&disk, io(Op::Read, tag).range).unwrap();
                assert!(engine.submit(&disk, io(Op::Read, tag), buf, tag).is_ok());
            }
            for tag in cancelled.clone() {
                assert_eq!(engine.cancel(&disk, tag), 1, "{kind:?}");
            }
            let mut ended = Vec::new();
            while ended.len() < cancelled.clone().count() {
                engine.wait(Some(Duration::from_secs(1)), &mut |_, _| {}).unwrap();
                ended.extend(std::iter::from_fn(|| engine.next()));
            }
            let expected = cancelled.map(|tag| (tag, Err(libc::ECANCELED)));
            assert!(expected.eq(results(ended)), "{kind:?}");
        }
        let lists = || held.0.lock().unwrap().iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(lists(), [3], "{kind:?}");
        // The storage has this one: it ends with its result.
        assert_eq!(engine.cancel(&disk, 6), 1);
        engine.poll().unwrap();
        assert!(engine.next().is_none() && lists() == [3], "{kind:?}");
        let begun = std::mem::take(&mut *held.0.lock().unwrap());
        begun.into_iter().flatten().for_each(|transfer| transfer.complete(&[1; BLOCK]));
        let expected = [4, 6, 7].map(|tag| (tag, Ok(BLOCK as u64)));
        assert_eq!(results(engine.finish()), expected, "{kind:?}");
    }
}

/// A disk behind a pipe, which a read waits for.
struct Piped(std::io::PipeReader);

impl Storage for Piped {
    fn properties(&self) -> StorageProperties {
        StorageProperties::new(nowait::Alignment::NONE)
    }

    fn size(&self) -> Result<u64, Error> {
        Ok(1 << 20)
    }

    fn read(&self, _bufs: &mut [IoSliceMut<'_>], _pos: u64) -> Result<usize, Error> {
        Err(Error::new(libc::ENXIO, nowait::Operation::Read))
    }

    fn write(&self, _bufs: &[IoSlice<'_>], _pos: u64, _flags: Flags) -> Result<usize, Error> {
        Err(Error::new(libc::EROFS, nowait::Operation::Write))
    }

    fn sync(&self) -> Result<(), Error> {
        Ok(())
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }
}

#[test]
fn c89_a_request_that_waits_in_the_kernel_is_cancelled_there() {
    let config = Config { slots: 64, ..Config::default() };
    let Some(queue) = TestQueueKind::Uring.queue(config.slots) else { return };
    let (reader, mut writer) = std::io::pipe().unwrap();
    let storage: Arc<dyn Storage> = Arc::new(Piped(reader));
    let disk = BlockDevice::mapped(storage, Vec::new(), 1 << 20, true, LinearMap);
    let mut engine = Engine::new(queue, WorkerPool::new(1), config).unwrap();
    let disk = engine.attach(Arc::new(disk)).unwrap();
    for tag in 0..4 {
        let buf = engine.buffer(&disk, io(Op::Read, tag).range).unwrap();
        assert!(engine.submit(&disk, io(Op::Read, tag), buf, tag).is_ok());
    }
    engine.poll().unwrap();
    assert!(engine.next().is_none());
    assert_eq!(engine.cancel(&disk, 1), 1);
    assert_eq!(engine.set_deadline(&disk, 2, Instant::now()), 1);
    let mut ended = Vec::new();
    while ended.len() < 2 {
        engine.wait(Some(Duration::from_secs(1)), &mut |_, _| {}).unwrap();
        ended.extend(std::iter::from_fn(|| engine.next()));
    }
    assert!(ended.iter().all(|done| done.buf.is_some()), "their memory is given back");
    assert_eq!(results(ended), [(1, Err(libc::ECANCELED)), (2, Err(libc::ETIMEDOUT))]);
    // The others are still served, the first one first, and no byte went to those that are gone.
    for tag in [0, 3] {
        writer.write_all(&[tag + 7; BLOCK]).unwrap();
    }
    let done = engine.finish();
    assert!(done.iter().all(|done| {
        let bytes = &done.buf.as_ref().expect("its buffer")[..BLOCK];
        bytes.iter().all(|&byte| byte == 7 || byte == 10)
    }));
    assert_eq!(results(done), [(0, Ok(BLOCK as u64)), (3, Ok(BLOCK as u64))]);
}
