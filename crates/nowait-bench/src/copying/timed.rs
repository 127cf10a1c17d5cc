//! What a program costs that runs to its end: time, its own processor time, and the machine's.
//!
//! Invariant: what is timed begins when the program is started, and is on storage when it ends.
//! Knows: nothing. Known by: race. Source: wait4(2), proc_stat(5).
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// What one run came to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timed {
    /// Until the program had ended.
    pub(super) ended: Duration,
    /// Until all that was written was on storage too.
    pub(super) stored: Duration,
    /// The program's own processor time.
    pub(super) processor: Duration,
    /// What the processors of the machine did from start to storage, for whomever.
    pub(super) machine: Duration,
}

/// Runs `command` to its end, and then puts the file system of `directory` on storage.
///
/// # Errors
/// What the program said last, if it failed; what the system said.
pub(super) fn run(command: &mut Command, directory: &File) -> io::Result<Timed> {
    let machine = busy()?;
    let begin = Instant::now();
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let mut said = String::new();
    if let Some(errors) = &mut child.stderr {
        // Ends when the program does; what is no text is no message.
        let _ = errors.read_to_string(&mut said);
    }
    let (good, processor) = wait(child.id())?;
    let ended = begin.elapsed();
    if !good {
        let line = said.lines().rev().find(|line| !line.trim().is_empty());
        return Err(io::Error::other(line.unwrap_or("it failed without a word").to_owned()));
    }
    rustix::fs::syncfs(directory.as_fd())?;
    let stored = begin.elapsed();
    Ok(Timed { ended, stored, processor, machine: busy()?.saturating_sub(machine) })
}

/// Waits for the child `pid`. Whether it ended well, and its processor time.
fn wait(pid: u32) -> io::Result<(bool, Duration)> {
    loop {
        let mut status = 0;
        // SAFETY: an rusage of zeros is one; it holds numbers only.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: both places are valid for as long as the call takes.
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

/// How long the processors of the machine have worked since it started.
fn busy() -> io::Result<Duration> {
    let stat = fs::read_to_string("/proc/stat")?;
    let ticks =
        busy_ticks(&stat).ok_or_else(|| io::Error::other("/proc/stat is not as expected"))?;
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    Ok(Duration::from_secs_f64(ticks as f64 / per_second as f64))
}

/// User, nice, system, interrupts; not idle, waiting, stolen.
fn busy_ticks(stat: &str) -> Option<u64> {
    let fields = stat.lines().next()?.strip_prefix("cpu ")?.split_ascii_whitespace();
    let ticks: Vec<u64> = fields.map_while(|field| field.parse().ok()).collect();
    [0, 1, 2, 5, 6].into_iter().map(|at| ticks.get(at).copied()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_that_nobody_worked_does_not_count() {
        let stat = "cpu  10 20 30 4000 500 6 7 8 9 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n";
        assert_eq!(busy_ticks(stat), Some(10 + 20 + 30 + 6 + 7));
        assert_eq!(busy_ticks("cpu 1 2"), None);
    }

    #[test]
    fn a_program_that_works_has_worked_and_one_that_fails_is_quoted() {
        let directory = File::open(std::env::temp_dir()).expect("a directory");
        let script = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done";
        let timed = run(Command::new("sh").args(["-c", script]), &directory).expect("a shell");
        assert!(timed.processor > Duration::ZERO && timed.processor < 2 * timed.ended);
        assert!(timed.ended <= timed.stored);
        let failed = run(Command::new("sh").args(["-c", "echo so >&2; exit 3"]), &directory);
        assert_eq!(failed.expect_err("it fails").to_string(), "so");
    }
}
