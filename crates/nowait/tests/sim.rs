//! What simulations have found, each told once more in as few requests as it takes.
#![cfg(feature = "sim")]
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nowait::sim::{Fault, Faults, Sim, SimDevice, SimOptions, set_pause};
use nowait::{
    Alignment, Config, Direct, Disk, Engine, Extents, Flags, Io, Op, OpenOptions, Range, Segment,
    Storage, Workers,
};

const BLOCK: u64 = 4096;

thread_local! {
    /// Where a job on this thread tells that it has paused, and is told to go on.
    static STOPS: RefCell<Option<(Sender<()>, Receiver<()>)>> = const { RefCell::new(None) };
}

/// A worker's job on a thread of its own, which goes on when it is told to.
struct Stepped {
    paused: Receiver<()>,
    goes_on: Sender<()>,
    thread: JoinHandle<()>,
}

impl Stepped {
    /// The youngest job that waits, before its first call to the device, or where it waits for
    /// others; at its end, if it leaves what it is to do to another job.
    fn begin(workers: &Workers) -> Self {
        let job = workers.take(workers.waiting() - 1).expect("a job");
        let workers = workers.clone();
        let ((pauses, paused), (goes_on, go)) = (channel(), channel());
        let thread = thread::spawn(move || {
            STOPS.set(Some((pauses, go)));
            set_pause(Some(|| {
                STOPS.with_borrow(|stops| {
                    let (paused, go) = stops.as_ref().unwrap();
                    // When nobody asks any more, it runs to its end.
                    let _ = paused.send(()).map(|()| go.recv());
                });
            }));
            workers.run(job);
        });
        let job = Self { paused, goes_on, thread };
        let _ = job.paused.recv();
        job
    }

    /// Up to its next pause, behind a call to the device or before the next, or to its end.
    fn step(&self) {
        let _ = self.goes_on.send(()).map(|()| self.paused.recv());
    }

    fn finish(self) {
        drop((self.paused, self.goes_on));
        self.thread.join().unwrap();
    }
}

struct Rig {
    device: Arc<SimDevice>,
    workers: Workers,
    engine: Engine<Sim, Extents>,
}

impl Rig {
    fn new(options: SimOptions, config: Config) -> Self {
        Self::on(Arc::new(SimDevice::new(options)), OpenOptions::default(), config)
    }

    fn on(device: Arc<SimDevice>, how: OpenOptions, config: Config) -> Self {
        let storage = Storage::simulated(&device, how).unwrap();
        let map = Extents::new(storage.size(), true);
        let disk = Arc::new(Disk::mapped(storage, Vec::new(), device.bytes(), false, map));
        let workers = Workers::simulated(&disk);
        let queue = Sim::new(device.clone()).unwrap();
        let engine = Engine::new(disk, workers.clone(), queue, config).unwrap();
        Self { device, workers, engine }
    }

    fn write(&mut self, range: Range, tag: u64) {
        let buf = self.engine.buffer(range).unwrap();
        let io = Io { op: Op::Write, flags: Flags::NONE, range };
        assert!(self.engine.submit(io, buf, tag).is_ok());
    }

    fn poll(&mut self) {
        self.engine.wait(Some(Duration::ZERO), &mut |_, _| {}).unwrap();
    }

    /// Runs everything to its end; what each request came to.
    fn settle(&mut self) -> Vec<(u64, Result<u64, i32>)> {
        let mut ended = Vec::new();
        while self.engine.in_flight() > 0 {
            self.poll();
            while let Some(job) = self.workers.take(0) {
                self.workers.run(job);
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
fn an_overwrite_that_waits_for_a_worker_does_not_keep_the_range_that_the_workers_wait_for() {
    // An engine that is dropped waits for what is in flight, also when that never ends.
    let mut rig = ManuallyDrop::new(Rig::new(SimOptions::able(16 * BLOCK), Config::default()));
    rig.write(Range::new(0, 2 * BLOCK), 0);
    rig.settle();
    // Two overwrites are refused: the first goes to a worker, the second waits for it. A write of
    // less than a block was there before the first.
    rig.device.set_faults(Faults { refusals: u16::MAX, ..Faults::default() });
    rig.write(Range::new(0, BLOCK), 1);
    rig.write(Range::new(BLOCK, BLOCK), 2);
    rig.write(Range::new(100, 100), 3);
    for _ in 0..10 {
        rig.poll();
    }
    assert_eq!((rig.workers.waiting(), rig.engine.stats().parked), (2, 1));
    set_pause(Some(|| panic!("a worker waits for what waits for a worker")));
    let mut ended = rig.settle();
    set_pause(None);
    ended.sort();
    assert_eq!(ended, [(1, Ok(BLOCK)), (2, Ok(BLOCK)), (3, Ok(100))]);
    drop(ManuallyDrop::into_inner(rig));
}

#[test]
fn c07_with_vectored_off_empty_segments_and_those_behind_the_end_are_left_out() {
    let config = Config { vectored: false, ..Config::default() };
    let mut rig = Rig::new(SimOptions::able(2 * BLOCK), config);
    rig.write(Range::new(0, 2 * BLOCK), 0);
    rig.settle();
    let mut memory = vec![7u8; 5 * BLOCK as usize];
    let start = memory.as_ptr().align_offset(BLOCK as usize);
    let base = memory[start..].as_mut_ptr();
    let block = BLOCK as usize;
    let list = [
        Segment { base: base.wrapping_add(3), len: 0 },
        Segment { base, len: block },
        Segment { base: base.wrapping_add(2 * block), len: block },
    ];
    for (tag, op) in [(1, Op::Write), (2, Op::Read)] {
        let range = Range::new(BLOCK, 2 * BLOCK);
        let io = Io { op, flags: Flags::NONE, range };
        // SAFETY: `memory` outlives the request, which ends in `settle`.
        assert!(unsafe { rig.engine.submit_segments(io, &list, tag) }.is_ok());
        assert_eq!(rig.settle(), [(tag, Ok(BLOCK))]);
    }
}

#[test]
fn zeros_that_have_to_be_written_fail_with_what_the_write_said() {
    let options =
        SimOptions { capacity: 1, punches: false, zeroes: false, ..SimOptions::able(16 * BLOCK) };
    let mut rig = Rig::new(options, Config::default());
    let range = Range::new(0, 4 * BLOCK);
    let io = Io { op: Op::Zero, flags: Flags::NONE, range };
    assert!(rig.engine.submit_bare(io, 1).is_ok());
    assert_eq!(rig.settle(), [(1, Err(libc::ENOSPC))]);
}

#[test]
fn c19_a_write_that_runs_out_of_space_gives_its_bytes_or_as_a_whole_the_error() {
    for (flags, wanted) in [(Flags::NONE, Ok(2 * BLOCK)), (Flags::WHOLE, Err(libc::ENOSPC))] {
        let options = SimOptions { capacity: 2, ..SimOptions::able(16 * BLOCK) };
        let mut rig = Rig::new(options, Config::default());
        let range = Range::new(BLOCK, 4 * BLOCK);
        let buf = rig.engine.buffer(range).unwrap();
        assert!(rig.engine.submit(Io { op: Op::Write, flags, range }, buf, 7).is_ok());
        assert_eq!(rig.settle(), [(7, wanted)]);
    }
}

#[test]
fn c19_a_read_that_fails_in_the_middle_gives_its_bytes_but_never_as_a_whole() {
    let range = Range::new(0, 8 * BLOCK);
    let read = |flags, at| {
        let mut rig = Rig::new(SimOptions::able(16 * BLOCK), Config::default());
        rig.write(range, 1);
        rig.settle();
        let once = Some((rig.device.operations() + at, Fault::Errno(libc::EIO)));
        rig.device.set_faults(Faults { shorts: u16::MAX, once, ..Faults::default() });
        let buf = rig.engine.buffer(range).unwrap();
        assert!(rig.engine.submit(Io { op: Op::Read, flags, range }, buf, 2).is_ok());
        rig.settle().pop().map(|(_, result)| result)
    };
    let is_short = |result| matches!(result, Some(Ok(done)) if done < range.len);
    assert!((1..10).any(|at| is_short(read(Flags::NONE, at))));
    assert!((1..10).all(|at| !is_short(read(Flags::WHOLE, at))));
}

#[test]
fn what_was_interrupted_is_done_again() {
    let range = Range::new(BLOCK, 4 * BLOCK);
    for op in [Op::Read, Op::Write, Op::Flush, Op::Discard, Op::Zero, Op::Status] {
        for at in 1..4 {
            let mut rig = Rig::new(SimOptions::able(16 * BLOCK), Config::default());
            rig.write(range, 0);
            rig.settle();
            let once = Some((rig.device.operations() + at, Fault::Errno(libc::EINTR)));
            rig.device.set_faults(Faults { once, ..Faults::default() });
            let io = Io { op, flags: Flags::NONE, range };
            let accepted = match op {
                Op::Read | Op::Write => {
                    let buf = rig.engine.buffer(range).unwrap();
                    rig.engine.submit(io, buf, 1)
                }
                _ => rig.engine.submit_bare(io, 1),
            };
            assert!(accepted.is_ok());
            let len = if op == Op::Flush { 0 } else { range.len };
            assert_eq!(rig.settle(), [(1, Ok(len))], "{op:?} {at}");
        }
    }
}

const THERE: Range = Range::new(BLOCK, BLOCK);

/// A rig whose workers pause before and behind each call, with a block of data that is `THERE`.
fn rig_that_pauses() -> Rig {
    let mut rig = Rig::new(
        SimOptions { pauses: u16::MAX, ..SimOptions::able(16 * BLOCK) },
        Config::default(),
    );
    rig.write(THERE, 0);
    rig.settle();
    rig
}

/// Asks for `op` on that block; a worker is to do it.
fn ask_worker(rig: &mut Rig, op: Op, flags: Flags, tag: u64) {
    let before = rig.workers.waiting();
    let io = Io { op, flags, range: THERE };
    let accepted = match op {
        Op::Write => {
            let mut buf = rig.engine.buffer(THERE).unwrap();
            buf.fill(7);
            rig.engine.submit(io, buf, tag)
        }
        _ => rig.engine.submit_bare(io, tag),
    };
    assert!(accepted.is_ok());
    while rig.workers.waiting() == before {
        rig.poll();
    }
}

/// The first byte of that block, as a read without help of a worker finds it.
fn first_byte(rig: &mut Rig) -> u8 {
    let io = Io { op: Op::Read, flags: Flags::NONE, range: THERE };
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
fn zeroing_and_discarding_keep_writes_away_until_the_hint_is_right() {
    for op in [Op::Zero, Op::Discard] {
        let mut rig = rig_that_pauses();
        ask_worker(&mut rig, op, Flags::NONE, 1);
        let zeroing = Stepped::begin(&rig.workers);
        // The block is gone, and the hint does not say so yet.
        zeroing.step();
        ask_worker(&mut rig, Op::Write, Flags::NONE, 2);
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
fn c18_a_hole_is_not_remembered_while_data_is_landing_in_it() {
    let mut rig = rig_that_pauses();
    ask_worker(&mut rig, Op::Discard, Flags::NONE, 1);
    rig.settle();
    // It goes to a worker because the hint says hole, which the next drops.
    ask_worker(&mut rig, Op::Write, Flags::NONE, 2);
    ask_worker(&mut rig, Op::Zero, Flags::NO_UNMAP, 3);
    Stepped::begin(&rig.workers).finish();
    ask_worker(&mut rig, Op::Status, Flags::NONE, 4);
    let asking = Stepped::begin(&rig.workers);
    // It has seen the hole.
    asking.step();
    let writing = Stepped::begin(&rig.workers);
    // The data is there, and the hint does not say so yet.
    writing.step();
    let before = first_byte(&mut rig);
    asking.finish();
    let after = first_byte(&mut rig);
    writing.finish();
    assert_eq!((before, after), (7, 7));
    rig.settle();
}

#[test]
fn c18_a_hole_is_forgotten_before_data_lands_in_it() {
    let mut rig = rig_that_pauses();
    ask_worker(&mut rig, Op::Discard, Flags::NONE, 1);
    rig.settle();
    // It goes to a worker because the hint says hole.
    ask_worker(&mut rig, Op::Write, Flags::NONE, 2);
    let writing = Stepped::begin(&rig.workers);
    // The data is there, and a read that was on its way before the hole was known finds it: whoever
    // asks after that one has ended must not be told of the hole.
    writing.step();
    assert_eq!(first_byte(&mut rig), 7);
    writing.finish();
    rig.settle();
}

/// What the next flush says, once.
fn lose(rig: &Rig) {
    let once = Some((rig.device.operations() + 1, Fault::Errno(libc::ENOSPC)));
    rig.device.set_faults(Faults { once, ..Faults::default() });
}

#[test]
fn c51_no_flush_succeeds_while_another_is_about_to_hear_that_it_has_failed() {
    let mut rig = rig_that_pauses();
    ask_worker(&mut rig, Op::Flush, Flags::NONE, 1);
    let first = Stepped::begin(&rig.workers);
    lose(&rig);
    // The device has lost something, and nobody knows yet.
    first.step();
    ask_worker(&mut rig, Op::Flush, Flags::NONE, 2);
    let second = Stepped::begin(&rig.workers);
    // The zeros are durable only after them.
    ask_worker(&mut rig, Op::Zero, Flags::DSYNC, 3);
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
    let through = OpenOptions { direct: Direct::Off, ..OpenOptions::default() };
    let mut rig = Rig::on(device, through, Config::default());
    rig.write(THERE, 0);
    rig.settle();
    let buf = rig.engine.buffer(THERE).unwrap();
    let io = Io { op: Op::Write, flags: Flags::DSYNC, range: THERE };
    assert!(rig.engine.submit(io, buf, 1).is_ok());
    // The data is there, and a worker is to make it durable.
    for _ in 0..1000 {
        rig.poll();
    }
    assert_eq!((rig.workers.waiting(), rig.engine.next().map(|done| done.tag)), (1, None));
    lose(&rig);
    assert_eq!(rig.settle(), [(1, Err(libc::ENOSPC))]);
    let nowhere = Io { op: Op::Flush, flags: Flags::NONE, range: Range::new(0, 0) };
    assert!(rig.engine.submit_bare(nowhere, 2).is_ok());
    assert_eq!(rig.settle(), [(2, Err(libc::EIO))]);
}

#[test]
fn c49_flushes_that_come_while_one_runs_share_the_next_sync_and_hold_no_worker() {
    let mut rig = rig_that_pauses();
    ask_worker(&mut rig, Op::Flush, Flags::NONE, 1);
    let first = Stepped::begin(&rig.workers);
    let before = rig.device.operations();
    for tag in 2..6 {
        ask_worker(&mut rig, Op::Flush, Flags::NONE, tag);
        // It has ended: without the first one's end it could not, if it waited.
        rig.workers.run(rig.workers.take(0).unwrap());
    }
    rig.poll();
    assert!(rig.engine.next().is_none());
    first.finish();
    let mut ended = rig.settle();
    ended.sort();
    assert_eq!(ended, [1, 2, 3, 4, 5].map(|tag| (tag, Ok(0))));
    assert_eq!(rig.device.operations() - before, 2);
}

#[test]
fn flushes_that_wait_while_the_device_is_silent_end_with_it_or_with_the_power() {
    for power_fails in [false, true] {
        let mut rig = rig_that_pauses();
        rig.device.fall_silent();
        let mut begun = Vec::new();
        for (tag, op, flags) in
            [(1, Op::Flush, Flags::NONE), (2, Op::Flush, Flags::NONE), (3, Op::Zero, Flags::DSYNC)]
        {
            ask_worker(&mut rig, op, flags, tag);
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
        let told = |good| if power_fails { Err(libc::EIO) } else { Ok(good) };
        assert_eq!(ended, [(1, told(0)), (2, told(0)), (3, told(BLOCK))]);
    }
}
