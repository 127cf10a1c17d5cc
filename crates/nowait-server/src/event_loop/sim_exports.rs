//! The exports of a simulated thread: each can be added, paused, replaced and removed while the thread
//! goes on with the others.
//!
//! Invariant: no clock decides. An export that is not used any more stays attached until the caller says
//! that idle time has passed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nowait::sim::SimQueue;
use nowait::{BlockDevice, BlockMap};

use crate::any_export::AnyExport;
use crate::event_loop::EventLoop;
use crate::event_loop::sim::{Pause, Simulated};
use crate::export::Export;
use crate::export_error::ExportError;
use crate::frontend::Frontend;
use crate::loop_context::LoopContext;
use crate::registered_export::RegisteredExport;

fn export_of(name: &str, disk: Arc<BlockDevice<dyn BlockMap>>) -> AnyExport {
    AnyExport::new(Export::new(disk, name.to_owned(), String::new()))
}

impl Simulated {
    /// The registered export of that name; the default one has none.
    pub(super) fn registered(&self, name: &str) -> Option<Arc<RegisteredExport>> {
        let registry = &self.thread.shared.registry;
        if name.is_empty() { registry.default_export() } else { registry.find(name) }
    }

    /// Adds an export for clients that choose it by `name`.
    ///
    /// # Errors
    /// [`ExportError::NameTaken`].
    pub fn add_export(
        &mut self,
        name: &str,
        disk: Arc<BlockDevice<dyn BlockMap>>,
    ) -> Result<(), ExportError> {
        self.thread.shared.registry.add(export_of(name, disk)).map(|_| ())
    }

    /// Lets no further client choose an export. It is gone once [`Simulated::has_export`] says so.
    ///
    /// # Errors
    /// [`ExportError::NotFound`], [`ExportError::IsDefault`].
    pub fn remove_export(&mut self, name: &str) -> Result<(), ExportError> {
        let export = self.registered(name).ok_or(ExportError::NotFound)?;
        let registry = &self.thread.shared.registry;
        registry.remove(export.id)?;
        registry.forget_if_over(export.id);
        self.thread.review_exports();
        Ok(())
    }

    /// Whether there is an export of that name, or one that was removed and is used yet.
    #[must_use]
    pub fn has_export(&self, name: &str) -> bool {
        self.thread.shared.registry.all().iter().any(|export| export.export().name() == name)
    }

    /// Has the thread take no more requests of one export, and leave its connections.
    pub fn begin_pause_of(&mut self, name: &str) {
        let Some(export) = self.registered(name) else { return };
        let attached = self.thread.context.exports.iter().find(|it| it.shared.id == export.id);
        let device = attached.map(|served| served.device.clone());
        let begun = self.thread.shared.begin_pause_of(export.id);
        let pause = begun.map(|paused| Pause { name: name.to_owned(), paused, device });
        self.pauses.extend(pause);
        self.thread.review_exports();
    }

    /// Whether the pause of the export has begun: the server says that none of its requests is in flight.
    #[must_use]
    pub fn has_paused_of(&self, name: &str) -> bool {
        self.pauses_of(name).all(|pause| pause.paused.has_begun())
    }

    /// Requests that the engine has in flight of an export since [`Simulated::begin_pause_of`].
    #[must_use]
    pub fn draining(&self, name: &str) -> usize {
        let devices = self.pauses_of(name).filter_map(|pause| pause.device.as_ref());
        devices.map(|device| self.thread.context.engine.in_flight_of(device)).sum()
    }

    fn pauses_of(&self, name: &str) -> impl Iterator<Item = &Pause> {
        self.pauses.iter().filter(move |pause| pause.name == name)
    }

    /// Ends the pause of an export.
    pub fn resume_of(&mut self, name: &str) {
        self.pauses.retain(|pause| pause.name != name);
        self.thread.review_exports();
        let EventLoop { frontend, context, .. } = &mut self.thread;
        Frontend::<SimQueue>::on_wake(frontend, context);
    }

    /// Connections that use the export of that name.
    #[must_use]
    pub fn members_of(&self, name: &str) -> usize {
        self.registered(name).map_or(0, |export| export.members())
    }

    /// Idle time passes: exports that are not used any more are flushed and detached.
    pub fn pass_idle_time(&mut self) {
        let exports = &mut self.thread.context.exports;
        let idle_time = std::mem::replace(&mut exports.idle_time, Duration::ZERO);
        self.thread.leave_unused(Instant::now());
        self.thread.context.exports.idle_time = idle_time;
    }

    /// Whether the thread has the export attached to its engine.
    #[must_use]
    pub fn has_attached(&self, name: &str) -> bool {
        self.thread.context.exports.iter().any(|served| served.export.name() == name)
    }

    /// An export whose requests in flight the thread and its engine count differently, with both counts.
    #[must_use]
    pub fn miscounted(&self) -> Option<(String, usize, usize)> {
        let LoopContext { exports, engine, .. } = &self.thread.context;
        let mut counts = exports.iter().map(|served| {
            let name = served.export.name().to_owned();
            (name, served.in_flight() as usize, engine.in_flight_of(&served.device))
        });
        // The engine counts fragments, too.
        counts.find(|(_, own, engine)| own > engine || (*own == 0) != (*engine == 0))
    }
}
