//! Records panics of all threads, and saves inputs.
//!
//! Invariant: a panic is recorded until [`take_panic`] returns it, and is not printed.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::split::seed_of;

static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Records panics from now on. Only one run at a time in a process, because a panic cannot be
/// attributed to a run.
pub(crate) fn note_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let mut panics = PANICS.lock().unwrap_or_else(PoisonError::into_inner);
        panics.push(panic.to_string().replace('\n', " "));
    }));
}

/// Prints panics again from now on.
pub(crate) fn print_panics() {
    drop(std::panic::take_hook());
}

/// The first panic since the last call.
pub(crate) fn take_panic() -> Option<String> {
    std::mem::take(&mut *PANICS.lock().unwrap_or_else(PoisonError::into_inner)).into_iter().next()
}

/// Writes an input into `directory`, under a name derived from its content.
///
/// # Errors
/// The error of the system, in one line.
pub(crate) fn keep(directory: &Path, target: &str, input: &[u8]) -> Result<PathBuf, String> {
    let path = directory.join(format!("{target}-{:016x}", seed_of(input)));
    let written = fs::create_dir_all(directory).and_then(|()| fs::write(&path, input));
    written.map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(path)
}
