//! Disks that move to another place while they are served.
//!
//! Invariant: until the exchange an export is served from where it was, whatever happens to the new place; a new file has
//! its name only when it is complete.

pub(crate) mod job;
pub(crate) mod move_thread;
pub(crate) mod target;

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nowait_control::{ControlError, MoveInfo};
use nowait_server::ExportId;

use crate::moves::job::Job;

/// The most disks that move at a time.
/// Beyond it: 409, until one of the moves has ended.
const MAX_MOVES: usize = 4;
/// How long the request that cancels a move waits for its end.
/// Beyond it: it is answered, and the move ends when its storage answers.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(5);

/// The moves of a server; clones share them.
#[derive(Clone, Default)]
pub(crate) struct Moves(Arc<Shared>);

#[derive(Default)]
struct Shared {
    all: Mutex<All>,
    /// Notified when a move has ended.
    ended: Condvar,
}

#[derive(Default)]
struct All {
    /// The last move of each export.
    jobs: BTreeMap<ExportId, Arc<Job>>,
    is_stopping: bool,
}

impl All {
    fn running(&self) -> impl Iterator<Item = (&ExportId, &Arc<Job>)> {
        self.jobs.iter().filter(|(_, job)| job.is_running())
    }
}

impl Moves {
    fn lock(&self) -> MutexGuard<'_, All> {
        self.0.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts `job` as the move of export `id`.
    ///
    /// # Errors
    /// It is being moved already; too many are; the server is stopping.
    pub(crate) fn add(&self, id: ExportId, job: &Arc<Job>) -> Result<(), ControlError> {
        let mut all = self.lock();
        if all.is_stopping {
            return Err(ControlError::Conflict("the server is stopping".into()));
        }
        refuse(all.running().filter(|(of, _)| **of == id))?;
        if all.running().count() >= MAX_MOVES {
            return Err(ControlError::Conflict(format!(
                "{MAX_MOVES} disks are being moved: wait for one of them"
            )));
        }
        all.jobs.insert(id, job.clone());
        Ok(())
    }

    /// Refuses what cannot be done while the disk of export `id` moves.
    ///
    /// # Errors
    /// It does.
    pub(crate) fn refuse_during_move(&self, id: ExportId) -> Result<(), ControlError> {
        refuse(self.lock().running().filter(|(of, _)| **of == id))
    }

    /// Refuses what cannot be done while any disk moves.
    ///
    /// # Errors
    /// One does.
    pub(crate) fn refuse_during_any(&self) -> Result<(), ControlError> {
        refuse(self.lock().running())
    }

    /// The move of export `id`, or its last one.
    pub(crate) fn info(&self, id: ExportId) -> Option<MoveInfo> {
        self.lock().jobs.get(&id).map(|job| job.info())
    }

    /// Export `id` is removed: its last move is forgotten.
    pub(crate) fn forget(&self, id: ExportId) {
        self.lock().jobs.remove(&id);
    }

    /// Has the move of export `id` end, and waits for that, 5 s at most.
    ///
    /// # Errors
    /// It is not being moved.
    pub(crate) fn cancel(&self, id: ExportId) -> Result<MoveInfo, ControlError> {
        let all = self.lock();
        let running = all.jobs.get(&id).filter(|job| job.is_running()).cloned();
        let job = running.ok_or_else(|| ControlError::NotFound("it is not being moved".into()))?;
        job.cancel();
        let waited = self.0.ended.wait_timeout_while(all, CANCEL_TIMEOUT, |_| job.is_running());
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        Ok(job.info())
    }

    /// Has all of them end, and waits for that. Returns whether they have within `timeout`.
    pub(crate) fn stop(&self, timeout: Duration) -> bool {
        let mut all = self.lock();
        all.is_stopping = true;
        all.running().for_each(|(_, job)| job.cancel());
        let is_running = |all: &mut All| all.running().next().is_some();
        let waited = self.0.ended.wait_timeout_while(all, timeout, is_running);
        let (all, _) = waited.unwrap_or_else(PoisonError::into_inner);
        all.running().next().is_none()
    }

    /// A move has ended; the job says so.
    fn notify(&self) {
        drop(self.lock());
        self.0.ended.notify_all();
    }
}

fn refuse<'a>(
    mut running: impl Iterator<Item = (&'a ExportId, &'a Arc<Job>)>,
) -> Result<(), ControlError> {
    match running.next() {
        Some((_, job)) => Err(ControlError::Conflict(format!(
            "a disk is being moved to {}: wait for that, or cancel it (nowait export move NAME --cancel)",
            job.info().target
        ))),
        None => Ok(()),
    }
}
