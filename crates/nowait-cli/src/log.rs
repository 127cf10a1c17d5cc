//! Messages on standard error while the server runs.
//!
//! Invariant: each message is one line that begins with `nowait:`, whatever names are in it, and
//! has no control characters; without `--verbose` only warnings and errors are printed. Where the
//! journal reads standard error, each line begins with its priority; in a log file, with the time.

use std::fmt;
use std::io::{self, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::error::plain;

/// Writes events of `tracing` to standard error from now on. To be called once.
pub fn start(verbose: bool) {
    tracing_subscriber::fmt()
        .with_max_level(if verbose { Level::DEBUG } else { Level::WARN })
        .with_writer(io::stderr)
        .with_ansi(false)
        // If standard error is closed, an error about that cannot be printed either.
        .log_internal_errors(false)
        .event_format(OneLine)
        .init();
}

/// Whether lines begin with the time.
static HAS_TIME: AtomicBool = AtomicBool::new(false);

/// From now on each line begins with the time (RFC 3339, UTC).
pub fn with_time() {
    HAS_TIME.store(true, Ordering::Relaxed);
}

/// Prints a line that is not an event of `tracing`.
pub fn write_line(level: Level, line: impl fmt::Display) {
    // Not eprintln!, which panics where standard error is closed.
    let _ = io::stderr().write_all(one_line(level, &line.to_string()).as_bytes());
}

/// The line for `message`, with a line break.
fn one_line(level: Level, message: &str) -> String {
    format!("{}{}nowait: {}\n", priority(level), time(), plain(message))
}

/// The time and a blank, where lines begin with it.
fn time() -> String {
    let mut time = String::new();
    if HAS_TIME.load(Ordering::Relaxed)
        && SystemTime.format_time(&mut Writer::new(&mut time)).is_ok()
    {
        time.push(' ');
    }
    time
}

/// The priority prefix of a line for the journal (sd-daemon(3)); empty for any other reader.
fn priority(level: Level) -> &'static str {
    static JOURNAL: OnceLock<bool> = OnceLock::new();
    if HAS_TIME.load(Ordering::Relaxed) || !JOURNAL.get_or_init(is_read_by_the_journal) {
        return "";
    }
    match level {
        Level::ERROR => "<3>",
        Level::WARN => "<4>",
        Level::INFO => "<6>",
        _ => "<7>",
    }
}

/// Whether standard error is connected to the journal: `JOURNAL_STREAM` has the stream's device and
/// inode (systemd.exec(5)).
fn is_read_by_the_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    rustix::fs::fstat(io::stderr())
        .is_ok_and(|stat| stream == format!("{}:{}", stat.st_dev, stat.st_ino))
}

struct OneLine;

impl<S, N> FormatEvent<S, N> for OneLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let level = *event.metadata().level();
        let mut message = String::from(match level {
            Level::ERROR => "error: ",
            Level::WARN => "warning: ",
            _ => "",
        });
        context.format_fields(Writer::new(&mut message), event)?;
        writer.write_str(&one_line(level, &message))
    }
}
