//! Files that grow, against an array of bytes, with several handles, tasks and processes, on every file
//! system that is here.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use nowait::{
    Allocate, AsyncFile, BlockDevice, BlockingFile, ByteRange, Config, Direct, Engine, FileLock,
    Flags, IoBuffer, LocalAsyncFile, LocalDriver, Op, OpenOptions, Request, WorkerPool,
};
use nowait_testkit::{Random, TestQueueKind, on_each_file_system, seed, skip};

const HERE: &str = env!("CARGO_TARGET_TMPDIR");
/// The greatest position of a request.
const MOST: u64 = 300_000;

/// The handles of one file, of each API.
struct Handles {
    blocking: [BlockingFile; 3],
    local: LocalAsyncFile,
    shared: AsyncFile,
    plain: fs::File,
    driver: LocalDriver,
}

impl Handles {
    fn new(path: &Path) -> Self {
        let options = OpenOptions::new().create(true);
        let open = |options| BlockingFile::open(path, options).unwrap();
        let blocking = [open(options), open(options), open(options.direct(Direct::Off))];
        Self {
            blocking,
            local: LocalAsyncFile::open(path, options).unwrap(),
            shared: AsyncFile::open(path, options).unwrap(),
            plain: fs::File::options().read(true).write(true).open(path).unwrap(),
            driver: LocalDriver::new().unwrap(),
        }
    }

    fn write(&self, random: &mut Random, pos: u64, bytes: &[u8]) {
        let buffer = || {
            let mut buffer = IoBuffer::zeroed(bytes.len()).unwrap();
            buffer.copy_from_slice(bytes);
            buffer
        };
        let flags = if random.chance(10) { Flags::DSYNC } else { Flags::NONE };
        let done = match random.below(6) {
            n @ 0..3 => self.blocking[n as usize].write_at(bytes, pos, flags),
            3 => self.driver.block_on(self.local.write_at(buffer(), pos, flags)).0,
            4 => self.driver.block_on(self.shared.write_at(buffer(), pos, flags)).0,
            _ => self
                .plain
                .write_all_at(bytes, pos)
                .map(|()| bytes.len())
                .map_err(|_| unreachable!()),
        };
        assert_eq!(done, Ok(bytes.len()));
    }

    fn append(&self, random: &mut Random, bytes: &[u8]) -> u64 {
        let mut buffer = IoBuffer::zeroed(bytes.len()).unwrap();
        buffer.copy_from_slice(bytes);
        let done = match random.below(5) {
            n @ 0..3 => self.blocking[n as usize].append(bytes, Flags::NONE),
            3 => self.driver.block_on(self.local.append(buffer, Flags::NONE)).0,
            _ => self.driver.block_on(self.shared.append(buffer, Flags::NONE)).0,
        };
        done.unwrap()
    }

    fn read(&self, random: &mut Random, pos: u64, len: usize) -> Vec<u8> {
        let mut bytes = IoBuffer::zeroed(len).unwrap();
        let done = match random.below(6) {
            n @ 0..3 => self.blocking[n as usize].read_at(&mut bytes, pos).unwrap(),
            n @ 3..5 => {
                let (done, buffer) = match n {
                    3 => self.driver.block_on(self.local.read_at(bytes, pos)),
                    _ => self.driver.block_on(self.shared.read_at(bytes, pos)),
                };
                bytes = buffer;
                done.unwrap()
            }
            _ => self.plain.read_at(&mut bytes, pos).unwrap(),
        };
        bytes[..done].to_vec()
    }

    /// The size by one API and then by the others.
    fn size(&self) -> u64 {
        let size = self.local.size();
        let others = self.blocking.iter().map(BlockingFile::size);
        assert!(others.chain([self.shared.size()]).all(|other| other == size));
        size
    }
}

/// A range of odd or round bounds.
fn range(random: &mut Random) -> (u64, usize) {
    let unit = [1, 512, 4096][random.below(3) as usize];
    let pos = random.below(MOST) / unit * unit;
    let most = if random.chance(20) { 100_000 } else { 9000 };
    let len = (1 + random.below(most) / unit) * unit;
    (pos, len as usize)
}

fn step(handles: &Handles, random: &mut Random, model: &mut Vec<u8>) {
    let (pos, len) = range(random);
    let end = pos + len as u64;
    let (at, n) = (pos as usize, random.below(3) as usize);
    match random.below(10) {
        0..4 => {
            let bytes = random.bytes(len);
            handles.write(random, pos, &bytes);
            model.resize(model.len().max(end as usize), 0);
            model[at..end as usize].copy_from_slice(&bytes);
        }
        4..7 => {
            let expected = &model[at.min(model.len())..(end as usize).min(model.len())];
            assert!(handles.read(random, pos, len) == expected, "{pos} {len}");
        }
        7 => {
            let bytes = random.bytes(len.min(20_000));
            assert_eq!(handles.append(random, &bytes), model.len() as u64);
            model.extend(bytes);
        }
        8 => {
            let file = &handles.blocking[n];
            match random.below(3) {
                0 => file.set_len(pos).unwrap(),
                1 => handles.driver.block_on(handles.local.set_len(pos)).unwrap(),
                _ => handles.driver.block_on(handles.shared.set_len(pos)).unwrap(),
            }
            model.resize(at, 0);
        }
        _ => {
            let (file, range) = (&handles.blocking[n], ByteRange::new(pos, len as u64));
            let inside = at.min(model.len())..(end as usize).min(model.len());
            match random.below(4) {
                0 => file.discard(range).unwrap(),
                1 => file.zero(range, Flags::NO_UNMAP).unwrap(),
                2 => handles.driver.block_on(handles.shared.discard(range)).unwrap(),
                _ => return file.allocate(range, Allocate::KeepSize).unwrap(),
            }
            model[inside].fill(0);
        }
    }
    if random.chance(20) {
        assert_eq!(handles.size(), model.len() as u64);
    }
}

#[test]
fn handles_of_every_api_agree_with_the_model_on_every_file_system() {
    on_each_file_system(Path::new(HERE), |directory, system| {
        for round in 0..2 {
            let path = directory.join(format!("file{round}"));
            let (handles, mut model) = (Handles::new(&path), Vec::new());
            let mut random = Random::from_seed(seed().wrapping_add(round));
            for _ in 0..700 {
                step(&handles, &mut random, &mut model);
            }
            assert!(fs::read(&path).unwrap() == model, "{system}");
            handles.blocking[0].sync_all().unwrap();
            drop(handles);
            assert!(fs::read(&path).unwrap() == model, "{system}, closed");
        }
    });
}

/// The byte of record `n`.
fn byte_of(n: u64) -> u8 {
    (n % 251) as u8 + 1
}

#[test]
fn tasks_that_extend_one_file_at_the_same_time_lose_nothing() {
    const TASKS: u64 = 8;
    const RECORDS: u64 = 40;
    // No multiple of a page, so that neighbours share one.
    const LEN: u64 = 5001;
    on_each_file_system(Path::new(HERE), |directory, system| {
        let path = directory.join("file");
        let file = AsyncFile::open(&path, OpenOptions::new().create(true)).unwrap();
        std::thread::scope(|scope| {
            for task in 0..TASKS {
                let file = file.clone();
                scope.spawn(move || {
                    let driver = LocalDriver::new().unwrap();
                    for record in 0..RECORDS {
                        let n = record * TASKS + task;
                        let mut buffer = IoBuffer::zeroed(LEN as usize).unwrap();
                        buffer.fill(byte_of(n));
                        let done = driver.block_on(file.write_at(buffer, n * LEN, Flags::NONE)).0;
                        assert_eq!(done, Ok(LEN as usize));
                    }
                });
            }
        });
        let bytes = fs::read(&path).unwrap();
        assert_eq!(bytes.len() as u64, TASKS * RECORDS * LEN, "{system}");
        for (n, record) in bytes.chunks(LEN as usize).enumerate() {
            assert!(record.iter().all(|byte| *byte == byte_of(n as u64)), "{system}: {n}");
        }
    });
}

#[test]
fn c26_appends_of_several_handles_and_tasks_are_each_in_one_piece() {
    const WRITERS: usize = 6;
    const RECORDS: usize = 60;
    on_each_file_system(Path::new(HERE), |directory, system| {
        let path = directory.join("log");
        let options = OpenOptions::new().create(true);
        let (one, shared) =
            (BlockingFile::open(&path, options).unwrap(), AsyncFile::open(&path, options).unwrap());
        // The length tells the writer.
        let len = |writer: usize| [100, 4096, 8192, 777, 4095, 20_000][writer];
        let mut found: Vec<(u64, u8, usize)> = std::thread::scope(|scope| {
            let writers = (0..WRITERS).map(|writer| {
                let (one, shared, path) = (&one, shared.clone(), &path);
                scope.spawn(move || {
                    let driver = LocalDriver::new().unwrap();
                    let own = BlockingFile::open(path, OpenOptions::new()).unwrap();
                    let mut places = Vec::new();
                    for record in 0..RECORDS {
                        let byte = byte_of((writer * RECORDS + record) as u64);
                        let mut buffer = IoBuffer::zeroed(len(writer)).unwrap();
                        buffer.fill(byte);
                        let pos = match record % 3 {
                            0 => one.append(&buffer, Flags::NONE),
                            1 => own.append(&buffer, Flags::NONE),
                            _ => driver.block_on(shared.append(buffer, Flags::NONE)).0,
                        };
                        places.push((pos.unwrap(), byte, len(writer)));
                    }
                    places
                })
            });
            let writers: Vec<_> = writers.collect();
            writers.into_iter().flat_map(|writer| writer.join().unwrap()).collect()
        });
        found.sort_unstable();
        let (bytes, mut end) = (fs::read(&path).unwrap(), 0);
        for (pos, byte, len) in found {
            assert_eq!(pos, end, "{system}: no gap, no overlap");
            end += len as u64;
            let record = &bytes[pos as usize..end as usize];
            assert!(record.iter().all(|found| *found == byte), "{system}: {pos}");
        }
        assert_eq!(bytes.len() as u64, end, "{system}");
    });
}

/// In the environment of another process: the path of its file, and the byte of its records.
const OTHER: &str = "NOWAIT_TEST_APPENDING_PROCESS";
const OTHER_RECORDS: usize = 100;

/// The other process of a test; without its variable it has nothing to do.
#[test]
fn the_appending_process() {
    let Ok(what) = std::env::var(OTHER) else { return };
    let (byte, path) = what.split_once(' ').unwrap();
    let byte: u8 = byte.parse().unwrap();
    let file = BlockingFile::open(Path::new(path), OpenOptions::new()).unwrap();
    for record in 0..OTHER_RECORDS {
        let record = vec![byte; [4096, 100, 8192][record % 3]];
        let pos = file.append(&record, Flags::NONE).unwrap();
        let mut back = vec![0; record.len()];
        assert_eq!(file.read_at(&mut back, pos), Ok(record.len()));
        assert!(back == record, "its own record, at {pos}");
    }
}

#[test]
fn c26_appends_of_several_processes_are_each_in_one_piece() {
    on_each_file_system(Path::new(HERE), |directory, system| {
        let path = directory.join("log");
        fs::File::create(&path).unwrap();
        let processes: Vec<_> = (1..=3)
            .map(|byte| {
                let mut child = std::process::Command::new(std::env::current_exe().unwrap());
                child.args(["--exact", "files::the_appending_process", "--nocapture"]);
                child.env(OTHER, format!("{byte} {}", path.display()));
                nowait_testkit::ends_with_test(&mut child);
                child.stdout(std::process::Stdio::piped()).spawn().unwrap()
            })
            .collect();
        for process in processes {
            let output = process.wait_with_output().unwrap();
            assert!(output.status.success(), "{system}: {output:?}");
        }
        let bytes = fs::read(&path).unwrap();
        for byte in 1..=3 {
            let count = bytes.iter().filter(|found| **found == byte).count();
            let records = (0..OTHER_RECORDS).map(|record| [4096, 100, 8192][record % 3]);
            assert_eq!(count, records.sum::<usize>(), "{system}");
        }
    });
}

#[test]
fn one_engine_extends_several_files_beside_a_disk() {
    let dir = tempfile::tempdir_in(HERE).unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("disk"), [7; 8192]).unwrap();
    for kind in TestQueueKind::REAL {
        let config = Config::default();
        let Some(queue) = kind.queue(config.slots) else { continue };
        let mut engine = Engine::new(queue, WorkerPool::new(3), config).unwrap();
        let disk =
            engine.attach(BlockDevice::open(&at("disk"), OpenOptions::new()).unwrap().into());
        let disk = disk.unwrap();
        let names = ["a", "b", "c"];
        let options = OpenOptions::new().create(true).truncate(true);
        let files = names.map(|name| {
            let file = BlockDevice::open_file(&at(name), options).unwrap();
            engine.attach(Arc::new(file)).unwrap()
        });
        let io = |n: u64| {
            let range = ByteRange::new(n * 4096, 4096 + n % 2 * 100);
            Request { op: Op::Write, flags: Flags::NONE, range }
        };
        for n in 0..24 {
            for device in files.iter().chain([&disk]) {
                let mut buf = engine.buffer(device, io(n).range).unwrap();
                buf.fill(byte_of(n));
                match engine.submit(device, io(n), buf, n) {
                    Ok(()) => {}
                    Err(rejected) => {
                        let is_beyond = Arc::ptr_eq(device.disk(), disk.disk()) && n >= 2;
                        assert!(
                            is_beyond && rejected.error.errno() == libc::ENOSPC,
                            "{kind:?} {n}"
                        );
                    }
                }
                while engine.in_flight() > 0 {
                    engine.wait(None, &mut |_, _| {}).unwrap();
                    while let Some(done) = engine.next() {
                        let is_cut = Arc::ptr_eq(device.disk(), disk.disk()) && n == 1;
                        let expected = if is_cut { 4096 } else { io(n).range.len };
                        assert_eq!(done.result().unwrap(), expected, "{kind:?} {n}");
                    }
                }
            }
        }
        drop(engine);
        for name in names {
            let bytes = fs::read(at(name)).unwrap();
            assert_eq!(bytes.len() as u64, io(23).range.end(), "{kind:?}");
            let is_right = |at: usize| bytes[at] == byte_of(at as u64 / 4096).min(24);
            assert!((0..bytes.len()).all(is_right), "{kind:?}");
        }
        assert_eq!(fs::metadata(at("disk")).unwrap().len(), 8192);
    }
}

#[test]
fn a_lock_excludes_other_handles_until_it_is_given_up_or_its_handle_is_closed() {
    let file = tempfile::NamedTempFile::new_in(HERE).unwrap();
    let open = || BlockingFile::open(file.path(), OpenOptions::new()).unwrap();
    let errno = |done: Result<(), nowait::Error>| done.map_err(|error| error.errno());
    let (one, other) = (open(), AsyncFile::open(file.path(), OpenOptions::new()).unwrap());
    if let Err(error) = one.try_lock(FileLock::Shared) {
        skip(&format!("no flock(2): {error}"));
        return;
    }
    other.try_lock(FileLock::Shared).unwrap();
    assert_eq!(errno(one.try_lock(FileLock::Exclusive)), Err(libc::EAGAIN));
    other.unlock().unwrap();
    one.lock(FileLock::Exclusive).unwrap();
    assert_eq!(errno(other.try_lock(FileLock::Shared)), Err(libc::EAGAIN));
    one.write_at(b"locked", 0, Flags::NONE).unwrap();
    drop(one);
    other.try_lock(FileLock::Exclusive).unwrap();
    assert_eq!(errno(open().try_lock(FileLock::Shared)), Err(libc::EAGAIN));
}
