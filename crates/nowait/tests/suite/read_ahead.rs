//! Files that are read ahead: a scan reads what plain direct I/O would read, whatever the handles of this
//! process write beside it, by each API on each file system.

use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};

use nowait::{
    AsyncFile, BlockDevice, BlockingFile, ByteRange, Flags, IoBuffer, LocalAsyncFile, LocalDriver,
    OpenOptions,
};
use nowait_testkit::{Random, on_each_file_system, skip, wait_until};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const HERE: &str = env!("CARGO_TARGET_TMPDIR");

fn ahead() -> OpenOptions {
    OpenOptions::new().read_ahead(true)
}

/// The byte at `pos`, never 0.
fn byte_at(pos: u64) -> u8 {
    (pos.wrapping_mul(31).wrapping_add(pos >> 9) as u8) | 1
}

fn content(size: u64) -> Vec<u8> {
    (0..size).map(byte_at).collect()
}

/// A new file of `size` bytes of content, none of them in the page cache.
fn file_of(size: u64, path: &Path) {
    std::fs::write(path, content(size)).unwrap();
    let file = std::fs::File::open(path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

/// Handles of one file, with read-ahead: one of each API.
struct Handles {
    blocking: BlockingFile,
    local: LocalAsyncFile,
    shared: AsyncFile,
    driver: LocalDriver,
}

impl Handles {
    const COUNT: u64 = 3;

    fn open(path: &Path) -> Self {
        Self {
            driver: LocalDriver::new().unwrap(),
            blocking: BlockingFile::open(path, ahead()).unwrap(),
            local: LocalAsyncFile::open(path, ahead()).unwrap(),
            shared: AsyncFile::open(path, ahead()).unwrap(),
        }
    }

    fn read(&self, api: u64, pos: u64, len: u64) -> Vec<u8> {
        let mut buffer = IoBuffer::zeroed(len as usize).unwrap();
        let (done, buffer) = match api % Self::COUNT {
            0 => (self.blocking.read_at(&mut buffer, pos), buffer),
            1 => self.driver.block_on(self.local.read_at(buffer, pos)),
            _ => self.driver.block_on(self.shared.read_at(buffer, pos)),
        };
        buffer[..done.unwrap()].to_vec()
    }

    fn write(&self, api: u64, pos: u64, bytes: &[u8]) {
        let mut buffer = IoBuffer::zeroed(bytes.len()).unwrap();
        buffer.copy_from_slice(bytes);
        let done = match api % Self::COUNT {
            0 => self.blocking.write_at(&buffer, pos, Flags::NONE),
            1 => self.driver.block_on(self.local.write_at(buffer, pos, Flags::NONE)).0,
            _ => self.driver.block_on(self.shared.write_at(buffer, pos, Flags::NONE)).0,
        };
        assert_eq!(done, Ok(bytes.len()));
    }
}

fn scan(handles: &Handles, api: u64, reads: impl Iterator<Item = (u64, u64)>, size: u64) {
    for (pos, len) in reads {
        let expected: Vec<u8> = (pos..(pos + len).min(size)).map(byte_at).collect();
        assert!(handles.read(api, pos, len) == expected, "api {api}: {len} bytes at {pos}");
    }
}

/// A read that has ended with its first poll has made no way to another thread and back.
#[test]
fn a_read_of_async_file_ends_with_its_first_poll_where_its_bytes_are_in_memory() {
    let directory = tempfile::tempdir_in(HERE).unwrap();
    let (path, size) = (directory.path().join("data"), MIB);
    file_of(size, &path);
    let handles = Handles::open(&path);
    let disk = handles.blocking.disk();
    if !disk.is_direct() {
        skip("no direct I/O for temporary files");
        return;
    }
    let mut positions = (0..size).step_by(4096).cycle();
    wait_until("a read that ends with its first poll", || {
        let (pos, before) = (positions.next().unwrap(), disk.served_ahead());
        let buffer = IoBuffer::zeroed(4096).unwrap();
        let mut read = pin!(handles.shared.read_at(buffer, pos));
        let polled = read.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        let (is_ready, (done, buffer)) = match polled {
            Poll::Ready(ended) => (true, ended),
            Poll::Pending => (false, handles.driver.block_on(read)),
        };
        assert!(done == Ok(4096) && (pos..).zip(&*buffer).all(|(pos, &byte)| byte == byte_at(pos)));
        is_ready && disk.served_ahead() == before + 4096
    });
}

#[test]
fn c81_streams_are_read_ahead_and_give_the_bytes_of_the_file() {
    on_each_file_system(Path::new(HERE), |directory, system| {
        let (path, size) = (directory.join("data"), 6 * MIB + 1234);
        file_of(size, &path);
        for api in 0..Handles::COUNT {
            let handles = Handles::open(&path);
            if !handles.blocking.disk().is_direct() {
                skip(&format!("no direct I/O on {system}"));
                return;
            }
            let served = || handles.blocking.disk().served_ahead();
            let mut before = served();
            let mut is_ahead = |what: &str, least: u64| {
                let now = served();
                assert!(now - before >= least, "{system} {api} {what}: {} bytes", now - before);
                before = now;
            };
            for len in [8 * KIB, 64 * KIB, 5000, 256 * KIB] {
                scan(&handles, api, (0..size).step_by(len as usize).map(|pos| (pos, len)), size);
                is_ahead("sequential", size / 2);
            }
            let stride = 3 * 8 * KIB;
            let forward = || (0..size - 8 * KIB).step_by(stride as usize).map(|pos| (pos, 8 * KIB));
            scan(&handles, api, forward(), size);
            is_ahead("strided", size / 3 / 2);
            scan(&handles, api, forward().collect::<Vec<_>>().into_iter().rev(), size);
            is_ahead("backwards", size / 3 / 2);
            let streams = (0..size / 4 - 16 * KIB).step_by(16 << 10);
            let turns =
                streams.flat_map(|pos| (0..4).map(move |n| (n * (size / 4) + pos, 16 * KIB)));
            scan(&handles, api, turns, size);
            is_ahead("four streams", size / 2);
        }
    });
}

#[test]
fn c81_without_the_option_nothing_is_read_ahead() {
    let dir = tempfile::tempdir_in(HERE).unwrap();
    let path = dir.path().join("data");
    file_of(MIB, &path);
    let (with, without) = (
        BlockingFile::open(&path, ahead()).unwrap(),
        BlockingFile::open(&path, OpenOptions::new()).unwrap(),
    );
    let mut memory = vec![0; 8192];
    for pos in (0..MIB).step_by(8192) {
        assert_eq!(without.read_at(&mut memory, pos), Ok(8192));
    }
    assert_eq!((with.disk().served_ahead(), without.disk().served_ahead()), (0, 0));
    let cached = BlockingFile::open(&path, ahead().direct(nowait::Direct::Off)).unwrap();
    for pos in (0..MIB).step_by(8192) {
        assert_eq!(cached.read_at(&mut memory, pos), Ok(8192));
    }
    assert_eq!((with.disk().served_ahead(), cached.disk().served_ahead()), (0, 0));
}

#[test]
fn c83_random_reads_and_large_ones_read_nothing_ahead() {
    let dir = tempfile::tempdir_in(HERE).unwrap();
    let path = dir.path().join("data");
    file_of(8 * MIB, &path);
    let (handles, mut random) = (Handles::open(&path), Random::from_seed(0x83));
    for n in 0..1000 {
        let pos = random.below(8 * MIB / 512) * 512;
        scan(&handles, n, std::iter::once((pos, 512)), 8 * MIB);
    }
    let served = handles.blocking.disk().served_ahead();
    assert_eq!(served, 0);
    let large = 256 * KIB + 1;
    for api in 0..Handles::COUNT {
        scan(&handles, api, (0..8 * MIB).step_by(large as usize).map(|pos| (pos, large)), 8 * MIB);
    }
    assert_eq!(handles.blocking.disk().served_ahead(), served);
}

/// A change of the file, by a handle without read-ahead or with it, of the model as well.
fn change(path: &Path, handles: &Handles, model: &mut Vec<u8>, random: &mut Random) {
    let other = || BlockingFile::open(path, OpenOptions::new()).unwrap();
    let size = model.len() as u64;
    let pos = random.below(size) / [1, 512, 4096][random.below(3) as usize] * 4096 % size;
    let len = (1 + random.below(64 * KIB)).min(size - pos);
    let bytes = random.bytes(len as usize);
    let range = ByteRange::new(pos, bytes.len() as u64);
    let place = pos as usize..pos as usize + bytes.len();
    match random.below(8) {
        0 => other().write_at(&bytes, pos, Flags::NONE).map(|_| ()).unwrap(),
        1 => {
            let disk = BlockDevice::open(path, OpenOptions::new()).unwrap();
            let file = AsyncFile::new(Arc::new(disk)).unwrap();
            let mut buffer = IoBuffer::zeroed(bytes.len()).unwrap();
            buffer.copy_from_slice(&bytes);
            let done = handles.driver.block_on(file.write_at(buffer, pos, Flags::NONE));
            assert_eq!(done.0, Ok(bytes.len()));
        }
        2 => {
            assert_eq!(other().append(&bytes, Flags::NONE), Ok(size));
            return model.extend(bytes);
        }
        3 => {
            // Cut off, and grown again: zeros.
            other().set_len(pos).unwrap();
            other().set_len(size).unwrap();
            return model[pos as usize..].fill(0);
        }
        4 => {
            other().zero(range, Flags::NONE).unwrap();
            return model[place].fill(0);
        }
        5 => match handles.blocking.discard(range) {
            Ok(()) => return model[place].fill(0),
            Err(error) => return assert_eq!(error.errno(), libc::EOPNOTSUPP),
        },
        api => handles.write(api, pos, &bytes),
    }
    model[place].copy_from_slice(&bytes);
}

#[test]
fn c82_a_handle_sees_what_others_have_changed_before_it_was_opened() {
    let dir = tempfile::tempdir_in(HERE).unwrap();
    let path = dir.path().join("data");
    file_of(MIB, &path);
    let first = Handles::open(&path);
    scan(&first, 0, (0..MIB / 2).step_by(8192).map(|pos| (pos, 8192)), MIB);
    let read_ahead = first.blocking.disk().served_ahead();
    std::fs::write(&path, vec![9; MIB as usize]).unwrap();
    for api in 0..Handles::COUNT {
        let handles = Handles::open(&path);
        for pos in (MIB / 2..MIB).step_by(8192) {
            assert_eq!(handles.read(api, pos, 8192), [9; 8192], "{api}: {pos}");
        }
    }
    // There was something to forget, where streams are found at all.
    assert!(read_ahead > 0 || !first.blocking.disk().is_direct());
}

#[test]
fn c82_a_change_by_any_handle_of_the_process_is_seen_by_the_next_read() {
    on_each_file_system(Path::new(HERE), |directory, system| {
        let path = directory.join("data");
        for seed in 0..6 {
            let mut random = Random::from_seed(0x82 + seed);
            let size = 2 * MIB + random.below(5000);
            file_of(size, &path);
            let (handles, mut model) = (Handles::open(&path), content(size));
            let mut streams = [(); 3].map(|()| random.below(size));
            for round in 0..600 {
                let stream = &mut streams[random.below(3) as usize];
                let len = [8 * KIB, 16 * KIB, 3000][random.below(3) as usize];
                let end = (*stream + len).min(model.len() as u64);
                let expected = &model[(*stream).min(end) as usize..end as usize];
                let read = handles.read(random.below(3), *stream, len);
                assert!(read == expected, "{system} {seed} {round}: {len} bytes at {stream}");
                *stream = if *stream >= model.len() as u64 { 0 } else { *stream + len };
                if random.below(4) == 0 {
                    change(&path, &handles, &mut model, &mut random);
                }
            }
        }
    });
}

/// Blocks whose first eight bytes are a version, which threads read and write at the same time. A read
/// that begins when a version was acknowledged returns that one or a later one.
#[test]
fn c82_no_thread_reads_a_version_older_than_the_last_acknowledged_one() {
    const BLOCKS: u64 = 512;
    let dir = tempfile::tempdir_in(HERE).unwrap();
    let path = dir.path().join("versions");
    std::fs::write(&path, vec![0; (BLOCKS * 4096) as usize]).unwrap();
    let acknowledged: Vec<_> = (0..BLOCKS).map(|_| AtomicU64::new(0)).collect();
    let ended = AtomicBool::new(false);
    let read_all = |len: u64| {
        let file = BlockingFile::open(&path, ahead()).unwrap();
        let mut memory = IoBuffer::zeroed((len * 4096) as usize).unwrap();
        while !ended.load(Ordering::Acquire) {
            for first in (0..BLOCKS).step_by(len as usize) {
                let blocks = first as usize..(first + len) as usize;
                let least: Vec<_> =
                    acknowledged[blocks].iter().map(|it| it.load(Ordering::Acquire)).collect();
                assert_eq!(file.read_at(&mut memory, first * 4096), Ok(memory.len()));
                for (block, least) in memory.chunks(4096).zip(least) {
                    let version = u64::from_le_bytes(block[..8].try_into().unwrap());
                    assert!(version >= least, "block {first}: {version}, after {least}");
                }
            }
        }
        file.disk().served_ahead()
    };
    std::thread::scope(|scope| {
        let readers = [2, 4, 16].map(|len| scope.spawn(move || read_all(len)));
        let driver = LocalDriver::new().unwrap();
        let (one, other) = (
            BlockingFile::open(&path, OpenOptions::new()).unwrap(),
            LocalAsyncFile::open(&path, OpenOptions::new()).unwrap(),
        );
        let mut random = Random::from_seed(1);
        for version in 1..=4000u64 {
            let block = random.below(BLOCKS);
            let mut buffer = IoBuffer::zeroed(4096).unwrap();
            buffer[..8].copy_from_slice(&version.to_le_bytes());
            let done = match version % 2 {
                0 => one.write_at(&buffer, block * 4096, Flags::NONE),
                _ => driver.block_on(other.write_at(buffer, block * 4096, Flags::NONE)).0,
            };
            assert_eq!(done, Ok(4096));
            acknowledged[block as usize].store(version, Ordering::Release);
        }
        ended.store(true, Ordering::Release);
        let served = readers.map(|reader| reader.join().unwrap());
        println!("{served:?} bytes were read ahead");
    });
}

#[test]
fn c82_what_another_process_or_a_buffered_writer_changes_is_seen_in_the_end() {
    use std::os::unix::fs::FileExt;
    let dir = tempfile::tempdir_in(HERE).unwrap();
    let path = dir.path().join("data");
    file_of(MIB, &path);
    let handles = Handles::open(&path);
    scan(&handles, 0, (0..256 * KIB).step_by(8192).map(|pos| (pos, 8192)), MIB);
    // A buffered descriptor stands for another process: neither tells the library.
    let others = std::fs::File::options().write(true).open(&path).unwrap();
    others.write_all_at(&[0; 8192], 256 * KIB).unwrap();
    wait_until("the change is seen", || handles.read(0, 256 * KIB, 8192) == [0; 8192]);
}
