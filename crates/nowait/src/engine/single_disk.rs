//! An engine with one device, for programs whose requests are all of that device.
//!
//! Invariant: the device is attached for as long as the engine is there.
#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::block::block_map::BlockMap;
use crate::block::device::BlockDevice;
use crate::blocking::worker_pool::WorkerPool;
use crate::engine::Engine;
use crate::engine::attached_device::DeviceHandle;
use crate::engine::completion::{Rejected, Stats};
use crate::memory::buffer_pool::PooledBuffer;
use crate::queue::IoQueue;
use crate::types::byte_range::ByteRange;
use crate::types::config::Config;
use crate::types::error::Error;
use crate::types::iovec::IoSegment;
use crate::types::request::Request;

/// An [`Engine`] with one device.
pub struct SingleDisk<Q: IoQueue, M: BlockMap + ?Sized> {
    engine: Engine<Q, M>,
    device: DeviceHandle<M>,
}

impl<Q: IoQueue, M: BlockMap + ?Sized> SingleDisk<Q, M> {
    /// An engine to which `disk` is attached.
    ///
    /// # Errors
    /// Like [`Engine::new`] and [`Engine::attach`].
    pub fn new(
        disk: Arc<BlockDevice<M>>,
        workers: WorkerPool,
        queue: Q,
        config: Config,
    ) -> Result<Self, Error> {
        let mut engine = Engine::new(queue, workers, config)?;
        let device = engine.attach(disk)?;
        Ok(Self { engine, device })
    }

    /// The device.
    #[inline]
    #[must_use]
    pub fn disk(&self) -> &Arc<BlockDevice<M>> {
        self.device.disk()
    }

    /// The handle of the device.
    #[inline]
    #[must_use]
    pub fn device(&self) -> &DeviceHandle<M> {
        &self.device
    }

    /// Like [`Engine::buffer`].
    #[inline]
    pub fn buffer(&mut self, range: ByteRange) -> Option<PooledBuffer> {
        self.engine.buffer(&self.device, range)
    }

    /// Like [`Engine::submit`].
    ///
    /// # Errors
    /// Like [`Engine::submit`].
    #[inline]
    pub fn submit(&mut self, io: Request, buf: PooledBuffer, tag: u64) -> Result<(), Rejected> {
        self.engine.submit(&self.device, io, buf, tag)
    }

    /// Like [`Engine::submit_no_data`].
    ///
    /// # Errors
    /// Like [`Engine::submit_no_data`].
    pub fn submit_no_data(&mut self, io: Request, tag: u64) -> Result<(), Rejected> {
        self.engine.submit_no_data(&self.device, io, tag)
    }

    /// Like [`Engine::submit_user_memory`].
    ///
    /// # Errors
    /// Like [`Engine::submit_user_memory`].
    ///
    /// # Safety
    /// As for [`Engine::submit_user_memory`].
    #[inline]
    pub unsafe fn submit_user_memory(
        &mut self,
        io: Request,
        segments: &[IoSegment],
        tag: u64,
    ) -> Result<(), Rejected> {
        // SAFETY: as promised by the caller.
        unsafe { self.engine.submit_user_memory(&self.device, io, segments, tag) }
    }

    /// The counts of the device, with those of the engine's pool and of polling.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let Stats { pool, polled, .. } = self.engine.stats();
        Stats { pool, polled, ..self.engine.stats_of(&self.device) }
    }
}

impl<Q: IoQueue, M: BlockMap + ?Sized> Deref for SingleDisk<Q, M> {
    type Target = Engine<Q, M>;
    fn deref(&self) -> &Self::Target {
        &self.engine
    }
}

impl<Q: IoQueue, M: BlockMap + ?Sized> DerefMut for SingleDisk<Q, M> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.engine
    }
}
