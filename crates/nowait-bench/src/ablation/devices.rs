//! Local block devices, and images behind a network, side by side, as fio measures them: reads and
//! writes by several jobs.
//!
//! Invariant: nothing is written to a device without permission. All devices of a table get the same
//! load at the same positions, in turns.

use std::io::{self, Write};
use std::time::Duration;

use serde_json::json;

use crate::ablation::blocking_calls::Jobs;
use crate::ablation::closed_loop::StopCondition;
use crate::ablation::fixture::BYTES_MAX;
use crate::ablation::gain_table::{Metric, Row, Sample, Table, Unit, cell};
use crate::ablation::measured_device::MeasuredDevice;
use crate::ablation::{heading, keep_rows, report};
use crate::args::What;
use crate::bench::Bench;
use crate::error::Error;
use crate::machine::Machine;
use crate::offsets::Region;
use crate::report::{Report, Reporter};
use crate::workload::{Direction, Order, Workload};

/// Long enough to fill the part of a device that is used.
const FILL_TIME: Duration = Duration::from_secs(3600);
const NOTE: &str = "A job is a thread with an engine and a part of the device of its own; direct I/O. The processor time \
    of what serves the device is not in CPU ns";
const NOTE_FILLED: &str = "Every block was written before. ";
const NOTE_DISCARDED: &str = "The storage of the device is given back before each turn, and each block is \
    written at most once. ";

/// A row: its load, and the part of the devices that is used.
#[derive(Clone, Copy)]
struct Case {
    load: Workload,
    jobs: u16,
    bytes: u64,
    discards: bool,
}

/// Measures the devices side by side, the first GiB of each.
pub(crate) fn run_devices(bench: &Bench, out: &mut dyn Write) -> Result<Report, Error> {
    let args = &bench.args;
    let reporter = Reporter::begin(bench, out);
    let opened = args.device.iter().map(|location| MeasuredDevice::open(location, args.overwrite));
    let devices = opened.collect::<Result<Vec<_>, _>>()?;
    let bytes = devices.iter().map(|it| it.bytes).min().unwrap_or(0).min(BYTES_MAX);
    let mut tables = tables(bench, &devices, bytes);
    keep_rows(&mut tables, args.only.as_deref())?;
    let names: Vec<_> = devices.iter().map(|it| it.name.as_str()).collect();
    let mib = bytes >> 20;
    let all = names.join(", ");
    let lines = match args.overwrite {
        true => format!("OVERWRITTEN: what was in the first {mib} MiB of {all} is lost\n"),
        false => format!("{all}: the first {mib} MiB, only reads (--overwrite allows writes)\n"),
    };
    if args.overwrite && args.json {
        eprint!("{lines}");
    }
    if args.overwrite {
        let stop_condition = StopCondition { duration: FILL_TIME, stop: &bench.stop, timed: false };
        for device in &devices {
            let filled = device.fill(bytes, stop_condition);
            filled.map_err(|error| Error::File {
                path: device.name.clone().into(),
                problem: format!("cannot be filled: {error}"),
            })?;
        }
    }
    let machine = Machine::this()?;
    let head = json!({
        "machine": machine.to_json(),
        "devices": names,
        "bytes": bytes,
        "written": args.overwrite,
        "seconds": args.duration().as_secs_f64(),
    });
    report(tables, heading(&machine, &lines, bench), head, reporter)
}

/// The table of what is on the devices, and that of devices without storage.
fn tables<'a>(bench: &'a Bench, devices: &'a [MeasuredDevice], bytes: u64) -> Vec<Table<'a>> {
    let overwrite = bench.args.overwrite;
    let directions: &[Direction] =
        if overwrite { &[Direction::Read, Direction::Write] } else { &[Direction::Read] };
    let rows = |discards| {
        let mut rows = Vec::new();
        for &block in &bench.args.block_size {
            for &direction in directions {
                for order in [Order::Sequential, Order::Random] {
                    let (block_bytes, depth) = (block as usize, bench.args.depth.into());
                    let (durable, beside) = (false, None);
                    let load = Workload { direction, order, block_bytes, depth, durable, beside };
                    let case = Case { load, jobs: bench.args.jobs, bytes, discards };
                    rows.push(case.row(bench, devices));
                }
            }
        }
        rows
    };
    let table = |title: &str, note: String, discards| Table {
        what: What::Nowait,
        title: title.to_owned(),
        unit: Unit::Iops,
        gain: Metric::FirstOver,
        note,
        rows: rows(discards),
    };
    let filled = if overwrite { NOTE_FILLED } else { "" };
    let mut tables = vec![table("block devices", format!("{filled}{NOTE}"), false)];
    if bench.args.discard {
        let note = format!("{NOTE_DISCARDED}{NOTE}");
        tables.push(table("block devices without storage", note, true));
    }
    tables
}

impl Case {
    fn row<'a>(self, bench: &'a Bench, devices: &'a [MeasuredDevice]) -> Row<'a> {
        let Workload { direction, order, block_bytes, depth, .. } = self.load;
        let (order, direction) = (order.name(), direction.name());
        let (kib, jobs) = (block_bytes >> 10, self.jobs);
        let plural = if jobs == 1 { "" } else { "s" };
        let title = format!("{kib}K {order} {direction}, {jobs} job{plural}, depth {depth}");
        let cells =
            devices.iter().map(|device| cell(&device.name, move || self.measure(device, bench)));
        Row { title, source: None, cells: cells.collect() }
    }

    /// Measures the load of each job on its part of the device, after all that was written before is
    /// on storage; on a device without storage at most until each block was written once.
    fn measure(self, device: &MeasuredDevice, bench: &Bench) -> io::Result<Sample> {
        if bench.args.overwrite {
            device.sync()?;
        }
        if self.discards {
            device.discard(self.bytes)?;
        }
        let block = self.load.block_bytes as u64;
        let all = Region { start: 0, bytes: self.bytes, block };
        let once = self.discards && self.load.writes();
        let jobs = Jobs { count: self.jobs.into(), order: self.load.order, all, once };
        let (duration, stop) = (bench.args.duration(), &bench.stop);
        jobs.run(StopCondition { duration, stop, timed: true }, || device.job(&self.load))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_refused_by_name() {
        let refused = run_devices(&Bench::of("nowait --device /dev/null"), &mut Vec::new()).err();
        let refused = refused.map(|error| error.to_string()).unwrap_or_default();
        assert_eq!(refused, "/dev/null: no block device (--file measures on a file)");
    }
}
