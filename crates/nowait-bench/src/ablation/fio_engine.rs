//! fio(1) as a client of the file, where it is installed.
//!
//! Invariant: it gets the same region, length, direction and depth as the others, creates no file,
//! and has ended when the measurement returns.

use std::io;

use serde_json::Value;

use crate::ablation::fixture::Fixture;
use crate::ablation::result_table::{Latency, Sample};
use crate::fio;
use crate::workload::{Direction, Workload};

const NS_PER_US: f64 = 1e3;
const KIB_PER_MIB: f64 = 1024.0;
/// The most requests that are submitted and reaped at once, as an efficient caller would do.
const BATCH_MAX: usize = 16;

/// One of fio's engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FioEngine {
    IoUring,
    Libaio,
    Psync,
}

impl FioEngine {
    pub(crate) const ALL: [FioEngine; 3] =
        [FioEngine::IoUring, FioEngine::Libaio, FioEngine::Psync];

    pub(crate) fn name(self) -> &'static str {
        match self {
            FioEngine::IoUring => "io_uring",
            FioEngine::Libaio => "libaio",
            FioEngine::Psync => "psync",
        }
    }

    /// The arguments for `depth` requests in flight; a synchronous engine has one for each job.
    fn arguments(self, depth: usize) -> Vec<String> {
        if self == FioEngine::Psync {
            return vec!["--iodepth=1".to_owned(), format!("--numjobs={depth}")];
        }
        let batch = depth.min(BATCH_MAX);
        let mut arguments = vec![
            format!("--iodepth={depth}"),
            format!("--iodepth_batch_submit={batch}"),
            "--iodepth_batch_complete_min=1".to_owned(),
            format!("--iodepth_batch_complete_max={batch}"),
        ];
        if self == FioEngine::IoUring {
            arguments.extend(["--fixedbufs=1", "--registerfiles=1"].map(str::to_owned));
        }
        arguments
    }
}

/// Measures `load` on the file of the fixture.
///
/// # Errors
/// The error that fio printed, or that its output could not be parsed.
pub(crate) fn run(engine: FioEngine, load: &Workload, fixture: &Fixture<'_>) -> io::Result<Sample> {
    let answer = fio::run(&arguments(engine, load, fixture), fixture.stop)?;
    sample(&answer, load.direction)
        .ok_or_else(|| io::Error::other("fio: its answer holds no figures"))
}

fn arguments(engine: FioEngine, load: &Workload, fixture: &Fixture<'_>) -> Vec<String> {
    // A colon separates files, and is escaped by a backslash (fio(1), filename).
    let path = fixture.path.to_string_lossy().replace('\\', "\\\\").replace(':', "\\:");
    // In a shorter time it may complete no request after its warm-up.
    let runtime = fixture.duration.max(fio::RUNTIME_MIN).as_millis();
    let mut arguments = vec![
        "--name=bench".to_owned(),
        format!("--filename={path}"),
        format!("--ioengine={}", engine.name()),
        format!("--rw={}", fio::direction(load)),
        format!("--bs={}", load.block_bytes),
        format!("--size={}", fixture.bytes),
        format!("--runtime={runtime}ms"),
        format!("--ramp_time={}ms", runtime / 5),
        format!("--direct={}", u8::from(fixture.direct)),
    ];
    let fixed = [
        "--time_based",
        "--norandommap",
        "--allow_file_create=0",
        // As in the other clients: the same bytes in each write, and latencies that start with the
        // submission.
        "--scramble_buffers=0",
        "--clat_percentiles=0",
        "--lat_percentiles=1",
        "--thread",
        "--group_reporting",
        "--output-format=json",
    ];
    arguments.extend(fixed.map(str::to_owned));
    arguments.extend(engine.arguments(load.depth));
    if load.direction == Direction::Read {
        arguments.push("--readonly".to_owned());
    }
    arguments
}

fn sample(json: &Value, direction: Direction) -> Option<Sample> {
    let (_, figures) = fio::figures(json, direction)?;
    let percentiles = figures.get("lat_ns")?.get("percentile");
    let us = |name: &str| Some(percentiles?.get(name)?.as_f64()? / NS_PER_US);
    let latency = || {
        Some(Latency {
            p50_us: us("50.000000")?,
            p90_us: us("90.000000")?,
            p99_us: us("99.000000")?,
            p999_us: us("99.900000")?,
        })
    };
    let per_second = figures.get("iops")?.as_f64()?;
    let mib_per_second = figures.get("bw")?.as_f64()? / KIB_PER_MIB;
    (per_second > 0.0).then(|| Sample { per_second, mib_per_second, latency: latency() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_figures_are_those_of_the_direction_asked_for() {
        let percentile = json!({
            "50.000000": 1000, "90.000000": 2000, "99.000000": 3000, "99.900000": 4000,
        });
        let json = json!({ "jobs": [{
            "read": { "iops": 0.0, "bw": 0, "lat_ns": {} },
            "write": { "iops": 256.0, "bw": 1024, "lat_ns": { "percentile": percentile } },
        }] });
        assert_eq!(sample(&json, Direction::Read), None);
        let latency = Some(Latency { p50_us: 1.0, p90_us: 2.0, p99_us: 3.0, p999_us: 4.0 });
        let expected = Sample { per_second: 256.0, mib_per_second: 1.0, latency };
        assert_eq!(sample(&json, Direction::Write), Some(expected));
    }
}
