//! Backups of the exports of a server, from any thread.
//!
//! Invariant: an export is paused for as long as its requests in flight take to end; nothing is copied meanwhile.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::backup::backup_spec::{BackupEnd, BackupError, BackupRefusal, BackupSpec, BackupStatus};
use crate::backup::running_backup::RunningBackup;
use crate::backup_transaction::{self, PreparedBackup};
use crate::export::ExportId;
use crate::export_error::ExportError;
use crate::exports::Exports;
use crate::locking::lock;
use crate::registered_export::RegisteredExport;

impl Exports {
    /// Begins backups: for each of `specs` an export of the disk as it is at one instant, at which none of the disks
    /// changes. Waits at most `timeout` until their requests in flight have ended. Returns the ids of the new exports, in
    /// the order of `specs`.
    ///
    /// # Errors
    /// Why one of them cannot begin: then none has.
    pub fn begin_backups(
        &self,
        specs: Vec<BackupSpec>,
        timeout: Duration,
    ) -> Result<Vec<ExportId>, BackupError> {
        let deadline = Instant::now() + timeout;
        let _alone = lock(&self.0.backups);
        let mut prepared: Vec<PreparedBackup> = Vec::new();
        for spec in specs {
            let export = spec.export;
            let refused = |why| BackupError { export, why };
            let of = self.0.registry.served_export(export);
            let of = of.ok_or(refused(BackupRefusal::Export(ExportError::NotFound)))?;
            if prepared.iter().any(|other| other.of.id == export) {
                return Err(refused(BackupRefusal::HasBackup));
            }
            let one = PreparedBackup::new(of, spec, BackupSpec::BLOCK_BYTES).map_err(refused)?;
            prepared.push(one);
        }
        let Some(first) = prepared.first().map(|one| one.of.id) else { return Ok(Vec::new()) };
        let exports = prepared.iter().map(|one| one.of.clone()).collect();
        let paused = self.0.pause_exports(exports, deadline);
        let refused = |error| BackupError { export: first, why: BackupRefusal::Export(error) };
        let paused = paused.map_err(refused)?;
        let begun = backup_transaction::begin(&self.0.registry, prepared);
        drop(paused);
        begun
    }

    /// Ends the backups of `exports`, and disconnects their clients; these decide nothing by leaving. Waits at most
    /// `timeout` for requests in flight, and before a commit for a flush of each disk whose bits are forgotten: what a loss of
    /// power takes from the disk would be in the backup, and no later backup would have the difference.
    ///
    /// # Errors
    /// Why one of them cannot end so: then none has. A commit: also [`ExportError::Storage`], that of the flush.
    pub fn end_backups(
        &self,
        exports: &[ExportId],
        end: BackupEnd,
        timeout: Duration,
    ) -> Result<(), BackupError> {
        let registered = |id: &ExportId| {
            let none = BackupRefusal::Export(ExportError::NotFound);
            self.0.registry.get(*id).ok_or(BackupError { export: *id, why: none })
        };
        let mut all = exports.iter().map(registered).collect::<Result<Vec<_>, _>>()?;
        all.sort_by_key(|export| export.id);
        all.dedup_by_key(|export| export.id);
        // Without the lock: a disk that does not answer holds up no other backup.
        let flushed = match end {
            BackupEnd::Commit => flush_frozen(&all)?,
            BackupEnd::Abort => Vec::new(),
        };
        let deadline = Instant::now() + timeout;
        let _alone = lock(&self.0.backups);
        let running = backup_transaction::check_end(&all, end)?;
        for (of, running) in all.iter().zip(&running) {
            let is_flushed = flushed.iter().any(|it| Arc::ptr_eq(it, running));
            if end == BackupEnd::Commit && running.frozen.is_some() && !is_flushed {
                return Err(BackupError { export: of.id, why: BackupRefusal::Changed });
            }
        }
        for (of, running) in all.iter().zip(&running) {
            backup_transaction::end(of, running, end);
            self.0.registry.remove_backup(running.id);
        }
        self.0.review_exports();
        for (of, running) in all.iter().zip(&running) {
            if let Some(backup) = self.0.registry.get(running.id) {
                // A client that has not left by then is served errors.
                let _ = self.disconnect_clients(&backup, deadline);
            }
            match self.0.pause_exports(vec![of.clone()], deadline) {
                Ok(paused) => {
                    backup_transaction::restore(of, running);
                    drop(paused);
                }
                // The disk is served through a guard that lets all pass.
                Err(error) => {
                    let name = of.export().name().to_owned();
                    tracing::warn!("export {name:?} is slower until it is paused again: {error}");
                }
            }
        }
        Ok(())
    }

    /// The backups that have not ended, in the order of their exports.
    #[must_use]
    pub fn backups(&self) -> Vec<BackupStatus> {
        let status =
            |of: &Arc<RegisteredExport>| Some(of.backup()?.status(of.id, of.export().name()));
        self.0.registry.served().iter().filter_map(status).collect()
    }
}

/// Makes the changes durable whose bits were frozen for the backups of `exports`. Returns these backups.
///
/// # Errors
/// One has none, or has failed; the errno of a flush.
fn flush_frozen(exports: &[Arc<RegisteredExport>]) -> Result<Vec<Arc<RunningBackup>>, BackupError> {
    let running = backup_transaction::check_end(exports, BackupEnd::Commit)?;
    for (of, _) in exports.iter().zip(&running).filter(|(_, running)| running.frozen.is_some()) {
        of.export().flush().map_err(|error| {
            let why = BackupRefusal::Export(ExportError::Storage(error));
            BackupError { export: of.id, why }
        })?;
    }
    Ok(running)
}
