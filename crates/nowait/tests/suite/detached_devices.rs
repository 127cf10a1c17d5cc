//! Each mechanism of an engine with two devices of which one is detached while its requests are in flight:
//! they complete, the neighbour is served as if it were alone, and so is the device that gets the index.
//!
//! Invariant: transfers are held back until the test answers them, so that every device is detached in the
//! middle of its mechanism.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::io::{IoSlice, IoSliceMut};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nowait::{
    Alignment, BlockDevice, ByteRange, Config, DeviceHandle, Engine, Error, Flags, IoQueue,
    LinearMap, Null, Op, Outcome, QueueFile, QueueFull, Request, Stats, Storage, StorageProperties,
    Token, Transfer, WorkerPool,
};
use nowait_testkit::WaitForRequests;

const BLOCK: u64 = 4096;
const SIZE: u64 = 64 * BLOCK;

/// A storage whose calls succeed, and which syncs for each durable write.
struct Willing;

impl Storage for Willing {
    fn properties(&self) -> StorageProperties {
        let block = BLOCK as u32;
        let align = Alignment { memory: 512, offset: block, read_offset: block };
        StorageProperties { nowait: true, shares_syncs: false, ..StorageProperties::new(align) }
    }

    fn size(&self) -> Result<u64, Error> {
        Ok(SIZE)
    }

    fn read(&self, bufs: &mut [IoSliceMut<'_>], _: u64) -> Result<usize, Error> {
        Ok(bufs.iter().map(|buf| buf.len()).sum())
    }

    fn write(&self, bufs: &[IoSlice<'_>], _: u64, _: Flags) -> Result<usize, Error> {
        Ok(bufs.iter().map(|buf| buf.len()).sum())
    }

    fn sync(&self) -> Result<(), Error> {
        Ok(())
    }
}

/// Transfers that were pushed, and the answers to them.
#[derive(Default)]
struct Held {
    pushed: Vec<(Token, Transfer)>,
    answered: Vec<(Token, Outcome)>,
    /// Transfers that were pushed so far.
    count: usize,
    files: u32,
}

/// A queue that moves no bytes and completes what the test has answered.
struct HeldQueue {
    held: Rc<RefCell<Held>>,
    events: Null,
}

// SAFETY: no memory is accessed; each token is returned once, from the list of answers.
unsafe impl IoQueue for HeldQueue {
    nowait_testkit::pass_on!(self.events: events);

    fn attach(&mut self, files: &[QueueFile<'_>]) -> Result<u32, Error> {
        let held = &mut *self.held.borrow_mut();
        held.files += files.len() as u32;
        Ok(held.files - files.len() as u32)
    }

    fn detach(&mut self, first: u32, _: u32) {
        let held = self.held.borrow();
        assert!(held.pushed.iter().all(|(_, transfer)| transfer.file != first), "in flight");
    }

    // SAFETY: the memory is never accessed.
    unsafe fn push(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull> {
        let held = &mut *self.held.borrow_mut();
        held.pushed.push((token, *transfer));
        held.count += 1;
        Ok(())
    }

    fn submit(&mut self) -> Result<(), Error> {
        Ok(())
    }

    fn drain_completions(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        let answered = std::mem::take(&mut self.held.borrow_mut().answered);
        answered.iter().for_each(|&(token, outcome)| sink(token, outcome));
        answered.len() + self.events.drain_completions(sink)
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        let is_ready = !self.held.borrow().answered.is_empty();
        self.events.wait(if is_ready { Some(Duration::ZERO) } else { timeout })
    }

    fn has_completions(&mut self) -> bool {
        !self.held.borrow().answered.is_empty() || self.events.has_completions()
    }
}

type Device = DeviceHandle<LinearMap>;

struct Scene {
    engine: Engine<HeldQueue, LinearMap>,
    held: Rc<RefCell<Held>>,
}

impl Scene {
    fn new() -> Self {
        let held = Rc::<RefCell<Held>>::default();
        let queue = HeldQueue { held: held.clone(), events: Null::new().unwrap() };
        let engine = Engine::new(queue, WorkerPool::new(2), Config::default()).unwrap();
        Self { engine, held }
    }

    fn attach(&mut self) -> Device {
        let disk = BlockDevice::mapped(Arc::new(Willing), Vec::new(), SIZE, false, LinearMap);
        self.engine.attach(Arc::new(disk)).unwrap()
    }

    fn submit(&mut self, device: &Device, op: Op, flags: Flags, range: ByteRange) {
        let buf = self.engine.buffer(device, range).unwrap();
        let submitted = self.engine.submit(device, Request { op, flags, range }, buf, 0);
        submitted.map_err(|rejected| rejected.error).unwrap();
    }

    /// Requests for one block each, in the order of `blocks`.
    fn blocks(&mut self, device: &Device, op: Op, flags: Flags, blocks: &[u64]) {
        for block in blocks {
            self.submit(device, op, flags, ByteRange::new(block * BLOCK, BLOCK));
        }
    }

    /// Answers the pushed transfers that `is_meant` says.
    fn answer(
        &mut self,
        is_meant: impl Fn(&Transfer) -> bool,
        outcome: impl Fn(&Transfer) -> Outcome,
    ) {
        let held = &mut *self.held.borrow_mut();
        let (meant, others) = held.pushed.drain(..).partition(|(_, transfer)| is_meant(transfer));
        held.pushed = others;
        let meant: Vec<(Token, Transfer)> = meant;
        held.answered.extend(meant.iter().map(|(token, transfer)| (*token, outcome(transfer))));
    }

    /// Answers the transfers of `device`, which is attached as the queue's file `file`, and polls.
    fn answer_file(&mut self, file: u32, outcome: Outcome) {
        self.answer(|transfer| transfer.file == file, |_| outcome);
        self.engine.poll().unwrap();
    }

    /// The number of the file of the device that was attached last.
    fn last_file(&self) -> u32 {
        self.held.borrow().files - 1
    }

    /// Lets all requests complete. Returns how many.
    fn finish(&mut self) -> usize {
        let mut completed = 0;
        while self.engine.in_flight() > 0 {
            while let Some(done) = self.engine.next() {
                assert_eq!(done.result(), Ok(done.io.range.len));
                completed += 1;
            }
            if self.engine.in_flight() > 0 {
                self.engine.poll().unwrap();
                self.answer(|_| true, |transfer| transfer.len as Outcome);
                self.engine.wait_once();
            }
        }
        completed
    }
}

/// A mechanism, and how a device that is the queue's file `file` comes into the middle of it.
type Mechanism = (&'static str, fn(&mut Scene, &Device, u32));

const MECHANISMS: [Mechanism; 8] = [
    ("neighbours whose run is open", |scene, device, _| {
        scene.blocks(device, Op::Read, Flags::NONE, &[4, 5, 6, 7]);
    }),
    ("neighbours whose merged transfer was short", |scene, device, file| {
        scene.blocks(device, Op::Read, Flags::NONE, &[4, 5, 6, 7]);
        scene.engine.poll().unwrap();
        let merged = |transfer: &Transfer| transfer.len > BLOCK as u32 && transfer.file == file;
        scene.answer(merged, |_| 0);
        scene.engine.poll().unwrap();
    }),
    ("deferred overwrites", |scene, device, file| {
        scene.blocks(device, Op::Write, Flags::NONE, &[2, 20, 40]);
        scene.answer_file(file, -libc::EAGAIN);
    }),
    ("durable writes that share a sync", |scene, device, _| {
        scene.blocks(device, Op::Write, Flags::DSYNC, &[2, 20]);
    }),
    ("refusals short of a back-off", |scene, device, file| {
        for _ in 0..23 {
            scene.blocks(device, Op::Read, Flags::NONE, &[2]);
            scene.answer_file(file, -libc::EAGAIN);
            while scene.engine.next().is_none() {
                scene.engine.wait_once();
            }
        }
        scene.blocks(device, Op::Read, Flags::NONE, &[2]);
    }),
    ("fragments", |scene, device, _| {
        scene.submit(device, Op::Read, Flags::NONE, ByteRange::new(BLOCK + 1, 100));
        scene.submit(device, Op::Read, Flags::NONE, ByteRange::new(9, 2 * BLOCK));
    }),
    ("requests at the workers", |scene, device, _| {
        scene.submit(device, Op::Write, Flags::NONE, ByteRange::new(BLOCK + 1, 100));
        scene.engine.poll().unwrap();
    }),
    ("requests of the simple path", |scene, device, _| {
        scene.blocks(device, Op::Read, Flags::NONE, &[2, 20]);
        scene.blocks(device, Op::Write, Flags::NONE, &[30, 40]);
    }),
];

/// The counts of one device, and the transfers that were made for it, if nothing else is in the engine.
fn alone(start: fn(&mut Scene, &Device, u32)) -> (Stats, usize) {
    let mut scene = Scene::new();
    let device = scene.attach();
    start(&mut scene, &device, 0);
    assert!(scene.finish() > 0);
    let transfers = scene.held.borrow().count;
    (scene.engine.stats_of(&device), transfers)
}

#[test]
fn a_device_detached_in_the_middle_of_a_mechanism_completes_and_changes_nothing_for_another() {
    for (name, start) in MECHANISMS {
        let (wanted, transfers) = alone(start);
        let mut scene = Scene::new();
        let [gone, neighbour] = [0, 1].map(|file| {
            let device = scene.attach();
            start(&mut scene, &device, file);
            device
        });
        scene.engine.detach(&gone).unwrap();
        assert!(scene.engine.in_flight_of(&gone) > 0, "{name}");
        // The index is not free yet.
        let third = scene.attach();
        let indices = [&gone, &neighbour, &third].map(|device| format!("{device:?}"));
        assert!(indices[2] != indices[0] && indices[2] != indices[1], "{name}: {indices:?}");
        let in_flight = scene.engine.in_flight();
        assert_eq!(scene.finish(), in_flight, "{name}");
        assert_eq!(scene.engine.stats_of(&neighbour), wanted, "{name}");
        assert_eq!(scene.held.borrow().count, 2 * transfers, "{name}");
        scene.engine.poll().unwrap();
        assert_eq!(scene.engine.stats_of(&gone), Stats::default(), "{name}");
        // Counts of the detached device stay in the sum.
        let all = scene.engine.stats();
        let of_all = [all.simple + all.general + all.worker, all.merged, all.deferred, all.refused];
        let Stats { simple, general, worker, merged, deferred, refused, .. } = wanted;
        let twice = [simple + general + worker, merged, deferred, refused].map(|count| 2 * count);
        assert_eq!((of_all, all.failed), (twice, 0), "{name}");

        let successor = scene.attach();
        assert_eq!(format!("{successor:?}"), indices[0], "{name}");
        let file = scene.last_file();
        start(&mut scene, &successor, file);
        scene.finish();
        assert_eq!(scene.engine.stats_of(&successor), wanted, "{name}");
        assert_eq!(scene.held.borrow().count, 3 * transfers, "{name}");
    }
}

#[test]
fn each_mechanism_of_these_tests_is_in_use() {
    let counts = MECHANISMS.map(|(_, start)| alone(start));
    let [open, short, deferred, durable, refusing, split, worker, simple] =
        counts.map(|(stats, transfers)| (stats.merged, stats.deferred, stats.remote, transfers));
    assert_eq!((open, short), ((3, 0, 0, 2), (0, 0, 0, 5)));
    // The probe request and two others, which are tried twice.
    assert_eq!(deferred, (0, 2, 1, 5));
    // The first write carries its sync, the other one leaves it to a worker.
    assert_eq!(durable, (0, 0, 1, 2));
    assert_eq!(refusing, (0, 0, 23, 24));
    assert_eq!((split, worker, simple), ((0, 0, 0, 2), (0, 0, 1, 0), (0, 0, 0, 4)));
}
