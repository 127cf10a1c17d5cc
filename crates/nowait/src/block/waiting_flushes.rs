//! Flushes that wait for the next sync of a device. They share it with any number of workers, and occupy
//! none of them.
//!
//! Invariant: a flush is answered by a sync that began after it was added.

use std::sync::{Arc, Mutex, PoisonError};

use crate::threads::completion_list::CompletionList;
use crate::types::error::Error;

/// A request whose data are written, and that completes with the next sync.
pub(crate) struct WaitingFlush {
    pub(crate) completions: Arc<CompletionList>,
    pub(crate) slot: u32,
    /// The request's result if the sync succeeds.
    pub(crate) result: i64,
}

#[derive(Default)]
struct State {
    /// A worker makes a sync, and will look at `waiting` after it.
    running: bool,
    waiting: Vec<WaitingFlush>,
}

/// The flushes of one device that wait.
#[derive(Default)]
pub(crate) struct WaitingFlushes(Mutex<State>);

impl WaitingFlushes {
    /// Makes syncs by `sync` for `flush` and all that wait until none waits; if another worker makes a
    /// sync now, leaves `flush` to it. While one worker completes the requests of its sync, another
    /// may make the next sync.
    pub(crate) fn serve(&self, flush: WaitingFlush, sync: impl Fn() -> Result<(), Error>) {
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut now = lock();
        now.waiting.push(flush);
        while !now.running && !now.waiting.is_empty() {
            let served = std::mem::take(&mut now.waiting);
            now.running = true;
            drop(now);
            let done = sync();
            lock().running = false;
            for WaitingFlush { completions, slot, result } in served {
                completions.push(slot, done.map_or_else(|e| -i64::from(e.errno()), |()| result));
            }
            now = lock();
        }
    }
}
