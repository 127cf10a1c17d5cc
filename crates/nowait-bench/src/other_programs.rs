//! Other programs: whether they are installed, and what they say.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::cancel::CancelFlag;

const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// The time that a program may take for its start and its end.
const GRACE: Duration = Duration::from_secs(60);
/// Bytes that are read of what a program prints.
const PRINTED_MAX: u64 = 16 << 20;

/// The first line that `program --version` prints.
///
/// # Errors
/// It cannot be started, or has failed.
pub(crate) fn version(program: &Path) -> io::Result<String> {
    let answer = Command::new(program).arg("--version").stdin(Stdio::null()).output()?;
    if !answer.status.success() {
        return Err(io::Error::other(format!("--version ended with {}", answer.status)));
    }
    let text = String::from_utf8_lossy(&answer.stdout);
    Ok(text.lines().next().unwrap_or_default().trim().to_owned())
}

/// Whether `program` is installed.
pub(crate) fn is_installed(program: &str) -> bool {
    version(Path::new(program)).is_ok()
}

/// The last line of `output` that is not empty: the message of a program that has failed.
pub(crate) fn last_line(output: &str) -> Option<&str> {
    output.lines().rev().map(str::trim).find(|line| !line.is_empty())
}

/// Runs `command`, which measures for `duration`, to its end. Returns what it printed.
///
/// # Errors
/// The last line of its stderr if it fails; that it was cancelled, or has not ended in time.
pub(crate) fn printed(
    command: &mut Command,
    duration: Duration,
    stop: &CancelFlag,
) -> io::Result<String> {
    let [mut answer, mut complaint] = [tempfile::tempfile()?, tempfile::tempfile()?];
    command.stdin(Stdio::null()).stdout(answer.try_clone()?).stderr(complaint.try_clone()?);
    if has_succeeded(&mut command.spawn()?, Instant::now() + duration + GRACE, stop)? {
        return text(&mut answer);
    }
    let complaint = text(&mut complaint)?;
    Err(io::Error::other(last_line(&complaint).unwrap_or("failed without a word").to_owned()))
}

/// Waits until `child` ends, or kills it at `deadline` or if the measurement is cancelled.
fn has_succeeded(child: &mut Child, deadline: Instant, stop: &CancelFlag) -> io::Result<bool> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status.success());
        }
        if stop.requested() || Instant::now() > deadline {
            child.kill()?;
            child.wait()?;
            return Ok(false);
        }
        thread::sleep(POLL_INTERVAL);
    }
}

fn text(file: &mut File) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.take(PRINTED_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
