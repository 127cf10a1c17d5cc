//! The order in which devices take turns: by weight, evenly spread, with a bound of what each runs.
//!
//! Each device has a position in virtual time, and the one that is least far has the next turn,
//! which moves it on by the inverse of its weight. Devices of one weight thus alternate.
//!
//! Invariant: `ready` is the number of queued jobs of devices of which one may be taken now. A
//! device that has neither queued nor running jobs is forgotten, as soon as its past turns give no
//! other device precedence.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::ops::{Index, IndexMut};

use crate::threads::number_hash::NumberHash;
use crate::types::weight::WEIGHTS;

/// The virtual time of a turn at weight 1. The clock lasts for 2^40 turns.
const TURN: u64 = 1 << 24;
/// The greatest number of empty lists that are kept for new devices, to save allocations.
const SPARE: usize = 64;

/// The jobs of one device.
#[derive(Default)]
pub(super) struct DeviceQueue {
    /// The device's number.
    id: u64,
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

/// Devices that have jobs. A device has an index as long as it is known.
pub(super) struct DeviceTurns {
    devices: Vec<DeviceQueue>,
    /// Indices by the numbers of devices.
    indices: HashMap<u64, usize, NumberHash>,
    /// Indices that no device has.
    free: Vec<usize>,
    /// Indices by the positions of their devices, then by when they came there. Some may have no job
    /// to take: their positions are remembered until the others come as far.
    order: BinaryHeap<Reverse<(u64, u64, usize)>>,
    /// The position of the device that has had the last turn.
    now: u64,
    /// Entries that `order` has had.
    entries: u64,
    ready: usize,
    /// The greatest number of runs of a device at the same time.
    limit: usize,
    spare: Vec<VecDeque<u64>>,
}

impl Index<usize> for DeviceTurns {
    type Output = DeviceQueue;

    fn index(&self, index: usize) -> &DeviceQueue {
        &self.devices[index]
    }
}

/// The caller calls [`DeviceTurns::update`] after a change.
impl IndexMut<usize> for DeviceTurns {
    fn index_mut(&mut self, index: usize) -> &mut DeviceQueue {
        &mut self.devices[index]
    }
}

impl DeviceTurns {
    /// Turns of devices that run at most `limit` jobs each at the same time; at least 1.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            devices: Vec::new(),
            indices: HashMap::default(),
            free: Vec::new(),
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
            self.all().into_iter().for_each(|index| self.update(index));
        }
    }

    /// The index of the device `id`, if it is known.
    pub(super) fn find(&self, id: u64) -> Option<usize> {
        self.indices.get(&id).copied()
    }

    /// The indices of all devices.
    pub(super) fn all(&self) -> Vec<usize> {
        self.indices.values().copied().collect()
    }

    /// The index of the device `id`, which is added if it is not known. Its weight becomes `weight`.
    /// The caller gives it a job.
    pub(super) fn device(&mut self, id: u64, weight: u32) -> usize {
        let Self { devices, indices, free, spare, .. } = self;
        let index = *indices.entry(id).or_insert_with(|| {
            let index = free.pop().unwrap_or(devices.len());
            if index == devices.len() {
                devices.push(DeviceQueue::default());
            }
            let clients = spare.pop().unwrap_or_default();
            devices[index] = DeviceQueue { id, clients, ..DeviceQueue::default() };
            index
        });
        devices[index].weight = weight.clamp(*WEIGHTS.start(), *WEIGHTS.end());
        index
    }

    /// The device whose turn it is, of which a job may be taken. Moves it to its next position. The
    /// caller takes a job, and calls [`DeviceTurns::update`].
    pub(super) fn next(&mut self) -> Option<usize> {
        while self.ready > 0 {
            let Reverse((at, _, index)) = self.order.pop()?;
            let device = &mut self.devices[index];
            device.listed = false;
            if device.ready > 0 {
                self.now = at;
                device.at = at + TURN / u64::from(device.weight);
                self.list(index);
                return Some(index);
            }
            self.forget_if_idle(index);
        }
        None
    }

    /// Puts a device into `order`.
    fn list(&mut self, index: usize) {
        let device = &mut self.devices[index];
        if !std::mem::replace(&mut device.listed, true) {
            // Time without jobs gives no right to more turns later.
            device.at = device.at.max(self.now);
            self.order.push(Reverse((device.at, self.entries, index)));
            self.entries += 1;
        }
    }

    /// Takes note of a change of a device. It may not be known after that.
    pub(super) fn update(&mut self, index: usize) {
        let device = &mut self.devices[index];
        let may_run = !device.clients.is_empty() && device.running < self.limit;
        let ready = if may_run { device.queued } else { 0 };
        self.ready = self.ready - device.ready + ready;
        device.ready = ready;
        if ready > 0 {
            self.list(index);
        } else {
            self.forget_if_idle(index);
        }
        while self.ready == 0
            && let Some(Reverse((_, _, index))) = self.order.pop()
        {
            // Without a job that may be taken no device has precedence.
            self.devices[index].listed = false;
            self.forget_if_idle(index);
        }
    }

    fn forget_if_idle(&mut self, index: usize) {
        let device = &mut self.devices[index];
        if device.listed || device.queued > 0 || device.running > 0 {
            return;
        }
        let clients = std::mem::take(&mut device.clients);
        self.indices.remove(&device.id);
        self.free.push(index);
        if self.spare.len() < SPARE {
            self.spare.push(clients);
        }
    }
}

#[cfg(test)]
impl DeviceTurns {
    pub(super) fn is_empty(&self) -> bool {
        let is_free = self.free.len() == self.devices.len();
        self.indices.is_empty() && self.order.is_empty() && is_free
    }

    /// All lists of clients that have memory: those of devices, and those that are kept.
    pub(super) fn lists(&self) -> impl Iterator<Item = &VecDeque<u64>> {
        let used = self.devices.iter().map(|device| &device.clients);
        used.chain(&self.spare).filter(|list| list.capacity() > 0)
    }
}
