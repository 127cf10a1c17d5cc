//! The registry of the exports of a server.
//!
//! Invariant: an id is never used again. A removed export is chosen by no further client, and stays
//! registered until its last use has ended.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use nowait::Error;

use crate::any_export::AnyExport;
use crate::export::ExportId;
use crate::export_error::ExportError;
use crate::registered_export::RegisteredExport;

/// All exports of a server. The first one is the default.
pub(crate) struct Registry(RwLock<Exports>);

struct Exports {
    by_id: BTreeMap<ExportId, Arc<RegisteredExport>>,
    /// The first of each name; it may be removed already.
    by_name: HashMap<String, ExportId>,
    /// Some exports have one name, as only those can that are there from the start.
    has_namesakes: bool,
    next: u64,
}

impl Registry {
    /// The id of the default export.
    pub(crate) const DEFAULT: ExportId = ExportId(0);

    /// The exports of `exports`.
    ///
    /// # Errors
    /// Errors of [`RegisteredExport::new`].
    pub(crate) fn new(exports: impl IntoIterator<Item = AnyExport>) -> Result<Self, Error> {
        let mut all = Exports {
            by_id: BTreeMap::new(),
            by_name: HashMap::new(),
            has_namesakes: false,
            next: 0,
        };
        for export in exports {
            all.add(export)?;
        }
        Ok(Self(RwLock::new(all)))
    }

    /// Adds an export.
    ///
    /// # Errors
    /// [`ExportError::NameTaken`]. [`ExportError::System`]: as [`RegisteredExport::new`].
    pub(crate) fn add(&self, export: AnyExport) -> Result<Arc<RegisteredExport>, ExportError> {
        let mut exports = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if exports.find(export.export.name()).is_some() {
            return Err(ExportError::NameTaken);
        }
        exports.add(export).map_err(ExportError::System)
    }

    /// An export, unless it was removed and is not used any more.
    pub(crate) fn get(&self, id: ExportId) -> Option<Arc<RegisteredExport>> {
        self.read().by_id.get(&id).cloned()
    }

    /// The export that clients choose by `name`.
    pub(crate) fn find(&self, name: &str) -> Option<Arc<RegisteredExport>> {
        self.read().find(name).cloned()
    }

    /// An export that clients can choose.
    pub(crate) fn served_export(&self, id: ExportId) -> Option<Arc<RegisteredExport>> {
        self.get(id).filter(|export| !export.is_removed())
    }

    /// The export of clients that name none.
    pub(crate) fn default_export(&self) -> Option<Arc<RegisteredExport>> {
        self.get(Self::DEFAULT)
    }

    /// All exports in the order of their ids, those included that were removed and are used yet.
    pub(crate) fn all(&self) -> Vec<Arc<RegisteredExport>> {
        self.read().by_id.values().cloned().collect()
    }

    /// The exports that clients can choose, the default first.
    pub(crate) fn served(&self) -> Vec<Arc<RegisteredExport>> {
        let mut all = self.all();
        all.retain(|export| !export.is_removed());
        all
    }

    /// An export that can be removed.
    ///
    /// # Errors
    /// [`ExportError::NotFound`], [`ExportError::IsDefault`], [`ExportError::HasNode`], [`ExportError::HasBackup`],
    /// [`ExportError::IsBackup`].
    fn removable(&self, id: ExportId) -> Result<Arc<RegisteredExport>, ExportError> {
        let export = self.get(id).ok_or(ExportError::NotFound)?;
        if let Some(of) = export.backup_of().and_then(|of| self.get(of)) {
            return Err(ExportError::IsBackup { of: of.export().name().to_owned() });
        }
        if let Some(backup) = export.backup() {
            return Err(ExportError::HasBackup { backup: backup.name.clone() });
        }
        if id == Self::DEFAULT {
            return Err(ExportError::IsDefault);
        }
        let refusal = export.devices().iter().find_map(|device| device.removal_refusal());
        refusal.map_or(Ok(export), Err)
    }

    /// Lets no further client choose an export that is not used; [`Registry::wait_removed`] does the rest.
    /// `connected` counts the connections of clients, those included whose use has not begun yet.
    ///
    /// # Errors
    /// Like [`Registry::remove`]; [`ExportError::HasClients`].
    pub(crate) fn remove_unused(
        &self,
        id: ExportId,
        connected: impl Fn() -> usize,
    ) -> Result<Arc<RegisteredExport>, ExportError> {
        let export = self.removable(id)?;
        match export.remove_unused(|| connected() > 0) {
            true => Ok(export),
            false => Err(ExportError::HasClients { count: connected().max(1) }),
        }
    }

    /// Removes an export: no further client can choose it. The threads have to look at their exports.
    ///
    /// # Errors
    /// [`ExportError::NotFound`], [`ExportError::IsDefault`], [`ExportError::HasNode`].
    pub(crate) fn remove(&self, id: ExportId) -> Result<Arc<RegisteredExport>, ExportError> {
        let export = self.removable(id)?;
        export.stop_devices();
        export.remove();
        Ok(export)
    }

    /// Lets no further client choose the export of a backup that has ended. The threads have to look at their exports.
    pub(crate) fn remove_backup(&self, id: ExportId) {
        self.get(id).iter().for_each(|export| export.remove());
    }

    /// Waits at most `timeout` until a removed export is not used any more and all writes are durable.
    ///
    /// # Errors
    /// [`ExportError::ClientsLeft`].
    pub(crate) fn wait_removed(
        &self,
        export: &RegisteredExport,
        timeout: Duration,
    ) -> Result<(), ExportError> {
        if !export.wait_unused(timeout) {
            return Err(ExportError::ClientsLeft);
        }
        self.forget_if_over(export.id);
        Ok(())
    }

    /// A thread serves an export no more, which may have been removed.
    pub(crate) fn forget_if_over(&self, id: ExportId) {
        let mut exports = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let is_over = |export: &Arc<RegisteredExport>| {
            export.is_removed() && export.wait_unused(Duration::ZERO)
        };
        if let Some(export) = exports.by_id.get(&id).cloned().filter(is_over) {
            exports.by_id.remove(&id);
            exports.forget_name(&export);
            export.export().summarize_faults();
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Exports> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Exports {
    fn add(&mut self, export: AnyExport) -> Result<Arc<RegisteredExport>, Error> {
        let id = ExportId(self.next);
        let registered = Arc::new(RegisteredExport::new(id, export)?);
        self.next += 1;
        let export = registered.export();
        match self.find(export.name()) {
            Some(_) => self.has_namesakes = true,
            None => _ = self.by_name.insert(export.name().to_owned(), id),
        }
        self.by_id.insert(id, registered.clone());
        Ok(registered)
    }

    /// The first export called `name` that clients can choose.
    fn find(&self, name: &str) -> Option<&Arc<RegisteredExport>> {
        let first = self.by_id.get(self.by_name.get(name)?)?;
        if !first.is_removed() {
            return Some(first);
        }
        if !self.has_namesakes {
            return None;
        }
        self.by_id.values().find(|other| !other.is_removed() && other.export().name() == name)
    }

    /// Another export that has the name of `removed` is the first one of that name now.
    fn forget_name(&mut self, removed: &RegisteredExport) {
        let export = removed.export();
        if self.by_name.get(export.name()) != Some(&removed.id) {
            return;
        }
        let is_next = |other: &&Arc<RegisteredExport>| other.export().name() == export.name();
        let next = self.has_namesakes.then(|| self.by_id.values().find(is_next)).flatten();
        match next.map(|next| next.id) {
            Some(next) => drop(self.by_name.insert(export.name().to_owned(), next)),
            None => drop(self.by_name.remove(export.name())),
        }
    }
}
