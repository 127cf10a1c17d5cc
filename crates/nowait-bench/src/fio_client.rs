//! fio(1) with its nbd engine as the client, to check the figures of the built-in client.
//!
//! Invariant: it runs on the processor of the built-in client, keeps as many requests in flight,
//! and has ended when the measurement returns.

use std::io;
use std::time::Duration;

use serde_json::Value;

use crate::address::Address;
use crate::cancel::CancelFlag;
use crate::fio;
use crate::workload::{Direction, Workload};

const NS_PER_US: f64 = 1e3;

/// The figures that fio reports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FioResult {
    pub(crate) requests: f64,
    /// Requests per second.
    pub(crate) iops: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    /// Part of the time that it was not asleep, 0 to 1.
    pub(crate) busy: f64,
}

/// Runs `load` on `connections` connections to the `export` of `bytes` bytes at `address`.
///
/// # Errors
/// The last message of fio, that it was cancelled, or that its output could not be parsed.
pub(crate) fn run(
    address: &Address,
    export: &str,
    bytes: u64,
    load: &Workload,
    connections: usize,
    duration: Duration,
    stop: &CancelFlag,
) -> io::Result<FioResult> {
    // fio accepts the options of an engine only after the engine is named.
    let fixed = ["--name=bench", "--ioengine=nbd", "--time_based", "--norandommap", "--thread"];
    let mut arguments = Vec::from(fixed.map(str::to_owned));
    let wanted = ["--group_reporting", "--clat_percentiles=0", "--lat_percentiles=1"];
    arguments.extend(wanted.map(str::to_owned));
    arguments.push("--output-format=json".to_owned());
    let given = [
        format!("--uri={}", address.uri(export)),
        format!("--rw={}", fio::direction(load)),
        format!("--bs={}", load.block_bytes),
        format!("--iodepth={}", load.depth),
        format!("--size={bytes}"),
        format!("--numjobs={connections}"),
        format!("--runtime={}ms", duration.max(fio::RUNTIME_MIN).as_millis()),
    ];
    arguments.extend(given);
    let answer = fio::run(&arguments, stop)?;
    parse(&answer, load.direction)
        .ok_or_else(|| io::Error::other("fio: its answer holds no figures"))
}

fn parse(json: &Value, direction: Direction) -> Option<FioResult> {
    let (job, figures) = fio::figures(json, direction)?;
    let figure = |of: &Value, name: &str| of.get(name)?.as_f64();
    let percentiles = figures.get("lat_ns")?.get("percentile")?;
    let requests = figure(figures, "total_ios")?;
    (requests > 0.0).then_some(FioResult {
        requests,
        iops: figure(figures, "iops")?,
        p50_us: figure(percentiles, "50.000000")? / NS_PER_US,
        p99_us: figure(percentiles, "99.000000")? / NS_PER_US,
        busy: (figure(job, "usr_cpu")? + figure(job, "sys_cpu")?) / 100.0,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_figures_are_those_of_the_direction_asked_for() {
        let percentile = json!({ "50.000000": 1000, "99.000000": 3000 });
        let json = json!({ "jobs": [{
            "usr_cpu": 20.0, "sys_cpu": 30.0,
            "read": { "iops": 0.0, "total_ios": 0, "lat_ns": { "percentile": {} } },
            "write": { "iops": 256.0, "total_ios": 512, "lat_ns": { "percentile": percentile } },
        }] });
        assert_eq!(parse(&json, Direction::Read), None);
        let expected =
            FioResult { requests: 512.0, iops: 256.0, p50_us: 1.0, p99_us: 3.0, busy: 0.5 };
        assert_eq!(parse(&json, Direction::Write), Some(expected));
    }
}
