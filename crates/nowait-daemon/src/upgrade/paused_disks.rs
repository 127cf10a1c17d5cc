//! The images and connections of a server that has stopped serving, for a program that takes over.
//!
//! Invariant: everything that was written is on storage; the server goes on when this is dropped, with
//! the images as they are.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

use nowait::Error;
use nowait_control::ControlError;
use nowait_image::BitmapStore;
use nowait_server::{ConnectionState, ExportError, ExportId, Exports, PausedDevice, PausedServer};
use rustix::fs::{MemfdFlags, memfd_create};
use tracing::warn;

use crate::disks::parallel_map;
use crate::disks::served_disks::ServedDisk;
use crate::process::systemd;
use crate::upgrade::messages::{BitmapMessage, ExportState};
use crate::upgrade::sender::{DRAIN_TIMEOUT, Paused};

/// The most threads that flush.
const FLUSH_THREADS: usize = 16;

/// The stored bitmaps that another process goes on with: nothing is stored in them by this one until this is dropped.
struct HeldBitmaps(Vec<Arc<BitmapStore>>);

impl HeldBitmaps {
    fn new(disks: &[ServedDisk]) -> Self {
        let stores = disks.iter().filter_map(|served| served.disk.image.bitmap_store());
        Self(stores.cloned().inspect(|store| store.hold(true)).collect())
    }
}

impl Drop for HeldBitmaps {
    fn drop(&mut self) {
        self.0.iter().for_each(|store| store.hold(false));
    }
}

/// Everything that is handed over.
pub(crate) struct PausedDisks<'a> {
    held: HeldBitmaps,
    disks: MutexGuard<'a, Vec<ServedDisk>>,
    server: PausedServer,
    exports: Exports,
    begun: Instant,
}

impl<'a> PausedDisks<'a> {
    /// Stops the server of `exports`, whose images are `disks`.
    ///
    /// # Errors
    /// Requests do not end in time, or a flush fails: then it goes on.
    pub(crate) fn new(
        exports: &Exports,
        disks: MutexGuard<'a, Vec<ServedDisk>>,
    ) -> Result<Self, ControlError> {
        let failed = |error: Error| ControlError::Failed(error.to_string());
        // Clients are served meanwhile, and the flush of the pause has little left to do.
        for_all(&disks, |served| served.disk.image.flush()).map_err(failed)?;
        let begun = Instant::now();
        let server = exports.pause(DRAIN_TIMEOUT).map_err(|error| match error {
            ExportError::CannotKeepBack => ControlError::Conflict(format!("{error}: restart it")),
            other => other.into(),
        })?;
        for_all(&disks, |served| served.disk.image.settle()).map_err(failed)?;
        let held = HeldBitmaps::new(&disks);
        Ok(Self { held, disks, server, exports: exports.clone(), begun })
    }

    /// Each of `all` with the index of its export.
    fn with_indices<T>(&self, all: Vec<(ExportId, T)>) -> Vec<(usize, T)> {
        let disks = self.disks.iter().enumerate();
        let indices: BTreeMap<_, _> = disks.map(|(index, served)| (served.id, index)).collect();
        let index = |id| indices.get(&id).copied();
        all.into_iter().filter_map(|(id, it)| Some((index(id)?, it))).collect()
    }
}

/// Calls `act` for all `disks`: a storage has ended the flushes of many in the time of one.
fn for_all(
    disks: &[ServedDisk],
    act: impl Fn(&ServedDisk) -> Result<(), Error> + Sync,
) -> Result<(), Error> {
    parallel_map::try_map(disks, FLUSH_THREADS, act).map(drop)
}

/// The bits of a bitmap in a file of its own, which is in memory only.
fn save(exports: &Exports, id: ExportId, bitmap: &str) -> Result<OwnedFd, String> {
    let file = memfd_create("nowait-bitmap", MemfdFlags::CLOEXEC);
    let file = File::from(file.map_err(|error| error.to_string())?);
    exports.save_bitmap(id, bitmap, &file)?;
    Ok(file.into())
}

impl Paused for PausedDisks<'_> {
    fn begun(&self) -> Instant {
        self.begun
    }

    fn images(&self) -> Vec<Vec<BorrowedFd<'_>>> {
        self.disks.iter().map(|served| served.disk.image.held_files()).collect()
    }

    fn connections(&self) -> Result<Vec<(usize, ConnectionState)>, ControlError> {
        Ok(self.with_indices(self.server.connections()?))
    }

    fn devices(&self) -> Result<Vec<(usize, PausedDevice)>, ControlError> {
        Ok(self.with_indices(self.server.devices(DRAIN_TIMEOUT)?))
    }

    fn bitmaps(&self, exports: &[ExportState]) -> Vec<Option<OwnedFd>> {
        let saved = |(id, bitmap): (ExportId, &BitmapMessage)| {
            let saved = save(&self.exports, id, &bitmap.name);
            saved.inspect_err(|why| warn!("bitmap {:?} is not handed over: {why}", bitmap.name))
        };
        let all = self.disks.iter().zip(exports);
        let all = all
            .flat_map(|(served, export)| export.bitmaps.iter().map(|bitmap| (served.id, bitmap)));
        all.map(|bitmap| saved(bitmap).ok()).collect()
    }

    fn left_over(&self, count: usize) -> usize {
        self.server.connection_count().saturating_sub(count)
    }

    fn begin_handing_over(&mut self) -> Result<(), ControlError> {
        Ok(self.server.begin_handing_over()?)
    }

    fn release(mut self, successor: u32) {
        systemd::notify_successor(successor);
        // Nothing is written any more, as closing an image does.
        std::mem::forget(self.held);
        self.disks.drain(..).for_each(std::mem::forget);
        self.server.release();
    }
}
