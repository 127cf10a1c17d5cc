//! The mechanisms of the engine, each switched on against off: the selection, the options and the
//! run.
//!
//! Invariant: a file of the user is only written to with permission.
#![deny(unsafe_code)]

mod gain_table;
mod closed_loop;
mod delayed;
mod fixture;
mod async_loop;
mod blocking_calls;
mod vectored_io;
mod bare_ring;
mod fio_engine;
mod loop_device;
mod claimed_device;
mod remote_device;
mod measured_device;
mod tables;
mod text;
mod chart;
mod html;
mod devices;

pub use devices::{DevicesOptions, run_devices};

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};

use crate::error::Error;
use crate::report::{Machine, Report, Reporter, RunOptions};
use crate::test_file::Target;
use fixture::Fixture;
use gain_table::{Row, Table, Variant};

const CPU_NOTE: &str = "CPU ns: processor time for a request, of all threads of the process that makes it; \
    that of kernel threads is not in it";
const LATENCY_MAX: Duration = Duration::from_secs(1);

/// Which tables are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableSelection {
    /// The simple path off and on.
    Simple,
    /// Deferred against inline completion.
    Completion,
    /// The segments of a request one after the other against all of them in one transfer.
    Vectored,
    /// Request slots from the allocator against slots from the pool.
    Pool,
    /// Requests that touch one by one against all of a burst in one transfer.
    Merge,
    /// Always a worker against a non-blocking attempt first; the engine beside the kernel's loop
    /// device.
    Nowait,
    /// A sync for each durable write against one for all that are in flight.
    Durable,
    /// A durable write for each record against the records of a log.
    Log,
    /// The engine on both of its queues and its other interfaces, a bare ring, plain system calls
    /// and fio.
    Engines,
    /// All tables.
    All,
}

impl TableSelection {
    /// Every single table, without `All`.
    pub const EACH: [TableSelection; 9] = [
        TableSelection::Simple,
        TableSelection::Completion,
        TableSelection::Vectored,
        TableSelection::Pool,
        TableSelection::Merge,
        TableSelection::Nowait,
        TableSelection::Durable,
        TableSelection::Log,
        TableSelection::Engines,
    ];

    /// Its name on the command line and in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            TableSelection::Simple => "simple",
            TableSelection::Completion => "completion",
            TableSelection::Vectored => "vectored",
            TableSelection::Pool => "pool",
            TableSelection::Merge => "merge",
            TableSelection::Nowait => "nowait",
            TableSelection::Durable => "durable",
            TableSelection::Log => "log",
            TableSelection::Engines => "engines",
            TableSelection::All => "all",
        }
    }
}

/// The options of a measurement of the engine. The default is all tables, on a temporary file.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// The options of every measurement.
    pub run: RunOptions,
    /// The tables to measure.
    pub what: TableSelection,
    /// The file or block device to measure on, at least 64 MiB, of which the first GiB is used;
    /// `None` creates a file of 256 MiB in `$TMPDIR`, or in /var/tmp, and removes it afterwards.
    pub file: Option<PathBuf>,
    /// Latencies of the simulated queue in the table `vectored`, each above 0 and at most 1 s.
    pub latency: Vec<Duration>,
    /// Only rows whose title contains this.
    pub only: Option<String>,
}

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        let latency = vec![Duration::from_micros(100), Duration::from_millis(4)];
        let (run, what) = (RunOptions::default(), TableSelection::All);
        EngineOptions { run, what, file: None, latency, only: None }
    }
}

/// Measures, writes the result to `out` and returns it.
///
/// A variant that cannot be measured is named in its table with the reason. That is a failure unless
/// the machine lacks what it takes: fio, a device with poll queues, the right to set up a loop device.
///
/// # Errors
/// [`Error::Option`], [`Error::File`] and [`Error::NoRow`] before anything is measured,
/// [`Error::System`] if `out` or the page cannot be written.
pub fn run_engine(options: &EngineOptions, out: &mut dyn Write) -> Result<Report, Error> {
    let good = options.latency.iter().all(|it| !it.is_zero() && *it <= LATENCY_MAX);
    Error::unless(good, "latency", "has to be more than 0 and at most 1 second")?;
    let run = &options.run;
    let reporter = Reporter::begin(run, out)?;
    let target = Target::open(options.file.as_deref(), run.overwrite, false)?;
    let fixture = Fixture::set(&target, options)?;
    let mut tables = tables::all(&fixture, options.what);
    keep_rows(&mut tables, options.only.as_deref())?;
    let machine = Machine::this()?;
    let cache = "no direct I/O on this file system: the figures are the page cache's\n";
    let lines = target.lines(fixture.bytes) + if fixture.direct { "" } else { cache };
    let heading = heading(&machine, &lines, run);
    let mut head = json!({
        "machine": machine.to_json(),
        "file": target.to_json(fixture.bytes),
        "seconds": run.duration.as_secs_f64(),
    });
    head["file"]["direct"] = fixture.direct.into();
    report(tables, heading, head, reporter)
}

/// Keeps the rows whose title contains `only`.
///
/// # Errors
/// [`Error::NoRow`]: there is none.
fn keep_rows(tables: &mut Vec<Table<'_>>, only: Option<&str>) -> Result<(), Error> {
    let Some(text) = only else { return Ok(()) };
    tables.iter_mut().for_each(|table| table.rows.retain(|row| row.title.contains(text)));
    tables.retain(|table| !table.rows.is_empty());
    match tables.is_empty() {
        true => Err(Error::NoRow { only: text.to_owned() }),
        false => Ok(()),
    }
}

/// The lines before the first table; `lines` are those about what is measured on.
fn heading(machine: &Machine, lines: &str, run: &RunOptions) -> String {
    format!(
        "Linux {}, {}\n{lines}{} rounds of {} s for each variant, in turns; medians\n{CPU_NOTE}\n",
        machine.kernel,
        machine.processor,
        run.rounds,
        run.duration.as_secs_f64(),
    )
}

/// Measures `tables` and reports them below `heading`; `head` is the JSON object without tables.
fn report(
    tables: Vec<Table<'_>>,
    heading: String,
    head: Value,
    mut reporter: Reporter<'_>,
) -> Result<Report, Error> {
    let rows = tables.iter().flat_map(|table| &table.rows);
    reporter.heading(heading, rows.map(|row| row.cells.len()).sum())?;
    let mut glance = "<nav class=glance>\n".to_owned();
    for (n, mut table) in tables.into_iter().enumerate() {
        if !measure(&mut table, &mut reporter) {
            break;
        }
        for (row, cell, problem) in table.problems() {
            if cell.is_lacking {
                continue;
            }
            reporter.failure(format!("{}, {row}: {}: {problem}", table.title, cell.key.name));
        }
        glance += &html::card(&table, n);
        reporter.table(&text::text(&table), table.to_json(), &html::section(&table, n))?;
    }
    reporter.end(("nowait bench", &(glance + "</nav>\n")), "", head, "tables")
}

/// False if cancelled.
fn measure(table: &mut Table<'_>, reporter: &mut Reporter<'_>) -> bool {
    let title = &table.title;
    table.rows.iter_mut().all(|Row { title: row, cells, .. }| {
        let name = |variant: &Variant<'_>| format!("{title}, {row}: {}", variant.name);
        reporter.measure(cells, name, |variant| (variant.measure)())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_no_row_has_is_rejected() {
        let only = Some("no such row".to_owned());
        let options =
            EngineOptions { only, what: TableSelection::Pool, ..EngineOptions::default() };
        let error = run_engine(&options, &mut Vec::new()).err().map(|error| error.to_string());
        assert!(error.is_some_and(|text| text.starts_with("--only no such row: ")));
    }

    #[test]
    fn a_latency_out_of_range_is_rejected_by_name() {
        let options = EngineOptions { latency: vec![Duration::ZERO], ..EngineOptions::default() };
        let error = run_engine(&options, &mut Vec::new()).err().map(|error| error.to_string());
        assert!(error.is_some_and(|text| text.starts_with("latency: has to be")));
    }
}
