//! fio(1): starts it with a load, waits for it, and parses its output.
//!
//! Invariant: the process has ended when [`run`] returns, and it creates no file in its working
//! directory.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::cancel::CancelFlag;
use crate::other_programs;
use crate::workload::{Direction, Order, Workload};

const POLL_INTERVAL: Duration = Duration::from_millis(5);
const NS_PER_US: f64 = 1e3;
const KIB_PER_MIB: f64 = 1024.0;

/// The figures that fio reports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FioResult {
    pub(crate) requests: f64,
    /// Requests per second.
    pub(crate) iops: f64,
    pub(crate) mib_per_second: f64,
    /// 50 %, 10 %, 1 % and 0.1 % of the requests took longer; `None` where fio reports none.
    pub(crate) latency_us: Option<[f64; 4]>,
    /// Part of the time that a job was not asleep, 0 to 1; the mean over the jobs.
    pub(crate) busy: f64,
}

/// Its version line; `None` if it is not installed.
pub(crate) fn version() -> Option<String> {
    other_programs::version(Path::new("fio")).ok()
}

/// How long it runs: in a shorter time than this it may complete no request.
pub(crate) fn runtime(duration: Duration) -> Duration {
    duration.max(Duration::from_millis(200))
}

/// Runs `load` with `arguments`, which begin with the engine and name the target and the depth.
///
/// # Errors
/// The last line of its stderr, that it was cancelled, or that its output could not be parsed.
pub(crate) fn run(
    arguments: &[String],
    load: &Workload,
    duration: Duration,
    stop: &CancelFlag,
) -> io::Result<FioResult> {
    let direction = match (load.order, load.direction) {
        (Order::Random, Direction::Read) => "randread",
        (Order::Random, Direction::Write) => "randwrite",
        (Order::Sequential, Direction::Read) => "read",
        (Order::Sequential, Direction::Write) => "write",
    };
    let mut answer = tempfile::tempfile()?;
    let mut complaint = tempfile::tempfile()?;
    let mut child = Command::new("fio")
        // fio accepts the options of an engine only after the engine is named.
        .arg("--name=bench")
        .args(arguments)
        .args([format!("--rw={direction}"), format!("--bs={}", load.block_bytes)])
        .arg(format!("--runtime={}ms", runtime(duration).as_millis()))
        .args(["--time_based", "--norandommap", "--thread", "--group_reporting"])
        // Latencies start with the submission, as in the other clients.
        .args(["--clat_percentiles=0", "--lat_percentiles=1", "--output-format=json"])
        .current_dir(std::env::temp_dir())
        .stdin(Stdio::null())
        .stdout(answer.try_clone()?)
        .stderr(complaint.try_clone()?)
        .spawn()
        .map_err(|error| match error.kind() {
            ErrorKind::NotFound => io::Error::new(ErrorKind::Unsupported, "fio is not installed"),
            _ => error,
        })?;
    if !wait(&mut child, stop)? {
        let complaint = text(&mut complaint)?;
        let last = other_programs::last_line(&complaint).unwrap_or("failed without a word");
        return Err(io::Error::other(format!("fio: {last}")));
    }
    // Some of its engines print messages before the JSON.
    let answer = text(&mut answer)?;
    let object = answer.find('{').and_then(|at| answer.get(at..)).unwrap_or_default();
    let object = serde_json::from_str(object).map_err(io::Error::other)?;
    let figures = parse(&object, load.direction);
    figures.ok_or_else(|| io::Error::other("fio: its answer holds no figures"))
}

/// The figures of one direction.
fn parse(answer: &Value, direction: Direction) -> Option<FioResult> {
    let job = answer.get("jobs")?.get(0)?;
    let figures = job.get(direction.name())?;
    let figure = |of: &Value, name: &str| of.get(name)?.as_f64();
    let percentiles = figures.get("lat_ns")?.get("percentile");
    let us = |name| Some(figure(percentiles?, name)? / NS_PER_US);
    let latency = || Some([us("50.000000")?, us("90.000000")?, us("99.000000")?, us("99.900000")?]);
    let iops = figure(figures, "iops")?;
    (iops > 0.0).then_some(FioResult {
        requests: figure(figures, "total_ios")?,
        iops,
        mib_per_second: figure(figures, "bw")? / KIB_PER_MIB,
        latency_us: latency(),
        busy: (figure(job, "usr_cpu")? + figure(job, "sys_cpu")?) / 100.0,
    })
}

/// Waits until fio ends, or kills it if the measurement is cancelled. True if fio succeeded.
fn wait(child: &mut Child, stop: &CancelFlag) -> io::Result<bool> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status.success());
        }
        if stop.requested() {
            child.kill()?;
            child.wait()?;
            return Ok(false);
        }
        thread::sleep(POLL_INTERVAL);
    }
}

fn text(file: &mut File) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0))?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_figures_are_those_of_the_direction_asked_for() {
        let percentile = json!({
            "50.000000": 1000, "90.000000": 2000, "99.000000": 3000, "99.900000": 4000,
        });
        let write = json!({
            "iops": 256.0, "bw": 1024, "total_ios": 512, "lat_ns": { "percentile": percentile },
        });
        let read = json!({ "iops": 0.0, "bw": 0, "total_ios": 0, "lat_ns": { "percentile": {} } });
        let job = json!({ "usr_cpu": 20.0, "sys_cpu": 30.0, "read": read, "write": write });
        let json = json!({ "jobs": [job] });
        assert_eq!(parse(&json, Direction::Read), None);
        let expected = FioResult {
            requests: 512.0,
            iops: 256.0,
            mib_per_second: 1.0,
            latency_us: Some([1.0, 2.0, 3.0, 4.0]),
            busy: 0.5,
        };
        assert_eq!(parse(&json, Direction::Write), Some(expected));
    }
}
