//! The exports that a thread serves: each is a device of its engine.
//!
//! Invariant: an export is attached to the engine of a thread while a member of the thread uses it or a
//! request of it is in flight there, and for an idle time after that; then its writes are made durable,
//! and it is detached.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nowait::{BlockMap, DeviceHandle, Engine, Error, IoQueue, Request};

use crate::dirty_bitmaps::EnabledBitmaps;
use crate::export::{Export, ExportId};
use crate::export_throttle::ExportThrottle;
use crate::injected_bug::{ServerBug, injected};
use crate::shared_export::SharedExport;
use crate::statistics::{MechanismCounts, ThreadStatistics};

/// Beside other exports, one may have this fraction of the requests in flight that there is room for.
const ROOM_SHARE: usize = 2;

/// Step of an export towards its end on a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// It has members, or requests in flight.
    Used,
    /// It is detached later, unless a member comes.
    Idle(Instant),
    /// Its flush is in flight.
    Flushing,
    /// Its writes are durable, or it had none.
    Flushed,
}

/// An export as one thread serves it. Its members have references to it.
pub(crate) struct ServedExport {
    pub(crate) shared: Arc<SharedExport>,
    pub(crate) export: Arc<Export>,
    /// The device of the export in the engine.
    pub(crate) device: DeviceHandle<dyn BlockMap>,
    /// The counters that only this thread changes.
    pub(crate) statistics: Arc<ThreadStatistics>,
    pub(crate) throttle: RefCell<ExportThrottle>,
    bitmaps: RefCell<EnabledBitmaps>,
    /// Its members have to leave the thread.
    pub(crate) is_pausing: Cell<bool>,
    /// Counts of the engines of the threads before this one.
    mechanisms_before: MechanismCounts,
    /// Members of the thread that use it.
    members: Cell<usize>,
    /// Requests in the engine.
    in_flight: Cell<u32>,
    stage: Cell<Stage>,
}

impl ServedExport {
    /// Publishes how the engine has served the requests.
    pub(crate) fn publish<Q: IoQueue>(&self, engine: &Engine<Q, dyn BlockMap>) {
        let stats = engine.stats_of(&self.device);
        self.statistics.publish(&self.mechanisms_before, &stats, self.in_flight());
    }

    /// Its index among the exports of the thread.
    #[inline]
    pub(crate) fn index(&self) -> u32 {
        self.device.index()
    }

    /// Requests in the engine.
    #[inline]
    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight.get()
    }

    /// A request of it is in the engine now.
    #[inline]
    pub(crate) fn on_submitted(&self) {
        self.in_flight.set(self.in_flight.get() + 1);
    }

    /// Looks at which dirty bitmaps there are: the memory of those that were removed is free then.
    pub(crate) fn review_bitmaps(&self) {
        self.bitmaps.borrow_mut().update(&self.shared.bitmaps);
    }

    /// The flush begins after which it is detached.
    pub(crate) fn begin_flush(&self) {
        self.stage.set(Stage::Flushing);
    }

    fn is_idle(&self) -> bool {
        let is_wrong = self.is_pausing.get() && injected(ServerBug::DrainWithRequest);
        let drained = self.in_flight() == 0 || is_wrong;
        self.members.get() == 0 && drained
    }
}

/// The exports that a thread serves, by the index of the device in its engine.
pub(crate) struct ServedExports {
    by_index: Vec<Option<Rc<ServedExport>>>,
    by_id: HashMap<ExportId, u32>,
    /// Exports without members and requests, to be looked at.
    left: Vec<u32>,
    /// Exports with members.
    used: usize,
    /// Idle exports, the one that has been idle longest first.
    idle: VecDeque<(Instant, u32)>,
    pub(crate) idle_time: Duration,
}

/// The next step of an export that is not used any more.
pub(crate) enum Unused {
    /// Its writes have to be made durable.
    Flush(u32),
    Detach(u32),
}

impl ServedExports {
    /// No exports. One that is not used any more stays attached for `idle_time`.
    pub(crate) fn new(idle_time: Duration) -> Self {
        let (by_index, by_id, left, used, idle) = Default::default();
        Self { by_index, by_id, left, used, idle, idle_time }
    }

    /// An export that the thread serves.
    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<&ServedExport> {
        self.by_index.get(index as usize)?.as_deref()
    }

    /// All of them.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &ServedExport> {
        self.by_index.iter().flatten().map(|served| &**served)
    }

    /// Counts a member that uses `shared`, whose device is attached to `engine` if it is not yet. The
    /// member keeps the reference until [`ServedExports::remove_member`].
    ///
    /// # Errors
    /// Like [`Engine::attach`].
    pub(crate) fn add_member<Q: IoQueue>(
        &mut self,
        engine: &mut Engine<Q, dyn BlockMap>,
        shared: &Arc<SharedExport>,
    ) -> Result<Rc<ServedExport>, Error> {
        let known = self.by_id.get(&shared.id).and_then(|index| self.by_index.get(*index as usize));
        let served = match known.cloned().flatten() {
            Some(served) => served,
            None => self.attach(engine, shared)?,
        };
        served.members.set(served.members.get() + 1);
        served.stage.set(Stage::Used);
        self.used += usize::from(served.members.get() == 1);
        Ok(served)
    }

    fn attach<Q: IoQueue>(
        &mut self,
        engine: &mut Engine<Q, dyn BlockMap>,
        shared: &Arc<SharedExport>,
    ) -> Result<Rc<ServedExport>, Error> {
        let export = shared.export();
        let device = engine.attach(export.disk().clone())?;
        shared.on_attached();
        let (index, statistics) = (device.index(), shared.statistics.for_thread());
        let mut throttle = ExportThrottle::default();
        // The use of a member that comes now may have begun before the pause.
        let is_pausing = shared.is_paused();
        if !is_pausing {
            throttle.update(&shared.limits);
        }
        let served = Rc::new(ServedExport {
            mechanisms_before: statistics.mechanisms(),
            shared: shared.clone(),
            export,
            device,
            statistics,
            throttle: RefCell::new(throttle),
            bitmaps: RefCell::default(),
            is_pausing: Cell::new(is_pausing),
            members: Cell::new(0),
            in_flight: Cell::new(0),
            stage: Cell::new(Stage::Used),
        });
        let room = self.by_index.len().max(index as usize + 1);
        self.by_index.resize_with(room, || None);
        if let Some(entry) = self.by_index.get_mut(index as usize) {
            *entry = Some(served.clone());
        }
        self.by_id.insert(shared.id, index);
        Ok(served)
    }

    /// A member of `served` has left.
    pub(crate) fn remove_member(&mut self, served: &ServedExport) {
        served.members.set(served.members.get() - 1);
        self.used -= usize::from(served.members.get() == 0);
        if served.is_idle() {
            self.left.push(served.index());
        }
    }

    /// Whether an export may have one more request in an engine with room for `room` more: beside other
    /// exports each may have half as many as there is room for, so that one whose storage does not answer
    /// leaves room for the others.
    #[inline]
    pub(crate) fn admits(&self, served: Option<&ServedExport>, room: usize) -> bool {
        let has_share = || {
            let in_flight = served.map_or(0, |served| served.in_flight() as usize);
            in_flight < (room / ROOM_SHARE).max(1)
        };
        room > 0 && (self.used <= 1 || has_share())
    }

    /// Request `io` of the export has completed. What it has changed is in the dirty bitmaps from now on.
    #[inline]
    pub(crate) fn on_completed(&mut self, index: u32, io: Request) -> Option<&ServedExport> {
        let served = self.by_index.get(index as usize)?.as_deref()?;
        served.in_flight.set(served.in_flight.get() - 1);
        if io.op.changes() {
            served.bitmaps.borrow_mut().mark(&served.shared.bitmaps, io);
        }
        if served.is_idle() {
            self.left.push(index);
        }
        Some(served)
    }

    /// The flush of an export that is not used any more has ended, or could not begin.
    pub(crate) fn end_flush(&mut self, index: u32) {
        let Some(served) = self.get(index) else { return };
        // Otherwise a member came meanwhile, whose writes it does not cover.
        if served.stage.get() == Stage::Flushing {
            served.stage.set(Stage::Flushed);
        }
        self.left.push(index);
    }

    /// Has exports looked at again later that could not be flushed.
    pub(crate) fn put_back(&mut self, waiting: Vec<u32>) {
        self.left.extend(waiting);
    }

    /// Has all that are not used looked at: some are paused or removed.
    pub(crate) fn look_again(&mut self) {
        let unused = self.by_index.iter().zip(0..);
        let unused =
            unused.filter(|(export, _)| export.as_ref().is_some_and(|served| served.is_idle()));
        self.left.extend(unused.map(|(_, index)| index));
    }

    /// Whether there is something for [`ServedExports::next_unused`], apart from what becomes due.
    #[inline]
    pub(crate) fn has_unused(&self) -> bool {
        !self.left.is_empty()
    }

    /// Time until an export has been idle for so long that it is detached; `None` without one.
    #[inline]
    pub(crate) fn idle_time_left(&self, now: Instant) -> Option<Duration> {
        let (since, _) = self.idle.front()?;
        Some(self.idle_time.saturating_sub(now.saturating_duration_since(*since)))
    }

    /// The next export that is to be flushed or detached.
    pub(crate) fn next_unused(&mut self, now: Instant) -> Option<Unused> {
        let idle_time = self.idle_time;
        while let Some(index) = self.left.pop() {
            let Some(served) = self.get(index).filter(|served| served.is_idle()) else {
                continue;
            };
            // The order of writes before a pause is kept by the server that goes on.
            let stage = served.stage.get();
            if served.is_pausing.get() || stage == Stage::Flushed {
                return Some(Unused::Detach(index));
            }
            let is_due = match stage {
                Stage::Idle(since) => now.saturating_duration_since(since) >= idle_time,
                _ => false,
            };
            if served.shared.is_removed() || is_due {
                return Some(served.unused(index));
            }
            if stage == Stage::Used {
                served.stage.set(Stage::Idle(now));
                self.idle.push_back((now, index));
            }
        }
        while self.idle_time_left(now) == Some(Duration::ZERO) {
            let (since, index) = self.idle.pop_front()?;
            if let Some(served) = self.get(index)
                && served.stage.get() == Stage::Idle(since)
            {
                return Some(served.unused(index));
            }
        }
        None
    }

    /// Detaches an export without members and requests.
    pub(crate) fn detach<Q: IoQueue>(&mut self, engine: &mut Engine<Q, dyn BlockMap>, index: u32) {
        let Some(served) = self.by_index.get_mut(index as usize).and_then(Option::take) else {
            return;
        };
        if !injected(ServerBug::ReuseIndex) {
            self.by_id.remove(&served.shared.id);
        }
        served.publish(engine);
        // It cannot fail: the device is one of this engine.
        let _ = engine.detach(&served.device);
        let shared = served.shared.clone();
        debug_assert_eq!(Rc::strong_count(&served), 1, "a member has it");
        drop(served);
        shared.on_detached();
    }
}

impl ServedExport {
    fn unused(&self, index: u32) -> Unused {
        match self.export.disk().is_read_only() {
            true => Unused::Detach(index),
            false => Unused::Flush(index),
        }
    }
}

impl Drop for ServedExports {
    /// The thread ends: the caller flushes the images.
    fn drop(&mut self) {
        self.by_index.drain(..).flatten().for_each(|served| served.shared.on_detached());
    }
}

#[cfg(test)]
mod tests {
    use nowait::{BlockDevice, Config, Null, OpenOptions, WorkerPool};

    use super::*;
    use crate::dirty_bitmaps::DirtyBitmaps;

    /// An export of a file of a block.
    fn shared(id: u64) -> Arc<SharedExport> {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let disk = Arc::new(BlockDevice::open(file.path(), OpenOptions::default()).unwrap());
        let export = Export::new(disk, id.to_string(), String::new());
        Arc::new(SharedExport::new(ExportId(id), Arc::new(export), DirtyBitmaps::default()))
    }

    #[test]
    fn beside_another_export_one_has_at_most_half_as_many_requests_as_there_is_room_for() {
        let (workers, config) = (WorkerPool::new(1), Config::default());
        let mut engine = Engine::new(Null::new().unwrap(), workers, config).unwrap();
        let mut exports = ServedExports::new(Duration::MAX);
        let first = exports.add_member(&mut engine, &shared(0)).unwrap();
        let admits = |exports: &ServedExports, served: &ServedExport, in_flight, room| {
            served.in_flight.set(in_flight);
            let admits = exports.admits(Some(served), room);
            served.in_flight.set(0);
            admits
        };
        assert!(admits(&exports, &first, 4095, 1), "alone it may have all");
        assert!(!admits(&exports, &first, 4096, 0));
        let second = exports.add_member(&mut engine, &shared(1)).unwrap();
        assert!(admits(&exports, &first, 2, 6) && !admits(&exports, &first, 3, 6));
        // A member that leaves makes room for a request of each other one.
        assert!(admits(&exports, &second, 0, 1) && !admits(&exports, &second, 1, 1));
        assert!(!admits(&exports, &second, 0, 0));
        exports.remove_member(&second);
        assert!(admits(&exports, &first, 4095, 1), "it is alone again");
    }
}
