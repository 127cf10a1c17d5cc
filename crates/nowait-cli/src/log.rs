//! Messages on standard error while the server runs.
//!
//! Invariant: each message is one line that begins with `nowait:`; without `--verbose` only
//! warnings and errors are said.
//! Knows: nothing. Known by: main.

use std::fmt;
use std::io;

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// From now on, events of `tracing` go to standard error. To be called once.
pub(crate) fn start(verbose: bool) {
    tracing_subscriber::fmt()
        .with_max_level(if verbose { Level::DEBUG } else { Level::WARN })
        .with_writer(io::stderr)
        .with_ansi(false)
        // Who closed our standard error does not want to hear that it is closed.
        .log_internal_errors(false)
        .event_format(OneLine)
        .init();
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
        writer.write_str(match level {
            Level::ERROR => "nowait: error: ",
            Level::WARN => "nowait: warning: ",
            _ => "nowait: ",
        })?;
        context.format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}
