//! Regions of stored bitmaps that are not written to any more get their exact bits on storage.
//!
//! Invariant: the bits of a region are stored only after each change that was admitted to it is in the bits in memory: a thread marks
//! a change when it completes, and answers which ones have not completed after the region has begun to rest.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use nowait::ByteRange;
use tracing::warn;

use crate::export::ExportId;
use crate::exports::Exports;
use crate::thread_handle::InFlightQuery;

/// How long the threads may take to tell which changes are in flight.
/// Beyond it: the regions are looked at again with the next call.
const ANSWER_TIME: Duration = Duration::from_secs(1);

impl Exports {
    /// Stores the exact bits of all regions of stored bitmaps to which no change was admitted between the last two calls. So
    /// after a kill a bitmap has at most 16 MiB too much for each region that was written to in the time of two calls. One
    /// thread calls this. It waits for a sync of each image with such regions, and up to a second for each if a thread hangs.
    pub fn cool_bitmaps(&self) {
        for export in self.0.registry.served() {
            let Some(store) = export.export().bitmap_store().cloned() else { continue };
            let Some(resting) = store.rest() else { continue };
            // It holds the lock of an image that may be closed meanwhile.
            let weak = Arc::downgrade(&store);
            drop(store);
            let Some(changes) = self.changes_in_flight(export.id) else { continue };
            if let Some(store) = weak.upgrade()
                && let Err(error) = store.cool(resting, &changes)
            {
                let name = export.export().name().to_owned();
                warn!("{name}: its stored bitmaps are not brought up to date: {error}");
            }
        }
    }

    /// The changes of an export that are in flight, as far as they had begun before this; `None` if a thread does not answer.
    fn changes_in_flight(&self, export: ExportId) -> Option<Vec<ByteRange>> {
        let (answer, answers) = channel();
        let query = InFlightQuery { export, answer };
        let asked = self.0.threads().map(|thread| thread.ask(query.clone())).count();
        let until = Instant::now() + ANSWER_TIME;
        let mut changes = Vec::new();
        for _ in 0..asked {
            let left = until.saturating_duration_since(Instant::now());
            changes.extend(answers.recv_timeout(left).ok()?);
        }
        Some(changes)
    }

    /// Calls [`Exports::cool_bitmaps`] on a thread every `interval`, as long as the server runs.
    ///
    /// # Errors
    /// Those of clone(2).
    pub fn cool_regularly(&self, interval: Duration) -> io::Result<()> {
        // The server's images are not kept open for the sake of this.
        let server = Arc::downgrade(&self.0);
        let run = move || {
            loop {
                std::thread::sleep(interval);
                match server.upgrade() {
                    Some(server) if !server.is_stopping() => Exports(server).cool_bitmaps(),
                    _ => return,
                }
            }
        };
        std::thread::Builder::new().name("bitmaps".into()).spawn(run).map(drop)
    }
}
