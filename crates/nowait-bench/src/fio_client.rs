//! fio(1) with its nbd engine as the client, to check the figures of our own one with.
//!
//! Invariant: it runs where our own client would, keeps as many requests in flight, and is gone when the turn
//! is over. Knows: address, comparison, stop, workload. Known by: turn, peers.

use std::io;
use std::io::{Read, Seek, SeekFrom};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::address::Address;
use crate::stop::Stop;
use crate::workload::{Direction, Order, Workload};

const LOOK: Duration = Duration::from_millis(5);
/// In less it may not finish anything.
const RUNTIME_MIN: Duration = Duration::from_millis(200);
const NS_PER_US: f64 = 1e3;

/// What fio tells of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Told {
    pub(crate) requests: f64,
    /// Requests per second.
    pub(crate) iops: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    /// Part of the time that it was not asleep, 0 to 1.
    pub(crate) busy: f64,
}

/// Whether it is installed.
pub(crate) fn is_there() -> bool {
    let output = Command::new("fio").arg("--version").stdin(Stdio::null()).output();
    output.is_ok_and(|output| output.status.success())
}

/// Keeps `load` up on `connections` connections to the `export` of `bytes` bytes at `address`.
///
/// # Errors
/// What it said last; that it was stopped, or that its answer could not be read.
pub(crate) fn run(
    address: &Address,
    export: &str,
    bytes: u64,
    load: &Workload,
    connections: usize,
    duration: Duration,
    stop: &Stop,
) -> io::Result<Told> {
    let direction = match (load.order, load.direction) {
        (Order::Random, Direction::Read) => "randread",
        (Order::Random, Direction::Write) => "randwrite",
        (Order::Sequential, Direction::Read) => "read",
        (Order::Sequential, Direction::Write) => "write",
    };
    let uri = match address {
        Address::Unix(path) => format!("nbd+unix:///{export}?socket={}", path.display()),
        Address::Loopback(port) => format!("nbd://127.0.0.1:{port}/{export}"),
    };
    let (mut answer, mut complaint) = (tempfile::tempfile()?, tempfile::tempfile()?);
    let mut child = Command::new("fio")
        .args(["--name=bench", "--ioengine=nbd", "--time_based", "--norandommap", "--thread"])
        .args(["--group_reporting", "--clat_percentiles=0", "--lat_percentiles=1"])
        .args(["--output-format=json", &format!("--uri={uri}"), &format!("--rw={direction}")])
        .args([format!("--bs={}", load.block_bytes), format!("--iodepth={}", load.depth)])
        .args([format!("--size={bytes}"), format!("--numjobs={connections}")])
        .arg(format!("--runtime={}ms", duration.max(RUNTIME_MIN).as_millis()))
        .current_dir(std::env::temp_dir())
        .stdin(Stdio::null())
        .stdout(answer.try_clone()?)
        .stderr(complaint.try_clone()?)
        .spawn()?;
    if !wait(&mut child, stop)? {
        let said = text(&mut complaint)?;
        let last = said.lines().rev().find(|line| !line.trim().is_empty());
        return Err(io::Error::other(format!("fio: {}", last.unwrap_or("it was ended"))));
    }
    // Its nbd engine says something of its own before.
    let answer = text(&mut answer)?;
    let object = answer.find('{').and_then(|at| answer.get(at..)).unwrap_or_default();
    let json: Value = serde_json::from_str(object).map_err(io::Error::other)?;
    told(&json, load.direction).ok_or_else(|| io::Error::other("fio: its answer holds no figures"))
}

/// Waits for the end, or ends it when the measurement is stopped. True if it went well.
fn wait(child: &mut Child, stop: &Stop) -> io::Result<bool> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status.success());
        }
        if stop.requested() {
            child.kill()?;
            child.wait()?;
            return Ok(false);
        }
        thread::sleep(LOOK);
    }
}

fn text(file: &mut std::fs::File) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0))?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn told(json: &Value, direction: Direction) -> Option<Told> {
    let job = json.get("jobs")?.get(0)?;
    let figures = job.get(match direction {
        Direction::Read => "read",
        Direction::Write => "write",
    })?;
    let figure = |of: &Value, name: &str| of.get(name)?.as_f64();
    let percentiles = figures.get("lat_ns")?.get("percentile")?;
    let requests = figure(figures, "total_ios")?;
    (requests > 0.0).then_some(Told {
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
        assert_eq!(told(&json, Direction::Read), None);
        let expected = Told { requests: 512.0, iops: 256.0, p50_us: 1.0, p99_us: 3.0, busy: 0.5 };
        assert_eq!(told(&json, Direction::Write), Some(expected));
    }
}
