//! What simulations have found, each told once more in as few requests as it takes.
#![cfg(feature = "sim")]
#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

use nowait::sim::{Fault, Faults, Sim, SimDevice, SimOptions, set_pause};
use nowait::{
    Alignment, Config, Disk, Engine, Extents, Flags, Io, Op, OpenOptions, Range, Segment, Storage,
    Workers,
};

const BLOCK: u64 = 4096;

struct Rig {
    device: Arc<SimDevice>,
    workers: Workers,
    engine: Engine<Sim, Extents>,
}

fn like(bytes: u64) -> SimOptions {
    SimOptions {
        seed: 1,
        bytes,
        align: Alignment { memory: 512, offset: 4096, read_offset: 4096 },
        unit: 512,
        capacity: u64::MAX,
        punches: true,
        zeroes: true,
        nowait: true,
        latency: 1000,
        pauses: 0,
    }
}

impl Rig {
    fn new(options: SimOptions, config: Config) -> Self {
        let device = Arc::new(SimDevice::new(options));
        let storage = Storage::simulated(&device, OpenOptions::default()).unwrap();
        let map = Extents::new(storage.size(), true);
        let disk = Arc::new(Disk::mapped(storage, Vec::new(), options.bytes, false, map));
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
    let mut rig = ManuallyDrop::new(Rig::new(like(16 * BLOCK), Config::default()));
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
    let mut rig = Rig::new(like(2 * BLOCK), config);
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
    let options = SimOptions { capacity: 1, punches: false, zeroes: false, ..like(16 * BLOCK) };
    let mut rig = Rig::new(options, Config::default());
    let range = Range::new(0, 4 * BLOCK);
    let io = Io { op: Op::Zero, flags: Flags::NONE, range };
    assert!(rig.engine.submit_bare(io, 1).is_ok());
    assert_eq!(rig.settle(), [(1, Err(libc::ENOSPC))]);
}

#[test]
fn c19_a_write_that_runs_out_of_space_gives_its_bytes_or_as_a_whole_the_error() {
    for (flags, wanted) in [(Flags::NONE, Ok(2 * BLOCK)), (Flags::WHOLE, Err(libc::ENOSPC))] {
        let options = SimOptions { capacity: 2, ..like(16 * BLOCK) };
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
        let mut rig = Rig::new(like(16 * BLOCK), Config::default());
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
            let mut rig = Rig::new(like(16 * BLOCK), Config::default());
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
