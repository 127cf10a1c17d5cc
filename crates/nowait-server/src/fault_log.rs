//! The log of the storage failures of an export.
//!
//! Invariant: each cause (an operation and an errno) is logged when it first occurs, and then at
//! most once in [`REPEAT_INTERVAL`], with the number of requests left out; of flushes only the
//! first failure is logged, because all later ones fail too (C51).

use std::io;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use nowait::{Op, Request};

use crate::locking::lock;

/// How long a logged cause is only counted.
const REPEAT_INTERVAL: Duration = Duration::from_secs(30);

/// Called when a flush has failed.
pub(crate) type OnFailedFlush = Box<dyn Fn() + Send + Sync>;

/// An operation and the errno it fails with.
struct Cause {
    op: Op,
    errno: i32,
    reported_at: Instant,
    suppressed: u64,
}

/// The failures of an export.
#[derive(Default)]
pub(crate) struct Faults {
    causes: Mutex<Vec<Cause>>,
    on_failed_flush: Option<OnFailedFlush>,
}

impl Faults {
    /// Calls `callback` when the first flush fails.
    pub(crate) fn with_callback(callback: OnFailedFlush) -> Self {
        Self { causes: Mutex::default(), on_failed_flush: Some(callback) }
    }

    /// Notes that `io` of `export` has failed with `errno`; `export` is called for a failure that is
    /// logged. Ignores `EOPNOTSUPP`: zeroing cannot be
    /// fast there, which is no failure.
    #[cold]
    pub(crate) fn note(&self, export: impl Fn() -> String, io: Request, errno: i32) {
        if errno == libc::EOPNOTSUPP {
            return;
        }
        let Some((left_out, first)) = self.is_due(io.op, errno, Instant::now()) else {
            return;
        };
        let why = io::Error::from_raw_os_error(errno);
        if io.op == Op::Flush {
            if first {
                let export = export();
                tracing::error!(
                    "{export}: a flush has failed: {why}; writes that were answered since the last \
                     one may be lost, and every flush fails until the server is started anew: mend \
                     the storage, have clients check what they wrote, and restart"
                );
                if let Some(callback) = &self.on_failed_flush {
                    callback();
                }
            }
            return;
        }
        let (export, left_out) = (export(), suppressed_note(left_out));
        tracing::error!("{export}: {} failed: {why}{left_out}", describe(io));
    }

    /// Logs the failures that were only counted until now.
    pub(crate) fn summarize(&self, export: &str) {
        for cause in self.lock().iter_mut().filter(|cause| cause.op != Op::Flush) {
            let left_out = std::mem::take(&mut cause.suppressed);
            if left_out > 0 {
                let (why, name) = (io::Error::from_raw_os_error(cause.errno), name(cause.op));
                tracing::error!("{export}: {left_out} more of {name} failed: {why}");
            }
        }
    }

    /// Whether to log a failure at `now`: the number left out since the last line, and whether it
    /// is the first of its cause.
    fn is_due(&self, op: Op, errno: i32, now: Instant) -> Option<(u64, bool)> {
        let mut causes = self.lock();
        // The first failed flush has its own errno; later ones fail because it has failed.
        let is_same =
            |cause: &&mut Cause| cause.op == op && (cause.errno == errno || op == Op::Flush);
        let Some(cause) = causes.iter_mut().find(is_same) else {
            causes.push(Cause { op, errno, reported_at: now, suppressed: 0 });
            return Some((0, true));
        };
        if now.saturating_duration_since(cause.reported_at) < REPEAT_INTERVAL {
            cause.suppressed += 1;
            return None;
        }
        cause.reported_at = now;
        Some((std::mem::take(&mut cause.suppressed), false))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Cause>> {
        lock(&self.causes)
    }
}

fn name(op: Op) -> &'static str {
    match op {
        Op::Read => "read",
        Op::Write => "write",
        Op::Flush => "flush",
        Op::Discard => "trim",
        Op::Zero => "zeroing",
        Op::Status => "block status",
    }
}

fn describe(io: Request) -> String {
    format!("{} of {} bytes at byte {}", name(io.op), io.range.len, io.range.pos)
}

fn suppressed_note(left_out: u64) -> String {
    match left_out {
        0 => String::new(),
        count => format!(" ({count} more since the last line)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_is_logged_at_once_and_then_counted_for_a_while() {
        let (faults, begin) = (Faults::default(), Instant::now());
        let log =
            |op, errno, seconds| faults.is_due(op, errno, begin + Duration::from_secs(seconds));
        assert_eq!(log(Op::Write, libc::ENOSPC, 0), Some((0, true)));
        assert_eq!(log(Op::Read, libc::EIO, 0), Some((0, true)));
        assert_eq!(log(Op::Write, libc::EIO, 1), Some((0, true)));
        for _ in 0..7 {
            assert_eq!(log(Op::Write, libc::ENOSPC, 29), None);
        }
        assert_eq!(log(Op::Write, libc::ENOSPC, 30), Some((7, false)));
        assert_eq!(log(Op::Write, libc::ENOSPC, 31), None);
        assert_eq!(log(Op::Read, libc::EIO, 60), Some((0, false)));
    }

    #[test]
    fn a_failed_flush_is_reported_once_whatever_the_errno_of_later_ones() {
        let count = std::sync::Arc::new(std::sync::atomic::AtomicU32::new(0));
        let counted = count.clone();
        let faults = Faults::with_callback(Box::new(move || {
            counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }));
        let flush = Request {
            op: Op::Flush,
            flags: nowait::Flags::NONE,
            range: nowait::ByteRange::new(0, 0),
        };
        for errno in [libc::ENOSPC, libc::EIO, libc::EIO] {
            faults.note(|| "disk".into(), flush, errno);
        }
        assert_eq!(count.load(std::sync::atomic::Ordering::Relaxed), 1);
    }
}
