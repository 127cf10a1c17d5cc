//! Standard output, and progress bars on standard error.
//!
//! Invariant: a failed write to standard output is an error of the command. A bar is drawn only
//! where standard error is a terminal.

use std::io::{self, Write};

use indicatif::{ProgressBar, ProgressStyle};

use nowait_daemon::error::{CliError, os_message};

/// Writes `bytes` to standard output.
///
/// # Errors
/// Standard output cannot be written to.
pub(crate) fn print(bytes: impl AsRef<[u8]>) -> Result<(), CliError> {
    io::stdout().write_all(bytes.as_ref()).map_err(|error| print_failure(&error))
}

/// Has standard output written.
///
/// # Errors
/// It cannot be written to.
pub(crate) fn flush() -> Result<(), CliError> {
    io::stdout().flush().map_err(|error| print_failure(&error))
}

/// The failure of a write to standard output; a silent one if its reader has left.
pub(crate) fn print_failure(error: &io::Error) -> CliError {
    match error.kind() {
        io::ErrorKind::BrokenPipe => CliError::broken_pipe(),
        _ => CliError::new(format!("standard output: {}", os_message(error))),
    }
}

/// A progress bar in the style of `template`, in the syntax of indicatif.
pub(crate) fn progress_bar(template: &str) -> ProgressBar {
    let bar = ProgressBar::new(0);
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
