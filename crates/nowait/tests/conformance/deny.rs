//! System calls that fail on demand, for one thread and the threads that it starts: a seccomp(2)
//! filter.
//!
//! Invariant: the filter ends with these threads and does not affect the rest of the program.
#![allow(unsafe_code)]

use std::path::Path;
use std::sync::Arc;
use std::thread;

use nowait::{
    AsyncFile, BlockDevice, BlockingFile, Config, Direct, Flags, IoBuffer, LocalAsyncFile,
    LocalDriver, Log, LogOptions, OpenOptions, QueueKind, WorkerPool,
};

/// Which calls fail.
#[derive(Clone, Copy)]
pub(crate) struct Deny {
    /// The number of the system call.
    pub(crate) call: libc::c_long,
    /// Only calls whose fourth argument is at least this; for preadv2(2) and pwritev2(2) that is
    /// the position in bytes, below 4 GiB.
    pub(crate) from: u32,
    /// The errno that they fail with.
    pub(crate) errno: i32,
}

impl Deny {
    /// Every `call` fails.
    pub(crate) fn all(call: libc::c_long, errno: i32) -> Self {
        Self { call, from: 0, errno }
    }
}

/// Offsets in `struct seccomp_data` of the number and of the low half of the fourth argument.
const NUMBER: u32 = 0;
const FOURTH: u32 = 16 + 3 * 8 + if cfg!(target_endian = "big") { 4 } else { 0 };

const fn step(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt, jf, k }
}

/// Makes the calls fail on this thread. False where the system has no such filters.
fn install(deny: Deny) -> bool {
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let jump = |test| libc::BPF_JMP | test | libc::BPF_K;
    let verdict = |k| step(libc::BPF_RET | libc::BPF_K, 0, 0, k);
    let mut steps = [
        step(load, 0, 0, NUMBER),
        step(jump(libc::BPF_JEQ), 0, 3, deny.call as u32),
        step(load, 0, 0, FOURTH),
        step(jump(libc::BPF_JGE), 0, 1, deny.from),
        verdict(libc::SECCOMP_RET_ERRNO | deny.errno as u32),
        verdict(libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: the program outlives the calls, which copy it.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    }
}

/// Runs `work` on a thread of its own on which the calls fail. `None`, with a message, where the
/// system has no such filters.
pub(crate) fn denied<T: Send>(deny: Deny, work: impl FnOnce() -> T + Send) -> Option<T> {
    thread::scope(|scope| {
        let worker = scope.spawn(|| install(deny).then(work));
        let done = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        if done.is_none() {
            nowait_testkit::skip("no seccomp filters");
        }
        done
    })
}

/// Every API appends to the file at `path`, whose bytes are `expected`, as another process does in between.
fn append_by_all(
    path: &Path,
    (file, local, shared): (&BlockingFile, &LocalAsyncFile, &AsyncFile),
    driver: &LocalDriver,
    expected: &mut Vec<u8>,
) {
    let record = || {
        let mut buffer = IoBuffer::zeroed(5000).unwrap();
        buffer.fill(9);
        buffer
    };
    for flags in [Flags::NONE, Flags::DSYNC] {
        // Another process has the end of the file moved.
        std::io::Write::write_all(
            &mut std::fs::File::options().append(true).open(path).unwrap(),
            &[8],
        )
        .unwrap();
        expected.push(8);
        for end in [
            file.append(&record(), flags),
            driver.block_on(local.append(record(), flags)).0,
            driver.block_on(shared.append(record(), flags)).0,
        ] {
            assert_eq!(end, Ok(expected.len() as u64));
            expected.extend(&record()[..]);
        }
    }
}

/// Every API writes and reads a file, aligned and not, while `call` fails with `errno`.
fn use_files(call: libc::c_long, errno: i32) {
    let what = format!("system call {call} fails with {errno}");
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("data");
    let options = OpenOptions::new().create(true).read_ahead(true);
    let file = BlockingFile::open(&path, options).unwrap();
    let driver = LocalDriver::new().unwrap();
    let local = LocalAsyncFile::open(&path, options).unwrap();
    let disk = Arc::new(BlockDevice::open_file(&path, options).unwrap());
    let make = || QueueKind::Auto.open(64);
    let config = Config { slots: 64, ..Config::default() };
    let shared = AsyncFile::with_queue(disk, WorkerPool::new(2), config, make).unwrap();
    let mut expected = Vec::new();
    let rounds = [
        (0, 8192, Flags::NONE),
        (4096, 4096, Flags::DSYNC | Flags::HIPRI),
        (9, 5000, Flags::SYNC),
        (8192, 65_536, Flags::DSYNC | Flags::DONT_CACHE),
    ];
    for (round, (pos, len, flags)) in rounds.into_iter().enumerate() {
        let bytes = vec![round as u8 + 1; len];
        let buffer = || {
            let mut buffer = IoBuffer::zeroed(len).unwrap();
            buffer.copy_from_slice(&bytes);
            buffer
        };
        let done = [
            file.write_at(&bytes, pos, flags),
            file.write_at(&buffer(), pos, flags),
            driver.block_on(local.write_at(buffer(), pos, Flags::DSYNC)).0,
            driver.block_on(shared.write_at(buffer(), pos, flags)).0,
        ];
        assert_eq!(done, [Ok(len); 4], "{what}");
        expected.resize(expected.len().max(pos as usize + len), 0);
        expected[pos as usize..][..len].copy_from_slice(&bytes);
        let mut back = vec![0; expected.len()];
        assert_eq!(file.read_at(&mut back, 0), Ok(expected.len()), "{what}");
        assert!(back == expected, "{what}");
        for (done, buffer) in [
            driver.block_on(local.read_at(buffer(), pos)),
            driver.block_on(shared.read_at(buffer(), pos)),
        ] {
            assert_eq!(done, Ok(len), "{what}");
            assert!(buffer[..] == bytes, "{what}");
        }
    }
    append_by_all(&path, (&file, &local, &shared), &driver, &mut expected);
    assert_eq!(file.flush(), Ok(()), "{what}");
    assert_eq!(file.size(), expected.len() as u64, "{what}");
    assert!(std::fs::read(&path).unwrap() == expected, "{what}");
}

/// A log has what was appended, also after it was opened again.
fn use_a_log(call: libc::c_long, direct: Direct) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let open = || Log::open(dir.path(), LogOptions::new().direct(direct)).unwrap();
    let log = open();
    let positions = [10, 5000, 1].map(|len| log.append(&vec![7; len]).unwrap());
    drop(log);
    let log = open();
    let found = log.records_from(positions[0]);
    let found: Vec<_> = found.map(|record| record.unwrap().data.len()).collect();
    assert_eq!(found, [10, 5000, 1], "{call}");
}

/// The calls without which a ring is of no use, whatever of it is allowed.
#[test]
fn c86_a_ring_of_which_a_part_is_forbidden_gives_way_to_threads_when_it_is_opened() {
    let has_rings = nowait::Uring::new().is_ok();
    for call in [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register] {
        for errno in [libc::EPERM, libc::ENOSYS] {
            let done = denied(Deny::all(call, errno), || {
                let queue = QueueKind::Auto.open(64).unwrap();
                assert!(queue.ring().is_none());
                let refusal = queue.refusal().map(|error| error.errno());
                let ring = QueueKind::Uring.open(64).err().map(|error| error.errno());
                assert_eq!(ring, refusal);
                use_files(call, errno);
                refusal
            });
            let Some(refusal) = done else { return };
            assert!(!has_rings || refusal == Some(errno), "{call}: {refusal:?}");
        }
    }
}

#[test]
fn c86_without_statx_a_file_is_still_opened_for_direct_io_with_the_alignment_of_a_page() {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let open = || BlockDevice::open_file(file.path(), OpenOptions::new()).unwrap();
    let direct = open().is_direct();
    for errno in [libc::EPERM, libc::ENOSYS] {
        denied(Deny::all(libc::SYS_statx, errno), || {
            let disk = open();
            assert_eq!(disk.is_direct(), direct);
            assert!(!direct || disk.alignment().offset >= 4096, "{:?}", disk.alignment());
            assert_eq!(disk.untorn_limits(), None);
            use_files(libc::SYS_statx, errno);
        });
    }
}

#[test]
fn c86_without_aio_a_queue_of_threads_makes_all_transfers() {
    for call in [libc::SYS_io_setup, libc::SYS_io_submit] {
        for errno in [libc::EPERM, libc::ENOSYS] {
            denied(Deny::all(call, errno), || {
                let disk = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
                let disk = BlockDevice::open_file(disk.path(), OpenOptions::new()).unwrap();
                let (workers, config) = (WorkerPool::new(2), Config::default());
                let queue = QueueKind::Threads.open(config.slots).unwrap();
                let file = LocalAsyncFile::with_queue(Arc::new(disk), workers, queue, config);
                let (file, driver) = (file.unwrap(), LocalDriver::new().unwrap());
                let all = (0..20u64).map(|n| {
                    let mut buffer = IoBuffer::zeroed(4096).unwrap();
                    buffer.fill(n as u8 + 1);
                    file.write_at(buffer, 2 * n * 4096, Flags::NONE)
                });
                let mut all: Vec<_> = all.collect();
                driver.block_on(async {
                    // All are in flight together, so that the queue would use AIO.
                    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
                    for write in &mut all {
                        let _ = std::future::Future::poll(std::pin::Pin::new(write), &mut context);
                    }
                    for write in all {
                        assert_eq!(write.await.0, Ok(4096));
                    }
                });
                use_files(call, errno);
            });
        }
    }
}

/// Both calls take the flags by which a transfer does not wait, or is durable.
#[test]
fn c86_without_preadv2_or_pwritev2_other_calls_make_all_transfers() {
    let calls = [libc::SYS_preadv2, libc::SYS_pwritev2];
    for (call, also) in [(calls[0], None), (calls[1], None), (calls[0], Some(calls[1]))] {
        for errno in [libc::EPERM, libc::EACCES, libc::ENOSYS] {
            let use_all = || {
                let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
                let disk = BlockDevice::open_file(file.path(), OpenOptions::new()).unwrap();
                assert!(!disk.supports_nowait(), "{call}: {errno}");
                assert!(also.is_none() && call == calls[0] || disk.untorn_limits().is_none());
                use_files(call, errno);
                use_a_log(call, Direct::Auto);
                use_a_log(call, Direct::Off);
            };
            denied(Deny::all(call, errno), || {
                if let Some(also) = also {
                    denied(Deny::all(also, errno), use_all);
                } else {
                    use_all();
                }
            });
        }
    }
}

#[test]
fn c86_a_filter_that_forbids_preadv2_and_pwritev2_may_come_after_the_open() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for (name, direct) in [("direct", Direct::Auto), ("cached", Direct::Off)] {
        let options = OpenOptions::new().create(true).direct(direct);
        let file = BlockingFile::open(&dir.path().join(name), options).unwrap();
        let disk = Arc::new(BlockDevice::open_file(&dir.path().join(name), options).unwrap());
        let mut block = IoBuffer::zeroed(4096).unwrap();
        block.fill(7);
        denied(Deny::all(libc::SYS_pwritev2, libc::ENOSYS), || {
            denied(Deny::all(libc::SYS_preadv2, libc::ENOSYS), || {
                for flags in [Flags::NONE, Flags::DSYNC, Flags::SYNC, Flags::DONT_CACHE] {
                    assert_eq!(file.write_at(&block, 0, flags), Ok(4096), "{name}");
                    assert_eq!(file.write_at(&block[..100], 4096, flags), Ok(100), "{name}");
                }
                assert_eq!(file.append(b"end", Flags::DSYNC), Ok(4196), "{name}");
                assert_eq!(file.append(b"end", Flags::DSYNC), Ok(4199), "{name}");
                let mut back = vec![0; 5000];
                assert_eq!(file.read_at(&mut back, 0), Ok(4202), "{name}");
                assert_eq!(back[..4196], [7; 4196], "{name}");
                assert_eq!(&back[4196..4202], b"endend", "{name}");
                // A queue of threads makes an attempt that does not wait, which a worker then repeats.
                let make = || QueueKind::Threads.open(64);
                let config = Config { slots: 64, ..Config::default() };
                let shared =
                    AsyncFile::with_queue(disk.clone(), WorkerPool::new(2), config, make).unwrap();
                let driver = LocalDriver::new().unwrap();
                let buffer = || IoBuffer::zeroed(4096).unwrap();
                for flags in [Flags::NONE, Flags::DSYNC] {
                    let (done, _) = driver.block_on(shared.write_at(buffer(), 0, flags));
                    assert_eq!(done, Ok(4096), "{name}");
                }
                let (done, read) = driver.block_on(shared.read_at(buffer(), 0));
                assert_eq!((done, &read[..]), (Ok(4096), &[0; 4096][..]), "{name}");
            })
        });
    }
}

/// A write that is to be durable makes the sync whose failure this makes visible.
#[test]
fn c86_without_pwritev2_a_durable_write_is_durable_when_it_returns() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut block = IoBuffer::zeroed(4096).unwrap();
    block.fill(7);
    for direct in [Direct::Auto, Direct::Off] {
        for (sync, flags) in [(libc::SYS_fdatasync, Flags::DSYNC), (libc::SYS_fsync, Flags::SYNC)] {
            denied(Deny::all(libc::SYS_pwritev2, libc::ENOSYS), || {
                denied(Deny::all(sync, libc::EIO), || {
                    let open = |name| {
                        let options = OpenOptions::new().create(true).direct(direct);
                        BlockingFile::open(&dir.path().join(name), options).unwrap()
                    };
                    let errno =
                        |done: Result<usize, nowait::Error>| done.map_err(|error| error.errno());
                    let file = open("first");
                    assert_eq!(errno(file.write_at(&block, 0, Flags::NONE)), Ok(4096));
                    assert_eq!(errno(file.write_at(&block, 0, flags)), Err(libc::EIO));
                    assert_eq!(
                        errno(open("second").write_at(&block[..9], 0, flags)),
                        Err(libc::EIO)
                    );
                    let appended =
                        open("third").append(&block, flags).map_err(|error| error.errno());
                    assert_eq!(appended, Err(libc::EIO));
                })
            });
        }
        let log = Log::open(&dir.path().join("log"), LogOptions::new().direct(direct)).unwrap();
        denied(Deny::all(libc::SYS_pwritev2, libc::ENOSYS), || {
            log.append(b"durable").unwrap();
            denied(Deny::all(libc::SYS_fdatasync, libc::EIO), || {
                let failed = log.append(b"in doubt").unwrap_err();
                assert_eq!(failed.errno(), libc::EIO);
            })
        });
    }
}

#[test]
fn c86_without_pwritev2_no_write_is_called_untorn() {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let block = IoBuffer::zeroed(4096).unwrap();
    denied(Deny::all(libc::SYS_pwritev2, libc::ENOSYS), || {
        let refused = BlockingFile::open(file.path(), OpenOptions::new().untorn(true)).err();
        assert_eq!(refused.map(|error| error.errno()), Some(libc::EOPNOTSUPP));
        let opened = BlockingFile::open(file.path(), OpenOptions::new()).unwrap();
        assert_eq!(opened.disk().untorn_limits(), None);
        let written = opened.write_at(&block, 0, Flags::UNTORN).map_err(|error| error.errno());
        assert_eq!(written, Err(libc::EOPNOTSUPP));
    });
}
