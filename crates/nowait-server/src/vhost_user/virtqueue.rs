//! A split virtqueue: which requests the driver has made available, and which it was told the end
//! of.
//!
//! Invariant: each request that is taken is marked as in flight until the driver is told of its
//! end. The driver's indices are checked where they are read. What each request takes is done here,
//! with one look-up of a region for each access; `virtio_queue` checks the addresses and does the rest.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use nowait::{Error, Operation};
use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Address, GuestAddress};

use crate::injected_death;
use crate::vhost_user::block_request::Malformed;
use crate::vhost_user::dirty_log::QueueLog;
use crate::vhost_user::guest_memory::GuestMemory;
use crate::vhost_user::inflight_region::InflightQueue;

/// The most descriptors of a queue.
/// Beyond it: the message is refused.
pub(crate) const MAX_QUEUE_SIZE: u16 = 32768;
/// Bytes before the entries of an available ring, and of one of them.
const AVAILABLE_HEADER_BYTES: u64 = 4;
const AVAILABLE_ENTRY_BYTES: u64 = 2;
/// Where the index is in the header.
const AVAILABLE_INDEX_AT: u64 = 2;
/// Bytes before the elements of a used ring, and of one of them.
const USED_HEADER_BYTES: u64 = 4;
const USED_ELEMENT_BYTES: u64 = 8;
/// Where the index is in the header.
const USED_INDEX_AT: u64 = 2;

/// Where a queue is in the guest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingAddresses {
    /// Descriptors, a power of two.
    pub(crate) size: u16,
    pub(crate) descriptors: GuestAddress,
    pub(crate) available: GuestAddress,
    pub(crate) used: GuestAddress,
}

/// A queue.
pub(crate) struct Virtqueue {
    queue: Queue,
    memory: Arc<GuestMemory>,
    inflight: Option<InflightQueue>,
    log: Option<QueueLog>,
    /// Requests that are taken again before new ones.
    again: VecDeque<u16>,
    /// Requests that have ended since it was asked whether the driver wants to be called.
    ended: u16,
}

/// Where a simulation may have the server die.
#[inline(always)]
fn live_on() -> Result<(), Malformed> {
    if injected_death::dies() { Err(Malformed("the server has died")) } else { Ok(()) }
}

impl Virtqueue {
    /// The queue at `addresses`, from the available entry `base` on, or from the requests on that an
    /// earlier server has left in `inflight`.
    ///
    /// # Errors
    /// `EINVAL`: the size or an address cannot be.
    pub(crate) fn new(
        addresses: RingAddresses,
        (base, event_idx): (u16, bool),
        memory: Arc<GuestMemory>,
        mut inflight: Option<InflightQueue>,
        log: Option<QueueLog>,
    ) -> Result<Self, Error> {
        let failed = |_| Error::new(libc::EINVAL, Operation::SetUp);
        let RingAddresses { size, descriptors, available, used } = addresses;
        let mut queue = Queue::new(MAX_QUEUE_SIZE).map_err(failed)?;
        queue.try_set_size(size).map_err(failed)?;
        queue.try_set_desc_table_address(descriptors).map_err(failed)?;
        queue.try_set_avail_ring_address(available).map_err(failed)?;
        queue.try_set_used_ring_address(used).map_err(failed)?;
        queue.set_event_idx(event_idx);
        queue.set_ready(true);
        if !queue.is_valid(memory.bytes()) {
            return Err(Error::new(libc::EINVAL, Operation::SetUp));
        }
        let used_index = queue.used_idx(memory.bytes(), Ordering::Acquire).map_err(failed)?.0;
        let mut again = VecDeque::with_capacity(usize::from(size));
        again.extend(inflight.iter_mut().flat_map(|queue| queue.recover(size, used_index)));
        let left = again.len() as u16;
        queue.set_next_avail(if left > 0 { used_index.wrapping_add(left) } else { base });
        queue.set_next_used(used_index);
        Ok(Self { queue, memory, inflight, log, again, ended: 0 })
    }

    /// The guest's memory.
    #[inline]
    pub(crate) fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Its descriptors: their address and their number.
    #[inline]
    pub(crate) fn table(&self) -> (GuestAddress, u16) {
        (GuestAddress(self.queue.desc_table()), self.queue.size())
    }

    /// Takes the next request: the index of its first descriptor.
    ///
    /// # Errors
    /// [`Malformed`]: an index of the driver cannot be.
    #[inline]
    pub(crate) fn take(&mut self) -> Result<Option<u16>, Malformed> {
        if let Some(head) = self.again.pop_front() {
            return Ok(Some(head));
        }
        let outside = Malformed("the available ring is outside of the memory");
        let (size, next) = (self.queue.size(), self.queue.next_avail());
        let waiting = self.available_index().ok_or(outside)?.wrapping_sub(next);
        if waiting > size {
            return Err(Malformed("more requests than the queue has room for"));
        }
        if waiting == 0 {
            return Ok(None);
        }
        let entry = AVAILABLE_HEADER_BYTES + u64::from(next % size) * AVAILABLE_ENTRY_BYTES;
        let entry = GuestAddress(self.queue.avail_ring()).checked_add(entry).ok_or(outside)?;
        let head = self.memory.load(entry, Ordering::Acquire).map(u16::from_le).ok_or(outside)?;
        if head >= size {
            return Err(Malformed("a request begins outside of the descriptor table"));
        }
        self.queue.set_next_avail(next.wrapping_add(1));
        if let Some(inflight) = &mut self.inflight {
            inflight.mark(head);
        }
        Ok(Some(head))
    }

    /// Whether there may be a request to take. Also if the driver's index cannot be: the reason is
    /// found when a request is taken.
    #[inline]
    pub(crate) fn has_next(&self) -> bool {
        self.has_again() || self.available_index() != Some(self.queue.next_avail())
    }

    /// The index behind the last entry that the driver has made available.
    #[inline]
    fn available_index(&self) -> Option<u16> {
        let at = GuestAddress(self.queue.avail_ring()).checked_add(AVAILABLE_INDEX_AT)?;
        self.memory.load(at, Ordering::Acquire).map(u16::from_le)
    }

    /// Takes the next of the requests that were taken before.
    pub(crate) fn take_again(&mut self) -> Option<u16> {
        self.again.pop_front()
    }

    /// Whether there is one of them.
    pub(crate) fn has_again(&self) -> bool {
        !self.again.is_empty()
    }

    /// The request at `head`, taken last, is taken again the next time.
    pub(crate) fn put_back(&mut self, head: u16) {
        self.again.push_front(head);
    }

    /// Tells the driver that the request at `head` has ended, with `len` bytes written to its
    /// memory.
    ///
    /// # Errors
    /// [`Malformed`]: the ring is not in memory any more.
    #[inline]
    pub(crate) fn finish(&mut self, head: u16, len: u32) -> Result<(), Malformed> {
        live_on()?;
        if let Some(inflight) = &mut self.inflight {
            inflight.begin_end(head);
        }
        live_on()?;
        let outside = Malformed("the used ring is outside of the memory");
        let (ring, next) = (GuestAddress(self.queue.used_ring()), self.queue.next_used());
        let slot = u64::from(next % self.queue.size());
        let element = ring.checked_add(USED_HEADER_BYTES + slot * USED_ELEMENT_BYTES);
        let ended = (u64::from(head) | u64::from(len) << 32).to_le();
        let index = ring.checked_add(USED_INDEX_AT).ok_or(outside)?;
        let next = next.wrapping_add(1);
        // The element is there before the index tells of it.
        let added = element.is_some_and(|element| self.memory.write(ended, element))
            && self.memory.store(next.to_le(), index, Ordering::Release);
        if !added {
            return Err(outside);
        }
        self.queue.set_next_used(next);
        self.ended = self.ended.wrapping_add(1);
        self.log_used(USED_HEADER_BYTES + slot * USED_ELEMENT_BYTES, USED_ELEMENT_BYTES);
        self.log_used(USED_INDEX_AT, 2);
        live_on()?;
        if let Some(inflight) = &mut self.inflight {
            inflight.end(head, self.queue.next_used());
        }
        live_on()
    }

    /// Whether the driver wants to be called for what has ended since this was asked last.
    ///
    /// # Errors
    /// Like [`Virtqueue::finish`].
    #[inline]
    pub(crate) fn wants_call(&mut self) -> Result<bool, Malformed> {
        // The driver sees the used index, or this thread the driver's newest wish.
        fence(Ordering::SeqCst);
        let ended = std::mem::take(&mut self.ended);
        if !self.queue.event_idx_enabled() {
            let flags = self.memory.load(GuestAddress(self.queue.avail_ring()), Ordering::Relaxed);
            let flags = flags.map(u16::from_le);
            let flags = flags.ok_or(Malformed("the available ring is outside of the memory"))?;
            // A call for nothing would be a kick, if the driver has one eventfd for both.
            return Ok(ended > 0 && flags & VRING_AVAIL_F_NO_INTERRUPT as u16 == 0);
        }
        let size = u64::from(self.queue.size());
        let wish = AVAILABLE_HEADER_BYTES + size * AVAILABLE_ENTRY_BYTES;
        let wish = GuestAddress(self.queue.avail_ring()).checked_add(wish);
        let wish = wish.and_then(|at| self.memory.load(at, Ordering::Relaxed)).map(u16::from_le);
        let wish = wish.ok_or(Malformed("the available ring is outside of the memory"))?;
        Ok(self.queue.next_used().wrapping_sub(wish).wrapping_sub(1) < ended)
    }

    /// Has the driver kick for its next request. Returns whether there is one already.
    ///
    /// # Errors
    /// Like [`Virtqueue::finish`].
    #[inline]
    pub(crate) fn ask_for_kick(&mut self) -> Result<bool, Malformed> {
        let asked = self.queue.enable_notification(self.memory.bytes());
        let size = u64::from(self.queue.size());
        self.log_used(USED_HEADER_BYTES + size * USED_ELEMENT_BYTES, 2);
        asked.map_err(|_| Malformed("the used ring is outside of the memory"))
    }

    /// The available entry that is taken next.
    pub(crate) fn base(&self) -> u16 {
        self.queue.next_avail()
    }

    /// The log of memory that is written to, while the VMM keeps one.
    #[inline]
    pub(crate) fn log(&self) -> Option<&QueueLog> {
        self.log.as_ref()
    }

    /// Whether memory that the VMM shares was missing when it was accessed.
    #[inline]
    pub(crate) fn has_faulted(&self) -> bool {
        self.memory.has_faulted()
            || self.inflight.as_ref().is_some_and(InflightQueue::has_faulted)
            || self.log.as_ref().is_some_and(|log| log.log.has_faulted())
    }

    /// Logs `len` bytes written at `at` of the used ring.
    #[inline]
    fn log_used(&self, at: u64, len: u64) {
        if let Some(QueueLog { log, used_ring: Some(address) }) = &self.log {
            log.mark(address.saturating_add(at), len);
        }
    }
}
