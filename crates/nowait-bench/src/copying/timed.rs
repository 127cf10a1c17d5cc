//! The cost of running a program to its end: elapsed time, its own processor time, and that of the
//! machine.
//!
//! Invariant: the time runs from the start of the program until its data is on storage.
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::other_programs::last_line;

/// The times of one run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timed {
    /// The time until the program had ended.
    pub(crate) ended: Duration,
    /// The time until all written data was on storage.
    pub(crate) stored: Duration,
    /// The program's own processor time.
    pub(crate) processor: Duration,
    /// The busy time of all processors of the machine from the start until the data was on storage,
    /// for all processes.
    pub(crate) machine: Duration,
}

/// Runs `command` to its end, then syncs the file system of `directory`.
///
/// # Errors
/// The last message of the program if it failed, or the error of the system.
pub(crate) fn run(command: &mut Command, directory: &File) -> io::Result<Timed> {
    let machine = busy()?;
    let begin = Instant::now();
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let mut message = String::new();
    if let Some(errors) = &mut child.stderr {
        // The pipe ends when the program does; output that is not text is ignored.
        let _ = errors.read_to_string(&mut message);
    }
    let (good, processor) = wait(child.id())?;
    let ended = begin.elapsed();
    if !good {
        let line = last_line(&message).unwrap_or("it failed without a word");
        return Err(io::Error::other(line.to_owned()));
    }
    rustix::fs::syncfs(directory.as_fd())?;
    let stored = begin.elapsed();
    Ok(Timed { ended, stored, processor, machine: busy()?.saturating_sub(machine) })
}

/// Waits for the child `pid`. Returns whether it succeeded, and its processor time.
fn wait(pid: u32) -> io::Result<(bool, Duration)> {
    loop {
        let mut status = 0;
        // SAFETY: an rusage of zeros is valid; it contains only numbers.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: both pointers are valid for the duration of the call.
        let waited = unsafe { libc::wait4(pid.cast_signed(), &raw mut status, 0, &raw mut usage) };
        if waited < 0 {
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::Interrupted {
                continue;
            }
            return Err(error);
        }
        let time = |time: libc::timeval| {
            Duration::from_secs(time.tv_sec.unsigned_abs())
                + Duration::from_micros(time.tv_usec.unsigned_abs())
        };
        return Ok((status == 0, time(usage.ru_utime) + time(usage.ru_stime)));
    }
}

/// The busy time of all processors since the machine started.
fn busy() -> io::Result<Duration> {
    let stat = fs::read_to_string("/proc/stat")?;
    let ticks =
        busy_ticks(&stat).ok_or_else(|| io::Error::other("/proc/stat is not as expected"))?;
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    Ok(Duration::from_secs_f64(ticks as f64 / per_second as f64))
}

/// The ticks of user, nice, system and interrupts; not of idle, iowait and steal.
fn busy_ticks(stat: &str) -> Option<u64> {
    let fields = stat.lines().next()?.strip_prefix("cpu ")?.split_ascii_whitespace();
    let ticks: Vec<u64> = fields.map_while(|field| field.parse().ok()).collect();
    [0, 1, 2, 5, 6].into_iter().map(|at| ticks.get(at).copied()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_iowait_and_steal_ticks_do_not_count() {
        let stat = "cpu  10 20 30 4000 500 6 7 8 9 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n";
        assert_eq!(busy_ticks(stat), Some(10 + 20 + 30 + 6 + 7));
        assert_eq!(busy_ticks("cpu 1 2"), None);
    }

    #[test]
    fn a_busy_program_has_processor_time_and_the_message_of_a_failing_one_is_reported() {
        let directory = File::open(std::env::temp_dir()).expect("a directory");
        let script = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done";
        let timed = run(Command::new("sh").args(["-c", script]), &directory).expect("a shell");
        assert!(timed.processor > Duration::ZERO && timed.processor < 2 * timed.ended);
        assert!(timed.ended <= timed.stored);
        let failed = run(Command::new("sh").args(["-c", "echo so >&2; exit 3"]), &directory);
        assert_eq!(failed.expect_err("it fails").to_string(), "so");
    }
}
