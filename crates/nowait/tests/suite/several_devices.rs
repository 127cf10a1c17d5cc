//! Several devices on one engine, on every queue with each switch off: bytes, completions and state of one
//! are not those of another, also while devices are attached and detached.
#![allow(unsafe_code)]

use std::sync::{Arc, Weak};
use std::time::Duration;

use nowait::{
    BlockDevice, BlockMap, ByteRange, Config, DeviceHandle, Direct, Engine, Error, Extent, Flags,
    Intent, IoQueue, IoSegment, LinearMap, Null, Op, OpenOptions, Outcome, QueueFile, QueueFull,
    Request, Token, Transfer, WorkerPool, WouldBlock,
};
use nowait_testkit::engines::TestQueue;
use nowait_testkit::{Random, TestQueueKind, WaitForRequests, seed, switches};

type Disk = BlockDevice<dyn BlockMap>;
type DiskEngine = Engine<TestQueue, dyn BlockMap>;

const BLOCK: u64 = 4096;
const SIZE: u64 = 16 * BLOCK;

fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    file.as_file().sync_all().unwrap();
    file
}

/// A device of `SIZE` bytes and a copy of its contents.
struct Model {
    handle: DeviceHandle<dyn BlockMap>,
    bytes: Vec<u8>,
    _file: tempfile::NamedTempFile,
}

/// Opens a file in one of several ways: with data or as a hole, by direct I/O or through the page cache,
/// with a cache of its holes or without.
fn model(engine: &mut DiskEngine, random: &mut Random) -> Model {
    let bytes = match random.chance(50) {
        true => random.bytes(SIZE as usize),
        false => vec![0; SIZE as usize],
    };
    let file = file(&bytes);
    let direct = if random.chance(70) { Direct::Auto } else { Direct::Off };
    let options = OpenOptions::new().direct(direct).cache_holes(true);
    let disk: Arc<Disk> = match random.chance(50) {
        true => Arc::new(BlockDevice::open_mapped(file.path(), options).unwrap()),
        false => {
            let disk = BlockDevice::open(file.path(), options).unwrap();
            disk.scan();
            Arc::new(disk)
        }
    };
    Model { handle: engine.attach(disk).unwrap(), bytes, _file: file }
}

fn engine(kind: TestQueueKind, config: Config) -> Option<DiskEngine> {
    let queue = kind.queue(config.slots)?;
    Some(Engine::new(queue, WorkerPool::new(4), config).unwrap())
}

fn request(op: Op, range: ByteRange) -> Request {
    Request { op, flags: Flags::NONE, range }
}

/// Submits a burst of requests for disjoint ranges of random devices, waits for them, and compares the
/// bytes that were read.
fn burst(engine: &mut DiskEngine, models: &mut [Model], random: &mut Random) {
    let mut expected = Vec::new();
    for tag in 0..24u64 {
        let at = random.below(models.len() as u64) as usize;
        let model = &mut models[at];
        // Each request of a device has a part of its own, so the order does not matter.
        let part = SIZE / 24 * tag;
        let unit = if random.chance(50) { 1 } else { 512 };
        let pos = part.next_multiple_of(unit);
        let range = ByteRange::new(pos, (1 + random.below(SIZE / 48 / unit)) * unit);
        let mut buf = engine.buffer(&model.handle, range).unwrap();
        let inside = range.pos as usize..range.end() as usize;
        let op = if random.chance(50) { Op::Write } else { Op::Read };
        if op == Op::Write {
            let data = random.bytes(range.len as usize);
            buf.copy_from_slice(&data);
            model.bytes[inside].copy_from_slice(&data);
            expected.push(None);
        } else {
            expected.push(Some(model.bytes[inside].to_vec()));
        }
        let submitted = engine.submit(&model.handle, request(op, range), buf, tag);
        submitted.map_err(|rejected| rejected.error).unwrap();
    }
    let completions = engine.finish();
    assert_eq!(completions.len(), expected.len());
    for done in completions {
        assert_eq!(done.result().unwrap(), done.io.range.len);
        if let Some(bytes) = &expected[done.tag as usize] {
            let buf = done.buf.as_ref().unwrap();
            assert!(buf[..] == bytes[..], "read {:?}", done.io.range);
        }
    }
}

fn play(kind: TestQueueKind, config: Config) {
    let mut random = Random::from_seed(seed());
    let Some(mut engine) = engine(kind, config) else { return };
    let mut models = Vec::new();
    for _ in 0..20 {
        match models.len() {
            n if n < 2 || n < 6 && random.chance(60) => {
                models.push(model(&mut engine, &mut random))
            }
            n => {
                let gone = models.swap_remove(random.below(n as u64) as usize);
                engine.detach(&gone.handle).unwrap();
            }
        }
        burst(&mut engine, &mut models, &mut random);
    }
    for model in models {
        engine.detach(&model.handle).unwrap();
        let mut on_disk = vec![0; SIZE as usize];
        let file = nowait::BlockingFile::new(model.handle.disk().clone());
        assert_eq!(file.read_at(&mut on_disk, 0).unwrap(), SIZE as usize);
        assert!(on_disk == model.bytes);
    }
    assert_eq!(engine.in_flight(), 0);
}

#[test]
fn requests_of_several_devices_have_their_own_bytes_on_every_queue_with_each_switch_off() {
    for kind in TestQueueKind::REAL {
        for (_, config, _) in switches(Config { slots: 64, ..Config::default() }) {
            play(kind, config);
        }
    }
}

fn errno_of(result: Result<(), nowait::Rejected>) -> Option<i32> {
    result.err().map(|rejected| rejected.error.errno())
}

/// The errnos with which requests of each kind are refused.
fn refusals(engine: &mut DiskEngine, handle: &DeviceHandle<dyn BlockMap>) -> [Option<i32>; 5] {
    let range = ByteRange::new(0, BLOCK);
    let mut submit = |op| {
        let buf = engine.buffer(handle, range).unwrap();
        errno_of(engine.submit(handle, request(op, range), buf, 0))
    };
    let [read, write] = [Op::Read, Op::Write].map(&mut submit);
    let flush = errno_of(engine.submit_no_data(handle, request(Op::Flush, range), 0));
    let mut memory = vec![0u8; BLOCK as usize];
    let one = IoSegment { base: memory.as_mut_ptr(), len: memory.len() };
    let halves = [0, BLOCK as usize / 2]
        .map(|at| IoSegment { base: one.base.wrapping_add(at), len: one.len / 2 });
    let [simple, list] = [&[one][..], &halves].map(|segments| {
        // SAFETY: the memory is not used, for the requests are refused; else the test fails.
        errno_of(unsafe {
            engine.submit_user_memory(handle, request(Op::Read, range), segments, 0)
        })
    });
    assert_eq!(engine.in_flight(), 0);
    [read, write, flush, simple, list]
}

#[test]
fn a_handle_of_a_detached_device_is_refused_also_when_another_device_has_its_place() {
    for kind in TestQueueKind::REAL {
        let Some(mut engine) = engine(kind, Config::default()) else { continue };
        let mut random = Random::from_seed(seed());
        let first = model(&mut engine, &mut random);
        assert_eq!(engine.detach(&first.handle).err(), None);
        let detached = engine.detach(&first.handle).map_err(|error| error.errno());
        assert_eq!(detached, Err(libc::ENODEV));
        assert_eq!(refusals(&mut engine, &first.handle), [Some(libc::ENODEV); 5]);
        let second = model(&mut engine, &mut random);
        assert_eq!(refusals(&mut engine, &first.handle), [Some(libc::ENODEV); 5]);
        assert_eq!(
            (engine.in_flight_of(&first.handle), engine.stats_of(&first.handle).simple),
            (0, 0)
        );
        burst(&mut engine, &mut [second], &mut random);
    }
}

#[test]
fn a_handle_of_another_engine_is_refused() {
    for kind in TestQueueKind::REAL {
        let engines = [(); 2].map(|()| engine(kind, Config::default()));
        let [Some(mut engine), Some(mut other)] = engines else { continue };
        let mut random = Random::from_seed(seed());
        let [mut own, mut foreign] = [&mut engine, &mut other].map(|it| model(it, &mut random));
        assert_eq!(refusals(&mut engine, &foreign.handle), [Some(libc::EINVAL); 5]);
        let detached = engine.detach(&foreign.handle).map_err(|error| error.errno());
        assert_eq!(detached, Err(libc::EINVAL));
        burst(&mut engine, std::slice::from_mut(&mut own), &mut random);
        burst(&mut other, std::slice::from_mut(&mut foreign), &mut random);
    }
}

#[test]
fn a_device_that_is_detached_completes_its_requests_and_is_closed_with_the_last_of_them() {
    for kind in TestQueueKind::REAL {
        let Some(mut engine) = engine(kind, Config::default()) else { continue };
        let mut random = Random::from_seed(seed());
        let Model { handle, bytes, _file } = model(&mut engine, &mut random);
        let weak: Weak<Disk> = Arc::downgrade(handle.disk());
        for tag in 0..8 {
            let range = ByteRange::new(tag * BLOCK, BLOCK);
            let buf = engine.buffer(&handle, range).unwrap();
            assert!(engine.submit(&handle, request(Op::Read, range), buf, tag).is_ok());
        }
        engine.detach(&handle).unwrap();
        assert_eq!(engine.in_flight_of(&handle), 8);
        drop(handle);
        assert!(weak.strong_count() > 0);
        for done in engine.finish() {
            let at = done.tag as usize * BLOCK as usize;
            assert!(done.buf.unwrap()[..BLOCK as usize] == bytes[at..at + BLOCK as usize]);
        }
        engine.poll().unwrap();
        assert_eq!(weak.strong_count(), 0, "{kind:?}: the device is still open");
    }
}

/// A map that says that all bytes are in a file that the device does not have.
struct Elsewhere;

impl BlockMap for Elsewhere {
    fn map_extent(&self, range: ByteRange, _: Intent) -> Result<Extent, WouldBlock> {
        Ok(Extent { file: 1, pos: range.pos, len: range.len, hole: false })
    }

    fn is_mapped(&self, _: ByteRange) -> bool {
        true
    }
}

#[test]
fn a_map_that_names_a_file_beyond_its_own_reaches_no_other_device() {
    for kind in TestQueueKind::REAL {
        let Some(mut engine) = engine(kind, Config::default()) else { continue };
        let secret = file(&[7; SIZE as usize]);
        let [own, other] = [file(&[1; SIZE as usize]), secret].map(|file| {
            let options = OpenOptions::default();
            (Arc::new(nowait::FileStorage::open(file.path(), options).unwrap()), file)
        });
        let device = BlockDevice::mapped(own.0, Vec::new(), SIZE, true, Elsewhere);
        let lost = engine.attach(Arc::new(device)).unwrap();
        let neighbour = BlockDevice::mapped(other.0, Vec::new(), SIZE, true, LinearMap);
        let _neighbour = engine.attach(Arc::new(neighbour)).unwrap();
        for len in [BLOCK, BLOCK - 1] {
            let range = ByteRange::new(0, len);
            let mut buf = engine.buffer(&lost, range).unwrap();
            buf.fill(0);
            assert!(engine.submit(&lost, request(Op::Read, range), buf, 0).is_ok());
            let done = engine.only();
            let buf = done.buf.as_ref().unwrap();
            assert!(!buf.contains(&7), "{kind:?}: {:?}", done.result());
        }
    }
}

/// A queue that refuses transfers of file 0 without waiting, and completes the others.
struct Refusing {
    queue: Null,
    files: u32,
    refused: Vec<(Token, Outcome)>,
}

// SAFETY: no memory is accessed; each token is returned once, from one of the two lists.
unsafe impl IoQueue for Refusing {
    nowait_testkit::pass_on!(self.queue: submit events);

    fn attach(&mut self, files: &[QueueFile<'_>]) -> Result<u32, Error> {
        self.files += files.len() as u32;
        Ok(self.files - files.len() as u32)
    }

    fn detach(&mut self, _: u32, _: u32) {}

    // SAFETY: as promised by the caller.
    unsafe fn push(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull> {
        if transfer.file == 0 {
            self.refused.push((token, -libc::EAGAIN));
            return Ok(());
        }
        // SAFETY: as promised by the caller.
        unsafe { self.queue.push(transfer, token) }
    }

    fn drain_completions(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        let count = self.refused.len();
        self.refused.drain(..).for_each(|(token, outcome)| sink(token, outcome));
        count + self.queue.drain_completions(sink)
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        let timeout = if self.refused.is_empty() { timeout } else { Some(Duration::ZERO) };
        self.queue.wait(timeout)
    }

    fn has_completions(&mut self) -> bool {
        !self.refused.is_empty() || self.queue.has_completions()
    }
}

#[test]
fn c39_a_device_that_refuses_is_left_alone_and_its_neighbour_is_not() {
    let queue = Refusing { queue: Null::new().unwrap(), files: 0, refused: Vec::new() };
    let mut engine = Engine::new(queue, WorkerPool::new(2), Config::default()).unwrap();
    let files = [(); 2].map(|()| file(&[5; SIZE as usize]));
    let devices = files.each_ref().map(|file| {
        let disk = BlockDevice::open_mapped(file.path(), OpenOptions::default()).unwrap();
        engine.attach(Arc::new(disk)).unwrap()
    });
    // Reads of every other block, which are not merged.
    for round in 0..40u64 {
        for device in &devices {
            let range = ByteRange::new(round * 2 % 16 * BLOCK, BLOCK);
            let buf = engine.buffer(device, range).unwrap();
            assert!(engine.submit(device, request(Op::Read, range), buf, 0).is_ok());
        }
        assert!(engine.finish().iter().all(|done| done.result() == Ok(BLOCK)));
    }
    let [refusing, other] = devices.each_ref().map(|device| engine.stats_of(device));
    assert_eq!((refusing.backed_off, other.backed_off), (1, 0));
    assert!(refusing.refused > 0 && refusing.worker > 0, "{refusing:?}");
    assert_eq!((other.simple, other.worker, other.refused), (40, 0, 0));
    let all = engine.stats();
    assert_eq!(all.simple, refusing.simple + other.simple);
    // The counts of a detached device stay in the sum.
    devices.iter().for_each(|device| engine.detach(device).unwrap());
    assert_eq!(engine.stats(), all);
}

#[test]
fn sequential_streams_of_two_devices_are_merged_although_they_alternate() {
    let queue = Null::new().unwrap();
    let mut engine = Engine::new(queue, WorkerPool::new(1), Config::default()).unwrap();
    let files = [(); 2].map(|()| file(&[5; SIZE as usize]));
    let devices = files.each_ref().map(|file| {
        let disk = BlockDevice::open_mapped(file.path(), OpenOptions::default()).unwrap();
        engine.attach(Arc::new(disk)).unwrap()
    });
    for n in 0..8 {
        for device in &devices {
            let range = ByteRange::new(n * BLOCK, BLOCK);
            let buf = engine.buffer(device, range).unwrap();
            assert!(engine.submit(device, request(Op::Read, range), buf, n).is_ok());
        }
    }
    assert_eq!(engine.finish().len(), 16);
    // The first of each stream has nothing before it.
    assert_eq!(devices.each_ref().map(|device| engine.stats_of(device).merged), [7; 2]);
}
