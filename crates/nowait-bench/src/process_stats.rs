//! The cost of a server: processor time of all its threads, and memory, read from /proc.
//!
//! Invariant: time is counted for all threads of the server, including io_uring workers, but not
//! for kernel threads that later work on its behalf, such as writeback; the report states this.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

use rustix::time::{ClockId, clock_gettime};

const NS_PER_SECOND: u64 = 1_000_000_000;
/// The largest error of a tick count: user and system time are each truncated, before and after.
const TICK_ERROR: u64 = 4;

/// Processor time of one process up to a moment.
pub(crate) struct CpuTime {
    /// Nanoseconds for each thread. Exact, but without threads that have ended.
    threads_ns: HashMap<String, u64>,
    /// Nanoseconds of all threads, including ended ones, with the resolution of a clock tick.
    process_ns: u64,
    tick_ns: u64,
}

impl CpuTime {
    /// Reads the counters of process `pid`.
    pub(crate) fn read(pid: u32) -> io::Result<CpuTime> {
        let directory = PathBuf::from(format!("/proc/{pid}"));
        let tick_ns = NS_PER_SECOND / rustix::param::clock_ticks_per_second().max(1);
        let stat = fs::read_to_string(directory.join("stat"))?;
        let ticks =
            ticks_of(&stat).ok_or_else(|| io::Error::other("/proc/PID/stat is not as expected"))?;
        Ok(CpuTime { threads_ns: threads_ns(&directory)?, process_ns: ticks * tick_ns, tick_ns })
    }

    /// Nanoseconds used since `earlier`.
    pub(crate) fn since(&self, earlier: &CpuTime) -> u64 {
        let exact: u64 = self
            .threads_ns
            .iter()
            .map(|(thread, now)| {
                now.saturating_sub(earlier.threads_ns.get(thread).copied().unwrap_or(0))
            })
            .sum();
        let coarse = self.process_ns.saturating_sub(earlier.process_ns);
        // A value far below the tick count means that threads have ended in between.
        if exact + TICK_ERROR * self.tick_ns < coarse { coarse } else { exact }
    }
}

fn threads_ns(process: &Path) -> io::Result<HashMap<String, u64>> {
    let mut all = HashMap::new();
    for thread in fs::read_dir(process.join("task"))? {
        let thread = thread?;
        // A thread may end before it is read, and some kernels lack the file.
        let Ok(schedstat) = fs::read_to_string(thread.path().join("schedstat")) else {
            continue;
        };
        let ran_ns = schedstat.split_ascii_whitespace().next().and_then(|field| field.parse().ok());
        all.insert(thread.file_name().to_string_lossy().into_owned(), ran_ns.unwrap_or(0));
    }
    Ok(all)
}

/// utime + stime of a /proc/PID/stat line: fields 14 and 15, counted after the name, which may
/// contain spaces.
fn ticks_of(stat: &str) -> Option<u64> {
    let (_, behind_name) = stat.rsplit_once(')')?;
    let mut fields = behind_name.split_ascii_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
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
    fn a_name_with_spaces_and_brackets_does_not_shift_the_fields() {
        let stat = "7 (a) b (c)) S 1 7 7 0 -1 4194560 100 0 0 0 31 11 0 0 20 0 1 0 5 0 0";
        assert_eq!(ticks_of(stat), Some(42));
    }

    #[test]
    fn resident_memory_is_found_in_status() {
        assert_eq!(resident_of("Name:\tx\nVmHWM:\t  9 kB\nVmRSS:\t    2048 kB\n"), Some(2 << 20));
        assert_eq!(resident_of("Name:\tx\n"), None);
    }

    #[test]
    fn time_of_a_thread_that_began_in_between_counts_in_full() {
        let earlier = time(&[("1", 1_000)], 0);
        let later = time(&[("1", 3_000), ("2", 500)], 0);
        assert_eq!(later.since(&earlier), 2_500);
    }

    #[test]
    fn time_of_threads_that_ended_is_taken_from_the_ticks() {
        let earlier = time(&[("1", 0), ("2", 0)], 0);
        let later = time(&[("1", 10)], 900_000_000);
        assert_eq!(later.since(&earlier), 900_000_000);
    }

    fn time(threads: &[(&str, u64)], process_ns: u64) -> CpuTime {
        let threads_ns = threads.iter().map(|&(name, ns)| (name.to_owned(), ns)).collect();
        CpuTime { threads_ns, process_ns, tick_ns: 10_000_000 }
    }
}
