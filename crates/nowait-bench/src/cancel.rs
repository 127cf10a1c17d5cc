//! A flag that cancels a measurement, so that after Ctrl-C servers are stopped and finished rows
//! are printed.
//!
//! Invariant: a requested cancellation is never withdrawn.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::error::Error;

/// A flag that cancels a measurement; clones share it.
#[derive(Clone, Debug, Default)]
pub struct CancelFlag(Arc<AtomicBool>);

impl CancelFlag {
    /// A flag that SIGINT, SIGTERM and SIGHUP set, for the rest of the lifetime of the process;
    /// also if the process was started with these signals ignored, as a shell does with background
    /// jobs.
    ///
    /// # Errors
    /// [`Error::System`]: the error of sigaction(2).
    pub fn on_signal() -> Result<CancelFlag, Error> {
        let stop = CancelFlag::default();
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, stop.0.clone())
                .map_err(Error::system("catching signals"))?;
        }
        Ok(stop)
    }

    /// Requests the cancellation; the measurement in progress is dropped soon after.
    pub fn request(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether the cancellation was requested.
    pub fn requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
