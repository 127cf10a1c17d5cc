//! A child process after fork(2): what works there, what is refused (C85), and whose the locks are (C87).
//!
//! Invariant: the process that forks has one thread beside those of the library: this program runs itself for that.
#![allow(unsafe_code)]

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};

use nowait::{
    AsyncFile, BlockingFile, FileLock, Flags, IoBuffer, LocalAsyncFile, LocalDriver, OpenOptions,
};

/// In the environment of the process that forks: what its parent does before, and the path of the file.
const FORKING: &str = "NOWAIT_TEST_FORKING_PROCESS";
const LEN: usize = 8192;

/// The exit status of `child` in a process that was forked.
fn status_of(child: impl FnOnce() -> Result<(), String>) -> i32 {
    // SAFETY: the child runs code that the contract allows, and exits without any destructor.
    match unsafe { libc::fork() } {
        0 => {
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child));
            let is_right = matches!(done, Ok(Ok(())));
            if let Ok(Err(what)) = done {
                eprintln!("{what}");
            }
            // SAFETY: the call has no conditions.
            unsafe { libc::_exit(i32::from(!is_right)) }
        }
        pid => {
            let mut status = 0;
            // SAFETY: the call writes one number.
            assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
            assert!(libc::WIFEXITED(status), "{status}");
            libc::WEXITSTATUS(status)
        }
    }
}

fn scan(file: &BlockingFile, byte: u8) -> Result<(), String> {
    let mut memory = vec![0; LEN];
    for n in 0..32 {
        let done = file.read_at(&mut memory, n * LEN as u64);
        if done != Ok(LEN) || memory != vec![byte; LEN] {
            return Err(format!("read {n}: {done:?}"));
        }
    }
    Ok(())
}

fn in_child(file: &BlockingFile, path: &Path, has_engine: bool) -> Result<(), String> {
    let served = file.disk().served_ahead();
    scan(file, 7)?;
    let own = BlockingFile::open(path, OpenOptions::new().read_ahead(true));
    let own = own.map_err(|error| error.to_string())?;
    scan(&own, 7)?;
    let now = [own.disk().served_ahead(), file.disk().served_ahead()];
    if has_engine && now != [served; 2] {
        return Err("something was read ahead".into());
    }
    let written = own.write_at(&[8; LEN], 33 * LEN as u64, Flags::DSYNC);
    let appended = file.append(&[9; 10], Flags::NONE);
    if written != Ok(LEN) || appended != Ok(34 * LEN as u64) {
        return Err(format!("{written:?}, {appended:?}"));
    }
    if !has_engine {
        return async_files(path);
    }
    let refused = [
        AsyncFile::open(path, OpenOptions::new()).err(),
        LocalAsyncFile::open(path, OpenOptions::new()).err(),
    ];
    match refused.map(|error| error.map(|error| error.errno())) {
        [Some(libc::EOPNOTSUPP), Some(libc::EOPNOTSUPP)] => Ok(()),
        other => Err(format!("{other:?}")),
    }
}

fn async_files(path: &Path) -> Result<(), String> {
    let failed = |error: nowait::Error| error.to_string();
    let driver = LocalDriver::new().map_err(failed)?;
    let local = LocalAsyncFile::open(path, OpenOptions::new()).map_err(failed)?;
    let shared = AsyncFile::open(path, OpenOptions::new()).map_err(failed)?;
    let buffer = || IoBuffer::zeroed(LEN).map_err(failed);
    let reads = [
        driver.block_on(local.read_at(buffer()?, 0)),
        driver.block_on(shared.read_at(buffer()?, 0)),
    ];
    let is_right = reads.iter().all(|(done, bytes)| *done == Ok(LEN) && bytes[..] == [7; LEN]);
    if is_right { Ok(()) } else { Err("a read by an engine of the child".into()) }
}

/// The process that forks; without its variable it has nothing to do.
#[test]
fn the_forking_process() {
    let Ok(what) = std::env::var(FORKING) else { return };
    let (before, path) = what.split_once(' ').unwrap();
    let (has_engine, path) = (before == "engine", Path::new(path));
    let read_ahead = before != "nothing";
    let file = BlockingFile::open(path, OpenOptions::new().read_ahead(read_ahead)).unwrap();
    if read_ahead {
        scan(&file, 7).unwrap();
        assert!(file.disk().served_ahead() > 0 || !file.disk().is_direct());
    }
    if has_engine {
        async_files(path).unwrap();
    }
    let status = status_of(|| in_child(&file, path, read_ahead));
    assert_eq!(status, 0);
    // The parent's go on.
    scan(&file, 7).unwrap();
    if has_engine {
        async_files(path).unwrap();
    }
}

#[test]
fn c85_a_child_has_blocking_files_and_no_engine_beside_one_of_its_parent() {
    for before in ["nothing", "read-ahead", "engine"] {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = dir.path().join("data");
        std::fs::write(&path, vec![7; 33 * LEN]).unwrap();
        let mut process = Command::new(std::env::current_exe().unwrap());
        process.args(["--exact", "the_forking_process", "--nocapture", "--test-threads=1"]);
        process.env(FORKING, format!("{before} {}", path.display()));
        nowait_testkit::ends_with_test(&mut process);
        let output = process.output().unwrap();
        assert!(output.status.success(), "{before}: {output:?}");
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 34 * LEN as u64 + 10, "{before}");
    }
}

/// In the environment of the process that locks and forks: which process closes the file then, and the path of the file.
const LOCKING: &str = "NOWAIT_TEST_LOCKING_PROCESS";

/// The process that locks and forks; without its variable it has nothing to do. Its child exits when its standard input is closed.
#[test]
fn the_locking_process() {
    let Ok(what) = std::env::var(LOCKING) else { return };
    let (then, path) = what.split_once(' ').unwrap();
    let file = BlockingFile::open(Path::new(path), OpenOptions::new()).unwrap();
    file.lock(FileLock::Exclusive).unwrap();
    // SAFETY: the child reads, closes files and exits without any destructor but theirs.
    match unsafe { libc::fork() } {
        0 => {
            if then == "child" {
                drop(file);
                println!("\nclosed");
            }
            let _ = std::io::stdin().read(&mut [0]);
            // SAFETY: the call has no conditions.
            unsafe { libc::_exit(0) }
        }
        _ => {
            if then == "parent" {
                drop(file);
                println!("\nclosed");
            } else {
                println!("\nlocked");
            }
            loop {
                std::thread::park();
            }
        }
    }
}

#[test]
fn c87_a_child_after_fork_shares_the_lock_and_only_the_process_that_has_locked_ends_it_by_closing()
{
    for (then, line) in [("neither", "locked"), ("child", "closed"), ("parent", "closed")] {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = dir.path().join("locked");
        std::fs::write(&path, b"locked").unwrap();
        let own = BlockingFile::open(&path, OpenOptions::new()).unwrap();
        let is_free = || {
            let locked = own.try_lock(FileLock::Exclusive).map_err(|error| error.errno());
            assert!(matches!(locked, Ok(()) | Err(libc::EAGAIN)), "{locked:?}");
            locked.is_ok_and(|()| own.unlock().is_ok())
        };
        if let Err(error) = own.try_lock(FileLock::Exclusive) {
            nowait_testkit::skip(&format!("no flock(2): {error}"));
            return;
        }
        own.unlock().unwrap();
        let mut process = Command::new(std::env::current_exe().unwrap());
        process.args(["--exact", "the_locking_process", "--nocapture", "--test-threads=1"]);
        process.env(LOCKING, format!("{then} {}", path.display()));
        nowait_testkit::ends_with_test(&mut process);
        let mut process = process.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        assert!(lines.any(|it| it.unwrap() == line), "{then}");
        assert_eq!(is_free(), then == "parent", "{then} closes");
        let child = process.stdin.take();
        process.kill().unwrap();
        process.wait().unwrap();
        // A child that is there, and has not closed the file, still has the lock.
        assert_eq!(is_free(), then != "neither", "{then} closes, and the parent is killed");
        drop(child);
        nowait_testkit::wait_until("the end of the child's lock", is_free);
    }
}
