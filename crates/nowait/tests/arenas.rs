//! Arenas of the caller: their parts are the memory of requests of every file and API, on each queue.
#![allow(unsafe_code)]

use std::sync::Arc;

use nowait::{
    AsyncFile, BlockDevice, BlockingFile, ByteRange, Config, Engine, Flags, IoArena, IoBuffer,
    IoSegment, LocalAsyncFile, LocalDriver, Op, OpenOptions, Request, WorkerPool,
};
use nowait_testkit::{TestQueueKind, WaitForRequests};

const BLOCK: usize = 4096;

fn file() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    file
}

fn disk(file: &tempfile::NamedTempFile) -> Arc<BlockDevice<nowait::AllocationCache>> {
    Arc::new(BlockDevice::open(file.path(), OpenOptions::new()).unwrap())
}

/// Whether a queue of this kind takes memory of callers.
fn registers(kind: TestQueueKind) -> bool {
    kind == TestQueueKind::Uring && nowait::Uring::new().is_ok_and(|ring| ring.offered().buffers)
}

#[test]
fn an_engine_registers_an_arena_once_and_serves_all_of_its_devices_from_it() {
    for kind in TestQueueKind::REAL {
        let config = Config { slots: 64, ..Config::default() };
        let Some(queue) = kind.queue(config.slots) else { continue };
        let can = registers(kind);
        let mut engine = Engine::new(queue, WorkerPool::new(2), config).unwrap();
        let arena = IoArena::new(64 * BLOCK).unwrap();
        let registered = nowait::internal::RegisteredMemory::of_this_process().bytes;
        // Other tests of this process may use up the limit on locked memory.
        let known = engine.register(&arena);
        assert!(can || !known, "{kind:?}");
        if can && !known {
            nowait_testkit::skip("no locked memory is left");
        }
        assert_eq!(engine.register(&arena.clone()), known, "{kind:?}: it is the same one");
        let now = nowait::internal::RegisteredMemory::of_this_process().bytes;
        assert!(!known || now >= registered.min(64 * BLOCK), "{kind:?}");
        let files = [file(), file()];
        let devices = [0, 1].map(|n: usize| engine.attach(disk(&files[n])).unwrap());
        for (pos, len) in [(0, BLOCK), (8 * BLOCK, 5 * BLOCK), (100, 7), (3, 2 * BLOCK)] {
            for (n, device) in devices.iter().enumerate() {
                let mut data = arena.buffer(len).unwrap();
                data.fill(n as u8 + 7);
                let mut back = arena.buffer(len).unwrap();
                for (op, memory) in [(Op::Write, &mut data), (Op::Read, &mut back)] {
                    let range = ByteRange::new(pos as u64, len as u64);
                    let io = Request { op, flags: Flags::NONE, range };
                    let segment = IoSegment { base: memory.as_mut_ptr(), len };
                    // SAFETY: the memory outlives the request, which is waited for.
                    let done =
                        unsafe { engine.submit_arena_memory(device, io, segment, &arena, 1) };
                    assert!(done.is_ok(), "{kind:?}");
                    assert_eq!(engine.only().result(), Ok(len as u64), "{kind:?} {pos} {len}");
                }
                assert!(back[..] == data[..], "{kind:?} {pos} {len}");
            }
        }
        for (n, file) in files.iter().enumerate() {
            let bytes = std::fs::read(file.path()).unwrap();
            assert!(bytes[3..3 + 2 * BLOCK].iter().all(|byte| *byte == n as u8 + 7), "{kind:?}");
        }
        drop(arena);
        // The engine keeps it.
        assert!(engine.settle().is_ok());
    }
}

#[test]
fn an_engine_registers_and_keeps_no_more_than_64_arenas() {
    for kind in TestQueueKind::REAL {
        let config = Config { slots: 64, ..Config::default() };
        let Some(queue) = kind.queue(config.slots) else { continue };
        let mut engine = Engine::new(queue, WorkerPool::new(2), config).unwrap();
        let device = engine.attach(disk(&file())).unwrap();
        for n in 0..70 {
            let arena = IoArena::new(BLOCK).unwrap();
            let known = engine.register(&arena);
            assert!(n < 64 || !known, "{kind:?} {n}");
            let mut buffer = arena.buffer(BLOCK).unwrap();
            let segment = IoSegment { base: buffer.as_mut_ptr(), len: BLOCK };
            let range = ByteRange::new(0, BLOCK as u64);
            let io = Request { op: Op::Read, flags: Flags::NONE, range };
            // SAFETY: the memory outlives the request, which is waited for.
            let done = unsafe { engine.submit_arena_memory(&device, io, segment, &arena, 1) };
            assert!(done.is_ok());
            assert_eq!(engine.only().result(), Ok(BLOCK as u64), "{kind:?} {n}");
        }
    }
}

#[test]
fn buffers_of_an_arena_are_those_of_async_files_on_each_queue() {
    let driver = LocalDriver::new().unwrap();
    let (one, other) = (file(), file());
    for kind in TestQueueKind::REAL {
        let config = Config { slots: 64, ..Config::default() };
        let arena = IoArena::new(16 * BLOCK).unwrap();
        let Some(queue) = kind.queue(config.slots) else { continue };
        let local =
            LocalAsyncFile::with_queue(disk(&one), WorkerPool::new(2), queue, config).unwrap();
        let make = move || kind.try_queue(config.slots);
        let shared = AsyncFile::with_queue(disk(&other), WorkerPool::new(2), config, make).unwrap();
        for (pos, len) in [(0, BLOCK), (4 * BLOCK as u64, 3 * BLOCK), (77, 100)] {
            let data = |byte: u8| {
                let mut buffer = arena.buffer(len).unwrap();
                buffer.fill(byte);
                buffer
            };
            let (done, buffer) = driver.block_on(local.write_at(data(3), pos, Flags::NONE));
            assert_eq!((done, buffer.len()), (Ok(len), len), "{kind:?}");
            // One memory reads from the other file, too.
            assert_eq!(driver.block_on(shared.write_at(data(5), pos, Flags::NONE)).0, Ok(len));
            let (done, buffer) = driver.block_on(shared.read_at(buffer, pos));
            assert_eq!(done, Ok(len), "{kind:?}");
            assert!(buffer.iter().all(|byte| *byte == 5), "{kind:?} {pos} {len}");
            let (done, buffer) = driver.block_on(local.read_at(buffer, pos));
            assert_eq!(done, Ok(len), "{kind:?}");
            assert!(buffer.iter().all(|byte| *byte == 3), "{kind:?} {pos} {len}");
        }
        let all = arena.buffer(16 * BLOCK);
        assert!(all.is_some(), "all buffers were given back");
    }
    let blocking = BlockingFile::new(disk(&one));
    let arena = IoArena::new(BLOCK).unwrap();
    let mut buffer = arena.buffer(BLOCK).unwrap();
    assert_eq!(blocking.read_at(&mut buffer, 0), Ok(BLOCK));
    assert_eq!(buffer[0], 3);
}

#[test]
fn vectored_requests_of_every_api_use_parts_of_an_arena() {
    let driver = LocalDriver::new().unwrap();
    for kind in TestQueueKind::REAL {
        let config = Config { slots: 64, ..Config::default() };
        let Some(queue) = kind.queue(config.slots) else { continue };
        let file = file();
        let device = disk(&file);
        let local = LocalAsyncFile::with_queue(device.clone(), WorkerPool::new(2), queue, config);
        let make = move || kind.try_queue(config.slots);
        let shared = AsyncFile::with_queue(device.clone(), WorkerPool::new(2), config, make);
        let (local, shared) = (local.unwrap(), shared.unwrap());
        let blocking = BlockingFile::new(device);
        let arena = IoArena::new(64 * BLOCK).unwrap();
        for (pos, lens) in
            [(0, [BLOCK, 2 * BLOCK, BLOCK]), (5, [1, 7000, 3]), (BLOCK as u64, [BLOCK, 0, 9])]
        {
            let buffers = |fill: u8| -> Vec<_> {
                let parts = lens.iter().zip(fill..).map(|(len, byte)| {
                    let mut part = arena.buffer(*len).unwrap();
                    part.fill(byte);
                    part
                });
                parts.collect()
            };
            let total: usize = lens.iter().sum();
            let expected = |fill: u8| -> Vec<u8> {
                lens.iter().zip(fill..).flat_map(|(len, byte)| vec![byte; *len]).collect()
            };
            let found = || {
                let bytes = std::fs::read(file.path()).unwrap();
                bytes[pos as usize..pos as usize + total].to_vec()
            };
            let (done, back) =
                driver.block_on(local.write_vectored_at(buffers(1), pos, Flags::NONE));
            assert_eq!((done, back.len()), (Ok(total), 3), "{kind:?}");
            assert!(found() == expected(1), "{kind:?} {pos}");
            let (done, back) = driver.block_on(shared.read_vectored_at(buffers(0), pos));
            assert_eq!(done, Ok(total), "{kind:?}");
            assert!(back.concat_bytes() == expected(1), "{kind:?} {pos}");
            let (done, _) =
                driver.block_on(shared.write_vectored_at(buffers(11), pos, Flags::DSYNC));
            assert_eq!(done, Ok(total), "{kind:?}");
            let (done, back) = driver.block_on(local.read_vectored_at(buffers(0), pos));
            assert_eq!(done, Ok(total), "{kind:?}");
            assert!(back.concat_bytes() == expected(11), "{kind:?} {pos}");
            let data = buffers(21);
            let slices: Vec<_> = data.iter().map(|part| std::io::IoSlice::new(part)).collect();
            assert_eq!(blocking.write_vectored_at(&slices, pos, Flags::NONE), Ok(total));
            assert!(found() == expected(21), "{kind:?} {pos}");
        }
        for count in [0, 1024, 1025] {
            let many: Vec<_> = (0..count).map(|_| IoBuffer::zeroed(1).unwrap()).collect();
            let (done, back) = driver.block_on(local.read_vectored_at(many, 0));
            let expected = if count > 1024 { Err(libc::EINVAL) } else { Ok(count) };
            assert_eq!(done.map_err(|error| error.errno()), expected, "{kind:?}");
            assert_eq!(back.len(), count, "{kind:?}: they are given back");
        }
    }
}

trait Bytes {
    fn concat_bytes(&self) -> Vec<u8>;
}

impl Bytes for Vec<IoBuffer> {
    fn concat_bytes(&self) -> Vec<u8> {
        self.iter().flat_map(|buffer| buffer.to_vec()).collect()
    }
}
