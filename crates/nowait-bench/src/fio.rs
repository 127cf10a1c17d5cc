//! fio(1): started with its arguments, waited for, and its answer read.
//!
//! Invariant: it is gone when [`run`] returns, and creates no file where it was started.
//! Knows: stop, workload. Known by: fio_client, engine (fio).

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::stop::Stop;
use crate::workload::{Direction, Order, Workload};

/// In less it may not finish anything.
pub(crate) const RUNTIME_MIN: Duration = Duration::from_millis(200);
const LOOK: Duration = Duration::from_millis(5);

/// Whether it is installed, as it names itself.
pub(crate) fn version() -> Option<String> {
    let output = Command::new("fio").arg("--version").stdin(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// What it calls the order and the direction of `load`.
pub(crate) fn direction(load: &Workload) -> &'static str {
    match (load.order, load.direction) {
        (Order::Random, Direction::Read) => "randread",
        (Order::Random, Direction::Write) => "randwrite",
        (Order::Sequential, Direction::Read) => "read",
        (Order::Sequential, Direction::Write) => "write",
    }
}

/// Runs it; `arguments` ask for its answer in JSON, which is returned.
///
/// # Errors
/// What it said last on stderr, that it was stopped, or that its answer could not be read.
pub(crate) fn run(arguments: &[String], stop: &Stop) -> io::Result<Value> {
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
    // Some of its engines say something of their own before.
    let answer = text(&mut answer)?;
    let object = answer.find('{').and_then(|at| answer.get(at..)).unwrap_or_default();
    serde_json::from_str(object).map_err(io::Error::other)
}

/// The first job of an answer, and what it tells of one direction.
pub(crate) fn figures(answer: &Value, direction: Direction) -> Option<(&Value, &Value)> {
    let job = answer.get("jobs")?.get(0)?;
    let figures = job.get(match direction {
        Direction::Read => "read",
        Direction::Write => "write",
    })?;
    Some((job, figures))
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
