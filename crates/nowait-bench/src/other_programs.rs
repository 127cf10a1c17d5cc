//! Other programs: whether they are installed, and what they say.

use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

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
