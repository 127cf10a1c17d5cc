//! Locks end with their process, and with the last clone of the handle that has opened the file (C87).
//!
//! Invariant: a lock is tried directly after what ends it, once, without waiting.

use std::future::Future;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::task::{Context, Waker};

use nowait::{
    AsyncFile, BlockDevice, BlockingFile, Direct, Error, FileLock, Flags, IoBuffer, LocalAsyncFile,
    LocalDriver, OpenOptions,
};
use nowait_testkit::process::ends_with_test;
use nowait_testkit::skip;

/// The file of a child, which locks it and writes until it is killed; a word before it says how.
const CHILD: &str = "NOWAIT_LOCK_CHILD";
const BLOCK: usize = 4096;

fn new_file() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("locked");
    std::fs::write(&path, vec![1; 64 * BLOCK]).unwrap();
    (dir, path)
}

/// The errno of an exclusive lock that is tried and given back.
fn lock_errno(path: &Path) -> Option<i32> {
    let file = BlockingFile::open(path, OpenOptions::new()).unwrap();
    file.try_lock(FileLock::Exclusive).err().map(|error| error.errno())
}

fn block() -> IoBuffer {
    IoBuffer::zeroed(BLOCK).unwrap()
}

/// Whether the file system lacks locks.
fn lacks_locks(path: &Path) -> bool {
    let errno = lock_errno(path);
    errno.is_some_and(|errno| !skip(&format!("no flock(2): errno {errno}")))
}

/// Runs only as the child of another test: four threads write, flush and read until it is killed.
#[test]
fn child_that_locks() {
    let Some(path) = std::env::var_os(CHILD) else { return };
    let direct = if std::env::var_os("NOWAIT_LOCK_CHILD_CACHED").is_some() {
        Direct::Off
    } else {
        Direct::Auto
    };
    let file = AsyncFile::open(Path::new(&path), OpenOptions::new().direct(direct)).unwrap();
    file.try_lock(FileLock::Exclusive).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let file = file.clone();
            scope.spawn(move || {
                for n in 0.. {
                    let pos = (n * 4 + thread) % 4096 * BLOCK as u64;
                    let flags = if n % 2 == 0 { Flags::DSYNC } else { Flags::NONE };
                    pollster::block_on(file.write_at(block(), pos, flags)).0.unwrap();
                    pollster::block_on(file.read_at(block(), pos)).0.unwrap();
                    pollster::block_on(file.flush()).unwrap();
                    if (n, thread) == (1, 0) {
                        println!("\nbusy");
                    }
                }
            });
        }
    });
}

#[test]
fn c87_a_lock_ends_with_its_process_whatever_that_has_in_flight() {
    let (_dir, path) = new_file();
    if lacks_locks(&path) {
        return;
    }
    for round in 0..12 {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "child_that_locks", "--nocapture"]).env(CHILD, &path);
        if round % 2 == 0 {
            command.env("NOWAIT_LOCK_CHILD_CACHED", "1");
        }
        let mut child = ends_with_test(&mut command).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap() == "busy"));
        assert_eq!(lock_errno(&path), Some(libc::EAGAIN), "{round}");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(lock_errno(&path), None, "{round}");
    }
}

/// Requests of each way through the library: from the task's thread, from the library's, from a worker, and calls.
async fn requests(file: &AsyncFile, round: u64) {
    let (one, two) = (file.write_at(block(), 0, Flags::NONE), file.read_at(block(), 8192));
    let (one, two) = (pin!(one), pin!(two));
    let (one, two) = futures_lite::future::zip(one, two).await;
    assert_eq!((one.0, two.0), (Ok(BLOCK), Ok(BLOCK)));
    match round % 4 {
        0 => file.write_at(block(), (100 + round) << 16, Flags::DSYNC).await.0.map(drop).unwrap(),
        1 => file.flush().await.unwrap(),
        2 => file.append(block(), Flags::NONE).await.0.map(drop).unwrap(),
        _ => assert_eq!(file.read_at(block(), 4096).await.0, Ok(BLOCK)),
    }
}

#[test]
fn c87_a_lock_ends_with_the_last_clone_of_an_async_file() {
    let (_dir, path) = new_file();
    if lacks_locks(&path) {
        return;
    }
    for round in 0..200 {
        let file = AsyncFile::open(&path, OpenOptions::new()).unwrap();
        file.try_lock(FileLock::Exclusive).unwrap();
        let clone = file.clone();
        pollster::block_on(requests(&file, round));
        drop(file);
        if round % 20 == 0 {
            assert_eq!(lock_errno(&path), Some(libc::EAGAIN), "{round}");
        }
        drop(clone);
        assert_eq!(lock_errno(&path), None, "{round}");
    }
}

#[test]
fn c87_a_lock_ends_with_the_last_clone_of_a_local_file_and_its_calls() {
    let (_dir, path) = new_file();
    if lacks_locks(&path) {
        return;
    }
    let driver = LocalDriver::new().unwrap();
    for round in 0..100 {
        driver.block_on(async {
            let file = LocalAsyncFile::open(&path, OpenOptions::new()).unwrap();
            file.try_lock(FileLock::Exclusive).unwrap();
            file.write_at(block(), round << 16, Flags::DSYNC).await.0.unwrap();
            file.sync_all().await.unwrap();
            let clone = file.clone();
            drop(file);
            assert_eq!(lock_errno(&path), Some(libc::EAGAIN), "{round}");
            // Its future is dropped: the write goes on, and is waited for.
            {
                let mut write = pin!(clone.write_at(block(), (500 + round) << 16, Flags::NONE));
                let _ = write.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            }
            drop(clone);
            assert_eq!(lock_errno(&path), None, "{round}");
        });
    }
}

#[test]
fn c87_a_lock_ends_with_a_blocking_file_although_another_thread_reads_ahead_of_it() {
    let (_dir, path) = new_file();
    if lacks_locks(&path) {
        return;
    }
    std::fs::write(&path, vec![1; 4 << 20]).unwrap();
    for round in 0..20 {
        let file = BlockingFile::open(&path, OpenOptions::new().read_ahead(true)).unwrap();
        file.lock(FileLock::Exclusive).unwrap();
        for n in 0..6 {
            assert_eq!(file.read_at(&mut block(), n * BLOCK as u64), Ok(BLOCK));
        }
        drop(file);
        assert_eq!(lock_errno(&path), None, "{round}");
    }
}

#[test]
fn c87_a_device_that_others_have_keeps_its_lock_when_a_file_of_it_is_dropped() -> Result<(), Error>
{
    let (_dir, path) = new_file();
    if lacks_locks(&path) {
        return Ok(());
    }
    let disk = Arc::new(BlockDevice::open_file(&path, OpenOptions::new())?);
    let file = AsyncFile::new(disk.clone())?;
    file.try_lock(FileLock::Exclusive)?;
    pollster::block_on(file.flush())?;
    drop(file);
    assert_eq!(lock_errno(&path), Some(libc::EAGAIN));
    disk.unlock()?;
    assert_eq!(lock_errno(&path), None);
    Ok(())
}
