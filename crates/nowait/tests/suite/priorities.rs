//! Requests of each priority on each queue of the kernel, on workers, and by blocking calls (C88).
//!
//! Invariant: a class that the process may not use is `EPERM` on every way, and every other priority is served.

use std::sync::Arc;

use nowait::{
    AsyncFile, BlockDevice, BlockingFile, Config, Error, Flags, IoBuffer, IoPriority,
    LocalAsyncFile, LocalDriver, OpenOptions, PriorityClass, WorkerPool,
};
use nowait_testkit::TestQueueKind;

const BLOCK: usize = 4096;

fn file_of_ones() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    std::fs::write(file.path(), vec![1; 64 * BLOCK]).unwrap();
    file
}

fn priorities() -> Vec<IoPriority> {
    let of = |class| (0..8).map(move |level| IoPriority::new(class, level).unwrap());
    let classes = [PriorityClass::BestEffort, PriorityClass::RealTime];
    classes.into_iter().flat_map(of).chain([IoPriority::IDLE]).collect()
}

/// The result of a write, a read of whole blocks, one of parts of them, and a write that extends the file.
fn by_calls(file: &BlockingFile, priority: IoPriority) -> [Result<usize, i32>; 4] {
    let file = BlockingFile::new(file.disk().clone()).with_priority(priority);
    let mut block = IoBuffer::zeroed(BLOCK).unwrap();
    [
        file.write_at(&block, 0, Flags::NONE),
        file.read_at(&mut block, 0),
        file.read_at(&mut block[..100], 50),
        file.write_at(&block, file.size(), Flags::DSYNC),
    ]
    .map(|done| done.map_err(|error| error.errno()))
}

macro_rules! by_futures {
    ($driver:expr, $file:expr, $priority:expr) => {
        $driver.block_on(async {
            let file = $file.clone().with_priority($priority);
            let errno = |done: Result<usize, Error>| done.map_err(|error| error.errno());
            let block = |len| IoBuffer::zeroed(len).unwrap();
            [
                errno(file.write_at(block(BLOCK), 0, Flags::NONE).await.0),
                errno(file.read_at(block(BLOCK), 0).await.0),
                errno(file.read_at(block(100), 50).await.0),
                errno(file.write_at(block(BLOCK), file.size(), Flags::DSYNC).await.0),
            ]
        })
    };
}

#[test]
fn c88_each_priority_is_served_on_every_way_or_refused_on_all() {
    let temporary = file_of_ones();
    let open = || Arc::new(BlockDevice::open_file(temporary.path(), OpenOptions::new()).unwrap());
    let blocking = BlockingFile::open(temporary.path(), OpenOptions::new()).unwrap();
    let expected: Vec<_> = priorities()
        .into_iter()
        .map(|priority| {
            let done = by_calls(&blocking, priority);
            let served = [Ok(BLOCK), Ok(BLOCK), Ok(100), Ok(BLOCK)];
            let is_refused =
                priority.class() == PriorityClass::RealTime && done == [Err(libc::EPERM); 4];
            assert!(done == served || is_refused, "{priority:?}: {done:?}");
            (priority, done)
        })
        .collect();
    let driver = LocalDriver::new().unwrap();
    let direct_only = Config::default();
    for config in [direct_only, Config { nowait_first: false, ..direct_only }] {
        for kind in TestQueueKind::REAL {
            let Some(queue) = kind.queue(config.slots) else { continue };
            let local =
                LocalAsyncFile::with_queue(open(), WorkerPool::new(2), queue, config).unwrap();
            let make = move || kind.try_queue(config.slots);
            let shared = AsyncFile::with_queue(open(), WorkerPool::new(2), config, make).unwrap();
            for &(priority, expected) in &expected {
                assert_eq!(by_futures!(driver, local, priority), expected, "{kind:?} {priority:?}");
                assert_eq!(
                    by_futures!(driver, shared, priority),
                    expected,
                    "{kind:?} {priority:?}"
                );
            }
        }
    }
    let file = AsyncFile::open(temporary.path(), OpenOptions::new()).unwrap();
    for (priority, expected) in expected {
        assert_eq!(by_futures!(driver, file, priority), expected, "{priority:?}");
    }
}
