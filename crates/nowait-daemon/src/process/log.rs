//! Messages while the server runs: on standard error, in a log file, or in the journal.
//!
//! Invariant: each message is one line that begins with `nowait:`, whatever names are in it, and has no control characters
//! and no secret of a URL; without `--verbose`, and of libraries, only warnings and errors are printed. In a log file each line begins with the
//! time. Where the journal reads standard error, it gets each message with its priority and its fields; if it cannot be
//! reached, as a line that begins with the priority.

use std::fmt;
use std::io::{self, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

use crate::error::{plain, without_secrets};
use crate::process::journal::{self, Journal};

/// Prints events of `tracing` from now on. To be called once.
pub fn start(verbose: bool) {
    let level = if verbose { LevelFilter::DEBUG } else { LevelFilter::WARN };
    // It fails only if it was called before.
    let _ = tracing::subscriber::set_global_default(
        tracing_subscriber::registry().with(level).with(Messages),
    );
}

/// Whether messages go to a log file.
static IN_LOG_FILE: AtomicBool = AtomicBool::new(false);

/// From now on standard error is a log file: each line begins with the time (RFC 3339, UTC).
pub fn in_log_file() {
    IN_LOG_FILE.store(true, Ordering::Relaxed);
}

/// Prints a line that is not an event of `tracing`.
pub fn write_line(level: Level, line: impl fmt::Display) {
    print(level, &line.to_string(), &[]);
}

fn print(level: Level, message: &str, fields: &[(&str, String)]) {
    let message = &without_secrets(message);
    let destination = match IN_LOG_FILE.load(Ordering::Relaxed) {
        true => &Destination::Lines,
        false => Destination::of_standard_error(),
    };
    let prefix = match destination {
        Destination::Journal(journal) if journal.send(level, message, fields).is_ok() => return,
        Destination::Journal(_) | Destination::PrefixedLines => {
            format!("<{}>", journal::priority(level))
        }
        Destination::Lines => time(),
    };
    let line = format!("{prefix}nowait: {}\n", plain(message));
    // Not eprintln!, which panics where standard error is closed.
    let _ = io::stderr().write_all(line.as_bytes());
}

/// The time and a blank, in a log file.
fn time() -> String {
    let mut time = String::new();
    if IN_LOG_FILE.load(Ordering::Relaxed)
        && SystemTime.format_time(&mut Writer::new(&mut time)).is_ok()
    {
        time.push(' ');
    }
    time
}

/// The reader of standard error.
enum Destination {
    Journal(Journal),
    /// The journal, which takes lines only: each with its priority (sd-daemon(3)).
    PrefixedLines,
    /// Any other.
    Lines,
}

impl Destination {
    fn of_standard_error() -> &'static Self {
        static FOUND: OnceLock<Destination> = OnceLock::new();
        FOUND.get_or_init(|| match is_read_by_the_journal() {
            true => Journal::connect(journal::SOCKET).map_or(Self::PrefixedLines, Self::Journal),
            false => Self::Lines,
        })
    }
}

/// Connects to the journal, if standard error is read by it: a confined process cannot any more.
pub fn connect() {
    Destination::of_standard_error();
}

/// Whether standard error is connected to the journal: `JOURNAL_STREAM` has the stream's device and
/// inode (systemd.exec(5)).
fn is_read_by_the_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    rustix::fs::fstat(io::stderr())
        .is_ok_and(|stat| stream == format!("{}:{}", stat.st_dev, stat.st_ino))
}

/// Prints each event.
struct Messages;

impl<S: Subscriber> Layer<S> for Messages {
    /// Of libraries only warnings and errors: that of HTTP has several lines for each request.
    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        *metadata.level() <= Level::WARN || metadata.target().starts_with("nowait")
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let level = *event.metadata().level();
        let mut parts = Parts::default();
        event.record(&mut parts);
        // The messages of this project have in words what is in their fields.
        if !event.metadata().target().starts_with("nowait") {
            for (name, value) in &parts.fields {
                parts.message.push_str(&format!(" {name}={value}"));
            }
        }
        let mark = match level {
            Level::ERROR => "error: ",
            Level::WARN => "warning: ",
            _ => "",
        };
        print(level, &format!("{mark}{}", parts.message), &parts.fields);
    }
}

/// The parts of an event.
#[derive(Default)]
struct Parts {
    message: String,
    fields: Vec<(&'static str, String)>,
}

impl Parts {
    fn add(&mut self, field: &Field, value: String) {
        match field.name() {
            "message" => self.message = value,
            name => self.fields.push((name, without_secrets(&value))),
        }
    }
}

impl Visit for Parts {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, format!("{value:?}"));
    }
}
