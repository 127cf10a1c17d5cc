//! Panics, on whatever thread, and inputs kept for later.
//!
//! Invariant: a panic is noted by whoever looks next, and nothing is printed of it before.
//! Knows: pieces. Known by: run.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::pieces::seed_of;

static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Panics are noted from now on. One run at a time in a process, for whose panic is it?
pub(crate) fn note_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let mut panics = PANICS.lock().unwrap_or_else(PoisonError::into_inner);
        panics.push(panic.to_string().replace('\n', " "));
    }));
}

/// Panics are printed again.
pub(crate) fn print_panics() {
    drop(std::panic::take_hook());
}

/// The first panic since the last call.
pub(crate) fn take_panic() -> Option<String> {
    std::mem::take(&mut *PANICS.lock().unwrap_or_else(PoisonError::into_inner)).into_iter().next()
}

/// Writes an input into `directory`, under a name that follows from what it is.
///
/// # Errors
/// What the system said, in one line.
pub(crate) fn keep(directory: &Path, target: &str, input: &[u8]) -> Result<PathBuf, String> {
    let path = directory.join(format!("{target}-{:016x}", seed_of(input)));
    let written = fs::create_dir_all(directory).and_then(|()| fs::write(&path, input));
    written.map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(path)
}
