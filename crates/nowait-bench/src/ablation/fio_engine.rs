//! fio(1) as a client of the file, where it is installed.
//!
//! Invariant: it gets the same region, length, direction and depth as the others, creates no file,
//! and has ended when the measurement returns.

use std::io;

use crate::ablation::fixture::Fixture;
use crate::ablation::gain_table::Sample;
use crate::fio;
use crate::workload::{Direction, Workload};

/// The most requests that are submitted and reaped together, as an efficient caller would do.
const BATCH_MAX: usize = 16;
const NS_PER_SECOND: f64 = 1e9;

/// One of fio's engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FioEngine {
    pub(crate) name: &'static str,
    /// Whether it has one request in flight for each job.
    is_synchronous: bool,
    options: &'static [&'static str],
}

pub(crate) const FIO_ENGINES: [FioEngine; 3] = [
    FioEngine {
        name: "io_uring",
        is_synchronous: false,
        options: &["--fixedbufs=1", "--registerfiles=1"],
    },
    FioEngine { name: "libaio", is_synchronous: false, options: &[] },
    FioEngine { name: "psync", is_synchronous: true, options: &[] },
];

/// Measures `load` on the file of the fixture.
///
/// # Errors
/// The error that fio printed, or that its output could not be parsed.
pub(crate) fn run(engine: FioEngine, load: &Workload, fixture: &Fixture<'_>) -> io::Result<Sample> {
    // A colon separates files, and is escaped by a backslash (fio(1), filename).
    let path = fixture.path.to_string_lossy().replace('\\', "\\\\").replace(':', "\\:");
    let mut arguments = vec![
        format!("--ioengine={}", engine.name),
        format!("--filename={path}"),
        format!("--size={}", fixture.bytes),
        format!("--ramp_time={}ms", fio::runtime(fixture.duration).as_millis() / 5),
        format!("--direct={}", u8::from(fixture.direct)),
        "--allow_file_create=0".to_owned(),
        // Each write has these bytes, as in the other clients.
        "--scramble_buffers=0".to_owned(),
    ];
    let (depth, batch) = (load.depth, load.depth.min(BATCH_MAX));
    let jobs = if engine.is_synchronous { depth } else { 1 };
    if engine.is_synchronous {
        arguments.extend(["--iodepth=1".to_owned(), format!("--numjobs={jobs}")]);
    } else {
        arguments.extend([
            format!("--iodepth={depth}"),
            format!("--iodepth_batch_submit={batch}"),
            "--iodepth_batch_complete_min=1".to_owned(),
            format!("--iodepth_batch_complete_max={batch}"),
        ]);
    }
    arguments.extend(engine.options.iter().map(|&option| option.to_owned()));
    if load.direction == Direction::Read {
        arguments.push("--readonly".to_owned());
    }
    let figures = fio::run(&arguments, load, fixture.duration, fixture.stop)?;
    Ok(Sample {
        per_second: figures.iops,
        mib_per_second: figures.mib_per_second,
        cpu_ns: figures.busy * jobs as f64 * NS_PER_SECOND / figures.iops,
        latency: figures.latency_us,
    })
}
