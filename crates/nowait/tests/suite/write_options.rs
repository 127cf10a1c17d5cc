//! Options of single writes that only some file systems have: untorn writes and writes that leave nothing in
//! the page cache; and the hint for how long what is written stays.
#![allow(unsafe_code)]

use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;

use nowait::{
    AsyncFile, BlockDevice, BlockingFile, Config, Direct, Flags, IoBuffer, LocalAsyncFile,
    LocalDriver, OpenOptions, UntornLimits, WorkerPool, WriteLife,
};
use nowait_testkit::{TestQueueKind, on_each_file_system, say_skipped, skip};

const HERE: &str = env!("CARGO_TARGET_TMPDIR");

/// Writes to a device by each API on each queue; the results are errnos.
fn write_by_all(
    path: &Path,
    options: OpenOptions,
    (len, pos): (u64, u64),
    flags: Flags,
    mut check: impl FnMut(Result<usize, i32>, &str),
) {
    let open = || Arc::new(BlockDevice::open_file(path, options).unwrap());
    let driver = LocalDriver::new().unwrap();
    let mut byte = 0;
    let mut buffer = || {
        let mut buffer = IoBuffer::zeroed(len as usize).unwrap();
        byte += 1;
        buffer.fill(byte);
        buffer
    };
    let errno = |done: Result<usize, nowait::Error>| done.map_err(|error| error.errno());
    check(errno(BlockingFile::new(open()).write_at(&buffer(), pos, flags)), "BlockingFile");
    for kind in TestQueueKind::REAL {
        for nowait_first in [true, false] {
            let config = Config { slots: 64, nowait_first, ..Config::default() };
            let Some(queue) = kind.queue(config.slots) else { continue };
            let file = LocalAsyncFile::with_queue(open(), WorkerPool::new(2), queue, config);
            let done = driver.block_on(file.unwrap().write_at(buffer(), pos, flags));
            check(errno(done.0), &format!("LocalAsyncFile, {kind:?}, {nowait_first}"));
            let make = move || kind.try_queue(config.slots);
            let file = AsyncFile::with_queue(open(), WorkerPool::new(2), config, make);
            let done = driver.block_on(file.unwrap().write_at(buffer(), pos, flags));
            check(errno(done.0), &format!("AsyncFile, {kind:?}, {nowait_first}"));
        }
    }
}

/// Writes within the limits and beside them, and overwrites what is there.
fn untorn(path: &Path, limits: UntornLimits, system: &str) {
    let UntornLimits { min_bytes: min, max_bytes: max, .. } = limits;
    let options = OpenOptions::new().untorn(true);
    for len in [min, max] {
        for pos in [0, max] {
            write_by_all(path, options, (len, pos), Flags::UNTORN, |done, api| {
                assert_eq!(done, Ok(len as usize), "{system}: {len} at {pos}, {api}");
            });
            write_by_all(path, options, (len, pos), Flags::UNTORN | Flags::DSYNC, |done, api| {
                assert_eq!(done, Ok(len as usize), "{system}: {len} at {pos}, {api}");
            });
        }
    }
    for wrong in [(min / 2, 0), (2 * max, 0), (3 * min, 0), (min, min / 2), (min + 1, 0), (min, 1)]
    {
        write_by_all(path, options, wrong, Flags::UNTORN, |done, api| {
            assert_eq!(done, Err(libc::EINVAL), "{system}: {wrong:?}, {api}");
        });
    }
    let file = BlockingFile::open(path, options).unwrap();
    let halves = [IoBuffer::zeroed(min as usize).unwrap(), IoBuffer::zeroed(min as usize).unwrap()];
    let slices = halves.each_ref().map(|half| std::io::IoSlice::new(half));
    let done = file.write_vectored_at(&slices, 0, Flags::UNTORN);
    assert_eq!(done.map_err(|error| error.errno()), Err(libc::EINVAL), "{system}: two segments");
    let mut memory = IoBuffer::zeroed(min as usize).unwrap();
    assert_eq!(file.with_flags(Flags::UNTORN).read_at(&mut memory, 0), Ok(min as usize));
}

#[test]
fn c27_untorn_writes_keep_to_their_limits_and_are_refused_where_there_are_none() {
    let any = std::cell::Cell::new(false);
    on_each_file_system(Path::new(HERE), |directory, system| {
        let path = directory.join("data");
        std::fs::write(&path, vec![1; 1 << 20]).unwrap();
        let disk = BlockDevice::open_file(&path, OpenOptions::new()).unwrap();
        if let Some(limits) = disk.untorn_limits() {
            println!("{system}: {limits:?}");
            any.set(true);
            return untorn(&path, limits, system);
        }
        let asked = BlockDevice::open_file(&path, OpenOptions::new().untorn(true));
        assert_eq!(asked.err().map(|error| error.errno()), Some(libc::EOPNOTSUPP), "{system}");
        write_by_all(&path, OpenOptions::new(), (4096, 0), Flags::UNTORN, |done, api| {
            assert_eq!(done, Err(libc::EOPNOTSUPP), "{system}, {api}");
        });
        assert!(std::fs::read(&path).unwrap() == vec![1; 1 << 20], "{system}");
    });
    if !any.get() {
        skip("no file system with untorn writes");
    }
    let file = tempfile::NamedTempFile::new_in(HERE).unwrap();
    let cached = OpenOptions::new().direct(Direct::Off).untorn(true);
    let refused = BlockDevice::open_file(file.path(), cached).err().map(|error| error.errno());
    assert_eq!(refused, Some(libc::EOPNOTSUPP), "through the page cache");
}

const STEP: std::time::Duration = std::time::Duration::from_millis(2);

fn drop_cached(path: &Path) {
    let file = std::fs::File::open(path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

/// Pages of a file in the page cache; `None` where the system has no cachestat(2).
fn cached_pages(path: &Path) -> Option<u64> {
    const SYS_CACHESTAT: libc::c_long = 451;
    let file = std::fs::File::open(path).unwrap();
    let (range, mut counts) = ([0u64; 2], [0u64; 5]);
    // SAFETY: the call reads two numbers and writes five.
    let done = unsafe {
        libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), range.as_ptr(), counts.as_mut_ptr(), 0)
    };
    (done == 0).then_some(counts[0])
}

#[test]
fn what_is_not_to_be_cached_leaves_the_page_cache_and_is_written_everywhere() {
    let any = std::cell::Cell::new(false);
    on_each_file_system(Path::new(HERE), |directory, system| {
        for direct in [Direct::Off, Direct::Auto] {
            let path = directory.join("data");
            std::fs::write(&path, vec![0; 64 << 10]).unwrap();
            drop_cached(&path);
            let options = OpenOptions::new().direct(direct);
            write_by_all(&path, options, (32 << 10, 0), Flags::DONT_CACHE, |done, api| {
                assert_eq!(done, Ok(32 << 10), "{system}, {direct:?}, {api}");
            });
            let file = BlockingFile::open(&path, options).unwrap();
            file.flush().unwrap();
            let mut memory = IoBuffer::zeroed(64 << 10).unwrap();
            let file = file.with_flags(Flags::DONT_CACHE);
            assert_eq!(file.read_at(&mut memory, 0), Ok(64 << 10));
            assert!(memory[..32 << 10].iter().all(|byte| *byte != 0), "{system}, {direct:?}");
            if direct == Direct::Off {
                // The pages go when their writeback has ended, a moment after the sync.
                let is_gone = || cached_pages(&path) == Some(0);
                let gone = (0..100).any(|_| is_gone() || (std::thread::sleep(STEP), false).1);
                any.set(any.get() || gone);
            }
        }
    });
    if !any.get() {
        say_skipped("no file system with RWF_DONTCACHE, or no cachestat(2)");
    }
}

#[test]
fn the_expected_life_of_what_is_written_is_a_property_of_the_file_where_the_kernel_has_it() {
    const F_GET_RW_HINT: libc::c_int = 1024 + 11;
    let file = tempfile::NamedTempFile::new_in(HERE).unwrap();
    let hint = || {
        let mut value = 0u64;
        // SAFETY: the call writes one number.
        let done =
            unsafe { libc::fcntl(file.as_file().as_raw_fd(), F_GET_RW_HINT, &raw mut value) };
        (done == 0).then_some(value)
    };
    let all = [WriteLife::Short, WriteLife::Medium, WriteLife::Long, WriteLife::Extreme];
    for (life, value) in all.into_iter().zip(2..) {
        let options = OpenOptions::new().write_life(Some(life));
        let opened = BlockingFile::open(file.path(), options).unwrap();
        assert_eq!(opened.write_at(&[1; 100], 0, Flags::NONE), Ok(100));
        match hint() {
            Some(found) => assert_eq!(found, value, "{life:?}"),
            None => drop(skip("no F_GET_RW_HINT")),
        }
    }
}
