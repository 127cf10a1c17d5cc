//! Requests whose memory is a driver's: a buffer that the driver has registered with the queue, which
//! has a number and no address. The data move between it and storage without a copy.
//!
//! Invariant: such a request is one transfer of the simple path, tried without waiting. All other
//! paths need memory with an address: there the request is refused, and the caller does it with a
//! buffer of the engine.
#![allow(unsafe_code)]

use crate::block::block_map::{BlockMap, Extent};
use crate::engine::Engine;
use crate::engine::attached_device::{AttachedDevice, DeviceHandle, count};
use crate::engine::completion::Rejected;
use crate::engine::dispatcher::{Dispatcher, push_transfer, reject_full, reject_no_slot};
use crate::engine::simple_path::Verdict;
use crate::engine::slot::{Place, Role, State};
use crate::queue::IoQueue;
use crate::types::request::{Flags, Op, Request};

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
        let io = Request { flags: io.flags.with(Flags::NOWAIT), ..io };
        // The driver keeps its memory aligned; address 0 passes for every alignment.
        match self.dispatcher.simple(&device.0, io, std::ptr::null_mut()) {
            Verdict::Simple(extent) => self.dispatcher.submit_registered(
                &mut self.queue,
                &device.0,
                io,
                extent,
                number,
                tag,
            ),
            Verdict::MustWait | Verdict::General => Err(reject_full(io, None)),
        }
    }
}

impl<M: BlockMap + ?Sized> Dispatcher<M> {
    /// As [`Dispatcher::submit_simple`], for the buffer `number`. Its transfer is not merged with
    /// others: the list of a merged one has addresses.
    fn submit_registered<Q: IoQueue>(
        &mut self,
        queue: &mut Q,
        device: &AttachedDevice<M>,
        io: Request,
        extent: Extent,
        number: u16,
        tag: u64,
    ) -> Result<(), Rejected> {
        let locked = device.simple_path.needs_range_lock(io);
        let Some((slot, request)) = self.pool.alloc() else {
            return Err(reject_no_slot(device, io, locked, None));
        };
        let role = if io.op == Op::Write { Role::Write } else { Role::Read };
        let target = device.target(extent.file);
        request.begin(role, State::Queued, target, io, None, tag);
        count(&device.simple);
        request.locked = locked;
        request.place =
            Place { base: std::ptr::null_mut(), pos: extent.pos, segments: 0, buffer: number };
        let transfer = device.simple_path.transfer(io, target, request.place);
        // SAFETY: the transfer names no address of this process; the kernel holds the driver's
        // memory until it has ended.
        if unsafe { push_transfer(queue, &transfer, slot) } {
            return Ok(());
        }
        Err(self.reject_queue_full(slot))
    }
}
