//! The ways to submit a request to an engine.
//!
//! Reads are the most of what is submitted: their simple path is compiled into the caller, that of all else
//! is not, so that each is compiled for its operation alone.
//!
//! Invariant: a request that is refused has changed nothing, and its buffer goes back with the refusal.
#![allow(unsafe_code)]

use crate::block::block_map::BlockMap;
use crate::blocking::sync_io;
use crate::engine::Engine;
use crate::engine::attached_device::DeviceHandle;
use crate::engine::completion::Rejected;
use crate::engine::simple_path::Verdict;
use crate::memory::buffer_pool::PooledBuffer;
use crate::queue::IoQueue;
use crate::types::byte_range::ByteRange;
use crate::types::error::{Error, Operation};
use crate::types::iovec::{self, IoSegment};
use crate::types::request::{Flags, Op, Request};

impl<Q: IoQueue, M: BlockMap + ?Sized> Engine<Q, M> {
    /// Submits a read or write of the first bytes of `buf`, which came from [`Engine::buffer`]: best for `io.range` of
    /// `device`, whose alignment it then has.
    ///
    /// The upper 32 bits of `tag` are the client's number: the workers serve the clients in turn,
    /// so that a client with many slow requests does not hold up the others. This applies to every
    /// way to submit.
    ///
    /// # Errors
    /// [`Rejected`], with the buffer; `EINVAL` also for a request that is longer than the buffer.
    #[inline(always)]
    pub fn submit(
        &mut self,
        device: &DeviceHandle<M>,
        io: Request,
        buf: PooledBuffer,
        tag: u64,
    ) -> Result<(), Rejected> {
        match io.op {
            Op::Read => self.submit_buffer(device, io, buf, tag),
            _ => self.submit_other_buffer(device, io, buf, tag),
        }
    }

    /// Requests of [`Engine::submit`] that are not reads.
    #[inline(never)]
    fn submit_other_buffer(
        &mut self,
        device: &DeviceHandle<M>,
        io: Request,
        buf: PooledBuffer,
        tag: u64,
    ) -> Result<(), Rejected> {
        self.submit_buffer(device, io, buf, tag)
    }

    #[inline(always)]
    fn submit_buffer(
        &mut self,
        device: &DeviceHandle<M>,
        io: Request,
        buf: PooledBuffer,
        tag: u64,
    ) -> Result<(), Rejected> {
        let base = buf.base();
        let verdict = if io.range.len <= buf.len() as u64 {
            self.dispatcher.simple(device.attached(), io, base)
        } else {
            Verdict::General
        };
        match verdict {
            Verdict::Simple(extent) => {
                let (queue, buf) = (&mut self.queue, Some(buf));
                // SAFETY: the buffer holds the range and moves into the slot, where it stays until
                // the request is given back.
                unsafe {
                    self.dispatcher.submit_simple(
                        queue,
                        device.attached(),
                        io,
                        extent,
                        base,
                        buf,
                        tag,
                    )
                }
            }
            Verdict::MustWait => self.dispatcher.submit_to_worker(
                device.attached(),
                (io.op, io.flags),
                io.range,
                base,
                Some(buf),
                tag,
            ),
            Verdict::General => self.submit_checked(device, (io.op, io.flags), io.range, buf, tag),
        }
    }

    #[inline(never)]
    fn submit_checked(
        &mut self,
        device: &DeviceHandle<M>,
        (op, flags): (Op, Flags),
        range: ByteRange,
        buf: PooledBuffer,
        tag: u64,
    ) -> Result<(), Rejected> {
        let io = Request { op, flags, range };
        let fits = io.range.len <= buf.len() as u64;
        if !fits || !matches!(io.op, Op::Read | Op::Write) {
            let error = Error::new(libc::EINVAL, Operation::Validate).at(io.range);
            return Err(Rejected { error, buf: Some(buf) });
        }
        let segment = IoSegment { base: buf.base(), len: io.range.len as usize };
        self.dispatcher.submit_general(
            &mut self.queue,
            device.attached(),
            io,
            &[segment],
            Some(buf),
            tag,
        )
    }

    /// Submits a request that needs no memory: flush, discard, zero, status.
    ///
    /// # Errors
    /// [`Rejected`], without a buffer.
    pub fn submit_no_data(
        &mut self,
        device: &DeviceHandle<M>,
        io: Request,
        tag: u64,
    ) -> Result<(), Rejected> {
        if matches!(io.op, Op::Read | Op::Write) {
            let error = Error::new(libc::EINVAL, Operation::Validate).at(io.range);
            return Err(Rejected { error, buf: None });
        }
        self.dispatcher.submit_general(&mut self.queue, device.attached(), io, &[], None, tag)
    }

    /// Submits a read or write of memory that the caller keeps. `io.range.len` is at most the
    /// length of the segments together (C06).
    ///
    /// # Errors
    /// [`Rejected`], without a buffer; `EINVAL` for more than 1024 segments (C04) or a negative
    /// length (C05).
    ///
    /// # Safety
    /// The memory stays valid and is not accessed from elsewhere until [`Engine::next`] gives the
    /// request back or [`Engine::settle`] succeeds. Dropping the engine is not enough: if its queue
    /// fails, the drop cannot wait.
    #[inline]
    pub unsafe fn submit_user_memory(
        &mut self,
        device: &DeviceHandle<M>,
        io: Request,
        segments: &[IoSegment],
        tag: u64,
    ) -> Result<(), Rejected> {
        match *segments {
            // SAFETY: as promised by the caller.
            [one] if io.op == Op::Read => unsafe { self.submit_segment(device, io, one, tag) },
            // SAFETY: as promised by the caller.
            [one] => unsafe {
                self.submit_other_segment(device, (io.op, io.flags), io.range, one, tag)
            },
            _ => self.submit_user_memory_checked(device, io.op, io.flags, io.range, segments, tag),
        }
    }

    /// Requests of [`Engine::submit_user_memory`] that are not reads. It takes the request's fields one by
    /// one, as [`Engine::submit_user_memory_checked`] does.
    ///
    /// # Safety
    /// The promise of [`Engine::submit_user_memory`].
    #[inline(never)]
    unsafe fn submit_other_segment(
        &mut self,
        device: &DeviceHandle<M>,
        (op, flags): (Op, Flags),
        range: ByteRange,
        one: IoSegment,
        tag: u64,
    ) -> Result<(), Rejected> {
        // SAFETY: as promised by the caller.
        unsafe { self.submit_segment(device, Request { op, flags, range }, one, tag) }
    }

    /// Requests of [`Engine::submit_user_memory`] with one segment.
    ///
    /// # Safety
    /// The promise of [`Engine::submit_user_memory`].
    #[inline(always)]
    unsafe fn submit_segment(
        &mut self,
        device: &DeviceHandle<M>,
        io: Request,
        one: IoSegment,
        tag: u64,
    ) -> Result<(), Rejected> {
        let fits = io.range.len == one.len as u64;
        let verdict = if fits {
            self.dispatcher.simple(device.attached(), io, one.base)
        } else {
            Verdict::General
        };
        match verdict {
            // SAFETY: as promised by the caller.
            Verdict::Simple(extent) => unsafe {
                self.dispatcher.submit_simple(
                    &mut self.queue,
                    device.attached(),
                    io,
                    extent,
                    one.base,
                    None,
                    tag,
                )
            },
            Verdict::MustWait => self.dispatcher.submit_to_worker(
                device.attached(),
                (io.op, io.flags),
                io.range,
                one.base,
                None,
                tag,
            ),
            Verdict::General => {
                self.submit_user_memory_checked(device, io.op, io.flags, io.range, &[one], tag)
            }
        }
    }

    /// Takes the request's fields one by one and its single segment as a copy, so that a simple
    /// request needs no memory before it is in its slot.
    #[inline(never)]
    fn submit_user_memory_checked(
        &mut self,
        device: &DeviceHandle<M>,
        op: Op,
        flags: Flags,
        range: ByteRange,
        segments: &[IoSegment],
        tag: u64,
    ) -> Result<(), Rejected> {
        let total = sync_io::check_rights(device.disk(), op)
            .and_then(|()| iovec::total(segments))
            .map_err(|error| Rejected { error, buf: None })?;
        let range = ByteRange::new(range.pos, range.len.min(total));
        self.dispatcher.submit_general(
            &mut self.queue,
            device.attached(),
            Request { op, flags, range },
            segments,
            None,
            tag,
        )
    }
}
