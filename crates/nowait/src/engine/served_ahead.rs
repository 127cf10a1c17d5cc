//! Reads whose bytes were read ahead.
//!
//! Invariant: the engine's thread waits for no chunk: a worker does.
#![allow(unsafe_code)]

use crate::block::block_map::BlockMap;
use crate::blocking::worker_pool::WorkerTask;
use crate::engine::attached_device::{AttachedDevice, Count};
use crate::engine::dispatcher::Dispatcher;
use crate::read_ahead::ahead_reads::Served;
use crate::types::io_cursor::ReadCursor;
use crate::types::iovec::IoSegment;
use crate::types::request::{Flags, Op, Request};

impl<M: BlockMap + ?Sized> Dispatcher<M> {
    /// Serves the request `io` in `slot` of a device with read-ahead, if it is a read whose bytes are in
    /// memory, or hands it to a worker if they are being read. False if it needs a transfer.
    #[cold]
    #[inline(never)]
    pub(crate) fn serve_ahead(
        &mut self,
        device: &AttachedDevice<M>,
        slot: u32,
        io: Request,
        segments: &[IoSegment],
    ) -> bool {
        let Some(ahead) = device.disk.read_ahead().filter(|_| io.op == Op::Read) else {
            return false;
        };
        ahead.note(io.range, device.disk.limit());
        // SAFETY: the memory of a request is valid from its submission on, and is not accessed elsewhere.
        let mut memory = unsafe { ReadCursor::new(segments, 0, io.range.len) };
        match ahead.serve(io.range, &mut memory, true) {
            Served::All => {
                device.count(Count::General);
                self.requests_mut().complete(slot, io.range.len as i64);
                true
            }
            Served::Coming if !io.flags.contains(Flags::NOWAIT) => {
                self.requests_mut().slot_mut(slot).segments.set(segments);
                device.count(Count::Worker);
                self.requests_mut().offload(slot, WorkerTask::Run);
                true
            }
            Served::Coming | Served::Not => false,
        }
    }
}
