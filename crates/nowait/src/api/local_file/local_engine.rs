//! An engine of any queue and map behind one type, so that a file names neither.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::block::block_map::BlockMap;
use crate::engine::Engine;
use crate::engine::attached_device::DeviceHandle;
use crate::engine::completion::Completion;
use crate::queue::{FD_TOKEN, Interest, IoQueue, Token};
use crate::types::error::Error;
use crate::types::iovec::IoSegment;
use crate::types::request::{Op, Request};

/// The token under which the descriptor is watched that ends a sleep.
const WAKE_TOKEN: Token = FD_TOKEN | 1 << 59;

/// The calls of [`Engine`] that a file needs.
pub(crate) trait LocalEngine {
    /// Submits a request of any kind; `segment` is the memory of a read or write.
    ///
    /// # Safety
    /// As for [`Engine::submit_user_memory`].
    unsafe fn submit(&mut self, io: Request, segment: IoSegment, tag: u64) -> Result<(), Error>;
    fn poll(&mut self) -> Result<(), Error>;
    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Error>;
    fn next(&mut self) -> Option<Completion>;
    fn has_completions(&mut self) -> bool;
    fn in_flight(&self) -> usize;
    fn settle(&mut self) -> Result<(), Error>;
    fn fd(&self) -> BorrowedFd<'_>;
    /// `wait` ends when `fd` becomes readable.
    fn watch(&mut self, fd: BorrowedFd<'_>) -> Result<(), Error>;
    fn unwatch(&mut self, fd: BorrowedFd<'_>);
}

/// The engine of a file, with the file.
pub(crate) struct FileEngine<Q: IoQueue, M: BlockMap + ?Sized> {
    pub(crate) engine: Engine<Q, M>,
    pub(crate) disk: DeviceHandle<M>,
}

impl<Q: IoQueue, M: BlockMap + ?Sized> LocalEngine for FileEngine<Q, M> {
    // SAFETY: the caller's promise is passed on.
    unsafe fn submit(&mut self, io: Request, segment: IoSegment, tag: u64) -> Result<(), Error> {
        let submitted = match io.op {
            // SAFETY: as promised by the caller.
            Op::Read | Op::Write => unsafe {
                self.engine.submit_user_memory(&self.disk, io, &[segment], tag)
            },
            Op::Flush | Op::Discard | Op::Zero | Op::Status => {
                self.engine.submit_no_data(&self.disk, io, tag)
            }
        };
        submitted.map_err(|rejected| rejected.error)
    }

    fn poll(&mut self) -> Result<(), Error> {
        self.engine.poll()
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        self.engine.wait(timeout, &mut |_, _| {})
    }

    fn next(&mut self) -> Option<Completion> {
        self.engine.next()
    }

    fn has_completions(&mut self) -> bool {
        self.engine.has_completions()
    }

    fn in_flight(&self) -> usize {
        self.engine.in_flight()
    }

    fn settle(&mut self) -> Result<(), Error> {
        self.engine.settle()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.engine.fd()
    }

    fn watch(&mut self, fd: BorrowedFd<'_>) -> Result<(), Error> {
        self.engine.watch(fd, WAKE_TOKEN, Interest::Readable)
    }

    fn unwatch(&mut self, fd: BorrowedFd<'_>) {
        self.engine.unwatch(fd, WAKE_TOKEN);
    }
}
