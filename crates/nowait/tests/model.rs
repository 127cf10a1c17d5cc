//! Random requests against an array of bytes, on every queue and with each switch off.

use std::sync::Arc;

use nowait::{
    AioThreadQueue, AllocationCache, BlockDevice, ByteRange, Config, Direct, Engine, Flags,
    IoQueue, Op, OpenOptions, Request, Uring, WorkerPool,
};

const SIZE: u64 = (4 << 20) + 1234;
const STEPS: u32 = 1500;
const DEPTH: usize = 24;

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

fn configs() -> Vec<(&'static str, Config)> {
    let on = Config { slots: 64, ..Config::default() };
    vec![
        ("all on", on),
        ("simple off", Config { simple: false, ..on }),
        ("inline completion off", Config { inline_completion: false, ..on }),
        ("vectored off", Config { vectored: false, ..on }),
        ("pool off", Config { pool: false, ..on }),
        ("nowait first off", Config { nowait_first: false, ..on }),
        ("hint off", Config { hint: false, ..on }),
    ]
}

fn image(dir: &tempfile::TempDir) -> std::path::PathBuf {
    let path = dir.path().join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
    path
}

/// A request in flight: its range and, for a read, the bytes that it must return.
struct Flight {
    range: ByteRange,
    expected: Option<Vec<u8>>,
}

/// Runs random requests. Requests in flight never overlap, so each has one right result.
fn run<Q: IoQueue>(engine: &mut Engine<Q, AllocationCache>, seed: u64, label: &str) {
    let mut random = Random(seed);
    let mut model = vec![0u8; SIZE as usize];
    let mut flights: Vec<Option<Flight>> = (0..DEPTH).map(|_| None).collect();
    for step in 0..STEPS {
        if random.below(4) == 0 || flights.iter().all(Option::is_some) {
            engine.wait(None, &mut |_, _| {}).unwrap();
            drain(engine, &mut flights, label);
        }
        let Some(tag) = flights.iter().position(Option::is_none) else { continue };
        let range = random_range(&mut random);
        let busy =
            |flight: &Flight| flight.range.pos < range.end() && range.pos < flight.range.end();
        if flights.iter().flatten().any(busy) {
            continue;
        }
        let flight = submit(engine, &mut random, &mut model, range, tag as u64, step);
        flights[tag] = Some(flight);
    }
    while engine.in_flight() > 0 {
        engine.wait(None, &mut |_, _| {}).unwrap();
        drain(engine, &mut flights, label);
    }
}

fn random_range(random: &mut Random) -> ByteRange {
    let len = match random.below(3) {
        0 => 4096 * (1 + random.below(16)),
        1 => 512 * (1 + random.below(64)),
        _ => 1 + random.below(70_000),
    };
    let pos = match random.below(4) {
        0 => random.below(SIZE),
        1 => SIZE - random.below(9000) - 1,
        _ => random.below(SIZE / 4096) * 4096,
    };
    ByteRange::new(pos, len.min(SIZE - pos))
}

fn submit<Q: IoQueue>(
    engine: &mut Engine<Q, AllocationCache>,
    random: &mut Random,
    model: &mut [u8],
    range: ByteRange,
    tag: u64,
    step: u32,
) -> Flight {
    let bytes = &mut model[range.pos as usize..range.end() as usize];
    let flags = if random.below(8) == 0 { Flags::DSYNC } else { Flags::NONE };
    let mut expected = None;
    let rejected = match random.below(10) {
        0..4 => {
            let io = Request { op: Op::Write, flags, range };
            let mut buf = engine.buffer(range).unwrap();
            let start = engine.buffer_offset(range.pos);
            bytes.fill_with(|| random.below(256) as u8 | 1);
            buf[start..start + bytes.len()].copy_from_slice(bytes);
            engine.submit(io, buf, tag)
        }
        4..8 => {
            let io = Request { op: Op::Read, flags: Flags::NONE, range };
            let mut buf = engine.buffer(range).unwrap();
            buf.fill(0xee);
            expected = Some(bytes.to_vec());
            engine.submit(io, buf, tag)
        }
        8 => {
            bytes.fill(0);
            let flags = if random.below(2) == 0 { flags } else { flags.with(Flags::NO_UNMAP) };
            engine.submit_no_data(Request { op: Op::Zero, flags, range }, tag)
        }
        _ => engine.submit_no_data(Request { op: Op::Flush, flags: Flags::NONE, range }, tag),
    };
    assert!(rejected.is_ok(), "step {step}");
    Flight { range, expected }
}

fn drain<Q: IoQueue>(
    engine: &mut Engine<Q, AllocationCache>,
    flights: &mut [Option<Flight>],
    label: &str,
) {
    while let Some(completion) = engine.next() {
        let flight = flights[completion.tag as usize].take().expect("completed once");
        let done = completion.result().unwrap_or_else(|e| panic!("{label}: {e}"));
        if completion.io.op != Op::Flush {
            assert_eq!(done, flight.range.len, "{label}: {:?}", completion.io);
        }
        if let Some(expected) = flight.expected {
            let start = engine.buffer_offset(flight.range.pos);
            let buf = completion.buf.expect("a read gives its buffer back");
            let got = &buf[start..start + expected.len()];
            let differs = got.iter().zip(&expected).position(|(a, b)| a != b);
            assert_eq!(differs, None, "{label}: first wrong byte of {:?}", flight.range);
        }
    }
}

fn with_queue<Q: IoQueue>(
    direct: Direct,
    seed: u64,
    make: impl Fn(&BlockDevice<AllocationCache>, u32) -> Result<Q, nowait::Error>,
) {
    for (label, config) in configs() {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = image(&dir);
        let options = OpenOptions { direct, no_hint: !config.hint, ..OpenOptions::default() };
        let disk = Arc::new(BlockDevice::open(&path, options).unwrap());
        let queue = match make(&disk, config.slots) {
            Ok(queue) => queue,
            Err(error) => {
                println!("skipped: {error}");
                return;
            }
        };
        let workers = WorkerPool::new(&disk, 4);
        let mut engine = Engine::new(disk, workers, queue, config).unwrap();
        run(&mut engine, seed, label);
        let stats = engine.stats();
        assert_eq!(stats.failed, 0, "{label}");
        match label {
            "simple off" | "nowait first off" => assert_eq!(stats.simple, 0, "{label}"),
            _ => assert!(stats.simple > 0, "{label}: {stats:?}"),
        }
        drop(engine);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), SIZE, "{label}: the size is kept");
    }
}

#[test]
fn uring_direct_agrees_with_the_model_with_each_switch_off() {
    with_queue(Direct::Auto, 0x1234_5678_9abc, |disk, _| Uring::new(disk.fd()?));
}

#[test]
fn uring_buffered_agrees_with_the_model_with_each_switch_off() {
    with_queue(Direct::Off, 0xfeed_beef, |disk, _| Uring::new(disk.fd()?));
}

#[test]
fn threads_direct_agrees_with_the_model_with_each_switch_off() {
    with_queue(Direct::Auto, 77, |disk, slots| AioThreadQueue::new(disk.fd()?, slots, false));
}

#[test]
fn threads_buffered_agrees_with_the_model_with_each_switch_off() {
    with_queue(Direct::Off, 99, |disk, slots| AioThreadQueue::new(disk.fd()?, slots, true));
}
