//! A landlock ruleset in force for every thread of this process, on kernels that restrict only the
//! thread that asks, and no capabilities but a few.
//!
//! Invariant: each thread restricts itself, in the handler of a signal that is sent to it; no thread
//! is left out, for the threads are listed until all have answered, and a new one inherits from its
//! creator. (Those of io_uring take no signals, and have no rights of their own.) The handler makes system calls and nothing else.
#![allow(unsafe_code)]

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{CapabilitySet, capabilities, gettid, set_capabilities};

/// How long a thread may sleep with the signal blocked when a server is confined: libraries block all signals for a
/// /// moment. A thread that waits for a processor, or for a device, may take as long as it likes.
/// Beyond it: the start fails.
const BLOCKED_TIMEOUT: Duration = Duration::from_secs(60);
const RETRY: Duration = Duration::from_millis(1);
/// The flag of io_uring's threads (include/linux/sched.h).
const PF_IO_WORKER: u32 = 0x10;
/// The state of a thread that has not answered yet.
const NO_ANSWER: i32 = -1;

/// The ruleset for the handler.
static RULESET: AtomicI32 = AtomicI32::new(-1);
/// The capabilities that the handler leaves, as bits.
static KEPT: AtomicU64 = AtomicU64::new(0);
/// The errno of the thread that was asked last, 0 or [`NO_ANSWER`].
static ANSWER: AtomicI32 = AtomicI32::new(NO_ANSWER);
/// One call at a time uses these.
static RUNNING: Mutex<()> = Mutex::new(());

/// Restricts all threads of this process to `ruleset` and, of the capabilities that they have, to those `kept`, for good.
/// The calling thread needs no_new_privs; the others get it here.
///
/// # Errors
/// A message: a thread could not be restricted, or takes no signal. Others may be restricted then.
pub(super) fn restrict(ruleset: BorrowedFd<'_>, kept: CapabilitySet) -> Result<(), String> {
    let _running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    let failed = |error: io::Error| format!("a thread cannot be confined: {error}");
    RULESET.store(ruleset.as_fd().as_raw_fd(), Ordering::Release);
    KEPT.store(kept.bits(), Ordering::Release);
    let signal = libc::SIGRTMAX();
    let previous = handle(signal).map_err(failed)?;
    let own = gettid().as_raw_nonzero().get();
    let mut done = HashSet::from([own]);
    let result = others(&mut done, signal).and_then(|()| match restrict_calling_thread() {
        0 => Ok(()),
        errno => Err(failed(io::Error::from_raw_os_error(errno))),
    });
    // SAFETY: the action is the one that was in force before.
    unsafe { libc::sigaction(signal, &previous, std::ptr::null_mut()) };
    result
}

/// Has all threads restrict themselves that are not in `done`.
fn others(done: &mut HashSet<i32>, signal: i32) -> Result<(), String> {
    loop {
        let listed = fs::read_dir("/proc/self/task").map_err(|error| error.to_string())?;
        let names = listed.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let threads: Vec<i32> = names.filter_map(|name| name.parse().ok()).collect();
        let new: Vec<i32> = threads.into_iter().filter(|thread| !done.contains(thread)).collect();
        if new.is_empty() {
            return Ok(());
        }
        for thread in new {
            if !is_of_io_uring(thread) {
                ask(thread, signal)?;
            }
            done.insert(thread);
        }
    }
}

/// Whether `thread` is one of io_uring, which runs in the kernel only, with the rights of the thread
/// whose request it carries out (proc_pid_stat(5): the flags are the seventh field after the name).
fn is_of_io_uring(thread: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap_or_default();
    let after_name = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    let flags = after_name.split(' ').nth(6).and_then(|flags| flags.parse::<u32>().ok());
    flags.is_some_and(|flags| flags & PF_IO_WORKER != 0)
}

/// Has `thread` restrict itself, and waits until it has. No effect if it has ended.
fn ask(thread: i32, signal: i32) -> Result<(), String> {
    ANSWER.store(NO_ANSWER, Ordering::Release);
    let process = std::process::id();
    let begin = Instant::now();
    // SAFETY: the call takes numbers only; the signal has a handler.
    if unsafe { libc::syscall(libc::SYS_tgkill, process, thread, signal) } != 0 {
        return Ok(());
    }
    loop {
        match ANSWER.load(Ordering::Acquire) {
            0 => return Ok(()),
            NO_ANSWER => {}
            errno => return Err(io::Error::from_raw_os_error(errno).to_string()),
        }
        match fs::read_to_string(format!("/proc/self/task/{thread}/status")) {
            Err(error) if has_ended(&error) => return Ok(()),
            Ok(status) if begin.elapsed() > BLOCKED_TIMEOUT && ignores(&status, signal) => {
                return Err(format!("thread {thread} blocks the signal for it"));
            }
            _ => thread::sleep(RETRY),
        }
    }
}

fn has_ended(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

/// Whether a thread with this `status` (proc_pid_status(5)) does not take `signal` however long it runs:
/// it blocks it, and waits neither for a processor nor for a device.
fn ignores(status: &str, signal: i32) -> bool {
    let field = |name| {
        status.lines().find_map(|line: &str| line.strip_prefix(name)?.split_whitespace().next())
    };
    let blocked = field("SigBlk:").and_then(|mask| u64::from_str_radix(mask, 16).ok());
    field("State:") == Some("S") && blocked.is_some_and(|mask| mask & 1 << (signal - 1) != 0)
}

fn handle(signal: i32) -> io::Result<libc::sigaction> {
    // SAFETY: all zeros are a valid value of this plain structure.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_signal as *const () as usize;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: as above.
    let mut previous: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: both structures are valid, and the handler only makes system calls.
    match unsafe { libc::sigaction(signal, &action, &mut previous) } {
        0 => Ok(previous),
        _ => Err(io::Error::last_os_error()),
    }
}

extern "C" fn on_signal(_signal: i32) {
    // SAFETY: the location of errno is this thread's own.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    ANSWER.store(restrict_calling_thread(), Ordering::Release);
    // SAFETY: as above.
    unsafe { *errno = before };
}

/// Returns 0 or an errno.
fn restrict_calling_thread() -> i32 {
    let ruleset = RULESET.load(Ordering::Acquire);
    // SAFETY: both calls take numbers only; the descriptor is open while the signal has its handler.
    let result = unsafe {
        match libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) {
            0 => libc::syscall(libc::SYS_landlock_restrict_self, ruleset, 0),
            _ => -1,
        }
    };
    match result {
        0 => drop_capabilities().err().map_or(0, |errno| errno.raw_os_error()),
        // SAFETY: the location of errno is this thread's own.
        _ => unsafe { *libc::__errno_location() },
    }
}

fn drop_capabilities() -> rustix::io::Result<()> {
    let kept = CapabilitySet::from_bits_retain(KEPT.load(Ordering::Acquire));
    let mut sets = capabilities(None)?;
    sets.effective &= kept;
    sets.permitted &= kept;
    sets.inheritable = CapabilitySet::empty();
    set_capabilities(None, sets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_thread_that_sleeps_with_the_signal_blocked_is_given_up() {
        let with = |state, blocked| format!("Name:\ta\nState:\t{state}\nSigBlk:\t{blocked}\n");
        let (all, none) = ("ffffffffffffffff", "0000000000000000");
        for signal in [1, 34, 64] {
            assert!(ignores(&with("S (sleeping)", all), signal));
            // However long it takes: it waits for a processor, for a device, or takes the signal then.
            assert!(!ignores(&with("R (running)", all), signal));
            assert!(!ignores(&with("D (disk sleep)", all), signal));
            assert!(!ignores(&with("S (sleeping)", none), signal));
        }
        assert!(!ignores("", 64));
    }

    #[test]
    fn a_thread_is_waited_for_until_it_takes_the_signal() {
        let _running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        let signal = libc::SIGRTMAX();
        let previous = handle(signal).unwrap();
        let (tell, number) = std::sync::mpsc::channel();
        let (answered, until_answered) = std::sync::mpsc::channel::<()>();
        let blocking = thread::spawn(move || {
            change_mask(libc::SIG_BLOCK, signal);
            tell.send(gettid().as_raw_nonzero().get()).unwrap();
            let pending = || {
                let status = fs::read_to_string("/proc/thread-self/status").unwrap();
                let line = status.lines().find_map(|line| line.strip_prefix("SigPnd:"));
                u64::from_str_radix(line.unwrap().trim(), 16).unwrap() != 0
            };
            while !pending() {
                thread::sleep(RETRY);
            }
            change_mask(libc::SIG_UNBLOCK, signal);
            // A thread that has exited needs no answer.
            let _ = until_answered.recv();
        });
        // It takes the signal and cannot restrict itself: there is no ruleset.
        let answer = ask(number.recv().unwrap(), signal);
        drop(answered);
        blocking.join().unwrap();
        assert!(answer.is_err_and(|why| why.contains("Bad file descriptor")));
        // SAFETY: the action is the one that was in force before.
        unsafe { libc::sigaction(signal, &previous, std::ptr::null_mut()) };
    }

    fn change_mask(how: i32, signal: i32) {
        // SAFETY: all zeros are a valid value of this plain structure.
        let mut mask: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: the set is valid, and the mask is this thread's own.
        unsafe {
            libc::sigaddset(&mut mask, signal);
            libc::pthread_sigmask(how, &mask, std::ptr::null_mut());
        }
    }
}
