//! The requests in flight, kept in memory that outlives this process: the VMM holds it, and hands
//! it to the server that comes after this one ("Inflight I/O tracking" of QEMU's vhost-user.rst).
//!
//! Invariant: a request is marked before the engine gets it, and unmarked after the driver was
//! told of its end. So each request is marked or told when this process dies, and a marked one that
//! was told is recognised by the index of the used ring.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nowait::{Error, Operation};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use serde::{Deserialize, Serialize};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

use crate::injected_bug::{ServerBug, injected};
use crate::vhost_user::fault_guard::{FaultGuard, file_of, map_shared};

/// Bytes of the header of a queue, and of the state of a descriptor.
const HEADER_BYTES: usize = 16;
const STATE_BYTES: usize = 16;
/// The parts of queues begin at multiples of this.
const ALIGNMENT_BYTES: usize = 64;
/// Bytes behind the parts of the queues, which are of no interest to the VMM. The first tells whether
/// the driver has the device cache writes, which the VMM does not tell the next server.
const TAIL_BYTES: usize = ALIGNMENT_BYTES;
const CACHE_OFF: u8 = 1;
const CACHE_ON: u8 = 2;
/// The version of the layout.
const VERSION: u16 = 1;
// Offsets in the header of a queue.
const VERSION_AT: usize = 8;
const DESCRIPTORS_AT: usize = 10;
const LAST_HEAD_AT: usize = 12;
const USED_INDEX_AT: usize = 14;
// Offsets in the state of a descriptor.
const IN_FLIGHT_AT: usize = 0;
const NEXT_AT: usize = 6;
const COUNTER_AT: usize = 8;

/// Where the memory of all queues of a device is in its file.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct InflightPlace {
    pub(crate) bytes: u64,
    pub(crate) offset: u64,
    pub(crate) queues: u16,
    pub(crate) queue_size: u16,
}

/// The memory of all queues of a device. The guard is dropped first.
pub(crate) struct InflightRegion {
    guard: FaultGuard,
    mapping: MmapRegion,
    queues: u16,
    queue_size: u16,
}

impl InflightRegion {
    /// The bytes for `queues` queues of `queue_size` descriptors.
    pub(crate) fn bytes_for(queues: u16, queue_size: u16) -> usize {
        usize::from(queues) * queue_bytes(queue_size) + TAIL_BYTES
    }

    /// New memory for `queues` queues of `queue_size` descriptors, all zeros. It cannot be shrunk.
    ///
    /// # Errors
    /// The errno of memfd_create(2) or ftruncate(2).
    pub(crate) fn create(queues: u16, queue_size: u16) -> Result<File, Error> {
        let failed = |e: rustix::io::Errno| Error::new(e.raw_os_error(), Operation::SetUp);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("nowait-inflight", flags).map_err(failed)?;
        ftruncate(&file, Self::bytes_for(queues, queue_size) as u64).map_err(failed)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&file, seals).map_err(failed)?;
        Ok(file.into())
    }

    /// Maps the memory at `offset` of `file`.
    ///
    /// # Errors
    /// `EINVAL`: the file is too short; the errno of mmap(2).
    pub(crate) fn map(
        file: File,
        offset: u64,
        queues: u16,
        queue_size: u16,
    ) -> Result<Self, Error> {
        let bytes = Self::bytes_for(queues, queue_size);
        let (guard, mapping) = map_shared(file, offset, bytes as u64)?;
        Ok(Self { guard, mapping, queues, queue_size })
    }

    /// Where it is, and a copy of its file.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`.
    pub(crate) fn place(&self) -> io::Result<(InflightPlace, OwnedFd)> {
        let Self { queues, queue_size, .. } = *self;
        let file = self.mapping.file_offset();
        let offset = file.map_or(0, FileOffset::start);
        let bytes = self.mapping.size() as u64;
        Ok((InflightPlace { bytes, offset, queues, queue_size }, file_of(file)?))
    }

    /// Whether writes are cached, as an earlier server has noted it.
    pub(crate) fn cache(&self) -> Option<bool> {
        match self.load::<u8>(self.tail()) {
            CACHE_OFF => Some(false),
            CACHE_ON => Some(true),
            _ => None,
        }
    }

    /// Notes for the next server whether writes are cached.
    pub(crate) fn set_cache(&self, is_on: bool) {
        self.store(self.tail(), if is_on { CACHE_ON } else { CACHE_OFF });
    }

    fn tail(&self) -> usize {
        Self::bytes_for(self.queues, self.queue_size) - TAIL_BYTES
    }

    /// The number at `at`, 0 outside of the memory.
    fn load<T: vm_memory::AtomicAccess + Default>(&self, at: usize) -> T {
        self.mapping.as_volatile_slice().load(at, Ordering::Acquire).unwrap_or_default()
    }

    fn store<T: vm_memory::AtomicAccess>(&self, at: usize, number: T) {
        // All positions are inside the memory, and aligned.
        let _ = self.mapping.as_volatile_slice().store(number, at, Ordering::Release);
    }
}

fn queue_bytes(queue_size: u16) -> usize {
    (HEADER_BYTES + STATE_BYTES * usize::from(queue_size)).next_multiple_of(ALIGNMENT_BYTES)
}

/// The part of one queue.
pub(crate) struct InflightQueue {
    region: Arc<InflightRegion>,
    at: usize,
    /// Counts requests, so that their order is known.
    counter: u64,
}

impl InflightQueue {
    /// The part of queue number `index`, of `size` descriptors; `None` if the memory has none for
    /// it.
    pub(crate) fn new(region: Arc<InflightRegion>, index: u16, size: u16) -> Option<Self> {
        let fits = index < region.queues && size <= region.queue_size;
        let at = usize::from(index) * queue_bytes(region.queue_size);
        fits.then_some(Self { region, at, counter: 0 })
    }

    /// The requests that an earlier server has left, in the order in which it took them, when the
    /// index of the used ring is `used_index`. The memory is initialised if it was new.
    pub(crate) fn recover(&mut self, size: u16, used_index: u16) -> Vec<u16> {
        let (region, at) = (&self.region, self.at);
        if region.load::<u16>(at + VERSION_AT) != VERSION {
            region.store(at + DESCRIPTORS_AT, size);
            region.store(at + USED_INDEX_AT, used_index);
            region.store(at + VERSION_AT, VERSION);
        }
        let repeats_told = injected(ServerBug::RepeatTold);
        if region.load::<u16>(at + USED_INDEX_AT) != used_index && !repeats_told {
            // The server died after it had told the driver of this request.
            let told: u16 = region.load(at + LAST_HEAD_AT);
            if told < size {
                region.store(self.state(told) + IN_FLIGHT_AT, 0u8);
            }
            region.store(at + USED_INDEX_AT, used_index);
        }
        if injected(ServerBug::ForgetInFlight) {
            return Vec::new();
        }
        let is_marked = |head: &u16| region.load::<u8>(self.state(*head) + IN_FLIGHT_AT) != 0;
        let counter = |head: u16| region.load::<u64>(self.state(head) + COUNTER_AT);
        let mut left: Vec<u16> = (0..size).filter(is_marked).collect();
        left.sort_by_key(|head| counter(*head));
        self.counter = left.last().map_or(0, |last| counter(*last).wrapping_add(1));
        left
    }

    /// The request at `head`, below the size of the queue, was taken.
    #[inline]
    pub(crate) fn mark(&mut self, head: u16) {
        let state = self.state(head);
        self.region.store(state + COUNTER_AT, self.counter);
        self.region.store(state + IN_FLIGHT_AT, 1u8);
        self.counter += 1;
    }

    /// The driver is about to be told of the end of the request at `head`.
    #[inline]
    pub(crate) fn begin_end(&mut self, head: u16) {
        let last: u16 = self.region.load(self.at + LAST_HEAD_AT);
        self.region.store(self.state(head) + NEXT_AT, last);
        self.region.store(self.at + LAST_HEAD_AT, head);
    }

    /// The driver was told, and the index of the used ring is `used_index`.
    #[inline]
    pub(crate) fn end(&mut self, head: u16, used_index: u16) {
        self.region.store(self.state(head) + IN_FLIGHT_AT, 0u8);
        self.region.store(self.at + USED_INDEX_AT, used_index);
    }

    /// Whether the memory was missing when it was accessed.
    pub(crate) fn has_faulted(&self) -> bool {
        self.region.guard.has_faulted()
    }

    fn state(&self, head: u16) -> usize {
        self.at + HEADER_BYTES + STATE_BYTES * usize::from(head)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u16 = 8;

    fn queue(file: &File) -> InflightQueue {
        let file = file.try_clone().unwrap();
        let region = InflightRegion::map(file, 0, 2, SIZE).unwrap();
        InflightQueue::new(Arc::new(region), 1, SIZE).unwrap()
    }

    #[test]
    fn the_next_server_finds_what_was_taken_and_not_told_in_its_order() {
        let file = InflightRegion::create(2, SIZE).unwrap();
        let mut first = queue(&file);
        assert!(first.recover(SIZE, 0).is_empty());
        [5, 2, 7, 0].into_iter().for_each(|head| first.mark(head));
        first.begin_end(2);
        first.end(2, 1);
        drop(first);
        let mut second = queue(&file);
        assert_eq!(second.recover(SIZE, 1), [5, 7, 0]);
        second.mark(1);
        drop(second);
        assert_eq!(queue(&file).recover(SIZE, 1), [5, 7, 0, 1]);
    }

    #[test]
    fn a_request_that_was_told_when_its_server_died_is_not_done_again() {
        let file = InflightRegion::create(2, SIZE).unwrap();
        let mut first = queue(&file);
        first.recover(SIZE, 10);
        first.mark(3);
        first.mark(4);
        first.begin_end(4);
        // The index of the used ring is 11 when the process dies.
        drop(first);
        assert_eq!(queue(&file).recover(SIZE, 11), [3]);
        assert_eq!(queue(&file).recover(SIZE, 11), [3]);
    }

    #[test]
    fn the_next_server_knows_whether_writes_are_cached() {
        let file = InflightRegion::create(1, SIZE).unwrap();
        let map = || InflightRegion::map(file.try_clone().unwrap(), 0, 1, SIZE).unwrap();
        assert_eq!(map().cache(), None);
        for is_on in [false, true] {
            map().set_cache(is_on);
            assert_eq!(map().cache(), Some(is_on));
        }
    }

    #[test]
    fn a_region_has_no_part_for_other_queues_and_is_not_longer_than_its_file() {
        let file = InflightRegion::create(2, SIZE).unwrap();
        let map = |queues| InflightRegion::map(file.try_clone().unwrap(), 0, queues, SIZE);
        assert!(map(64).is_err());
        let region = Arc::new(map(2).unwrap());
        assert!(InflightQueue::new(region.clone(), 2, SIZE).is_none());
        assert!(InflightQueue::new(region, 1, 2 * SIZE).is_none());
    }
}
