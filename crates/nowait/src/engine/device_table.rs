//! The devices of an engine, by the index that slots name.
//!
//! Invariant: the entry of a detached device, and its files in the queue, stay until no slot names it. Only
//! then another device may get its index.

use std::ops::{Index, Range};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slab::Slab;

use crate::block::block_map::BlockMap;
use crate::block::device::BlockDevice;
use crate::engine::attached_device::AttachedDevice;
use crate::engine::completion::Stats;
use crate::sim_hooks::injected_bug::{EngineBug, injected};
use crate::types::config::Config;
use crate::types::error::Error;

/// The devices of an engine by index.
pub(crate) struct DeviceTable<M: BlockMap + ?Sized> {
    /// The number of the engine in the process.
    engine: u64,
    devices: Slab<Rc<AttachedDevice<M>>>,
    /// Devices that are detached and that a slot may still name.
    detaching: Vec<u32>,
    /// The counts of devices that left the table.
    departed: Stats,
}

impl<M: BlockMap + ?Sized> DeviceTable<M> {
    /// The table of an engine that has no devices.
    pub(crate) fn new() -> Self {
        static ENGINES: AtomicU64 = AtomicU64::new(0);
        let engine = ENGINES.fetch_add(1, Ordering::Relaxed);
        Self { engine, devices: Slab::new(), detaching: Vec::new(), departed: Stats::default() }
    }

    /// Adds a device; `files` are the numbers of its files in the queue.
    pub(crate) fn add(
        &mut self,
        disk: Arc<BlockDevice<M>>,
        files: Range<u32>,
        config: &Config,
    ) -> Rc<AttachedDevice<M>> {
        let entry = self.devices.vacant_entry();
        let index = entry.key() as u32;
        let device = Rc::new(AttachedDevice::new(self.engine, index, disk, files, config));
        entry.insert(device.clone());
        device
    }

    /// Whether requests of `device` are this engine's to serve: it is in the table and not detached.
    #[inline(always)]
    pub(crate) fn serves(&self, device: &AttachedDevice<M>) -> bool {
        device.is_of(self.engine)
    }

    /// Whether `device` is in the table, attached or detached.
    pub(crate) fn contains(&self, device: &AttachedDevice<M>) -> bool {
        let found = self.devices.get(device.index() as usize);
        found.is_some_and(|found| std::ptr::eq(&**found, device))
    }

    /// Refuses requests of `device` from now on.
    ///
    /// # Errors
    /// The error of [`AttachedDevice::refusal`].
    pub(crate) fn detach(&mut self, device: &AttachedDevice<M>) -> Result<(), Error> {
        if !self.serves(device) {
            return Err(device.refusal());
        }
        device.detach();
        self.detaching.push(device.index());
        Ok(())
    }

    /// Whether a detached device is in the table.
    pub(crate) fn has_detached(&self) -> bool {
        !self.detaching.is_empty()
    }

    /// Takes out the detached devices that no slot names by `is_named`. `release` returns the counts of each.
    pub(crate) fn release(
        &mut self,
        is_named: impl Fn(u32) -> bool,
        mut release: impl FnMut(&AttachedDevice<M>) -> Stats,
    ) {
        let Self { devices, detaching, departed, .. } = self;
        detaching.retain(|&index| {
            if is_named(index) {
                return true;
            }
            if let Some(device) = devices.try_remove(index as usize) {
                *departed = departed.plus(release(&device));
            }
            false
        });
    }

    /// The device that a completion of a request of `device` names.
    #[inline(always)]
    pub(crate) fn completed(&self, device: u32) -> u32 {
        if injected(EngineBug::CompleteElsewhere) {
            let mut others = self.iter().map(|other| other.index());
            return others.find(|other| *other != device).unwrap_or(device);
        }
        device
    }

    /// All devices of the table.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &AttachedDevice<M>> {
        self.devices.iter().map(|(_, device)| &**device)
    }

    /// The counts of devices that left the table.
    pub(crate) fn departed(&self) -> Stats {
        self.departed
    }
}

impl<M: BlockMap + ?Sized> Index<u32> for DeviceTable<M> {
    type Output = AttachedDevice<M>;
    #[inline]
    fn index(&self, index: u32) -> &AttachedDevice<M> {
        &self.devices[index as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::block_map::LinearMap;
    use crate::storage::open_options::OpenOptions;

    fn add(table: &mut DeviceTable<LinearMap>, first_file: u32) -> Rc<AttachedDevice<LinearMap>> {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let disk = BlockDevice::open_mapped(file.path(), OpenOptions::default()).unwrap();
        table.add(Arc::new(disk), first_file..first_file + 1, &Config::default())
    }

    #[test]
    fn a_detached_device_keeps_its_index_until_no_slot_names_it() {
        let mut table = DeviceTable::new();
        let (first, second) = (add(&mut table, 5), add(&mut table, 6));
        assert_eq!((first.index(), second.index(), second.files()), (0, 1, 6..7));
        table.detach(&first).unwrap();
        assert_eq!(table.detach(&first).unwrap_err().errno(), libc::ENODEV);
        assert!(!table.serves(&first) && table.contains(&first) && table.serves(&second));
        table.release(|_| true, |_| panic!("a slot names it"));
        assert_eq!(add(&mut table, 7).index(), 2);
        let mut released = Vec::new();
        table.release(
            |_| false,
            |device| {
                released.push(device.files().start);
                Stats { failed: 3, ..device.stats() }
            },
        );
        assert_eq!((released, table.departed().failed), (vec![5], 3));
        assert!(!table.has_detached() && !table.contains(&first));
        let third = add(&mut table, 5);
        assert_eq!(third.index(), 0);
        assert!(table.serves(&third) && !table.serves(&first) && !table.contains(&first));
    }

    #[test]
    fn a_table_does_not_serve_a_device_of_another_one() {
        let mut tables = [DeviceTable::new(), DeviceTable::new()];
        let device = add(&mut tables[0], 0);
        add(&mut tables[1], 0);
        assert!(!tables[1].serves(&device) && !tables[1].contains(&device));
        assert_eq!(tables[1].detach(&device).unwrap_err().errno(), libc::EINVAL);
        assert!(tables[0].serves(&device));
    }
}
