//! The engine: submit, poll, wait; one for each thread.
//!
//! Invariant: every accepted request, also one that fails, is given back exactly once by `next`
//! (C41); memory that the kernel or a worker can see is held until then (C45).
#![allow(unsafe_code)]

mod fragment;
pub(crate) mod deadlines;
mod slot;
mod transfer_result;
pub(crate) mod pool;
mod per_device;
mod back_off;
pub(crate) mod completion;
pub(crate) mod simple_path;
pub(crate) mod attached_device;
mod device_table;
mod shared_syncs;
mod worker_exchange;
mod inline_completion;
mod requests;
mod merge;
mod deferred_overwrites;
mod vectored;
mod split_requests;
mod dispatcher;
mod served_ahead;
mod stopped_requests;
mod submit;
mod registered;
pub(crate) mod single_disk;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::block::block_map::BlockMap;
use crate::block::device::BlockDevice;
use crate::blocking::worker_pool::WorkerPool;
use crate::memory::arena_memory::ArenaMemory;
use crate::memory::buffer_pool::{Budget, BufferPool, PooledBuffer};
use crate::queue::{Interest, IoQueue};
use crate::threads::fork_mark;
use crate::types::byte_range::ByteRange;
use crate::types::config::Config;
use crate::types::error::{Error, Operation};
use crate::types::request::ExtentStatus;
use crate::types::token::{self, Token, WORKERS_EVENT};
use crate::types::{alignment, iovec};
use attached_device::DeviceHandle;
use completion::{Completion, Stats};
use dispatcher::Dispatcher;

/// One thread's engine, for any number of devices.
///
/// ```
/// # use std::sync::Arc;
/// use nowait::{AioThreadQueue, BlockDevice, ByteRange, Config, Engine};
/// use nowait::{Flags, Op, OpenOptions, Request, WorkerPool};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("disk.img");
/// # std::fs::write(&path, [7; 65536])?;
/// let config = Config::default();
/// let mut engine = Engine::new(AioThreadQueue::new(config.slots)?, WorkerPool::new(4), config)?;
/// let disk = engine.attach(Arc::new(BlockDevice::open(&path, OpenOptions::default())?))?;
/// for tag in 0..4 {
///     let range = ByteRange::new(tag * 4096, 4096);
///     let buf = engine.buffer(&disk, range).ok_or("no memory")?;
///     let io = Request { op: Op::Read, flags: Flags::NONE, range };
///     engine.submit(&disk, io, buf, tag).map_err(|rejected| rejected.error)?;
/// }
/// let mut bytes = 0;
/// while engine.in_flight() > 0 {
///     engine.wait(None, &mut |_, _| {})?;
///     while let Some(done) = engine.next() {
///         bytes += done.result()?;
///     }
/// }
/// assert_eq!(bytes, 4 * 4096);
/// # Ok(())
/// # }
/// ```
pub struct Engine<Q: IoQueue, M: BlockMap + ?Sized> {
    pub(crate) dispatcher: Dispatcher<M>,
    queue: Q,
    buffers: BufferPool,
    /// Memory of callers, and its number in the queue. It is dropped after the queue.
    arenas: Vec<(Arc<ArenaMemory>, u16)>,
}

impl<Q: IoQueue, M: BlockMap + ?Sized> Engine<Q, M> {
    /// An engine on `queue` without devices; requests that must wait go to `workers`.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: the wake-up descriptor could not be made or watched. `EOPNOTSUPP` in a
    /// child process after fork(2), if its parent has made an engine or read ahead.
    pub fn new(queue: Q, workers: WorkerPool, config: Config) -> Result<Self, Error> {
        let budgets = [(); 2].map(|()| Budget::new(config.buffer_bytes));
        Self::with_budgets(queue, workers, config, budgets)
    }

    /// Like [`Engine::new`], with buffers taken from `budget` in place of [`Config::buffer_bytes`].
    /// Other engines may share the budget; memory that one engine keeps for its next requests is
    /// not available to the others.
    ///
    /// # Errors
    /// Like [`Engine::new`].
    #[doc(hidden)]
    pub fn sharing(
        queue: Q,
        workers: WorkerPool,
        config: Config,
        budget: &Budget,
    ) -> Result<Self, Error> {
        Self::with_budgets(queue, workers, config, [budget.clone(), budget.clone()])
    }

    fn with_budgets(
        mut queue: Q,
        workers: WorkerPool,
        config: Config,
        [buffers, bounce]: [Budget; 2],
    ) -> Result<Self, Error> {
        if fork_mark::is_child() {
            return Err(Error::new(libc::EOPNOTSUPP, Operation::SetUp));
        }
        fork_mark::set();
        let dispatcher = Dispatcher::new(workers, config, bounce)?;
        queue.events_mut().watch(
            dispatcher.requests().worker_fd(),
            WORKERS_EVENT,
            Interest::Readable,
        )?;
        Ok(Self { dispatcher, queue, buffers: BufferPool::new(buffers), arenas: Vec::new() })
    }

    /// Attaches a device, which other engines may serve at the same time. Requests of other devices
    /// may be in flight.
    ///
    /// # Errors
    /// Errors of [`IoQueue::attach`].
    pub fn attach(&mut self, disk: Arc<BlockDevice<M>>) -> Result<DeviceHandle<M>, Error> {
        let files = disk.queue_files();
        let first = self.queue.attach(&files)?;
        let files = first..first + files.len() as u32;
        Ok(DeviceHandle::new(self.dispatcher.requests_mut().attach(disk, files)))
    }

    /// Detaches a device: a later request of it is refused with `ENODEV`. Those in flight complete, and
    /// its files are in the queue until the last of them was given back.
    ///
    /// # Errors
    /// `EINVAL` for a device of another engine, `ENODEV` for one that is detached already.
    pub fn detach(&mut self, device: &DeviceHandle<M>) -> Result<(), Error> {
        self.dispatcher.requests_mut().detach(device.attached())?;
        self.release_detached();
        Ok(())
    }

    /// Forgets the detached devices that no slot names any more.
    fn release_detached(&mut self) {
        let queue = &mut self.queue;
        self.dispatcher.release_detached(|device| {
            let files = device.files();
            queue.detach(files.start, files.len() as u32);
        });
    }

    /// A buffer with the bytes of a request of `range` of `device`. `None` when [`Config::buffer_bytes`] are in use, or `range` is
    /// longer than memory could hold.
    #[inline]
    pub fn buffer(&mut self, device: &DeviceHandle<M>, range: ByteRange) -> Option<PooledBuffer> {
        if range.len > iovec::MAX_TRANSFER_BYTES {
            return None;
        }
        let block = device.disk().alignment().offset;
        // The buffer and the device are aligned alike, with room for all blocks around the range.
        let offset = range.pos & (u64::from(block) - 1);
        let room = alignment::round_up(offset + range.len, block);
        let queue = &mut self.queue;
        let place = (room as usize, offset as usize, range.len as u32);
        self.buffers.get(place, |base, bytes| {
            // SAFETY: a chunk lives until the pool and every buffer are gone; the engine drops its
            // queue before its pool.
            unsafe { queue.register(base, bytes) }
        })
    }

    /// Submits the queued transfers and reaps completions, without waiting.
    ///
    /// # Errors
    /// The errno of io_uring_enter(2); requests stay in flight.
    #[inline]
    pub fn poll(&mut self) -> Result<(), Error> {
        self.dispatcher.start_collected(&mut self.queue);
        self.queue.submit()?;
        self.reap(&mut |_, _| {})
    }

    /// Like [`Engine::poll`]; events of watched descriptors go to `watched`.
    ///
    /// # Errors
    /// As for [`Engine::poll`].
    #[inline]
    pub fn poll_watched(&mut self, watched: &mut impl FnMut(Token, i32)) -> Result<(), Error> {
        self.dispatcher.start_collected(&mut self.queue);
        self.queue.submit()?;
        self.reap(watched)
    }

    /// Submits the queued transfers, sleeps until a request has ended, a watched descriptor is
    /// ready, or `timeout` has passed, and reaps completions.
    ///
    /// # Errors
    /// As for [`Engine::poll`].
    pub fn wait(
        &mut self,
        timeout: Option<Duration>,
        watched: &mut impl FnMut(Token, i32),
    ) -> Result<(), Error> {
        self.dispatcher.start_collected(&mut self.queue);
        if self.dispatcher.requests().pool().has_done() {
            self.queue.submit()?;
        } else {
            self.queue.wait(self.dispatcher.requests().until_deadline(timeout))?;
        }
        self.reap(watched)
    }

    #[inline]
    fn reap(&mut self, watched: &mut impl FnMut(Token, i32)) -> Result<(), Error> {
        match self.dispatcher.requests().config().inline_completion {
            true => self.drain::<true>(watched),
            false => self.drain_by_workers(watched),
        }
        if self.dispatcher.requests().needs_attention() { self.attend() } else { Ok(()) }
    }

    /// Steps of a poll beside the completion of full reads.
    #[inline(never)]
    fn attend(&mut self) -> Result<(), Error> {
        self.dispatcher.attend(&mut self.queue)?;
        self.release_detached();
        self.dispatcher.attended();
        Ok(())
    }

    /// Handles what the queue has completed. `INLINE_COMPLETION` is the
    /// switch, so that it is not asked for each of them.
    #[inline(always)]
    fn drain<const INLINE_COMPLETION: bool>(&mut self, watched: &mut impl FnMut(Token, i32)) {
        let dispatcher = &mut self.dispatcher;
        self.queue.drain_completions(|token, outcome| {
            if !dispatcher.on_transfer_done::<INLINE_COMPLETION>(token, outcome) {
                on_event(dispatcher, token, outcome, watched);
            }
        });
    }

    /// [`Self::drain`] with the switch off.
    #[inline(never)]
    fn drain_by_workers(&mut self, watched: &mut impl FnMut(Token, i32)) {
        self.drain::<false>(watched);
    }

    /// Waits until nothing is in flight and drops the completions. To be called before memory that
    /// requests were submitted with is freed.
    ///
    /// # Errors
    /// As for [`Engine::poll`]: the queue has failed. The kernel or a worker may use the memory of
    /// the requests in flight at any later time; it must be leaked (C45).
    pub fn settle(&mut self) -> Result<(), Error> {
        loop {
            while self.next().is_some() {}
            if self.dispatcher.in_flight() == 0 {
                return Ok(());
            }
            self.wait(None, &mut |_, _| {})?;
        }
    }

    /// The next request that has ended, in the order in which they ended.
    #[inline]
    #[allow(clippy::should_implement_trait, reason = "an engine is not an iterator: it never ends")]
    pub fn next(&mut self) -> Option<Completion> {
        self.dispatcher.requests_mut().next()
    }

    /// The result of an [`Op::Status`](crate::Op::Status) that was given back under `tag`: the extents
    /// of its range from its start on, possibly not to its end.
    pub fn take_extents(&mut self, tag: u64) -> Vec<ExtentStatus> {
        self.dispatcher.requests_mut().take_extents(tag)
    }

    /// Whether [`Engine::next`] would return a completion.
    #[inline]
    #[must_use]
    pub fn has_done(&self) -> bool {
        self.dispatcher.requests().pool().has_done()
    }

    /// Whether [`Engine::poll`] would find a completion; without a system call where the queue
    /// allows that.
    #[inline]
    pub fn has_completions(&mut self) -> bool {
        self.dispatcher.requests().pool().has_done()
            || self.dispatcher.has_run()
            || self.queue.has_completions()
    }

    /// Requests that were accepted and not yet given back.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.dispatcher.in_flight()
    }

    /// Whether another request would find a slot.
    #[inline]
    #[must_use]
    pub fn has_free_slot(&self) -> bool {
        self.free_slots() > 0
    }

    /// How many further requests, or fragments of requests, would find a slot.
    #[inline]
    #[must_use]
    pub fn free_slots(&self) -> usize {
        self.dispatcher.requests().pool().room()
    }

    /// Reports `token` whenever `fd` is ready. The token has [`FD_TOKEN`](crate::FD_TOKEN) set and
    /// bits 60 to 62 clear.
    ///
    /// # Errors
    /// `EINVAL` for another token; as for [`EventSource::watch`](crate::EventSource::watch).
    pub fn watch(
        &mut self,
        fd: BorrowedFd<'_>,
        token: Token,
        interest: Interest,
    ) -> Result<(), Error> {
        if !token::is_of_caller(token) {
            return Err(Error::new(libc::EINVAL, Operation::SetUp));
        }
        self.queue.events_mut().watch(fd, token, interest)
    }

    /// Ends a watch; to be called before the descriptor is closed. A token that [`Engine::watch`]
    /// refuses is ignored: it would name a transfer, or a watch of the engine's own.
    pub fn unwatch(&mut self, fd: BorrowedFd<'_>, token: Token) {
        if token::is_of_caller(token) {
            self.queue.events_mut().unwatch(fd, token);
        }
    }

    /// Submits a command to the driver behind `fd`; see
    /// [`EventSource::command`](crate::EventSource::command). Its result is reported under `token`,
    /// as the events of watched descriptors are.
    ///
    /// # Errors
    /// As for [`EventSource::command`](crate::EventSource::command); `EINVAL` for a token that
    /// [`Engine::watch`] refuses.
    ///
    /// # Safety
    /// As for [`EventSource::command`](crate::EventSource::command).
    #[inline]
    pub unsafe fn command(
        &mut self,
        fd: BorrowedFd<'_>,
        op: u32,
        address: u64,
        arguments: [u8; 16],
        token: Token,
    ) -> Result<(), Error> {
        if !token::is_of_caller(token) {
            return Err(Error::new(libc::EINVAL, Operation::SetUp));
        }
        // SAFETY: as promised by the caller.
        unsafe { self.queue.events_mut().command(fd, op, address, arguments, token) }
    }

    /// Readable when [`Engine::poll`] would find something.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.queue.events().fd()
    }

    /// Whether the device has refused to be polled, although it could be when the queue was made.
    /// Its requests complete by interrupt then (C48).
    #[must_use]
    pub fn has_stopped_polling(&self) -> bool {
        self.queue.has_stopped_polling()
    }

    /// Requests of `device` that were accepted and not yet given back, and their fragments. It looks at
    /// every slot of the engine.
    #[must_use]
    pub fn in_flight_of(&self, device: &DeviceHandle<M>) -> usize {
        self.dispatcher.in_use_of(device.attached())
    }

    /// Ranges of the writes, discards and zeroings of `device` that were accepted and not yet given back. It looks at every
    /// slot of the engine.
    #[must_use]
    pub fn changes_in_flight(&self, device: &DeviceHandle<M>) -> Vec<ByteRange> {
        let slots = self.dispatcher.requests().pool().slots_in_use();
        let changes = slots.filter(|slot| slot.device() == device.index() && slot.io.op.changes());
        changes.map(|slot| slot.io.range).collect()
    }

    /// Device and tag of each request in flight, as in [`Completion::device`] and [`Completion::tag`]. It
    /// looks at every slot of the engine.
    pub fn tags_in_flight(&self) -> impl Iterator<Item = (u32, u64)> {
        let requests = self.dispatcher.requests().pool().slots_in_use();
        let requests = requests.filter(|slot| slot.role != slot::Role::Fragment);
        requests.map(|slot| (slot.device(), slot.tag))
    }

    /// Counts of how the requests of `device` were served so far; those of the pool, and of polling,
    /// are 0.
    #[must_use]
    pub fn stats_of(&self, device: &DeviceHandle<M>) -> Stats {
        self.dispatcher.stats_of(device.attached())
    }

    /// Why transfers of `device` cannot be polled for (C48); `None` if they can.
    #[must_use]
    pub fn polling_refusal(&self, device: &DeviceHandle<M>) -> Option<&'static str> {
        device.attached().files().find_map(|file| self.queue.polling_refusal(file))
    }

    /// The queue.
    #[must_use]
    pub fn queue(&self) -> &Q {
        &self.queue
    }

    /// Counts of how requests were served so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats { polled: self.queue.polled(), ..self.dispatcher.stats() }
    }
}

/// Handles an event of a watched descriptor; apart from the code for transfers, which come more
/// often.
#[inline(never)]
fn on_event<M: BlockMap + ?Sized>(
    dispatcher: &mut Dispatcher<M>,
    token: Token,
    outcome: i32,
    watched: &mut impl FnMut(Token, i32),
) {
    match token {
        WORKERS_EVENT => dispatcher.requests().acknowledge_workers(),
        _ => watched(token, outcome),
    }
}

impl<Q: IoQueue, M: BlockMap + ?Sized> Drop for Engine<Q, M> {
    /// Waits for all requests in flight. If the queue fails, leaks the engine's own memory that the
    /// kernel may still write to (C45); for other memory see [`Engine::settle`].
    fn drop(&mut self) {
        if self.settle().is_err() {
            self.dispatcher.leak_in_flight();
        }
    }
}
