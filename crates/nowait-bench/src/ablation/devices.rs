//! Local block devices, and images behind a network, side by side, as fio measures them: reads and
//! writes by several jobs.
//!
//! Invariant: nothing is written to a device without permission. All devices of a table get the same
//! load at the same positions, in turns.

use std::io::{self, Write};
use std::time::Duration;

use nowait_remote::Location;
use serde_json::json;

use crate::ablation::blocking_calls::in_threads;
use crate::ablation::closed_loop::StopCondition;
use crate::ablation::fixture::BYTES_MAX;
use crate::ablation::gain_table::{Metric, Row, Sample, Table, Unit, cell};
use crate::ablation::measured_device::MeasuredDevice;
use crate::ablation::{TableSelection, heading, keep_rows, report};
use crate::error::Error;
use crate::offsets::{Offsets, Region};
use crate::report::{Machine, Output, Report, Reporter, RunOptions};
use crate::workload::{Direction, Order, Workload};

const MEMORY_MAX: u64 = 1 << 30;
/// Long enough to fill the part of a device that is used.
const FILL_TIME: Duration = Duration::from_secs(3600);
const NOTE: &str = "A job is a thread with an io_uring of its own, registered buffers and a part of the \
    device of its own; direct I/O. An image behind a network has an engine in place of the ring. The processor time of \
    what serves the device is not in CPU ns";
const NOTE_FILLED: &str = "Every block was written before. ";
const NOTE_DISCARDED: &str = "The storage of the device is given back before each turn, and each block is \
    written at most once. ";

/// The options of a measurement of block devices.
#[derive(Clone, Debug)]
pub struct DevicesOptions {
    /// The options of every measurement; with `overwrite` the first GiB of each device is written
    /// over.
    pub run: RunOptions,
    /// Block devices and images behind a network, at least one, each of at least 64 MiB; the first is
    /// compared to the others.
    pub devices: Vec<Location>,
    /// Whether there is a table of devices whose storage was given back.
    pub discard: bool,
    /// Threads that make requests, 1 to 64.
    pub jobs: u16,
    /// Requests of each in flight, 1 to 1024.
    pub depth: u16,
    /// Bytes of a request, one row for each: multiples of 4096 up to 1 MiB.
    pub block_bytes: Vec<u64>,
    /// Only rows whose title contains this.
    pub only: Option<String>,
}

/// A row: its load, and the part of the devices that is used.
#[derive(Clone, Copy)]
struct Case {
    load: Workload,
    jobs: u16,
    bytes: u64,
    discards: bool,
}

/// Measures the devices side by side, writes the result to `out` and returns it.
///
/// # Errors
/// [`Error::Option`], [`Error::File`] and [`Error::NoRow`] before anything is measured,
/// [`Error::System`] if a device cannot be filled, or `out` or the page not written.
pub fn run_devices(options: &DevicesOptions, out: &mut dyn Write) -> Result<Report, Error> {
    let run = &options.run;
    check(options)?;
    let reporter = Reporter::begin(run, out)?;
    let open = |location: &Location| MeasuredDevice::open(location, run.overwrite);
    let devices = options.devices.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let bytes = devices.iter().map(MeasuredDevice::bytes).min().unwrap_or(0).min(BYTES_MAX);
    let mut tables = tables(options, &devices, bytes);
    keep_rows(&mut tables, options.only.as_deref())?;
    let names: Vec<_> = devices.iter().map(MeasuredDevice::name).collect();
    let mib = bytes >> 20;
    let all = names.join(", ");
    let lines = match run.overwrite {
        true => format!("OVERWRITTEN: what was in the first {mib} MiB of {all} is lost\n"),
        false => format!("{all}: the first {mib} MiB, only reads (--overwrite allows writes)\n"),
    };
    if run.overwrite && run.output == Output::Json {
        eprint!("{lines}");
    }
    if run.overwrite {
        let stop_condition = StopCondition { duration: FILL_TIME, stop: &run.stop, timed: false };
        for device in &devices {
            let filled = device.fill(bytes, stop_condition);
            filled.map_err(|error| Error::File {
                path: device.name().into(),
                problem: format!("cannot be filled: {error}"),
            })?;
        }
    }
    let machine = Machine::this()?;
    let head = json!({
        "machine": machine.to_json(),
        "devices": names,
        "bytes": bytes,
        "written": run.overwrite,
        "seconds": run.duration.as_secs_f64(),
    });
    report(tables, heading(&machine, &lines, run), head, reporter)
}

fn check(options: &DevicesOptions) -> Result<(), Error> {
    let DevicesOptions { run, devices, discard, jobs, depth, block_bytes, .. } = options;
    Error::unless(!devices.is_empty(), "device", "has to be named")?;
    Error::unless(!discard || run.overwrite, "discard", "takes --overwrite")?;
    Error::unless((1..=64).contains(jobs), "jobs", "has to be 1 to 64")?;
    Error::unless((1..=1024).contains(depth), "depth", "has to be 1 to 1024")?;
    let good = |bytes: &u64| bytes.is_multiple_of(4096) && (4096..=1 << 20).contains(bytes);
    let sizes = "has to be a multiple of 4K up to 1M";
    Error::unless(block_bytes.iter().all(good) && !block_bytes.is_empty(), "block-size", sizes)?;
    let in_flight = u64::from(*jobs) * u64::from(*depth);
    let fits = |bytes: &u64| in_flight * bytes <= MEMORY_MAX;
    let memory = "jobs times depth times block size has to be at most 1 GiB";
    Error::unless(block_bytes.iter().all(fits), "depth", memory)
}

/// The table of what is on the devices, and that of devices without storage.
fn tables<'a>(
    options: &'a DevicesOptions,
    devices: &'a [MeasuredDevice],
    bytes: u64,
) -> Vec<Table<'a>> {
    let overwrite = options.run.overwrite;
    let directions: &[Direction] =
        if overwrite { &[Direction::Read, Direction::Write] } else { &[Direction::Read] };
    let rows = |discards| {
        let mut rows = Vec::new();
        for &block in &options.block_bytes {
            for &direction in directions {
                for order in [Order::Sequential, Order::Random] {
                    let (block_bytes, depth) = (block as usize, options.depth.into());
                    let (durable, beside) = (false, None);
                    let load = Workload { direction, order, block_bytes, depth, durable, beside };
                    let case = Case { load, jobs: options.jobs, bytes, discards };
                    rows.push(case.row(options, devices));
                }
            }
        }
        rows
    };
    let table = |title: &str, note: String, discards| Table {
        what: TableSelection::Nowait,
        title: title.to_owned(),
        unit: Unit::Iops,
        gain: Metric::FirstOver,
        note,
        rows: rows(discards),
    };
    let filled = if overwrite { NOTE_FILLED } else { "" };
    let mut tables = vec![table("block devices", format!("{filled}{NOTE}"), false)];
    if options.discard {
        let note = format!("{NOTE_DISCARDED}{NOTE}");
        tables.push(table("block devices without storage", note, true));
    }
    tables
}

impl Case {
    fn row<'a>(self, options: &'a DevicesOptions, devices: &'a [MeasuredDevice]) -> Row<'a> {
        let Workload { direction, order, block_bytes, depth, .. } = self.load;
        let (order, direction) = (order.name(), direction.name());
        let (kib, jobs) = (block_bytes >> 10, self.jobs);
        let plural = if jobs == 1 { "" } else { "s" };
        let title = format!("{kib}K {order} {direction}, {jobs} job{plural}, depth {depth}");
        let cells = devices
            .iter()
            .map(|device| cell(device.name(), move || self.measure(device, &options.run)));
        Row { title, source: None, cells: cells.collect() }
    }

    /// Measures the load of each job on its part of the device, after all that was written before is
    /// on storage; on a device without storage at most until each block was written once.
    fn measure(self, device: &MeasuredDevice, run: &RunOptions) -> io::Result<Sample> {
        if run.overwrite {
            device.sync()?;
        }
        if self.discards {
            device.discard(self.bytes)?;
        }
        let block = self.load.block_bytes as u64;
        let all = Region { start: 0, bytes: self.bytes, block };
        let once = self.discards && self.load.writes();
        let stop_condition = StopCondition { duration: run.duration, stop: &run.stop, timed: true };
        let samples = in_threads(self.jobs.into(), |job, gate| {
            let region = all.part(job as u64, self.jobs.into());
            let made = device.job(&self.load);
            let mut offsets = match once {
                true => Offsets::once(self.load.order, region, region.start),
                false => Offsets::endless(self.load.order, region, 0),
            };
            gate.wait();
            let mut made = made?;
            if !once {
                made.run(&mut offsets, stop_condition.warm_up())?;
            }
            made.run(&mut offsets, stop_condition)
        });
        samples?.sample(self.load.block_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl Fn(&mut DevicesOptions)) -> String {
        let mut options = DevicesOptions {
            run: RunOptions::default(),
            devices: vec![Location::File("/dev/null".into())],
            discard: false,
            jobs: 12,
            depth: 16,
            block_bytes: vec![4096],
            only: None,
        };
        change(&mut options);
        let refused = run_devices(&options, &mut Vec::new()).err();
        refused.map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn what_is_no_block_device_is_refused_by_name() {
        let said = refused(|_| {});
        assert_eq!(said, "/dev/null: no block device (--file measures on a file)");
    }

    #[test]
    fn options_out_of_range_are_refused_before_a_device_is_opened() {
        assert!(refused(|options| options.discard = true).starts_with("discard: "));
        assert!(refused(|options| options.jobs = 0).starts_with("jobs: "));
        assert!(refused(|options| options.depth = 1025).starts_with("depth: "));
        assert!(refused(|options| options.block_bytes = vec![512]).starts_with("block-size: "));
        let large = |options: &mut DevicesOptions| {
            (options.jobs, options.depth, options.block_bytes) = (64, 1024, vec![1 << 20]);
        };
        assert!(refused(large).contains("at most 1 GiB"));
    }
}
