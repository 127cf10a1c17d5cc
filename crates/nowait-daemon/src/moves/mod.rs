//! Tasks that take long with the disks of exports that are served: moves to another place, and replications.
//!
//! Invariant: until the exchange an export is served from where it was, whatever happens to the new place; a new file has
//! its name only when it is complete. A task that has ended does not run again.

pub(crate) mod move_state;
pub(crate) mod target;
pub(crate) mod move_thread;
pub(crate) mod replication_state;
pub(crate) mod target_comparison;
pub(crate) mod replica_thread;
pub(crate) mod resumed_round;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nowait_control::ControlError;
use nowait_server::ExportId;

/// The most disks that move, and the most that are replicated.
/// Beyond it: 409, until one of them has ended.
const MAX_TASKS: usize = 4;
/// How long the request that ends a task waits for its end.
/// Beyond it: it is answered, and the task ends when its storage answers.
pub(crate) const CANCEL_TIMEOUT: Duration = Duration::from_secs(5);

/// Something that goes on with the disk of an export, on a thread of its own.
pub(crate) trait Task {
    /// The words for it behind "it is".
    const IS: &'static str;
    /// The command that ends it.
    const END: &'static str;

    /// Whether it has not ended.
    fn is_running(&self) -> bool;
    /// It is to end.
    fn cancel(&self);
    /// The path or URI that it writes to.
    fn target(&self) -> String;
}

/// The state of a task, and whether it is to end.
pub(crate) struct TaskState<I> {
    cancel: AtomicBool,
    info: Mutex<I>,
}

impl<I> TaskState<I> {
    /// A task of which `info` is known.
    pub(crate) fn new(info: I) -> Self {
        Self { cancel: AtomicBool::new(false), info: Mutex::new(info) }
    }

    /// Its state.
    pub(crate) fn lock(&self) -> MutexGuard<'_, I> {
        self.info.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It is to end.
    pub(crate) fn cancel(&self) {
        self.cancel.store(true, Ordering::Relaxed);
    }

    /// The flag that says so.
    pub(crate) const fn cancel_flag(&self) -> &AtomicBool {
        &self.cancel
    }

    /// Whether it is to end.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }
}

/// The tasks of one kind of a server; clones share them.
pub(crate) struct Tasks<T>(Arc<Shared<T>>);

impl<T> Clone for Tasks<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Default for Tasks<T> {
    fn default() -> Self {
        let all = Mutex::new(All { by_export: BTreeMap::new(), is_stopping: false });
        Self(Arc::new(Shared { all, ended: Condvar::new() }))
    }
}

struct Shared<T> {
    all: Mutex<All<T>>,
    /// Notified when a task has ended.
    ended: Condvar,
}

struct All<T> {
    /// The last task of each export.
    by_export: BTreeMap<ExportId, Arc<T>>,
    is_stopping: bool,
}

impl<T: Task> All<T> {
    fn running(&self) -> impl Iterator<Item = (&ExportId, &Arc<T>)> {
        self.by_export.iter().filter(|(_, task)| task.is_running())
    }
}

impl<T: Task> Tasks<T> {
    fn lock(&self) -> MutexGuard<'_, All<T>> {
        self.0.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts `task` as that of export `id`.
    ///
    /// # Errors
    /// There is one already; there are too many; the server is stopping.
    pub(crate) fn add(&self, id: ExportId, task: &Arc<T>) -> Result<(), ControlError> {
        let mut all = self.lock();
        if all.is_stopping {
            return Err(ControlError::Conflict("the server is stopping".into()));
        }
        refuse(all.running().filter(|(of, _)| **of == id))?;
        if all.running().count() >= MAX_TASKS {
            let why = format!("{MAX_TASKS} disks are {} already", T::IS);
            return Err(ControlError::Conflict(why));
        }
        all.by_export.insert(id, task.clone());
        Ok(())
    }

    /// Refuses what cannot be done during the task of export `id`.
    ///
    /// # Errors
    /// It runs.
    pub(crate) fn refuse_during(&self, id: ExportId) -> Result<(), ControlError> {
        refuse(self.lock().running().filter(|(of, _)| **of == id))
    }

    /// Refuses what cannot be done during any task.
    ///
    /// # Errors
    /// One runs.
    pub(crate) fn refuse_during_any(&self) -> Result<(), ControlError> {
        refuse(self.lock().running())
    }

    /// The task of export `id`, or its last one.
    pub(crate) fn get(&self, id: ExportId) -> Option<Arc<T>> {
        self.lock().by_export.get(&id).cloned()
    }

    /// Export `id` is removed, or its task has not begun: it is forgotten.
    pub(crate) fn forget(&self, id: ExportId) {
        self.lock().by_export.remove(&id);
    }

    /// Has the task of export `id` end, and waits for that, 5 s at most.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn cancel(&self, id: ExportId) -> Result<Arc<T>, ControlError> {
        let all = self.lock();
        let running = all.by_export.get(&id).filter(|task| task.is_running()).cloned();
        let none = || ControlError::NotFound(format!("it is not {}", T::IS));
        let task = running.ok_or_else(none)?;
        task.cancel();
        let waited = self.0.ended.wait_timeout_while(all, CANCEL_TIMEOUT, |_| task.is_running());
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        Ok(task)
    }

    /// Has all of them end for good, and waits for that. Returns whether they have within `timeout`.
    pub(crate) fn stop(&self, timeout: Duration) -> bool {
        self.lock().is_stopping = true;
        self.end_all(timeout)
    }

    /// Those that run, with their exports.
    pub(crate) fn running(&self) -> Vec<(ExportId, Arc<T>)> {
        self.lock().running().map(|(id, task)| (*id, task.clone())).collect()
    }

    /// Has all of them end, and waits for that. Returns whether they have within `timeout`.
    pub(crate) fn end_all(&self, timeout: Duration) -> bool {
        let all = self.lock();
        all.running().for_each(|(_, task)| task.cancel());
        let is_running = |all: &mut All<T>| all.running().next().is_some();
        let waited = self.0.ended.wait_timeout_while(all, timeout, is_running);
        let (all, _) = waited.unwrap_or_else(PoisonError::into_inner);
        all.running().next().is_none()
    }

    /// A task has ended, and says so.
    pub(crate) fn notify(&self) {
        drop(self.lock());
        self.0.ended.notify_all();
    }
}

fn refuse<'a, T: Task + 'a>(
    mut running: impl Iterator<Item = (&'a ExportId, &'a Arc<T>)>,
) -> Result<(), ControlError> {
    match running.next() {
        Some((_, task)) => Err(ControlError::Conflict(format!(
            "a disk is {} to {}: end that first ({})",
            T::IS,
            task.target(),
            T::END
        ))),
        None => Ok(()),
    }
}
