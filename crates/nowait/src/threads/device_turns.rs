//! The order in which devices take turns: by weight, evenly spread, with a bound of what each runs.
//!
//! Each device has a position in virtual time, and the one that is least far has the next turn,
//! which moves it on by the inverse of its weight. Devices of one weight thus alternate.
//!
//! Invariant: `ready` is the number of queued jobs of devices of which one may be taken now. A
//! device that has neither queued nor running jobs is forgotten, as soon as its past turns give no
//! other device precedence.

use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{BinaryHeap, HashMap, VecDeque};

/// The virtual time of a turn at weight 1. The clock lasts for 2^44 turns.
const TURN: u64 = 1 << 20;
/// The greatest weight of a device.
const MAX_WEIGHT: u32 = 1000;
/// The greatest number of empty lists that are kept for new devices, to save allocations.
const SPARE: usize = 64;

/// The jobs of one device.
#[derive(Default)]
pub(super) struct DeviceQueue {
    /// Clients of which a job may be taken, the next one first.
    pub(super) clients: VecDeque<u64>,
    /// Jobs that were not taken yet.
    pub(super) queued: usize,
    /// Runs of jobs that were taken and have not ended.
    pub(super) running: usize,
    /// The jobs that `DeviceTurns::ready` counts: all that are queued, or none.
    ready: usize,
    weight: u32,
    /// The position in virtual time.
    at: u64,
    /// Whether the device is in `DeviceTurns::order`.
    listed: bool,
}

/// Devices that have jobs, which are identified by number.
pub(super) struct DeviceTurns {
    devices: HashMap<u64, DeviceQueue>,
    /// Devices by their positions, then by when they came there. Some may have no job to take: their
    /// positions are remembered until the others come as far.
    order: BinaryHeap<Reverse<(u64, u64, u64)>>,
    /// The position of the device that has had the last turn.
    now: u64,
    /// Entries that `order` has had.
    entries: u64,
    ready: usize,
    /// The greatest number of runs of a device at the same time.
    limit: usize,
    spare: Vec<VecDeque<u64>>,
}

impl DeviceTurns {
    /// Turns of devices that run at most `limit` jobs each at the same time; at least 1.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            devices: HashMap::new(),
            order: BinaryHeap::new(),
            now: 0,
            entries: 0,
            ready: 0,
            limit: limit.max(1),
            spare: Vec::new(),
        }
    }

    /// Queued jobs of devices of which one may be taken now.
    pub(super) fn ready(&self) -> usize {
        self.ready
    }

    /// Lets a device run at most `limit` jobs at the same time from now on; at least 1. Jobs that
    /// run go on. Visits all devices if the limit changes.
    pub(super) fn set_limit(&mut self, limit: usize) {
        let limit = limit.max(1);
        if std::mem::replace(&mut self.limit, limit) != limit {
            self.ids().into_iter().for_each(|id| self.update(id));
        }
    }

    /// The device `id`, which is added if it is not known. Its weight becomes `weight`. The caller
    /// calls [`DeviceTurns::update`] after a change.
    pub(super) fn device(&mut self, id: u64, weight: u32) -> &mut DeviceQueue {
        let spare = &mut self.spare;
        let device = self.devices.entry(id).or_insert_with(|| DeviceQueue {
            clients: spare.pop().unwrap_or_default(),
            ..DeviceQueue::default()
        });
        device.weight = weight.clamp(1, MAX_WEIGHT);
        device
    }

    /// The device `id`, if it is known. The caller calls [`DeviceTurns::update`] after a change.
    pub(super) fn get(&mut self, id: u64) -> Option<&mut DeviceQueue> {
        self.devices.get_mut(&id)
    }

    /// The device whose turn it is, of which a job may be taken. Moves it to its next position. The
    /// caller takes a job, and calls [`DeviceTurns::update`].
    pub(super) fn next(&mut self) -> Option<u64> {
        while self.ready > 0 {
            let Reverse((at, _, id)) = self.order.pop()?;
            let Some(device) = self.devices.get_mut(&id) else { continue };
            device.listed = false;
            if device.ready > 0 {
                self.now = at;
                device.at = at + TURN / u64::from(device.weight);
                self.list(id);
                return Some(id);
            }
            self.update(id);
        }
        None
    }

    /// Puts the device `id` into `order`.
    fn list(&mut self, id: u64) {
        let Some(device) = self.devices.get_mut(&id) else { return };
        if !std::mem::replace(&mut device.listed, true) {
            // Time without jobs gives no right to more turns later.
            device.at = device.at.max(self.now);
            self.order.push(Reverse((device.at, self.entries, id)));
            self.entries += 1;
        }
    }

    /// Takes note of a change of the device `id`.
    pub(super) fn update(&mut self, id: u64) {
        let Some(device) = self.devices.get_mut(&id) else { return };
        let may_run = !device.clients.is_empty() && device.running < self.limit;
        let ready = if may_run { device.queued } else { 0 };
        self.ready = self.ready - device.ready + ready;
        device.ready = ready;
        if ready > 0 {
            self.list(id);
        } else {
            self.forget_if_idle(id);
        }
        while self.ready == 0
            && let Some(Reverse((_, _, id))) = self.order.pop()
        {
            // Without a job that may be taken no device has precedence.
            if let Some(device) = self.devices.get_mut(&id) {
                device.listed = false;
                self.forget_if_idle(id);
            }
        }
    }

    fn forget_if_idle(&mut self, id: u64) {
        let Entry::Occupied(entry) = self.devices.entry(id) else { return };
        let device = entry.get();
        if device.listed || device.queued > 0 || device.running > 0 {
            return;
        }
        let clients = entry.remove().clients;
        if self.spare.len() < SPARE {
            self.spare.push(clients);
        }
    }

    /// The numbers of all devices.
    pub(super) fn ids(&self) -> Vec<u64> {
        self.devices.keys().copied().collect()
    }
}

#[cfg(test)]
impl DeviceTurns {
    pub(super) fn is_empty(&self) -> bool {
        self.devices.is_empty() && self.order.is_empty()
    }

    /// All lists of clients, those of devices and those that are kept.
    pub(super) fn lists(&self) -> impl Iterator<Item = &VecDeque<u64>> {
        self.devices.values().map(|device| &device.clients).chain(&self.spare)
    }
}
