//! The descriptors, threads and locked memory of 200 files of either async API: engines are shared.
//!
//! Invariant: this program has one test function, so that nothing else opens or starts anything while
//! it counts.

use std::fs;
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Waker};

use nowait::{
    AsyncFile, Flags, IoBuffer, LocalAsyncFile, LocalDriver, OpenOptions, Uring, WorkerPool,
};
use nowait_testkit::{required, wait_until};

const FILES: usize = 200;
/// Threads that serve async files.
const ENGINE_THREADS: usize = 4;

fn entries(directory: &str) -> usize {
    fs::read_dir(directory).unwrap().count()
}

fn descriptors() -> usize {
    entries("/proc/self/fd")
}

fn threads() -> usize {
    entries("/proc/self/task")
}

/// Locked and pinned memory in KiB.
fn locked() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let of = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap()
    };
    of("VmLck:") + of("VmPin:")
}

/// Every file reads and writes a block, all at the same time.
macro_rules! use_all {
    ($driver:expr, $files:expr) => {
        $driver.block_on(async {
            let buffer = || IoBuffer::zeroed(4096).unwrap();
            let mut reads: Vec<_> = $files.iter().map(|file| file.read_at(buffer(), 0)).collect();
            let mut context = Context::from_waker(Waker::noop());
            let begun: Vec<_> =
                reads.iter_mut().map(|it| Pin::new(it).poll(&mut context).is_pending()).collect();
            for (read, _) in reads.into_iter().zip(begun).filter(|(_, is_pending)| *is_pending) {
                assert_eq!(read.await.0, Ok(4096));
            }
            for file in &$files {
                assert_eq!(file.write_at(buffer(), 4096, Flags::NONE).await.0, Ok(4096));
            }
        })
    };
}

/// Checks that at most `most` threads and those of the workers run; a queue without a ring has threads of
/// its own.
fn check_threads(most: usize) {
    let workers = WorkerPool::DEFAULT_LIMIT as usize;
    let has_rings = required("io_uring", Uring::new()).is_some();
    assert!(!has_rings || threads() <= most + workers, "{} threads", threads());
}

fn of_one_thread(path: &Path, before: usize) {
    let driver = LocalDriver::new().unwrap();
    let open = || LocalAsyncFile::open(path, OpenOptions::default()).unwrap();
    let mut files = vec![open()];
    use_all!(driver, files);
    let (one, locked_by_one) = (descriptors(), locked());
    files.extend((1..FILES).map(|_| open()));
    use_all!(driver, files);
    let each = (descriptors() - one).div_ceil(FILES - 1);
    assert!(each <= 3, "{each} descriptors for a file");
    assert_eq!(locked(), locked_by_one);
    check_threads(before);
    println!("LocalAsyncFile: {each} descriptors for a file, {} threads", threads());
}

fn of_several_threads(path: &Path, before: usize) {
    let driver = LocalDriver::new().unwrap();
    let open = || AsyncFile::open(path, OpenOptions::default()).unwrap();
    let mut files: Vec<_> = (0..ENGINE_THREADS).map(|_| open()).collect();
    use_all!(driver, files);
    let (few, locked_by_few) = (descriptors(), locked());
    files.extend((ENGINE_THREADS..FILES).map(|_| open()));
    use_all!(driver, files);
    let each = (descriptors() - few).div_ceil(FILES - ENGINE_THREADS);
    assert!(each <= 3, "{each} descriptors for a file");
    assert_eq!(locked(), locked_by_few);
    check_threads(before + ENGINE_THREADS);
    println!("AsyncFile: {each} descriptors for a file, {} threads", threads());
    let engine_threads = || {
        let tasks = fs::read_dir("/proc/self/task").unwrap();
        let names = tasks.flatten().flat_map(|task| fs::read_to_string(task.path().join("comm")));
        names.filter(|name| name.trim() == "nowait-async").count()
    };
    let processors = std::thread::available_parallelism().unwrap().get();
    assert_eq!(engine_threads(), processors.min(ENGINE_THREADS));
    files.truncate(1);
    wait_until("the end of the threads without files", || engine_threads() == 1);
    use_all!(driver, files);
    files.clear();
    wait_until("the end of the last thread", || engine_threads() == 0);
    files.push(open());
    use_all!(driver, files);
    assert_eq!(engine_threads(), 1);
}

#[test]
fn a_file_costs_descriptors_and_no_thread_and_no_locked_memory() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("disk.img");
    fs::write(&path, [7; 16 << 10]).unwrap();
    let (before, threads_before) = (descriptors(), threads());
    of_one_thread(&path, threads_before);
    wait_until("the end of the first engine", || descriptors() <= before);
    of_several_threads(&path, threads_before);
    wait_until("the end of all engines", || descriptors() <= before);
}
