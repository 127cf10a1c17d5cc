//! The log of what the storage of an export does wrong: requests that fail, and those that take long.
//!
//! Invariant: each cause (an operation and an errno; an operation that is slow) is logged when it
//! first occurs, and then as [`LogLimit`] allows, with the number of requests left out; of flushes
//! only the first failure is logged after which all later ones fail, too (C51).

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nowait::{Op, Request};
use nowait_image::os_message;

use crate::log_limit::{LogLimit, left_out_note};

/// Called when a flush has failed.
pub(crate) type OnFailedFlush = Box<dyn Fn() + Send + Sync>;

/// An export in the log.
pub(crate) struct ExportLabel {
    pub(crate) name: String,
    pub(crate) description: String,
}

impl fmt::Display for ExportLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "export {:?} ({})", self.name, self.description)
    }
}

/// Faults that are logged, once in a while each.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Cause {
    /// An operation fails with an errno.
    Failed(Op, i32),
    /// An operation has taken long.
    Slow(Op),
    /// Requests have not ended for long.
    Overdue,
}

/// The failures of an export.
#[derive(Default)]
pub(crate) struct Faults {
    causes: LogLimit<Cause>,
    flush_failed: AtomicBool,
    on_failed_flush: Option<OnFailedFlush>,
}

impl Faults {
    /// Calls `callback` when the first flush fails.
    pub(crate) fn with_callback(callback: OnFailedFlush) -> Self {
        Self { on_failed_flush: Some(callback), ..Self::default() }
    }

    /// Notes that `io` of `export` has failed with `errno`; `export` is called for a failure that is
    /// logged, and `latched` says of a flush whether all later ones fail, too. Ignores `EOPNOTSUPP`:
    /// zeroing cannot be fast there, which does not count as a failure.
    #[cold]
    pub(crate) fn note(
        &self,
        export: impl Fn() -> ExportLabel,
        io: Request,
        errno: i32,
        latched: impl Fn() -> bool,
    ) {
        if errno == libc::EOPNOTSUPP {
            return;
        }
        if io.op == Op::Flush && latched() {
            return self.note_failed_flush(export, errno);
        }
        let Some(left_out) = self.causes.due(Cause::Failed(io.op, errno), Instant::now()) else {
            return;
        };
        let (export, why) = (export(), words(errno));
        let (operation, position, length) = (name(io.op), io.range.pos, io.range.len);
        tracing::error!(
            export = export.name,
            operation,
            position,
            length,
            errno,
            "{export}: {} failed: {why}{}",
            describe(io),
            left_out_note(left_out)
        );
    }

    fn note_failed_flush(&self, export: impl Fn() -> ExportLabel, errno: i32) {
        // The first one has its own errno; later ones fail because it has failed.
        if self.flush_failed.swap(true, Ordering::Relaxed) {
            return;
        }
        let (export, why) = (export(), words(errno));
        tracing::error!(
            export = export.name,
            operation = name(Op::Flush),
            errno,
            "{export}: a flush has failed: {why}; writes that were answered since the last \
             one may be lost, and every flush fails until the server is started again: mend \
             the storage, have clients check what they wrote, and restart"
        );
        if let Some(callback) = &self.on_failed_flush {
            callback();
        }
    }

    /// Notes that `io` of `export` has ended after `time`, or a little more.
    #[cold]
    pub(crate) fn note_slow(&self, export: impl Fn() -> ExportLabel, io: Request, time: Duration) {
        let Some(left_out) = self.causes.due(Cause::Slow(io.op), Instant::now()) else { return };
        let (export, seconds) = (export(), time.as_secs_f64());
        let (operation, position, length) = (name(io.op), io.range.pos, io.range.len);
        tracing::warn!(
            export = export.name,
            operation,
            position,
            length,
            seconds,
            "{export}: {} took {seconds:.1} s{}",
            describe(io),
            left_out_note(left_out)
        );
    }

    /// Notes that `count` requests of `export` have not ended for `time`.
    #[cold]
    pub(crate) fn note_overdue(
        &self,
        export: impl Fn() -> ExportLabel,
        count: u32,
        time: Duration,
    ) {
        let Some(left_out) = self.causes.due(Cause::Overdue, Instant::now()) else { return };
        let (export, seconds) = (export(), time.as_secs_f64());
        tracing::warn!(
            export = export.name,
            count,
            seconds,
            "{export}: {count} requests have waited for its storage for {seconds:.1} s and go on \
             waiting{}",
            left_out_note(left_out)
        );
    }

    /// Logs what was only counted until now.
    pub(crate) fn summarize(&self, export: &ExportLabel) {
        for (cause, left_out) in self.causes.take_left_out() {
            match cause {
                Cause::Failed(op, errno) => {
                    let (why, operation) = (words(errno), name(op));
                    tracing::error!(
                        export = export.name,
                        operation,
                        errno,
                        "{export}: {left_out} more of {operation} failed: {why}"
                    );
                }
                Cause::Slow(op) => {
                    let operation = name(op);
                    tracing::warn!(
                        export = export.name,
                        operation,
                        "{export}: {left_out} more of {operation} took long"
                    );
                }
                Cause::Overdue => {}
            }
        }
    }
}

/// Why an operation has failed.
fn words(errno: i32) -> String {
    os_message(&io::Error::from_raw_os_error(errno))
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
    match io.op {
        Op::Flush => name(io.op).to_owned(),
        _ => format!("{} of {} bytes at byte {}", name(io.op), io.range.len, io.range.pos),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        for (errno, reported) in [(libc::ENOSPC, 0), (libc::EIO, 1), (libc::EIO, 1)] {
            let disk = || ExportLabel { name: "disk".into(), description: String::new() };
            // One that has lost nothing is a failure as others.
            faults.note(disk, flush, errno, || false);
            assert_eq!(count.load(std::sync::atomic::Ordering::Relaxed), reported);
            faults.note(disk, flush, errno, || true);
            assert_eq!(count.load(std::sync::atomic::Ordering::Relaxed), 1);
        }
    }
}
