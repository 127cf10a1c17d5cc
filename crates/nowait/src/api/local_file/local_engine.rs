//! An engine of any queue behind one type, so that a file does not name the queue.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::block::block_map::BlockMap;
use crate::block::device::BlockDevice;
use crate::engine::Engine;
use crate::engine::attached_device::DeviceHandle;
use crate::engine::completion::Completion;
use crate::memory::arena_memory::ArenaMemory;
use crate::queue::{Interest, IoQueue};
use crate::types::error::Error;
use crate::types::iovec::IoSegment;
use crate::types::request::{Op, Request};
use crate::types::token::WAKE_EVENT;

/// A device of any map that is attached.
pub(crate) type AnyDevice = DeviceHandle<dyn BlockMap>;

/// The calls of [`Engine`] that files need.
pub(crate) trait LocalEngine {
    fn attach(&mut self, disk: Arc<BlockDevice<dyn BlockMap>>) -> Result<AnyDevice, Error>;
    fn detach(&mut self, device: &AnyDevice) -> Result<(), Error>;
    /// Submits a request of any kind; `segments` are the memory of a read or write, one of them perhaps a part of `arena`.
    ///
    /// # Safety
    /// As for [`Engine::submit_user_memory`].
    unsafe fn submit_any(
        &mut self,
        device: &AnyDevice,
        io: Request,
        segments: &[IoSegment],
        arena: Option<&Arc<ArenaMemory>>,
        tag: u64,
    ) -> Result<(), Error>;
    fn poll(&mut self) -> Result<(), Error>;
    fn sleep(&mut self, timeout: Option<Duration>) -> Result<(), Error>;
    fn next(&mut self) -> Option<Completion>;
    fn has_completions(&mut self) -> bool;
    fn in_flight(&self) -> usize;
    fn free_slots(&self) -> usize;
    fn settle(&mut self) -> Result<(), Error>;
    fn fd(&self) -> BorrowedFd<'_>;
    /// `sleep` ends when `fd` becomes readable.
    fn watch_waker(&mut self, fd: BorrowedFd<'_>) -> Result<(), Error>;
    fn unwatch_waker(&mut self, fd: BorrowedFd<'_>);
}

impl<Q: IoQueue> LocalEngine for Engine<Q, dyn BlockMap> {
    fn attach(&mut self, disk: Arc<BlockDevice<dyn BlockMap>>) -> Result<AnyDevice, Error> {
        Engine::attach(self, disk)
    }

    fn detach(&mut self, device: &AnyDevice) -> Result<(), Error> {
        Engine::detach(self, device)
    }

    // SAFETY: the caller's promise is passed on.
    unsafe fn submit_any(
        &mut self,
        device: &AnyDevice,
        io: Request,
        segments: &[IoSegment],
        arena: Option<&Arc<ArenaMemory>>,
        tag: u64,
    ) -> Result<(), Error> {
        let submitted = match (io.op, arena) {
            (Op::Read | Op::Write, Some(arena)) => {
                let number = self.number_of(arena);
                // SAFETY: as promised by the caller.
                unsafe { self.submit_numbered(device, io, segments, number, tag) }
            }
            // SAFETY: as promised by the caller.
            (Op::Read | Op::Write, None) => unsafe {
                self.submit_user_memory(device, io, segments, tag)
            },
            (Op::Flush | Op::Discard | Op::Zero | Op::Status, _) => {
                self.submit_no_data(device, io, tag)
            }
        };
        submitted.map_err(|rejected| rejected.error)
    }

    fn poll(&mut self) -> Result<(), Error> {
        Engine::poll(self)
    }

    fn sleep(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        self.wait(timeout, &mut |_, _| {})
    }

    fn next(&mut self) -> Option<Completion> {
        Engine::next(self)
    }

    fn has_completions(&mut self) -> bool {
        Engine::has_completions(self)
    }

    fn in_flight(&self) -> usize {
        Engine::in_flight(self)
    }

    fn free_slots(&self) -> usize {
        Engine::free_slots(self)
    }

    fn settle(&mut self) -> Result<(), Error> {
        Engine::settle(self)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        Engine::fd(self)
    }

    fn watch_waker(&mut self, fd: BorrowedFd<'_>) -> Result<(), Error> {
        self.watch(fd, WAKE_EVENT, Interest::Readable)
    }

    fn unwatch_waker(&mut self, fd: BorrowedFd<'_>) {
        self.unwatch(fd, WAKE_EVENT);
    }
}
