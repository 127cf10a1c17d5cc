//! fio(1): starts it with given arguments, waits for it, and parses its output.
//!
//! Invariant: the process has ended when [`run`] returns, and it creates no file in its working
//! directory.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::cancel::CancelFlag;
use crate::workload::{Direction, Order, Workload};

/// In a shorter time it may complete no request.
pub(crate) const RUNTIME_MIN: Duration = Duration::from_millis(200);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Its version line; `None` if it is not installed.
pub(crate) fn version() -> Option<String> {
    let output = Command::new("fio").arg("--version").stdin(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The name that fio uses for the order and the direction of `load`.
pub(crate) fn direction(load: &Workload) -> &'static str {
    match (load.order, load.direction) {
        (Order::Random, Direction::Read) => "randread",
        (Order::Random, Direction::Write) => "randwrite",
        (Order::Sequential, Direction::Read) => "read",
        (Order::Sequential, Direction::Write) => "write",
    }
}

/// Runs fio with `arguments`, which must request JSON output, and returns that output.
///
/// # Errors
/// The last line of its stderr, that it was cancelled, or that its output could not be parsed.
pub(crate) fn run(arguments: &[String], stop: &CancelFlag) -> io::Result<Value> {
    let mut answer = tempfile::tempfile()?;
    let mut complaint = tempfile::tempfile()?;
    let mut child = Command::new("fio")
        .args(arguments)
        .current_dir(std::env::temp_dir())
        .stdin(Stdio::null())
        .stdout(answer.try_clone()?)
        .stderr(complaint.try_clone()?)
        .spawn()?;
    if !wait(&mut child, stop)? {
        return Err(io::Error::other(format!("fio: {}", last_line(&mut complaint)?)));
    }
    // Some of its engines print messages before the JSON.
    let answer = text(&mut answer)?;
    let object = answer.find('{').and_then(|at| answer.get(at..)).unwrap_or_default();
    serde_json::from_str(object).map_err(io::Error::other)
}

/// The first job of the output, and its figures of one direction.
pub(crate) fn figures(answer: &Value, direction: Direction) -> Option<(&Value, &Value)> {
    let job = answer.get("jobs")?.get(0)?;
    let figures = job.get(match direction {
        Direction::Read => "read",
        Direction::Write => "write",
    })?;
    Some((job, figures))
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

fn last_line(file: &mut File) -> io::Result<String> {
    let text = text(file)?;
    let last = text.lines().rev().find(|line| !line.trim().is_empty());
    Ok(last.unwrap_or("failed without a word").to_owned())
}
