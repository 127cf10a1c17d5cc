//! A wish to stop, so that Ctrl-C ends the measurement in order: servers stopped, finished rows printed.
//!
//! Invariant: once asked for, a stop is never taken back. Knows: error. Known by: client, turn, peers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::error::Error;

/// A flag that ends a measurement early; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// A flag that SIGINT, SIGTERM and SIGHUP set, for the rest of the process's life; also where the
    /// process was started with them ignored, as a shell does with what runs in the background.
    ///
    /// # Errors
    /// [`Error::System`]: what sigaction(2) said.
    pub fn on_signal() -> Result<Stop, Error> {
        let stop = Stop::default();
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, stop.0.clone())
                .map_err(Error::system("catching signals"))?;
        }
        Ok(stop)
    }

    /// Asks for the end; the measurement in progress is dropped within a moment.
    pub fn request(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether the end was asked for.
    pub fn requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
