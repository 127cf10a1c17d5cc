//! A queue of jobs for a thread pool: devices take turns by their weights, and the clients of a
//! device take turns.
//!
//! Invariant: a job is taken once; jobs of one client are taken in the order of their push. At most
//! so many jobs of a device, and of a client, run at the same time as their limits say; jobs that
//! join count as one. A push or a pop costs as much with many devices as with few, but for the
//! logarithm of the number of those that have jobs.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

use crate::threads::device_turns::DeviceTurns;
use crate::threads::number_hash::NumberHash;
use crate::threads::work_item::WorkItem;

/// The greatest number of empty lists that are kept for new clients, to save allocations.
const SPARE: usize = 64;

/// A client, by the index of its device and its number.
pub(crate) type ClientId = (usize, u64);

/// The jobs of one client.
struct ClientQueue<J> {
    items: VecDeque<J>,
    /// Runs of jobs that were taken and have not ended.
    running: usize,
    /// Whether the client is in `DeviceQueue::clients`.
    listed: bool,
}

/// Jobs of the clients of devices.
pub(crate) struct FairQueue<J> {
    devices: DeviceTurns,
    clients: HashMap<ClientId, ClientQueue<J>, NumberHash>,
    spare: Vec<VecDeque<J>>,
    client_limit: usize,
}

impl<J: WorkItem> FairQueue<J> {
    /// A queue that lets at most `device_limit` jobs of a device, and `client_limit` of a client,
    /// run at the same time; at least 1.
    pub(crate) fn new(device_limit: usize, client_limit: usize) -> Self {
        let devices = DeviceTurns::new(device_limit);
        let client_limit = client_limit.max(1);
        Self { devices, clients: HashMap::default(), spare: Vec::new(), client_limit }
    }

    /// Lets at most `limit` jobs of a device run at the same time from now on; at least 1.
    pub(crate) fn set_device_limit(&mut self, limit: usize) {
        self.devices.set_limit(limit);
    }

    /// Jobs of devices of which one may be taken now: 0 if none may be.
    pub(crate) fn ready(&self) -> usize {
        self.devices.ready()
    }

    /// Queues `job`.
    pub(crate) fn push(&mut self, job: J) {
        let index = self.devices.device(job.device(), job.weight());
        let (device, id, spare) = (&mut self.devices[index], job.client(), &mut self.spare);
        let client = self.clients.entry((index, id)).or_insert_with(|| ClientQueue {
            items: spare.pop().unwrap_or_default(),
            running: 0,
            listed: false,
        });
        client.items.push_back(job);
        device.queued += 1;
        list(client, id, self.client_limit, &mut device.clients);
        self.devices.update(index);
    }

    /// Takes the first job of the client whose turn it is, and those that join it, into `run`,
    /// which is empty; returns the client. The caller calls [`FairQueue::ended`] when they have
    /// ended.
    pub(crate) fn pop(&mut self, run: &mut Vec<J>) -> Option<ClientId> {
        let index = self.devices.next()?;
        let device = &mut self.devices[index];
        let id = device.clients.pop_front()?;
        let client = self.clients.get_mut(&(index, id))?;
        client.listed = false;
        run.push(client.items.pop_front()?);
        while client.items.front().is_some_and(|next| J::joins(run, next)) {
            run.extend(client.items.pop_front());
        }
        client.running += 1;
        device.running += 1;
        device.queued -= run.len();
        list(client, id, self.client_limit, &mut device.clients);
        self.devices.update(index);
        Some((index, id))
    }

    /// The jobs of the client that were taken together have ended.
    pub(crate) fn ended(&mut self, (index, id): ClientId) {
        let Entry::Occupied(mut entry) = self.clients.entry((index, id)) else { return };
        let (client, device) = (entry.get_mut(), &mut self.devices[index]);
        client.running -= 1;
        device.running -= 1;
        if client.running > 0 || !client.items.is_empty() {
            list(client, id, self.client_limit, &mut device.clients);
        } else {
            let items = entry.remove().items;
            if self.spare.len() < SPARE {
                self.spare.push(items);
            }
        }
        self.devices.update(index);
    }

    /// Takes all queued jobs, in order for each client.
    pub(crate) fn drain(&mut self) -> Vec<J> {
        let mut taken = Vec::new();
        self.clients.retain(|_, client| {
            taken.extend(client.items.drain(..));
            client.listed = false;
            client.running > 0
        });
        for index in self.devices.all() {
            self.devices[index].clients.clear();
            self.devices[index].queued = 0;
            self.devices.update(index);
        }
        taken
    }

    /// Removes the first job for which `is_it` of those of a client of a device that are queued.
    pub(crate) fn remove(&mut self, device: u64, id: u64, is_it: impl Fn(&J) -> bool) -> Option<J> {
        let index = self.devices.find(device)?;
        let client = self.clients.get_mut(&(index, id))?;
        let at = client.items.iter().position(is_it)?;
        let job = client.items.remove(at)?;
        let is_empty = client.items.is_empty();
        let is_gone = is_empty && client.running == 0;
        let device = &mut self.devices[index];
        device.queued -= 1;
        if is_empty && std::mem::take(&mut client.listed) {
            device.clients.retain(|&listed| listed != id);
        }
        if is_gone {
            self.clients.remove(&(index, id));
        }
        self.devices.update(index);
        Some(job)
    }

    /// Runs of jobs of the device `id` that were taken and have not ended.
    #[cfg(test)]
    pub(crate) fn running(&self, id: u64) -> usize {
        self.devices.find(id).map_or(0, |index| self.devices[index].running)
    }
}

/// Puts `client`, whose number is `id`, into `ready`, if it has a queued job and is below the limit.
fn list<J>(client: &mut ClientQueue<J>, id: u64, limit: usize, ready: &mut VecDeque<u64>) {
    if !client.listed && !client.items.is_empty() && client.running < limit {
        client.listed = true;
        ready.push_back(id);
    }
}

#[cfg(test)]
mod tests;
