//! An export whose storage or client misbehaves does not slow another one of its thread down.
//!
//! Invariant: time is that of the simulated devices, which have one clock; what a request needs beside the
//! other export is at most 1.5 times what it needs without its load.

use std::sync::Arc;

use nowait::sim::{Faults, Random, SimDevice, SimOptions, SimQueue};
use nowait::{ByteRange, Config, Direct, Flags, Op};
use nowait_server::{SimThread, Simulated};
use nowait_sim::clients::Clients;
use nowait_sim::coroutines::Coroutines;
use nowait_sim::image::{Image, Opening};
use nowait_sim::oracle::Oracle;
use nowait_sim::pattern;
use nowait_sim::scenario::{Mode, RequestSpec, Scenario};

const BYTES: u64 = 256 << 10;
const BLOCK: u64 = 4096;
/// The greatest duration of an operation of a device, in virtual nanoseconds.
const LATENCY: u64 = 1000;
/// Reads that are measured, one after the other.
const READS: u64 = 400;
/// Iterations within which a read has to be answered.
const MAX_ITERATIONS: u32 = 2000;
/// Slots of the engine: fewer than one client may have requests.
const SLOTS: u32 = 16;

/// An export with its device and its clients.
struct Side {
    device: Arc<SimDevice>,
    image: Image,
    oracle: Oracle,
    clients: Clients,
}

impl Side {
    fn new(name: &str, seed: u64, latency: u64) -> Self {
        let mut scenario = Scenario::of(Mode::Server, seed);
        scenario.device = SimOptions { seed, latency, ..SimOptions::able(BYTES) };
        (scenario.faults, scenario.qcow2, scenario.disk.direct) =
            (Faults::default(), None, Direct::On);
        (scenario.config, scenario.grain) = (Config::default(), BLOCK);
        let device = Arc::new(SimDevice::new(scenario.device));
        let mut bytes = vec![0; BYTES as usize];
        pattern::fill(&mut bytes, 0, pattern::BASE);
        device.put_on(None, &bytes);
        let image = Image::open(&scenario, &device, Opening::Consistent).unwrap();
        let oracle = Oracle::new(&scenario, &device, &bytes);
        Self { device, image, oracle, clients: Clients::new(name) }
    }

    fn read(&mut self, client: usize, pos: u64, random: &mut Random) {
        self.ask(client, Op::Read, pos, random);
    }

    fn ask(&mut self, client: usize, op: Op, pos: u64, random: &mut Random) {
        let range = ByteRange::new(pos % BYTES, BLOCK);
        let spec = RequestSpec { op, flags: Flags::NONE, range, segments: 0 };
        self.clients.ask(client, (&mut [], 0), spec, &mut self.oracle, random).unwrap();
    }

    fn exchange(&mut self) {
        self.clients.exchange(&mut self.oracle).unwrap();
    }
}

/// A thread with two exports.
struct Scene {
    thread: [Simulated; 1],
    measured: Side,
    other: Side,
    coroutines: Coroutines,
    random: Random,
}

impl Scene {
    /// The other export's operations take up to `latency`, and it has `clients` clients.
    fn new(latency: u64, clients: usize) -> Self {
        let (measured, other) = (Side::new("", 1, LATENCY), Side::new("other", 2, latency));
        let Image { disk, workers, .. } = &measured.image;
        let queue = SimQueue::new(measured.device.clone()).unwrap();
        let config = Config { slots: SLOTS, ..Config::default() };
        let mut thread = Simulated::new(disk.clone(), workers.clone(), queue, config).unwrap();
        thread.add_export("other", other.image.disk.clone()).unwrap();
        let (coroutines, random) = (Coroutines::new(4), Random::new(3));
        let mut scene = Self { thread: [thread], measured, other, coroutines, random };
        scene.measured.clients.connect(&mut scene.thread, 0, &mut scene.random).unwrap();
        for _ in 0..clients {
            scene.other.clients.connect(&mut scene.thread, 0, &mut scene.random).unwrap();
        }
        for _ in 0..MAX_ITERATIONS {
            scene.iterate();
        }
        assert!(scene.measured.clients.is_idle() && scene.other.clients.is_idle());
        assert!(scene.thread[0].has_attached("") && scene.thread[0].has_attached("other"));
        scene
    }

    fn iterate(&mut self) {
        self.thread[0].run_once(true).unwrap();
        let workers = &self.measured.image.workers;
        while self.coroutines.choices(workers) > 0 {
            self.coroutines.run(0, workers).unwrap();
        }
        self.measured.exchange();
        self.other.exchange();
    }

    /// The time that the reads of the measured client take, in virtual nanoseconds, while each client of
    /// the other export has `depth` reads in flight.
    fn measure(&mut self, depth: u64) -> u64 {
        let began = self.measured.device.now();
        for n in 0..READS {
            self.measured.read(0, n * BLOCK, &mut self.random);
            let mut iterations = 0;
            while !self.measured.clients.is_idle() {
                for client in 0..self.other.clients.count() {
                    (0..depth).for_each(|n| self.other.read(client, n * BLOCK, &mut self.random));
                }
                self.iterate();
                iterations += 1;
                assert!(iterations < MAX_ITERATIONS, "read {n} is not answered");
            }
        }
        self.measured.device.now() - began
    }
}

impl Drop for Scene {
    /// An engine waits for its requests in flight.
    fn drop(&mut self) {
        self.measured.device.answer();
        self.other.device.answer();
    }
}

/// Measures beside another export that has the faults, the latency and the load of a test, and without
/// its load.
fn assert_isolated(latency: u64, (clients, depth): (usize, u64), spoil: impl Fn(&SimDevice)) {
    let alone = Scene::new(latency, clients).measure(0);
    let mut scene = Scene::new(latency, clients);
    spoil(&scene.other.device);
    let before = scene.other.clients.requests;
    let beside = scene.measure(depth);
    assert!(scene.other.clients.requests > before, "the other export has no load");
    assert!(2 * beside <= 3 * alone, "{beside} ns beside the other export, {alone} ns alone");
    assert!(alone > READS * LATENCY / 4, "{alone} ns: the reads do not reach the device");
    scene.other.device.answer();
    scene.other.device.set_faults(Faults::default());
    (0..MAX_ITERATIONS).for_each(|_| scene.iterate());
    assert!(scene.other.clients.is_idle(), "a request of the other export is lost");
}

#[test]
fn an_export_whose_device_never_answers_does_not_slow_another_one_down() {
    assert_isolated(LATENCY, (3, 24), SimDevice::fall_silent);
}

#[test]
fn an_export_that_takes_100_times_as_long_does_not_slow_another_one_down() {
    assert_isolated(100 * LATENCY, (3, 24), |_| ());
}

#[test]
fn an_export_that_fails_each_request_does_not_slow_another_one_down() {
    let faults = Faults { errors: u16::MAX, ..Faults::default() };
    assert_isolated(LATENCY, (3, 4), move |device| device.set_faults(faults));
}

#[test]
fn a_client_that_floods_its_export_does_not_slow_another_one_down() {
    assert_isolated(LATENCY, (1, 24), |_| ());
}

#[test]
fn a_removed_export_is_flushed_although_no_slot_was_free_when_its_client_left() {
    let mut scene = Scene::new(LATENCY, 1);
    for n in 0..8 {
        scene.other.ask(0, Op::Write, n * BLOCK, &mut scene.random);
    }
    (0..MAX_ITERATIONS).for_each(|_| scene.iterate());
    assert!(scene.other.clients.is_idle());
    scene.other.clients.leave();
    (0..MAX_ITERATIONS).for_each(|_| scene.iterate());
    // The other export is not used any more: this one may have all slots.
    scene.measured.device.fall_silent();
    (0..24).for_each(|n| scene.measured.read(0, n * BLOCK, &mut scene.random));
    (0..MAX_ITERATIONS).for_each(|_| scene.iterate());
    assert_eq!(scene.thread[0].in_flight(), SLOTS as usize);
    scene.thread[0].remove_export("other").unwrap();
    (0..MAX_ITERATIONS).for_each(|_| scene.iterate());
    assert!(scene.thread[0].has_export("other"), "it was removed without a flush");
    scene.measured.device.answer();
    (0..MAX_ITERATIONS).for_each(|_| scene.iterate());
    assert!(!scene.thread[0].has_export("other"));
    let Side { oracle, device, .. } = &mut scene.other;
    let now = oracle.now();
    oracle.closed(now).unwrap();
    let rotten = device.cut_power();
    let mut bytes = vec![0; BYTES as usize];
    device.peek(0, 0, &mut bytes);
    oracle.power_cut(&bytes, &rotten).unwrap();
}
