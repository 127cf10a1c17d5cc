//! The driver's side of a split virtqueue with event indices, as a guest of Linux has it: a request
//! is an indirect table of header, data and status (Virtual I/O Device 1.2, 2.7 and 5.2.6).
//!
//! Invariant: a slot has its descriptors, its header, its status and its data at fixed places, so
//! that only the sector of a header changes from request to request.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

use vm_memory::{GuestRegionMmap, VolatileMemory};

use crate::workload::Direction;

const PAGE_BYTES: usize = 4096;
const SECTOR_BYTES: u64 = 512;
const DESCRIPTOR_BYTES: usize = 16;
/// Descriptors of a request: header, data, status.
const TABLE_LEN: usize = 3;
const HEADER_BYTES: usize = 16;
const SECTOR_AT: usize = 8;
/// Bytes before the elements of a ring, and where the index is in them.
const RING_HEADER_BYTES: usize = 4;
const INDEX_AT: usize = 2;
const USED_ELEMENT_BYTES: usize = 8;
/// Flags of a descriptor.
const NEXT: u16 = 1;
const WRITABLE: u16 = 2;
const INDIRECT: u16 = 4;
/// Kinds of requests.
const READ: u32 = 0;
const WRITE: u32 = 1;
/// A status that no device stores.
const NO_STATUS: u8 = 0xff;

/// Where the parts of a queue are in the memory of the guest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueLayout {
    /// Descriptors, a power of two.
    pub(crate) size: u16,
    pub(crate) descriptors: usize,
    pub(crate) available: usize,
    pub(crate) used: usize,
    tables: usize,
    headers: usize,
    statuses: usize,
    /// The data of all slots, one after the other.
    pub(crate) data: usize,
    block_bytes: usize,
    /// The first byte after the queue.
    pub(crate) end: usize,
}

impl QueueLayout {
    /// A queue of `size` descriptors from `start` on, with `depth` requests of `block_bytes`.
    pub(crate) fn new(start: usize, size: u16, depth: usize, block_bytes: usize) -> Self {
        let mut end = start;
        let mut take = |bytes: usize| {
            let at = end;
            end += bytes.next_multiple_of(PAGE_BYTES);
            at
        };
        let count = usize::from(size);
        Self {
            size,
            descriptors: take(count * DESCRIPTOR_BYTES),
            available: take(RING_HEADER_BYTES + 2 * count + 2),
            used: take(RING_HEADER_BYTES + USED_ELEMENT_BYTES * count + 2),
            tables: take(depth * TABLE_LEN * DESCRIPTOR_BYTES),
            headers: take(depth * HEADER_BYTES),
            statuses: take(depth),
            data: take(depth * block_bytes),
            block_bytes,
            end,
        }
    }

    /// The event index that the driver writes: the used element that it wants to be called for.
    fn used_event(&self) -> usize {
        self.available + RING_HEADER_BYTES + 2 * usize::from(self.size)
    }

    /// The event index that the device writes: the available entry that it wants a kick for.
    fn available_event(&self) -> usize {
        self.used + RING_HEADER_BYTES + USED_ELEMENT_BYTES * usize::from(self.size)
    }
}

/// A queue of the guest.
pub(crate) struct SplitQueue {
    memory: Arc<GuestRegionMmap>,
    layout: QueueLayout,
    /// Entries of the available ring so far, and those that the device was told of.
    available: u16,
    told: u16,
    /// Elements of the used ring that were taken.
    seen: u16,
}

impl SplitQueue {
    /// A queue at `layout` of `memory`, whose address in the guest is 0. It has `depth` slots for
    /// requests of `direction`.
    pub(crate) fn new(
        memory: Arc<GuestRegionMmap>,
        layout: QueueLayout,
        depth: usize,
        direction: Direction,
    ) -> io::Result<Self> {
        let queue = Self { memory, layout, available: 0, told: 0, seen: 0 };
        (0..depth).try_for_each(|slot| queue.prepare(slot, direction))?;
        Ok(queue)
    }

    /// Writes the descriptors of a slot, and its header.
    fn prepare(&self, slot: usize, direction: Direction) -> io::Result<()> {
        let QueueLayout { descriptors, tables, headers, statuses, data, block_bytes, .. } =
            self.layout;
        let (kind, writable) = match direction {
            Direction::Read => (READ, WRITABLE),
            Direction::Write => (WRITE, 0),
        };
        let table_bytes = TABLE_LEN * DESCRIPTOR_BYTES;
        let (table, header) = (tables + slot * table_bytes, headers + slot * HEADER_BYTES);
        self.describe(descriptors + slot * DESCRIPTOR_BYTES, (table, table_bytes), INDIRECT, 0)?;
        let parts = [
            ((header, HEADER_BYTES), NEXT),
            ((data + slot * block_bytes, block_bytes), NEXT | writable),
            ((statuses + slot, 1), WRITABLE),
        ];
        for (n, (part, flags)) in parts.into_iter().enumerate() {
            self.describe(table + n * DESCRIPTOR_BYTES, part, flags, n as u16 + 1)?;
        }
        self.u32_at(header)?.store(kind.to_le(), Ordering::Relaxed);
        Ok(())
    }

    fn describe(
        &self,
        at: usize,
        (address, len): (usize, usize),
        flags: u16,
        next: u16,
    ) -> io::Result<()> {
        self.u64_at(at)?.store((address as u64).to_le(), Ordering::Relaxed);
        self.u32_at(at + 8)?.store((len as u32).to_le(), Ordering::Relaxed);
        self.u16_at(at + 12)?.store(flags.to_le(), Ordering::Relaxed);
        self.u16_at(at + 14)?.store(next.to_le(), Ordering::Relaxed);
        Ok(())
    }

    /// Puts the request of `slot` for the bytes from `position` on into the available ring; the
    /// device sees it after [`SplitQueue::publish`].
    pub(crate) fn offer(&mut self, slot: usize, position: u64) -> io::Result<()> {
        let QueueLayout { headers, statuses, available, size, .. } = self.layout;
        let sector = self.u64_at(headers + slot * HEADER_BYTES + SECTOR_AT)?;
        sector.store((position / SECTOR_BYTES).to_le(), Ordering::Relaxed);
        self.u8_at(statuses + slot)?.store(NO_STATUS, Ordering::Relaxed);
        let at = available + RING_HEADER_BYTES + 2 * usize::from(self.available % size);
        self.u16_at(at)?.store((slot as u16).to_le(), Ordering::Relaxed);
        self.available = self.available.wrapping_add(1);
        Ok(())
    }

    /// Makes the offered requests available. Returns whether the device wants a kick.
    pub(crate) fn publish(&mut self) -> io::Result<bool> {
        let (old, new) = (std::mem::replace(&mut self.told, self.available), self.available);
        self.u16_at(self.layout.available + INDEX_AT)?.store(new.to_le(), Ordering::Release);
        // The index is visible before the event index is read.
        fence(Ordering::SeqCst);
        let event = self.u16_at(self.layout.available_event())?.load(Ordering::Relaxed);
        Ok(needs_event(u16::from_le(event), new, old))
    }

    /// Takes the next request that has ended: its slot.
    ///
    /// # Errors
    /// The device has answered it with a status other than success.
    pub(crate) fn take(&mut self) -> io::Result<Option<usize>> {
        if !self.has_used()? {
            return Ok(None);
        }
        let element = usize::from(self.seen % self.layout.size) * USED_ELEMENT_BYTES;
        let id = self.u32_at(self.layout.used + RING_HEADER_BYTES + element)?;
        let slot = u32::from_le(id.load(Ordering::Relaxed)) as usize;
        self.seen = self.seen.wrapping_add(1);
        match self.u8_at(self.layout.statuses + slot)?.load(Ordering::Relaxed) {
            0 => Ok(Some(slot)),
            status => Err(io::Error::other(format!(
                "the server answered a request with status {status} of virtio-blk"
            ))),
        }
    }

    /// Has the device call for the next request that ends. Returns whether one has ended already.
    pub(crate) fn ask_for_call(&self) -> io::Result<bool> {
        let event = self.u16_at(self.layout.used_event())?;
        event.store(self.seen.to_le(), Ordering::Relaxed);
        // The event index is visible before the used ring is read.
        fence(Ordering::SeqCst);
        self.has_used()
    }

    fn has_used(&self) -> io::Result<bool> {
        let used = self.u16_at(self.layout.used + INDEX_AT)?.load(Ordering::Acquire);
        Ok(u16::from_le(used) != self.seen)
    }

    fn u8_at(&self, at: usize) -> io::Result<&AtomicU8> {
        self.memory.get_atomic_ref(at).map_err(io::Error::other)
    }

    fn u16_at(&self, at: usize) -> io::Result<&AtomicU16> {
        self.memory.get_atomic_ref(at).map_err(io::Error::other)
    }

    fn u32_at(&self, at: usize) -> io::Result<&AtomicU32> {
        self.memory.get_atomic_ref(at).map_err(io::Error::other)
    }

    fn u64_at(&self, at: usize) -> io::Result<&AtomicU64> {
        self.memory.get_atomic_ref(at).map_err(io::Error::other)
    }
}

/// Whether the entry after `event` is one of those from `old` to `new`.
fn needs_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kick_is_due_if_the_entry_that_is_waited_for_was_added() {
        assert!(needs_event(4, 5, 4));
        assert!(needs_event(u16::MAX, 0, u16::MAX));
        assert!(needs_event(5, 8, 4));
        assert!(!needs_event(3, 5, 4));
        assert!(!needs_event(8, 8, 4));
        assert!(!needs_event(4, 4, 4));
    }

    #[test]
    fn the_parts_of_a_queue_do_not_overlap() {
        let layout = QueueLayout::new(PAGE_BYTES, 128, 64, 4096);
        let QueueLayout { descriptors, available, used, tables, headers, .. } = layout;
        let starts = [descriptors, available, used, tables, headers, layout.statuses, layout.data];
        assert!(starts.is_sorted_by(|a, b| a < b), "{layout:?}");
        assert!(layout.available_event() + 2 <= layout.tables && layout.used_event() + 2 <= used);
        assert_eq!(layout.end, layout.data + 64 * 4096);
    }
}
