//! The mechanisms of the engine, each switched on against off: the selection, the options and the
//! run.
//!
//! Invariant: a file of the user is only written to with permission.
#![deny(unsafe_code)]

mod gain_table;
mod closed_loop;
mod fixture;
mod async_loop;
mod blocking_calls;
mod bare_ring;
mod loop_device;
mod measured_device;
mod tables;
mod text;
mod devices;

pub(crate) use devices::run_devices;

use std::io::Write;

use serde_json::{Value, json};

use crate::bench::Bench;
use crate::error::Error;
use crate::machine::Machine;
use crate::report::{Report, Reporter};
use crate::test_file::Target;
use fixture::Fixture;
use gain_table::{Row, Table, Variant};

const CPU_NOTE: &str = "CPU ns: processor time for a request, of all threads of the process that makes it; \
    that of kernel threads is not in it";

/// Measures the engine. A variant that cannot be measured is named in its table with the reason. That is a failure unless
/// the machine lacks what it takes: a device with poll queues, the right to set up a loop device.
pub(crate) fn run(bench: &Bench, out: &mut dyn Write) -> Result<Report, Error> {
    let args = &bench.args;
    let reporter = Reporter::begin(bench, out);
    let target = Target::open(args.file.as_deref(), args.overwrite, false)?;
    let fixture = Fixture::set(&target, bench)?;
    let mut tables = tables::all(&fixture, args.what);
    keep_rows(&mut tables, args.only.as_deref())?;
    let machine = Machine::this()?;
    let cache = "no direct I/O on this file system: the figures are the page cache's\n";
    let lines = target.lines(fixture.bytes) + if fixture.direct { "" } else { cache };
    let heading = heading(&machine, &lines, bench);
    let mut head = json!({
        "machine": machine.to_json(),
        "file": target.to_json(fixture.bytes),
        "seconds": args.duration().as_secs_f64(),
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
fn heading(machine: &Machine, lines: &str, bench: &Bench) -> String {
    let (machine, rounds) = (machine.line(), bench.rounds(" variant"));
    format!("{machine}\n{lines}{rounds}; medians\n{CPU_NOTE}\n")
}

/// Measures `tables` and reports them below `heading`; `head` is the JSON object without tables.
fn report(
    tables: Vec<Table<'_>>,
    heading: String,
    head: Value,
    mut reporter: Reporter<'_>,
) -> Result<Report, Error> {
    let rows = tables.iter().flat_map(|table| &table.rows);
    reporter.heading(&heading, rows.map(|row| row.cells.len()).sum())?;
    for mut table in tables {
        if !measure(&mut table, &mut reporter) {
            break;
        }
        for (row, cell, problem) in table.problems() {
            if cell.is_lacking {
                continue;
            }
            reporter.failure(format!("{}, {row}: {}: {problem}", table.title, cell.key.name));
        }
        reporter.table(&text::text(&table), table.to_json())?;
    }
    reporter.end(head, "tables")
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
        let bench = Bench::of("pool --only none");
        let error = run(&bench, &mut Vec::new()).err().map(|error| error.to_string());
        assert!(error.is_some_and(|text| text.starts_with("--only none: ")));
    }
}
