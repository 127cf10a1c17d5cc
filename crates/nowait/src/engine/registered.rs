//! Requests whose memory is registered with the queue: a part of an arena of the caller, or a driver's, a
//! buffer that the driver has registered with the queue, which has a number and no address. The data move between
//! it and storage without a copy.
//!
//! Invariant: a request of a driver's memory is one transfer of the simple path, tried without waiting. All other
//! paths need memory with an address: there the request is refused, and the caller does it with a
//! buffer of the engine.

#![allow(unsafe_code)]

use std::sync::Arc;

use crate::block::block_map::BlockMap;
use crate::engine::Engine;
use crate::engine::attached_device::DeviceHandle;
use crate::engine::completion::Rejected;
use crate::engine::requests::reject_full;
use crate::engine::simple_path::Verdict;
use crate::memory::arena_memory::ArenaMemory;
use crate::memory::io_arena::IoArena;
use crate::queue::IoQueue;
use crate::types::iovec::IoSegment;
use crate::types::request::{Flags, Request};
use crate::types::transfer::UNREGISTERED;

/// The most arenas whose memory an engine registers and keeps.
const MOST_ARENAS: usize = 64;

impl<Q: IoQueue, M: BlockMap + ?Sized> Engine<Q, M> {
    /// Reserves numbers of buffers for a driver; see [`IoQueue::reserve_buffers`]. `None` also for a
    /// device whose storage cannot say that it would have to wait.
    pub fn reserve_buffers(&mut self, device: &DeviceHandle<M>, count: u16) -> Option<u16> {
        if device.disk().supports_nowait() { self.queue.reserve_buffers(count) } else { None }
    }

    /// Gives back what [`Engine::reserve_buffers`] has reserved from `first` on; the driver has no memory
    /// registered under these numbers.
    pub fn release_buffers(&mut self, first: u16) {
        self.queue.release_buffers(first);
    }

    /// Submits a read or write of the memory that a driver has registered under `number`, one of
    /// those that [`Engine::reserve_buffers`] has reserved, from its first byte on. The request gets
    /// [`Flags::NOWAIT`]. A completion with an error, `EAGAIN` most of all, says nothing about the
    /// image: the caller submits the request again, with a buffer of the engine.
    ///
    /// The kernel checks the number and the length: a wrong one is `EFAULT`.
    ///
    /// # Errors
    /// [`Rejected`] with `EAGAIN`: the request has no single extent of aligned data, would have to
    /// wait, or there is no slot.
    #[inline]
    pub fn submit_registered(
        &mut self,
        device: &DeviceHandle<M>,
        io: Request,
        number: u16,
        tag: u64,
    ) -> Result<(), Rejected> {
        let io = Request { flags: io.flags | Flags::NOWAIT, ..io };
        // The driver keeps its memory aligned; address 0 passes for every alignment.
        match self.dispatcher.simple(device.attached(), io, std::ptr::null_mut()) {
            // SAFETY: there is no address.
            Verdict::Simple(extent) => unsafe {
                self.dispatcher.submit_registered(
                    &mut self.queue,
                    device.attached(),
                    io,
                    extent,
                    (std::ptr::null_mut(), number),
                    tag,
                )
            },
            Verdict::MustWait | Verdict::General => Err(reject_full(io.range, None)),
        }
    }

    /// Registers the memory of `arena` with the queue, so that requests of all devices of the engine that use parts of
    /// it cost less. False where that is not possible: without a ring, with more than 64 arenas, and beyond the limit on
    /// locked memory; the requests are served nevertheless. The engine keeps the memory until it ends.
    pub fn register(&mut self, arena: &IoArena) -> bool {
        self.number_of(arena.memory()) != UNREGISTERED
    }

    /// Like [`Engine::submit_user_memory`] with one segment, which is a part of `arena`.
    ///
    /// # Errors
    /// Like [`Engine::submit_user_memory`].
    ///
    /// # Safety
    /// As for [`Engine::submit_user_memory`].
    pub unsafe fn submit_arena_memory(
        &mut self,
        device: &DeviceHandle<M>,
        io: Request,
        segment: IoSegment,
        arena: &IoArena,
        tag: u64,
    ) -> Result<(), Rejected> {
        let number = self.number_of(arena.memory());
        // SAFETY: as promised by the caller.
        unsafe { self.submit_numbered(device, io, &[segment], number, tag) }
    }

    /// The number of the memory of an arena, which is registered if it is new.
    pub(crate) fn number_of(&mut self, arena: &Arc<ArenaMemory>) -> u16 {
        if let Some((_, number)) = self.arenas.iter().find(|(known, _)| Arc::ptr_eq(known, arena)) {
            return *number;
        }
        if self.arenas.len() >= MOST_ARENAS {
            return UNREGISTERED;
        }
        let IoSegment { base, len } = arena.segment();
        // SAFETY: the engine keeps the memory, and drops its queue before.
        let number = unsafe { self.queue.register(base, len) }.unwrap_or(UNREGISTERED);
        self.arenas.push((arena.clone(), number));
        number
    }

    /// Submits a request whose memory, if it is one segment, is registered under `number`.
    ///
    /// # Safety
    /// As for [`Engine::submit_user_memory`].
    pub(crate) unsafe fn submit_numbered(
        &mut self,
        device: &DeviceHandle<M>,
        io: Request,
        segments: &[IoSegment],
        number: u16,
        tag: u64,
    ) -> Result<(), Rejected> {
        if let [segment] = segments
            && number != UNREGISTERED
            && io.range.len == segment.len as u64
            && let Verdict::Simple(extent) =
                self.dispatcher.simple(device.attached(), io, segment.base)
        {
            let (queue, memory) = (&mut self.queue, (segment.base, number));
            let device = device.attached();
            // SAFETY: as promised by the caller.
            return unsafe {
                self.dispatcher.submit_registered(queue, device, io, extent, memory, tag)
            };
        }
        // SAFETY: as promised by the caller.
        unsafe { self.submit_user_memory(device, io, segments, tag) }
    }
}
