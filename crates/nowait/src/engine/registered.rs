//! Requests whose memory is a driver's: a buffer that the driver has registered with the queue, which
//! has a number and no address. The data move between it and storage without a copy.
//!
//! Invariant: such a request is one transfer of the simple path, tried without waiting. All other
//! paths need memory with an address: there the request is refused, and the caller does it with a
//! buffer of the engine.

use crate::block::block_map::BlockMap;
use crate::engine::Engine;
use crate::engine::attached_device::DeviceHandle;
use crate::engine::completion::Rejected;
use crate::engine::requests::reject_full;
use crate::engine::simple_path::Verdict;
use crate::queue::IoQueue;
use crate::types::request::{Flags, Request};

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
            Verdict::Simple(extent) => self.dispatcher.submit_registered(
                &mut self.queue,
                device.attached(),
                io,
                extent,
                number,
                tag,
            ),
            Verdict::MustWait | Verdict::General => Err(reject_full(io.range, None)),
        }
    }
}
