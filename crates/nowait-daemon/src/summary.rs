//! Counts of a server, at its end (`--verbose`).
//!
//! Invariant: what did not happen is not mentioned.

use nowait::internal::RegisteredMemory;
use std::io;

use nowait_server::{ExportStatus, Exports, FrontendKind, FrontendTotals};
use tracing::info;

use crate::error::os_message;
use crate::size::{human, short};

/// Logs what each export of `exports` has done.
pub(crate) fn log(exports: &Exports) {
    if !tracing::enabled!(tracing::Level::INFO) {
        return;
    }
    for status in exports.status() {
        lines(&status).iter().for_each(|line| info!("{line}"));
    }
}

fn lines(status: &ExportStatus) -> Vec<String> {
    let export = format!("export {:?} ({})", status.name, status.description);
    let used = status.totals.iter().filter(|(_, totals)| totals.requests() > 0);
    let mut lines: Vec<String> =
        used.map(|(kind, totals)| format!("{export}: {}", requests(*kind, totals))).collect();
    let mechanisms = status.mechanisms.iter().filter(|(_, count)| *count > 0);
    let mechanisms: Vec<_> =
        mechanisms.map(|(name, count)| format!("{} {count}", name.replace('_', " "))).collect();
    if !lines.is_empty() && !mechanisms.is_empty() {
        lines.push(format!("{export}: mechanisms: {}", mechanisms.join(", ")));
    }
    lines
}

/// The requests of one frontend: numbers, bytes, errors.
fn requests(kind: FrontendKind, totals: &FrontendTotals) -> String {
    let done = totals.ops().filter(|(_, op)| op.requests > 0);
    let done: Vec<_> = done
        .map(|(name, op)| match op.bytes {
            0 => format!("{} {name}", op.requests),
            bytes => format!("{} {name} ({})", op.requests, short(bytes)),
        })
        .collect();
    let errors: Vec<_> = totals
        .errnos
        .iter()
        .map(|(errno, count)| {
            format!("{count} x {}", os_message(&io::Error::from_raw_os_error(*errno)))
        })
        .collect();
    let errors = match errors.as_slice() {
        [] => "no errors".to_owned(),
        errors => format!("errors: {}", errors.join(", ")),
    };
    format!("{}: {}; {errors}", kind.name(), done.join(", "))
}

/// How much buffer memory rings may register here.
pub fn registrable() -> String {
    match RegisteredMemory::of_this_process().limit_bytes {
        Some(bytes) => format!("up to {}, an eighth of ulimit -l", human(bytes as u64)),
        None => "all, for no limit on locked memory applies".into(),
    }
}
