//! Says on standard error which server is waited for, while something is opened there.
//!
//! Invariant: nothing is said within `PATIENCE`, nor after the end of a [`Waiting`]; its thread does
//! not outlive it.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::process::log;
use nowait_remote::Location;
use tracing::Level;

/// The time after which a user wants to know.
const PATIENCE: Duration = Duration::from_secs(2);

/// A wait for the servers of some locations, from its start until it is dropped.
pub struct Waiting(Option<(Sender<()>, JoinHandle<()>)>);

impl Waiting {
    /// Begins to wait. Of files nothing is said.
    pub fn start<'a>(locations: impl IntoIterator<Item = &'a Location>) -> Self {
        let servers: Vec<String> = locations.into_iter().filter_map(Location::server).collect();
        if servers.is_empty() {
            return Self(None);
        }
        let (end, is_over) = channel::<()>();
        let say = move || {
            if is_over.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                let servers = servers.join(", ");
                log::write_line(Level::WARN, format_args!("waiting for {servers} ..."));
            }
        };
        // Without a thread it is silent.
        let thread = thread::Builder::new().name("nowait-waiting".into()).spawn(say);
        Self(thread.ok().map(|thread| (end, thread)))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some((end, thread)) = self.0.take() {
            drop(end);
            let _ = thread.join();
        }
    }
}

/// Calls `open`, which opens something at `locations`.
pub fn on<'a, T>(locations: impl IntoIterator<Item = &'a Location>, open: impl FnOnce() -> T) -> T {
    let _waiting = Waiting::start(locations);
    open()
}
