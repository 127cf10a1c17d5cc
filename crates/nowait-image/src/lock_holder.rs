//! Finds the process that has an image locked, as far as possible.
//!
//! The kernel does not report the owner of a lock that belongs to an open file description
//! (fcntl(2), `F_OFD_GETLK` gives -1). It lists each process's descriptors and their locks, for the
//! same user and for root (proc_pid_fdinfo(5)).
//!
//! Invariant: the result is a guess for messages; no decision depends on it.

use std::fs;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::lock::LockError;

/// The message for `error`, which came from locking `fd`: with the process that holds the lock,
/// where it can be found.
#[must_use]
pub fn told(fd: BorrowedFd<'_>, error: LockError) -> String {
    let holder = match error {
        LockError::Conflict { .. } => holder(fd),
        LockError::Unsupported | LockError::Os(_) => None,
    };
    match holder {
        Some(holder) => format!("{error} ({holder}; end it first)"),
        None => error.to_string(),
    }
}

/// "process 4711, nowait" for a process other than this one that has a lock on the file.
fn holder(fd: BorrowedFd<'_>) -> Option<String> {
    let stat = rustix::fs::fstat(fd).ok()?;
    let processes = fs::read_dir("/proc").ok()?.flatten();
    processes
        .filter_map(|process| process.file_name().to_str()?.parse::<u32>().ok())
        .filter(|&pid| pid != std::process::id())
        .find(|pid| has_lock(&Path::new("/proc").join(pid.to_string()), stat.st_dev, stat.st_ino))
        .map(|pid| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            format!("process {pid}, {}", name.trim())
        })
}

/// Whether one of the process's descriptors refers to this file and has a lock.
fn has_lock(process: &Path, device: u64, inode: u64) -> bool {
    let open = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    let is_it = |path: &Path| {
        fs::metadata(path).is_ok_and(|stat| (stat.dev(), stat.ino()) == (device, inode))
    };
    open.filter(|entry| is_it(&entry.path())).any(|entry| {
        let info = fs::read_to_string(process.join("fdinfo").join(entry.file_name()));
        info.is_ok_and(|info| info.lines().any(|line| line.starts_with("lock:")))
    })
}
