//! A storage of the test's own, without a descriptor: requests reach it by the worker threads, and
//! every transfer is aligned as it requires.
#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use nowait::{
    AioThreadQueue, Alignment, BlockDevice, BlockingFile, ByteRange, Config, Error, Flags,
    IoBuffer, IoSegment, LinearMap, Null, Op, OpenOptions, Operation, ReadCursor, Request,
    SingleDisk, Storage, StorageProperties, WorkerPool, WriteCursor,
};

const BLOCK: u64 = 4096;
/// The storage ends inside a block.
const SIZE: usize = 10 * BLOCK as usize + 100;

/// Bytes in memory, which move at most [`MemoryStorage::most`] together.
struct MemoryStorage {
    bytes: Mutex<Vec<u8>>,
    /// Bytes of the longest transfer, a multiple of the block.
    most: usize,
    /// Transfers from this byte on fail with `EIO`.
    bad: u64,
    /// Reads and writes so far.
    transfers: AtomicUsize,
    /// Requests that were to be polled.
    polled: AtomicUsize,
}

impl MemoryStorage {
    fn new() -> Self {
        let bytes = (0..SIZE).map(|n| (n % 251) as u8).collect();
        Self {
            bytes: Mutex::new(bytes),
            most: usize::MAX,
            bad: u64::MAX,
            transfers: AtomicUsize::new(0),
            polled: AtomicUsize::new(0),
        }
    }

    fn contents(&self) -> Vec<u8> {
        self.bytes.lock().unwrap().clone()
    }

    /// The bytes that a transfer of `total` bytes may move.
    fn begin(&self, pos: u64, total: usize, aligned: bool, op: Operation) -> Result<usize, Error> {
        let in_last_block = op == Operation::Write && pos >= 10 * BLOCK;
        assert!(
            aligned && pos.is_multiple_of(BLOCK) || in_last_block,
            "{op:?} of {total} at {pos}"
        );
        self.transfers.fetch_add(1, Ordering::Relaxed);
        let moved = total.min(self.most);
        match pos + moved as u64 > self.bad {
            true => Err(Error::new(libc::EIO, op)),
            false => Ok(moved),
        }
    }
}

fn is_aligned(slice: &[u8]) -> bool {
    (slice.as_ptr() as usize).is_multiple_of(512) && (slice.len() as u64).is_multiple_of(BLOCK)
}

impl Storage for MemoryStorage {
    fn properties(&self) -> StorageProperties {
        let block = BLOCK as u32;
        StorageProperties::new(Alignment { memory: 512, offset: block, read_offset: block })
    }

    fn size(&self) -> Result<u64, Error> {
        Ok(self.bytes.lock().unwrap().len() as u64)
    }

    fn read(&self, bufs: &mut [IoSliceMut<'_>], pos: u64) -> Result<usize, Error> {
        let total = bufs.iter().map(|buf| buf.len()).sum();
        let aligned = bufs.iter().all(|buf| is_aligned(buf));
        let most = self.begin(pos, total, aligned, Operation::Read)?;
        let bytes = self.bytes.lock().unwrap();
        let from = bytes.get(pos as usize..).unwrap_or_default();
        let mut rest = &from[..most.min(from.len())];
        let found = rest.len();
        for buf in bufs {
            let (now, later) = rest.split_at(buf.len().min(rest.len()));
            buf[..now.len()].copy_from_slice(now);
            rest = later;
        }
        Ok(found)
    }

    fn read_with(
        &self,
        bufs: &mut [IoSliceMut<'_>],
        pos: u64,
        flags: Flags,
    ) -> Result<usize, Error> {
        self.polled.fetch_add(usize::from(flags.contains(Flags::HIPRI)), Ordering::Relaxed);
        self.read(bufs, pos)
    }

    fn write(&self, bufs: &[IoSlice<'_>], pos: u64, flags: Flags) -> Result<usize, Error> {
        self.polled.fetch_add(usize::from(flags.contains(Flags::HIPRI)), Ordering::Relaxed);
        let total = bufs.iter().map(|buf| buf.len()).sum();
        let aligned = bufs.iter().all(|buf| is_aligned(buf));
        let most = self.begin(pos, total, aligned, Operation::Write)?;
        let data: Vec<_> = bufs.iter().flat_map(|buf| buf.iter().copied()).take(most).collect();
        let mut bytes = self.bytes.lock().unwrap();
        let (pos, end) = (pos as usize, pos as usize + data.len());
        let len = bytes.len().max(end);
        bytes.resize(len, 0);
        bytes[pos..end].copy_from_slice(&data);
        Ok(data.len())
    }

    fn sync(&self) -> Result<(), Error> {
        Ok(())
    }
}

/// Reads `len` bytes; returns those that were found, and the error.
fn read(storage: &dyn Storage, pos: u64, len: usize) -> (Vec<u8>, Option<i32>) {
    let mut memory = vec![0xee; len];
    let mut cursor = ReadCursor::from(&mut memory[..]);
    let errno = storage.read_at(pos, &mut cursor).err().map(Error::errno);
    let found = len - cursor.len() as usize;
    memory.truncate(found);
    (memory, errno)
}

/// Positions and lengths around blocks and the end.
fn ranges() -> Vec<(u64, usize)> {
    let around = |pos: u64| [pos.saturating_sub(1), pos, pos + 1, pos + 700];
    let starts = [0, BLOCK, 9 * BLOCK, 10 * BLOCK].into_iter().flat_map(around);
    let lens = [1, 99, BLOCK as usize - 1, BLOCK as usize, 3 * BLOCK as usize + 5];
    starts.flat_map(|pos| lens.map(|len| (pos, len))).collect()
}

/// The same, cut at the end.
fn ranges_inside() -> Vec<(u64, usize)> {
    let inside = ranges().into_iter().filter(|&(pos, _)| pos < SIZE as u64);
    inside.map(|(pos, len)| (pos, len.min(SIZE - pos as usize))).collect()
}

#[test]
fn c12_any_range_is_read_by_whole_blocks_also_by_short_transfers() {
    for most in [usize::MAX, BLOCK as usize] {
        let storage = MemoryStorage { most, ..MemoryStorage::new() };
        let all = storage.contents();
        for (pos, len) in ranges() {
            let expected: Vec<_> = all.iter().skip(pos as usize).take(len).copied().collect();
            assert_eq!(read(&storage, pos, len), (expected, None), "{len} at {pos}");
        }
    }
}

#[test]
fn c12_any_range_is_written_by_whole_blocks_and_the_storage_keeps_its_size() {
    for most in [usize::MAX, BLOCK as usize] {
        let storage = MemoryStorage { most, ..MemoryStorage::new() };
        let mut expected = storage.contents();
        for ((pos, len), byte) in ranges_inside().into_iter().zip((0..).cycle()) {
            let data = vec![byte; len];
            let mut cursor = WriteCursor::from(&data[..]);
            let storage: &dyn Storage = &storage;
            storage.write_at(pos, &mut cursor, Some(SIZE as u64)).unwrap();
            assert!(cursor.is_empty());
            expected[pos as usize..][..len].fill(byte);
        }
        assert!(storage.contents() == expected);
    }
}

#[test]
fn a_storage_without_a_given_end_grows_to_a_whole_block() {
    let storage = MemoryStorage::new();
    let mut expected = storage.contents();
    let data = [7; 50];
    let part: &dyn Storage = &storage;
    part.write_at(SIZE as u64 + 10, &mut WriteCursor::from(&data[..]), None).unwrap();
    expected.resize(11 * BLOCK as usize, 0);
    expected[SIZE + 10..][..50].fill(7);
    assert!(storage.contents() == expected);
}

#[test]
fn c19_the_cursor_tells_the_bytes_before_an_error() {
    let most = BLOCK as usize;
    let storage = MemoryStorage { most, bad: 3 * BLOCK, ..MemoryStorage::new() };
    let before = storage.contents();
    assert_eq!(read(&storage, 4 * BLOCK, 9), (Vec::new(), Some(libc::EIO)));
    assert_eq!(read(&storage, 5, 2 * BLOCK as usize), (before[5..][..2 * most].to_vec(), None));
    let data = vec![1; 4 * most];
    let write = |pos| {
        let mut cursor = WriteCursor::from(&data[..]);
        let error = (&storage as &dyn Storage).write_at(pos, &mut cursor, None).unwrap_err();
        (error.errno(), cursor.len())
    };
    // Its last block cannot be read.
    assert_eq!(write(BLOCK + 9), (libc::EIO, 4 * BLOCK));
    assert!(storage.contents() == before);
    assert_eq!(write(BLOCK), (libc::EIO, 2 * BLOCK));
    assert!(storage.contents()[..3 * most] == [&before[..most], &data[..2 * most]].concat());
}

#[test]
fn a_storage_without_a_descriptor_is_served_by_the_workers() {
    let storage = Arc::new(MemoryStorage::new());
    let disk = Arc::new(BlockDevice::raw(storage.clone(), OpenOptions::default()).unwrap());
    let config = Config { nowait_first: false, ..Config::default() };
    let workers = WorkerPool::new(2);
    let queue = AioThreadQueue::new(config.slots).unwrap();
    let refused = SingleDisk::new(disk.clone(), workers.clone(), queue, config).err();
    assert_eq!(refused.map(|error| error.errno()), Some(libc::EOPNOTSUPP));
    let mut engine = SingleDisk::new(disk, workers, Null::new().unwrap(), config).unwrap();
    let mut expected = storage.contents();
    for ((pos, len), byte) in ranges_inside().into_iter().zip((0..).cycle()) {
        let range = ByteRange::new(pos, len as u64);
        for op in [Op::Write, Op::Read] {
            let mut buf = engine.buffer(range).unwrap();
            if op == Op::Write {
                buf.fill(byte);
            }
            let io = Request { op, flags: Flags::NONE, range };
            engine.submit(io, buf, 1).map_err(|rejected| rejected.error).unwrap();
            while !engine.has_done() {
                engine.wait(None, &mut |_, _| {}).unwrap();
            }
            let done = engine.next().unwrap();
            assert_eq!(done.result().unwrap(), len as u64);
            assert!(op == Op::Write || done.buf.unwrap().iter().all(|b| *b == byte));
        }
        expected[pos as usize..][..len].fill(byte);
    }
    assert!(storage.contents() == expected);
}

/// A list of 1024 aligned segments, none of which touches the next one in memory.
#[test]
fn c16_1024_aligned_segments_are_one_transfer_of_the_blocking_api_and_of_a_worker() {
    const SEGMENTS: usize = 1024;
    let len = SEGMENTS * BLOCK as usize;
    let bytes = Mutex::new(vec![7; len]);
    let storage = Arc::new(MemoryStorage { bytes, ..MemoryStorage::new() });
    let disk = BlockDevice::mapped(storage.clone(), Vec::new(), len as u64, false, LinearMap);
    let disk = Arc::new(disk);
    let transfers = || storage.transfers.swap(0, Ordering::Relaxed);
    transfers();
    let mut memory = IoBuffer::zeroed(2 * len).unwrap();
    let blocks = |memory: &IoBuffer| {
        let all = memory.chunks_exact(BLOCK as usize).map(<[u8]>::to_vec);
        all.step_by(2).collect::<Vec<_>>().concat()
    };
    let file = BlockingFile::new(disk.clone());
    let parts = memory.chunks_exact_mut(BLOCK as usize).step_by(2).map(IoSliceMut::new);
    assert_eq!(file.read_vectored_at(&mut parts.collect::<Vec<_>>(), 0).unwrap(), len);
    assert_eq!((transfers(), blocks(&memory) == storage.contents()), (1, true));
    memory.fill(9);
    let parts = memory.chunks_exact(BLOCK as usize).step_by(2).map(IoSlice::new);
    let parts: Vec<_> = parts.collect();
    assert_eq!(file.write_vectored_at(&parts, 0, Flags::NONE).unwrap(), len);
    assert_eq!((transfers(), storage.contents() == vec![9; len]), (1, true));

    memory.fill(5);
    let workers = WorkerPool::new(1);
    let config = Config { nowait_first: false, ..Config::default() };
    let mut engine = SingleDisk::new(disk, workers, Null::new().unwrap(), config).unwrap();
    let parts = memory.chunks_exact_mut(BLOCK as usize).step_by(2);
    let segments = parts.map(|part| IoSegment { base: part.as_mut_ptr(), len: part.len() });
    let segments: Vec<_> = segments.collect();
    for op in [Op::Write, Op::Read] {
        let io = Request { op, flags: Flags::NONE, range: ByteRange::new(0, len as u64) };
        // SAFETY: the memory outlives the engine's use of it: the loop below waits for its end.
        let sent = unsafe { engine.submit_user_memory(io, &segments, 0) };
        sent.map_err(|rejected| rejected.error).unwrap();
        while engine.in_flight() > 0 {
            engine.wait(None, &mut |_, _| {}).unwrap();
            while let Some(done) = engine.next() {
                assert_eq!(done.result(), Ok(len as u64));
            }
        }
        assert_eq!((transfers(), storage.contents() == vec![5; len]), (1, true), "{op:?}");
    }
}

#[test]
fn c48_each_aligned_call_of_a_blocking_file_with_hipri_has_it() {
    for (flags, polled) in [(Flags::HIPRI, 2), (Flags::NONE, 0)] {
        let storage = Arc::new(MemoryStorage::new());
        let disk = BlockDevice::mapped(storage.clone(), Vec::new(), SIZE as u64, false, LinearMap);
        let file = BlockingFile::new(Arc::new(disk)).with_flags(flags);
        let mut memory = IoBuffer::zeroed(BLOCK as usize).unwrap();
        assert_eq!(file.read_at(&mut memory, BLOCK).unwrap(), BLOCK as usize);
        assert_eq!(file.write_at(&memory, 0, Flags::NONE).unwrap(), BLOCK as usize);
        assert_eq!(storage.polled.load(Ordering::Relaxed), polled);
    }
}

/// Writes pages in one burst, each with its number from 1 on, by one worker. Returns the transfers,
/// and the errno of each write, 0 for success.
fn written_in_a_burst(
    storage: &Arc<MemoryStorage>,
    merge: bool,
    flags: Flags,
    pages: &[u64],
) -> (usize, Vec<i32>) {
    let disk = Arc::new(BlockDevice::raw(storage.clone(), OpenOptions::default()).unwrap());
    let config = Config { nowait_first: false, merge, ..Config::default() };
    let workers = WorkerPool::new(1);
    let mut engine = SingleDisk::new(disk, workers, Null::new().unwrap(), config).unwrap();
    storage.transfers.store(0, Ordering::Relaxed);
    for (tag, page) in pages.iter().enumerate() {
        let range = ByteRange::new(page * BLOCK, BLOCK);
        let mut buf = engine.buffer(range).unwrap();
        buf.fill(tag as u8 + 1);
        let io = Request { op: Op::Write, flags, range };
        engine.submit(io, buf, tag as u64).map_err(|rejected| rejected.error).unwrap();
    }
    let mut results = vec![-1; pages.len()];
    while engine.in_flight() > 0 {
        engine.wait(None, &mut |_, _| {}).unwrap();
        while let Some(done) = engine.next() {
            results[done.tag as usize] = done.result().map_or_else(|error| error.errno(), |_| 0);
        }
    }
    (storage.transfers.load(Ordering::Relaxed), results)
}

#[test]
fn writes_of_a_burst_that_touch_and_wait_for_a_worker_are_one_transfer() {
    let pages: Vec<u64> = (0..8).collect();
    for (merge, flags, transfers) in
        [(true, Flags::NONE, 1), (false, Flags::NONE, 8), (true, Flags::DSYNC, 8)]
    {
        let storage = Arc::new(MemoryStorage::new());
        let done = written_in_a_burst(&storage, merge, flags, &pages);
        assert_eq!(done, (transfers, vec![0; 8]), "merge {merge}, {flags:?}");
        let bytes = storage.contents();
        let mut blocks = bytes.chunks_exact(BLOCK as usize).zip(1..=8);
        assert!(blocks.all(|(block, n)| block.iter().all(|&byte| byte == n)));
    }
    // Pages 2 to 4 touch, in this order only.
    let storage = Arc::new(MemoryStorage::new());
    let done = written_in_a_burst(&storage, true, Flags::NONE, &[9, 2, 3, 4, 1, 0, 6]);
    assert_eq!(done, (5, vec![0; 7]));
    let first = [9, 2, 3, 4, 1, 0, 6].map(|page: usize| storage.contents()[page * 4096]);
    assert_eq!(first, [1, 2, 3, 4, 5, 6, 7]);
}

#[test]
fn writes_that_fail_as_one_are_made_and_answered_one_by_one() {
    let storage = Arc::new(MemoryStorage { bad: 5 * BLOCK, ..MemoryStorage::new() });
    let done = written_in_a_burst(&storage, true, Flags::NONE, &(0..8).collect::<Vec<_>>());
    let results = [0, 0, 0, 0, 0, libc::EIO, libc::EIO, libc::EIO];
    assert_eq!(done, (1 + 8, results.to_vec()));
    // A transfer that moves a part is continued.
    let most = 2 * BLOCK as usize;
    let storage = Arc::new(MemoryStorage { most, ..MemoryStorage::new() });
    let done = written_in_a_burst(&storage, true, Flags::NONE, &(0..8).collect::<Vec<_>>());
    assert_eq!(done, (4, vec![0; 8]));
}
