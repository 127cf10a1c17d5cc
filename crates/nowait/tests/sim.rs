//! Regression tests of errors that simulations have found, each in as few requests as possible.
#![cfg(feature = "sim")]
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nowait::sim::{Fault, Faults, SimDevice, SimOptions, SimQueue, set_yield};
use nowait::{
    Alignment, AllocationCache, BlockDevice, ByteRange, Config, Direct, Flags, IoSegment, Op,
    OpenOptions, Request, SimStorage, SingleDisk, WorkerPool,
};

const BLOCK: u64 = 4096;

thread_local! {
    /// The channels of the work item on this thread: it reports a pause, and waits for the signal
    /// to continue.
    static STOPS: RefCell<Option<(Sender<()>, Receiver<()>)>> = const { RefCell::new(None) };
}

/// A worker's item on a thread of its own, run step by step.
struct Stepped {
    paused: Receiver<()>,
    continues: Sender<()>,
    thread: JoinHandle<()>,
}

impl Stepped {
    /// Starts the item that was queued last, and returns when it pauses: before its first call to
    /// the device or where it waits for another item, or at its end if it leaves its work to
    /// another item.
    fn begin(workers: &WorkerPool) -> Self {
        let item = workers.take_simulated(workers.waiting() - 1).expect("a work item");
        let workers = workers.clone();
        let ((pauses, paused), (continues, go)) = (channel(), channel());
        let thread = thread::spawn(move || {
            STOPS.set(Some((pauses, go)));
            set_yield(Some(|| {
                STOPS.with_borrow(|stops| {
                    let (paused, go) = stops.as_ref().unwrap();
                    // After `finish` both channels are closed, and it runs to its end.
                    let _ = paused.send(()).map(|()| go.recv());
                });
            }));
            workers.run(item);
        });
        let stepped = Self { paused, continues, thread };
        let _ = stepped.paused.recv();
        stepped
    }

    /// Runs to the next pause, after a call to the device or before the next one, or to the end.
    fn step(&self) {
        let _ = self.continues.send(()).map(|()| self.paused.recv());
    }

    fn finish(self) {
        drop((self.paused, self.continues));
        self.thread.join().unwrap();
    }
}

struct Rig {
    device: Arc<SimDevice>,
    workers: WorkerPool,
    engine: SingleDisk<SimQueue, AllocationCache>,
}

impl Rig {
    fn new(options: SimOptions, config: Config) -> Self {
        Self::on(Arc::new(SimDevice::new(options)), OpenOptions::default(), config)
    }

    fn on(device: Arc<SimDevice>, how: OpenOptions, config: Config) -> Self {
        let storage = SimStorage::open(&device, 0, how);
        let disk = Arc::new(
            BlockDevice::raw(Arc::new(storage), OpenOptions::new().cache_holes(true)).unwrap(),
        );
        let workers = WorkerPool::simulated();
        let queue = SimQueue::new(device.clone()).unwrap();
        let engine = SingleDisk::new(disk, workers.clone(), queue, config).unwrap();
        Self { device, workers, engine }
    }

    fn write(&mut self, range: ByteRange, tag: u64) {
        let buf = self.engine.buffer(range).unwrap();
        let io = Request { op: Op::Write, flags: Flags::NONE, range };
        assert!(self.engine.submit(io, buf, tag).is_ok());
    }

    fn poll(&mut self) {
        self.engine.wait(Some(Duration::ZERO), &mut |_, _| {}).unwrap();
    }

    /// Runs all requests to their ends; returns the result of each.
    fn settle(&mut self) -> Vec<(u64, Result<u64, i32>)> {
        let mut ended = Vec::new();
        while self.engine.in_flight() > 0 {
            self.poll();
            while let Some(item) = self.workers.take_simulated(0) {
                self.workers.run(item);
            }
            while let Some(done) = self.engine.next() {
                ended.push((done.tag, done.result().map_err(|error| error.errno())));
            }
        }
        assert_eq!(self.device.take_violations(), Vec::<String>::new());
        ended
    }
}

#[test]
fn a_deferred_overwrite_does_not_hold_the_range_lock_that_the_workers_wait_for() {
    // If the test fails, the engine is not dropped: it would wait forever for the requests in
    // flight.
    let mut rig = ManuallyDrop::new(Rig::new(SimOptions::able(16 * BLOCK), Config::default()));
    rig.write(ByteRange::new(0, 2 * BLOCK), 0);
    rig.settle();
    // Two overwrites are refused: the first goes to a worker, the second is deferred until it ends.
    // A write of less than a block is with a worker before the first.
    rig.device.set_faults(Faults { refusals: u16::MAX, ..Faults::default() });
    rig.write(ByteRange::new(0, BLOCK), 1);
    rig.write(ByteRange::new(BLOCK, BLOCK), 2);
    rig.write(ByteRange::new(100, 100), 3);
    for _ in 0..10 {
        rig.poll();
    }
    assert_eq!((rig.workers.waiting(), rig.engine.stats().deferred), (2, 1));
    set_yield(Some(|| panic!("a worker waits for a request that waits for a worker")));
    let mut ended = rig.settle();
    set_yield(None);
    ended.sort();
    assert_eq!(ended, [(1, Ok(BLOCK)), (2, Ok(BLOCK)), (3, Ok(100))]);
    drop(ManuallyDrop::into_inner(rig));
}

#[test]
fn c07_with_vectored_off_empty_segments_and_segments_past_the_end_are_left_out() {
    let config = Config { vectored: false, ..Config::default() };
    let mut rig = Rig::new(SimOptions::able(2 * BLOCK), config);
    rig.write(ByteRange::new(0, 2 * BLOCK), 0);
    rig.settle();
    let mut memory = vec![7u8; 5 * BLOCK as usize];
    let start = memory.as_ptr().align_offset(BLOCK as usize);
    let base = memory[start..].as_mut_ptr();
    let block = BLOCK as usize;
    let list = [
        IoSegment { base: base.wrapping_add(3), len: 0 },
        IoSegment { base, len: block },
        IoSegment { base: base.wrapping_add(2 * block), len: block },
    ];
    for (tag, op) in [(1, Op::Write), (2, Op::Read)] {
        let range = ByteRange::new(BLOCK, 2 * BLOCK);
        let io = Request { op, flags: Flags::NONE, range };
        // SAFETY: `memory` outlives the request, which ends in `settle`.
        assert!(unsafe { rig.engine.submit_user_memory(io, &list, tag) }.is_ok());
        assert_eq!(rig.settle(), [(tag, Ok(BLOCK))]);
    }
}

#[test]
fn zeros_that_have_to_be_written_fail_with_the_errno_of_the_write() {
    let options =
        SimOptions { capacity: 1, punches: false, zeroes: false, ..SimOptions::able(16 * BLOCK) };
    let mut rig = Rig::new(options, Config::default());
    let range = ByteRange::new(0, 4 * BLOCK);
    let io = Request { op: Op::Zero, flags: Flags::NONE, range };
    assert!(rig.engine.submit_no_data(io, 1).is_ok());
    assert_eq!(rig.settle(), [(1, Err(libc::ENOSPC))]);
}

#[test]
fn c19_a_write_that_runs_out_of_space_returns_its_bytes_or_with_all_or_error_the_error() {
    for (flags, wanted) in [(Flags::NONE, Ok(2 * BLOCK)), (Flags::ALL_OR_ERROR, Err(libc::ENOSPC))]
    {
        let options = SimOptions { capacity: 2, ..SimOptions::able(16 * BLOCK) };
        let mut rig = Rig::new(options, Config::default());
        let range = ByteRange::new(BLOCK, 4 * BLOCK);
        let buf = rig.engine.buffer(range).unwrap();
        assert!(rig.engine.submit(Request { op: Op::Write, flags, range }, buf, 7).is_ok());
        assert_eq!(rig.settle(), [(7, wanted)]);
    }
}

#[test]
fn c19_a_read_that_fails_in_the_middle_returns_its_bytes_but_never_with_all_or_error() {
    let range = ByteRange::new(0, 8 * BLOCK);
    let read = |flags, at| {
        let mut rig = Rig::new(SimOptions::able(16 * BLOCK), Config::default());
        rig.write(range, 1);
        rig.settle();
        let once = Some((rig.device.operations() + at, Fault::Errno(libc::EIO)));
        rig.device.set_faults(Faults { shorts: u16::MAX, once, ..Faults::default() });
        let buf = rig.engine.buffer(range).unwrap();
        assert!(rig.engine.submit(Request { op: Op::Read, flags, range }, buf, 2).is_ok());
        rig.settle().pop().map(|(_, result)| result)
    };
    let is_short = |result| matches!(result, Some(Ok(done)) if done < range.len);
    assert!((1..10).any(|at| is_short(read(Flags::NONE, at))));
    assert!((1..10).all(|at| !is_short(read(Flags::ALL_OR_ERROR, at))));
}

#[test]
fn a_request_whose_call_was_interrupted_is_done_again() {
    let range = ByteRange::new(BLOCK, 4 * BLOCK);
    for op in [Op::Read, Op::Write, Op::Flush, Op::Discard, Op::Zero, Op::Status] {
        for at in 1..4 {
            let mut rig = Rig::new(SimOptions::able(16 * BLOCK), Config::default());
            rig.write(range, 0);
            rig.settle();
            let once = Some((rig.device.operations() + at, Fault::Errno(libc::EINTR)));
            rig.device.set_faults(Faults { once, ..Faults::default() });
            let io = Request { op, flags: Flags::NONE, range };
            let accepted = match op {
                Op::Read | Op::Write => {
                    let buf = rig.engine.buffer(range).unwrap();
                    rig.engine.submit(io, buf, 1)
                }
                _ => rig.engine.submit_no_data(io, 1),
            };
            assert!(accepted.is_ok());
            let len = if op == Op::Flush { 0 } else { range.len };
            assert_eq!(rig.settle(), [(1, Ok(len))], "{op:?} {at}");
        }
    }
}

const THERE: ByteRange = ByteRange::new(BLOCK, BLOCK);

/// A rig whose workers pause before and after each call, with a block of data at `THERE`.
fn rig_that_pauses() -> Rig {
    let mut rig = Rig::new(
        SimOptions { pauses: u16::MAX, ..SimOptions::able(16 * BLOCK) },
        Config::default(),
    );
    rig.write(THERE, 0);
    rig.settle();
    rig
}

/// Submits `op` on that block and polls until a worker has it.
fn submit_to_worker(rig: &mut Rig, op: Op, flags: Flags, tag: u64) {
    let before = rig.workers.waiting();
    let io = Request { op, flags, range: THERE };
    let accepted = match op {
        Op::Write => {
            let mut buf = rig.engine.buffer(THERE).unwrap();
            buf.fill(7);
            rig.engine.submit(io, buf, tag)
        }
        _ => rig.engine.submit_no_data(io, tag),
    };
    assert!(accepted.is_ok());
    while rig.workers.waiting() == before {
        rig.poll();
    }
}

/// The first byte of that block, read without a worker.
fn first_byte(rig: &mut Rig) -> u8 {
    let io = Request { op: Op::Read, flags: Flags::NONE, range: THERE };
    let buf = rig.engine.buffer(THERE).unwrap();
    assert!(rig.engine.submit(io, buf, 99).is_ok());
    loop {
        rig.poll();
        while let Some(done) = rig.engine.next() {
            assert_eq!(done.result().ok(), Some(BLOCK));
            if done.tag == 99 {
                return done.buf.unwrap()[0];
            }
        }
    }
}

#[test]
fn zeroing_and_discarding_keep_writes_away_until_the_allocation_cache_is_right() {
    for op in [Op::Zero, Op::Discard] {
        let mut rig = rig_that_pauses();
        submit_to_worker(&mut rig, op, Flags::NONE, 1);
        let zeroing = Stepped::begin(&rig.workers);
        // The block is a hole, and the allocation cache does not say so yet.
        zeroing.step();
        submit_to_worker(&mut rig, Op::Write, Flags::NONE, 2);
        let writing = Stepped::begin(&rig.workers);
        for _ in 0..10 {
            writing.step();
        }
        rig.poll();
        let early = rig.engine.next().map(|done| done.tag);
        zeroing.finish();
        writing.finish();
        assert_eq!(early, None, "{op:?}");
        assert_eq!(rig.settle().len(), 2);
        assert_eq!(first_byte(&mut rig), 7, "{op:?}");
    }
}

#[test]
fn c18_a_hole_is_not_cached_while_data_is_written_to_it() {
    let mut rig = rig_that_pauses();
    submit_to_worker(&mut rig, Op::Discard, Flags::NONE, 1);
    rig.settle();
    // The write goes to a worker because the block is cached as a hole; the zeroing invalidates
    // that.
    submit_to_worker(&mut rig, Op::Write, Flags::NONE, 2);
    submit_to_worker(&mut rig, Op::Zero, Flags::NO_UNMAP, 3);
    Stepped::begin(&rig.workers).finish();
    submit_to_worker(&mut rig, Op::Status, Flags::NONE, 4);
    let status = Stepped::begin(&rig.workers);
    // It has seen the hole.
    status.step();
    let writing = Stepped::begin(&rig.workers);
    // The data is there, and the allocation cache does not say so yet.
    writing.step();
    let before = first_byte(&mut rig);
    status.finish();
    let after = first_byte(&mut rig);
    writing.finish();
    assert_eq!((before, after), (7, 7));
    rig.settle();
}

#[test]
fn c18_a_hole_is_invalidated_before_data_is_written_to_it() {
    let mut rig = rig_that_pauses();
    submit_to_worker(&mut rig, Op::Discard, Flags::NONE, 1);
    rig.settle();
    // The write goes to a worker because the block is cached as a hole.
    submit_to_worker(&mut rig, Op::Write, Flags::NONE, 2);
    let writing = Stepped::begin(&rig.workers);
    // The data is there, and a read that was in flight before the hole was cached finds it. A read
    // that begins after that one has ended must not be served from the cached hole.
    writing.step();
    assert_eq!(first_byte(&mut rig), 7);
    writing.finish();
    rig.settle();
}

/// Makes the next flush fail once with `ENOSPC`.
fn lose(rig: &Rig) {
    let once = Some((rig.device.operations() + 1, Fault::Errno(libc::ENOSPC)));
    rig.device.set_faults(Faults { once, ..Faults::default() });
}

#[test]
fn c51_no_flush_succeeds_while_a_failed_one_has_not_yet_returned() {
    let mut rig = rig_that_pauses();
    submit_to_worker(&mut rig, Op::Flush, Flags::NONE, 1);
    let first = Stepped::begin(&rig.workers);
    lose(&rig);
    // The device has lost data, and the first flush has not returned yet.
    first.step();
    submit_to_worker(&mut rig, Op::Flush, Flags::NONE, 2);
    let second = Stepped::begin(&rig.workers);
    // The zeroing with DSYNC needs a flush too.
    submit_to_worker(&mut rig, Op::Zero, Flags::DSYNC, 3);
    let third = Stepped::begin(&rig.workers);
    for _ in 0..10 {
        second.step();
        third.step();
    }
    rig.poll();
    let early = rig.engine.next().map(|done| done.tag);
    first.finish();
    second.finish();
    third.finish();
    let mut ended = rig.settle();
    ended.sort();
    assert_eq!(early, None);
    assert_eq!(ended, [(1, Err(libc::ENOSPC)), (2, Err(libc::EIO)), (3, Err(libc::EIO))]);
}

#[test]
fn c28_a_durable_write_through_the_page_cache_is_durable_by_a_flush() {
    let options = SimOptions { align: Alignment::NONE, ..SimOptions::able(16 * BLOCK) };
    let device = Arc::new(SimDevice::new(options));
    let through = OpenOptions::new().direct(Direct::Off);
    let mut rig = Rig::on(device, through, Config::default());
    rig.write(THERE, 0);
    rig.settle();
    let buf = rig.engine.buffer(THERE).unwrap();
    let io = Request { op: Op::Write, flags: Flags::DSYNC, range: THERE };
    assert!(rig.engine.submit(io, buf, 1).is_ok());
    // The data is there, and a worker has to make it durable.
    for _ in 0..1000 {
        rig.poll();
    }
    assert_eq!((rig.workers.waiting(), rig.engine.next().map(|done| done.tag)), (1, None));
    lose(&rig);
    assert_eq!(rig.settle(), [(1, Err(libc::ENOSPC))]);
    let nowhere = Request { op: Op::Flush, flags: Flags::NONE, range: ByteRange::new(0, 0) };
    assert!(rig.engine.submit_no_data(nowhere, 2).is_ok());
    assert_eq!(rig.settle(), [(2, Err(libc::EIO))]);
}

#[test]
fn c49_flushes_submitted_while_one_runs_share_the_next_sync_and_hold_no_worker() {
    let mut rig = rig_that_pauses();
    submit_to_worker(&mut rig, Op::Flush, Flags::NONE, 1);
    let first = Stepped::begin(&rig.workers);
    let before = rig.device.operations();
    for tag in 2..6 {
        submit_to_worker(&mut rig, Op::Flush, Flags::NONE, tag);
        // The item has ended although the first one has not: it does not wait for it.
        rig.workers.run(rig.workers.take_simulated(0).unwrap());
    }
    rig.poll();
    assert!(rig.engine.next().is_none());
    first.finish();
    let mut ended = rig.settle();
    ended.sort();
    assert_eq!(ended, [1, 2, 3, 4, 5].map(|tag| (tag, Ok(0))));
    assert_eq!(rig.device.operations() - before, 2);
}

/// Submits five durable writes of one block each together, to mapped blocks of a device, and returns
/// how many of them wait for a sync of their own when their data is there.
fn durable_writes_at_once(rig: &mut Rig) -> usize {
    rig.write(ByteRange::new(0, 5 * BLOCK), 0);
    rig.settle();
    for tag in 0..5 {
        let range = ByteRange::new(tag * BLOCK, BLOCK);
        let mut buf = rig.engine.buffer(range).unwrap();
        buf.fill(7);
        let io = Request { op: Op::Write, flags: Flags::DSYNC, range };
        assert!(rig.engine.submit(io, buf, tag).is_ok());
    }
    for _ in 0..1000 {
        rig.poll();
    }
    rig.workers.waiting()
}

/// Cuts the power, and asserts that the five writes are still there.
fn assert_durable(rig: &Rig) {
    assert!(rig.device.cut_power().is_empty());
    let mut bytes = vec![0; 5 * BLOCK as usize];
    rig.device.peek(0, 0, &mut bytes);
    assert!(bytes.iter().all(|&byte| byte == 7));
}

#[test]
fn c29_durable_writes_in_flight_at_once_share_a_sync_where_the_storage_shares_none() {
    let options =
        SimOptions { shares_syncs: false, pauses: u16::MAX, ..SimOptions::able(16 * BLOCK) };
    let mut rig = Rig::new(options, Config::default());
    // The first one was alone when it was submitted, and is durable by its transfer.
    assert_eq!(durable_writes_at_once(&mut rig), 4);
    let first = Stepped::begin(&rig.workers);
    let before = rig.device.operations();
    while let Some(item) = rig.workers.take_simulated(0) {
        // The item has ended although the first one has not: it leaves its sync to it.
        rig.workers.run(item);
    }
    first.finish();
    let mut ended = rig.settle();
    ended.sort();
    assert_eq!(ended, [0, 1, 2, 3, 4].map(|tag| (tag, Ok(BLOCK))));
    assert_eq!(rig.device.operations() - before, 2, "syncs for four writes");
    assert_durable(&rig);
    rig.device.power_on();
    // All of them have ended, so the next one is alone again.
    let range = ByteRange::new(0, BLOCK);
    let buf = rig.engine.buffer(range).unwrap();
    let io = Request { op: Op::Write, flags: Flags::DSYNC, range };
    let before = rig.device.operations();
    assert!(rig.engine.submit(io, buf, 5).is_ok());
    assert_eq!(rig.settle(), [(5, Ok(BLOCK))]);
    assert_eq!(rig.device.operations() - before, 1, "one transfer and no sync");
}

#[test]
fn c29_durable_writes_are_synced_by_their_transfers_where_the_storage_shares_syncs() {
    for (shares_syncs, group_syncs) in [(true, true), (false, false)] {
        let options = SimOptions { shares_syncs, ..SimOptions::able(16 * BLOCK) };
        let mut rig = Rig::new(options, Config { group_syncs, ..Config::default() });
        assert_eq!(durable_writes_at_once(&mut rig), 0, "no write waits for a worker");
        let mut ended = rig.settle();
        ended.sort();
        assert_eq!(ended, [0, 1, 2, 3, 4].map(|tag| (tag, Ok(BLOCK))));
        assert_durable(&rig);
    }
}

#[test]
fn flushes_that_wait_for_a_silent_device_end_when_it_answers_or_loses_power() {
    for power_fails in [false, true] {
        let mut rig = rig_that_pauses();
        rig.device.fall_silent();
        let mut begun = Vec::new();
        for (tag, op, flags) in
            [(1, Op::Flush, Flags::NONE), (2, Op::Flush, Flags::NONE), (3, Op::Zero, Flags::DSYNC)]
        {
            submit_to_worker(&mut rig, op, flags, tag);
            begun.push(Stepped::begin(&rig.workers));
        }
        begun.iter().for_each(Stepped::step);
        if power_fails {
            let _ = rig.device.cut_power();
        } else {
            rig.device.answer();
        }
        begun.into_iter().for_each(Stepped::finish);
        let mut ended = rig.settle();
        ended.sort();
        let result = |good| if power_fails { Err(libc::EIO) } else { Ok(good) };
        assert_eq!(ended, [(1, result(0)), (2, result(0)), (3, result(BLOCK))]);
    }
}

/// A device with room for a few blocks more than the writes need: what is allocated ahead leaves
/// none for a write elsewhere, until it is given back.
#[test]
fn c19_a_write_finds_the_space_that_was_allocated_ahead() {
    const WRITTEN: u64 = 64;
    let options = SimOptions { capacity: WRITTEN + 5, ..SimOptions::able(256 * BLOCK) };
    let mut rig = Rig::new(options, Config::default());
    rig.engine.disk().scan();
    let mut failed = Vec::new();
    for block in (0..WRITTEN).chain(200..205) {
        rig.write(ByteRange::new(block * BLOCK, BLOCK), block);
        failed.extend(rig.settle().into_iter().filter(|(_, result)| result.is_err()));
    }
    assert_eq!(failed, []);
    assert!(rig.engine.stats().worker < WRITTEN, "{:?}", rig.engine.stats());
    rig.write(ByteRange::new(230 * BLOCK, BLOCK), 9);
    assert_eq!(rig.settle(), [(9, Err(libc::ENOSPC))]);
}
