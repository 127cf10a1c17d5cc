//! The cost of a server: processor time of all its threads, and memory.
//!
//! Invariant: time is counted for all threads of the server, those that have ended and io_uring workers, too, but not
//! for kernel threads that later work on its behalf, such as writeback; the report states this.
#![allow(unsafe_code)]

use std::{fs, io};

use rustix::time::{ClockId, clock_gettime};

const NS_PER_SECOND: u64 = 1_000_000_000;

/// Nanoseconds of processor time of process `pid`, all of its threads.
///
/// # Errors
/// `ESRCH`: there is no such process.
pub(crate) fn process_ns(pid: u32) -> io::Result<u64> {
    let mut clock = 0;
    // SAFETY: the pointer is valid for the duration of the call.
    let failed = unsafe { libc::clock_getcpuclockid(pid.cast_signed(), &raw mut clock) };
    if failed != 0 {
        return Err(io::Error::from_raw_os_error(failed));
    }
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: as above.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(time.tv_sec.cast_unsigned() * NS_PER_SECOND + time.tv_nsec.cast_unsigned())
}

/// Nanoseconds of a clock, such as the processor time of this thread or of this process.
pub(crate) fn clock_ns(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec.cast_unsigned() * NS_PER_SECOND + time.tv_nsec.cast_unsigned()
}

/// Resident memory of process `pid` in bytes.
pub(crate) fn resident_bytes(pid: u32) -> io::Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    resident_of(&status).ok_or_else(|| io::Error::other("/proc/PID/status has no VmRSS"))
}

fn resident_of(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_time_of_a_process_is_that_of_its_clock() {
        let before = clock_ns(ClockId::ProcessCPUTime);
        let between = process_ns(std::process::id()).expect("this process");
        assert!((before..=clock_ns(ClockId::ProcessCPUTime)).contains(&between));
        // The kernel gives no process a number above 4194304 (proc(5)).
        let missing = process_ns(5_000_000).expect_err("no such process");
        assert_eq!(missing.raw_os_error(), Some(libc::ESRCH));
    }

    #[test]
    fn resident_memory_is_found_in_status() {
        assert_eq!(resident_of("Name:\tx\nVmHWM:\t  9 kB\nVmRSS:\t    2048 kB\n"), Some(2 << 20));
        assert_eq!(resident_of("Name:\tx\n"), None);
    }
}
