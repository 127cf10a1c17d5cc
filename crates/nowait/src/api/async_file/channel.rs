//! The channel from any thread to the thread of an engine: a bounded list of requests of each file, and
//! a descriptor that wakes the thread.
//!
//! Invariant: a task that found its file's list full is woken when the driver has taken half of it or
//! has ended. A request is held by a list, by the driver, or again by its sender. The driver sleeps only
//! after it has found no request that it may take, and is woken by a request of a file without others.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use rustix::event::{EventfdFlags, eventfd};

use crate::api::async_file::async_request::AsyncRequest;
use crate::api::async_file::caller_transfers::CallerTransfers;
use crate::api::file_turns::{FileTurns, Turn};
use crate::api::handle_disk::HandleDisk;
use crate::block::block_map::BlockMap;
use crate::block::device::BlockDevice;
use crate::types::error::{Error, Operation};
use crate::types::request::Flags;

/// Whether requests are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChannelState {
    Open,
    /// The last file is closed: no request can come any more.
    Closed,
    /// The driver has ended because of an error.
    Failed(Error),
}

/// A file, as the channel knows it.
struct ChannelFile {
    disk: Arc<BlockDevice<dyn BlockMap>>,
    /// The device of a closed file that had requests, which ends its lock.
    closed: Option<HandleDisk>,
    /// The wakers of tasks that found the list full, by waiter ID.
    waiting: HashMap<u64, Waker>,
}

struct ChannelContents {
    files: FileTurns<AsyncRequest, ChannelFile>,
    /// Files that are open.
    open: usize,
    /// Files that were closed, and may still have requests.
    closed: Vec<u32>,
    next_waiter_id: u64,
    phase: ChannelState,
    /// The driver looks at the lists before it sleeps.
    is_awake: bool,
    /// The driver waits, or is to wait, for the transfers of callers.
    watches_callers: bool,
}

/// The greatest number of requests that the driver takes together.
const BATCH: usize = 64;

pub(crate) struct Channel {
    contents: Mutex<ChannelContents>,
    wake: OwnedFd,
    limit: usize,
    /// For requests that their callers submit themselves; without it all go through the lists.
    pub(crate) callers: Option<CallerTransfers>,
}

/// Requests that the driver takes together, and what else it has to know.
#[derive(Default)]
pub(crate) struct Batch {
    /// Requests that have their turn.
    pub(crate) turns: Vec<Turn<AsyncRequest>>,
    /// The files of requests that have ended since the last batch.
    pub(crate) ended: Vec<u32>,
    /// Closed files of which no request is left.
    pub(crate) detached: Vec<u32>,
    /// The driver is to wait for the transfers of callers.
    pub(crate) watches_callers: bool,
    wakers: Vec<Waker>,
}

impl Channel {
    /// A channel without files, each of which may have `limit` requests that the driver has not taken.
    pub(crate) fn new(limit: usize, callers: Option<CallerTransfers>) -> Result<Self, Error> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::from_os(e, Operation::SetUp))?;
        let contents = ChannelContents {
            files: FileTurns::new(),
            open: 0,
            closed: Vec::new(),
            next_waiter_id: 0,
            phase: ChannelState::Open,
            is_awake: false,
            watches_callers: false,
        };
        Ok(Self { contents: Mutex::new(contents), wake, limit, callers })
    }

    fn lock(&self) -> MutexGuard<'_, ChannelContents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // A full counter (EAGAIN) is readable already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Opens a file, and returns its number; `None` if the channel is closed.
    ///
    /// # Errors
    /// The driver's, if it has ended with one.
    pub(crate) fn open(&self, disk: Arc<BlockDevice<dyn BlockMap>>) -> Result<Option<u32>, Error> {
        let mut contents = self.lock();
        match contents.phase {
            ChannelState::Failed(error) => Err(error),
            ChannelState::Closed => Ok(None),
            ChannelState::Open => {
                contents.open += 1;
                let file = ChannelFile { disk, closed: None, waiting: HashMap::new() };
                Ok(Some(contents.files.add(file)))
            }
        }
    }

    /// How many files are open; `None` if no further one can be opened.
    pub(crate) fn open_files(&self) -> Option<usize> {
        let contents = self.lock();
        (contents.phase == ChannelState::Open).then_some(contents.open)
    }

    /// The device of a file.
    pub(crate) fn disk(&self, file: u32) -> Option<Arc<BlockDevice<dyn BlockMap>>> {
        self.lock().files.state(file).map(|file| file.disk.clone())
    }

    /// Appends a request to its file's list. If the list is full, a request with `NOWAIT` is refused
    /// with `EAGAIN` (C32); any other is returned, and `waker`, kept under `waiter_id`, is woken when
    /// there is room. After [`Channel::fail`] every request is refused with the driver's error.
    pub(crate) fn try_send(
        &self,
        file: u32,
        request: AsyncRequest,
        waiter_id: &mut Option<u64>,
        waker: &Waker,
    ) -> Option<AsyncRequest> {
        let mut contents = self.lock();
        if let ChannelState::Failed(error) = contents.phase {
            drop(contents);
            request.refuse(error);
            return None;
        }
        let length = contents.files.waiting(file);
        if length < self.limit {
            contents.files.push(file, request);
            let sleeps = length == 0 && !std::mem::replace(&mut contents.is_awake, true);
            drop(contents);
            if sleeps {
                self.wake();
            }
            return None;
        }
        if request.io.flags.contains(Flags::NOWAIT) {
            drop(contents);
            let error = Error::new(libc::EAGAIN, Operation::Validate).at(request.io.range);
            request.refuse(error);
            return None;
        }
        let waiter_id = *waiter_id.get_or_insert_with(|| {
            contents.next_waiter_id += 1;
            contents.next_waiter_id
        });
        let state = contents.files.state(file);
        let old = state.and_then(|state| state.waiting.insert(waiter_id, waker.clone()));
        drop(contents);
        drop(old);
        Some(request)
    }

    /// Removes the waker of `waiter_id`.
    pub(crate) fn cancel_wait(&self, file: u32, waiter_id: u64) {
        // Dropping a waker runs an executor's code: it is dropped outside the lock.
        let _waker = self.lock().files.state(file).and_then(|file| file.waiting.remove(&waiter_id));
    }

    /// Moves requests that may have one of the `free` slots to the empty `batch`, by turns over the
    /// files, and wakes the tasks that wait for room: all of a file, because a task that is woken may
    /// have dropped its request. If there is no request, the next one wakes the driver.
    pub(crate) fn take(&self, batch: &mut Batch, free: usize) -> ChannelState {
        debug_assert!(batch.turns.is_empty() && batch.detached.is_empty());
        let mut contents = self.lock();
        let ChannelContents { files, closed, is_awake, phase, watches_callers, .. } =
            &mut *contents;
        batch.ended.drain(..).for_each(|file| files.ended(file));
        let mut left = free;
        while batch.turns.len() < BATCH
            && let Some(turn) = files.next(left, |request| request.io.flags.contains(Flags::NOWAIT))
        {
            left -= usize::from(turn.has_begun);
            let has_room = files.waiting(turn.file) <= self.limit / 2;
            if has_room && let Some(file) = files.state(turn.file) {
                batch.wakers.extend(file.waiting.drain().map(|(_, waker)| waker));
            }
            batch.turns.push(turn);
        }
        *is_awake = !batch.turns.is_empty();
        batch.watches_callers = *watches_callers;
        closed.retain(|&file| {
            let is_busy = files.waiting(file) + files.in_engine(file) > 0;
            if !is_busy {
                batch.detached.push(file);
            }
            is_busy
        });
        let phase = match *phase {
            ChannelState::Closed if !closed.is_empty() => ChannelState::Open,
            phase => phase,
        };
        drop(contents);
        batch.wakers.drain(..).for_each(Waker::wake);
        phase
    }

    /// Whether a caller may submit a request itself: the channel is open, the driver has none of this file, and there is
    /// room. It is counted then.
    pub(crate) fn begin_transfer(&self, file: u32) -> bool {
        let contents = self.lock();
        contents.phase == ChannelState::Open
            && contents.files.waiting(file) + contents.files.in_engine(file) == 0
            && self.callers.as_ref().is_some_and(CallerTransfers::begin)
    }

    /// Has the driver wait for the transfers of callers, one of which is in flight.
    pub(crate) fn watch_callers(&self) {
        let mut contents = self.lock();
        if !std::mem::replace(&mut contents.watches_callers, true) {
            contents.is_awake = true;
            drop(contents);
            self.wake();
        }
    }

    /// Ends that, unless one is in flight. True if the driver is not to wait any more.
    pub(crate) fn unwatch_callers(&self) -> bool {
        let mut contents = self.lock();
        contents.watches_callers &= self.callers.as_ref().is_some_and(CallerTransfers::is_busy);
        !contents.watches_callers
    }

    /// Sends a request that its caller has submitted in vain, whatever the length of its file's list.
    pub(crate) fn send_again(&self, file: u32, request: AsyncRequest) {
        let mut contents = self.lock();
        if let ChannelState::Failed(error) = contents.phase {
            drop(contents);
            return request.refuse(error);
        }
        contents.files.push(file, request);
        let sleeps = !std::mem::replace(&mut contents.is_awake, true);
        drop(contents);
        if sleeps {
            self.wake();
        }
    }

    /// Counts requests that have ended, so that a file without others may be closed.
    pub(crate) fn count_ended(&self, ended: &mut Vec<u32>) {
        let mut contents = self.lock();
        ended.drain(..).for_each(|file| contents.files.ended(file));
    }

    /// Puts a request that the engine did not take back to the front of its file's list.
    pub(crate) fn put_back(&self, file: u32, request: AsyncRequest) {
        self.lock().files.put_back(file, request);
    }

    /// Forgets the closed files in `batch`.
    pub(crate) fn forget(&self, batch: &mut Batch) {
        for file in batch.detached.drain(..) {
            // Dropping a device closes its files: outside the lock.
            let _file = self.lock().files.remove(file);
        }
    }

    /// Closes a file: it has no handle and no unsent request. The driver ends when the last file is
    /// closed and its requests have ended. Until then it has `disk`.
    pub(crate) fn close(&self, file: u32, disk: &HandleDisk) {
        let mut contents = self.lock();
        let files = &mut contents.files;
        if files.waiting(file) + files.in_engine(file) > 0
            && let Some(state) = files.state(file)
        {
            state.closed = Some(disk.clone());
        }
        contents.open -= 1;
        contents.closed.push(file);
        if contents.open == 0 && contents.phase == ChannelState::Open {
            contents.phase = ChannelState::Closed;
        }
        contents.is_awake = true;
        drop(contents);
        self.wake();
    }

    /// Refuses the requests in the lists, and all later ones, with `error`: the driver ends.
    pub(crate) fn fail(&self, error: Error) {
        let mut contents = self.lock();
        contents.phase = ChannelState::Failed(error);
        let requests = contents.files.take_all();
        let files = contents.files.remove_all();
        drop(contents);
        requests.into_iter().for_each(|request| request.refuse(error));
        files.into_iter().flat_map(|file| file.waiting).for_each(|(_, waker)| waker.wake());
    }

    /// Readable after a request has come while the driver slept, or after a close.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::async_file::async_request::Answer;
    use crate::api::oneshot::{Receiver, oneshot};
    use crate::memory::io_buffer::IoBuffer;
    use crate::storage::file_calls::FileLock;
    use crate::storage::open_options::OpenOptions;
    use crate::types::byte_range::ByteRange;
    use crate::types::request::{Op, Request};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Poll, Wake};

    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn disk() -> Arc<BlockDevice<dyn BlockMap>> {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        Arc::new(BlockDevice::open(file.path(), OpenOptions::default()).unwrap())
    }

    fn given() -> HandleDisk {
        HandleDisk::given(disk())
    }

    /// A channel with that many open files.
    fn channel<const FILES: usize>(limit: usize) -> (Channel, [u32; FILES]) {
        let channel = Channel::new(limit, None).unwrap();
        let files = [(); FILES].map(|()| channel.open(disk()).unwrap().unwrap());
        (channel, files)
    }

    fn request(flags: Flags) -> (AsyncRequest, Receiver<Answer>) {
        let (sender, receiver) = oneshot();
        let io = Request { op: Op::Flush, flags, range: ByteRange::default() };
        (AsyncRequest { io, buffer: IoBuffer::default(), sender }, receiver)
    }

    /// Sends a request that finds room.
    fn send(channel: &Channel, file: u32) {
        let (request, _) = request(Flags::NONE);
        assert!(channel.try_send(file, request, &mut None, Waker::noop()).is_none());
    }

    /// The files of the requests that are taken.
    fn take(channel: &Channel, batch: &mut Batch, free: usize) -> (Vec<u32>, ChannelState) {
        let phase = channel.take(batch, free);
        (batch.turns.drain(..).map(|turn| turn.file).collect(), phase)
    }

    fn errno(mut receiver: Receiver<Answer>) -> Option<i32> {
        match receiver.poll(Waker::noop()) {
            Poll::Ready(Some((Err(error), _))) => Some(error.errno()),
            _ => None,
        }
    }

    #[test]
    fn a_task_that_finds_the_list_full_is_woken_once_when_half_of_it_is_taken() {
        let (channel, [file, other]) = channel(4);
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(count.clone());
        (0..4).for_each(|_| send(&channel, file));
        let mut waiter_id = None;
        let back = channel.try_send(file, request(Flags::NONE).0, &mut waiter_id, &waker).unwrap();
        let back = channel.try_send(file, back, &mut waiter_id, &waker).unwrap();
        // The list of another file is not full.
        send(&channel, other);
        let mut batch = Batch::default();
        assert_eq!(take(&channel, &mut batch, 2).0, [file, other]);
        assert_eq!(count.0.load(Ordering::SeqCst), 0, "3 of 4 are left");
        assert_eq!(take(&channel, &mut batch, 1).0, [file]);
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        assert!(channel.try_send(file, back, &mut waiter_id, &waker).is_none());
    }

    #[test]
    fn a_task_that_has_cancelled_its_wait_is_not_woken() {
        let (channel, [file]) = channel(1);
        send(&channel, file);
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let (mut waiter_id, waker) = (None, Waker::from(count.clone()));
        let sent = channel.try_send(file, request(Flags::NONE).0, &mut waiter_id, &waker);
        drop(waker);
        assert!(sent.is_some());
        channel.cancel_wait(file, waiter_id.unwrap());
        channel.take(&mut Batch::default(), 9);
        assert_eq!(count.0.load(Ordering::SeqCst), 0);
        assert_eq!(Arc::strong_count(&count), 1);
    }

    #[test]
    fn c32_a_request_that_is_not_to_wait_is_eagain_when_the_list_is_full_or_there_is_no_slot() {
        let (channel, [file]) = channel(1);
        send(&channel, file);
        let mut batch = Batch::default();
        assert!(take(&channel, &mut batch, 0).0.is_empty());
        let (second, receiver) = request(Flags::NOWAIT);
        assert!(channel.try_send(file, second, &mut None, Waker::noop()).is_none());
        assert_eq!(errno(receiver), Some(libc::EAGAIN));
        assert_eq!(take(&channel, &mut batch, 1).0, [file]);
        let (third, _) = request(Flags::NOWAIT);
        assert!(channel.try_send(file, third, &mut None, Waker::noop()).is_none());
        channel.take(&mut batch, 0);
        assert!(batch.turns.len() == 1 && !batch.turns[0].has_begun);
    }

    #[test]
    fn c46_requests_in_the_list_and_later_ones_are_refused_when_the_driver_has_failed() {
        let (channel, [file]) = channel(1);
        let ((early, before), (late, after)) = (request(Flags::NONE), request(Flags::NONE));
        assert!(channel.try_send(file, early, &mut None, Waker::noop()).is_none());
        channel.fail(Error::new(libc::ENXIO, Operation::Wait));
        assert!(channel.try_send(file, late, &mut None, Waker::noop()).is_none());
        assert_eq!((errno(before), errno(after)), (Some(libc::ENXIO), Some(libc::ENXIO)));
        assert_eq!(channel.open(disk()).unwrap_err().errno(), libc::ENXIO);
        assert_eq!(channel.open_files(), None);
        channel.close(file, &given());
    }

    #[test]
    fn a_closed_file_is_forgotten_after_its_last_request_and_the_channel_ends_with_the_last_file() {
        let (channel, [one, other]) = channel(9);
        let mut batch = Batch::default();
        [one, one, other].into_iter().for_each(|file| send(&channel, file));
        channel.close(one, &given());
        assert_eq!(take(&channel, &mut batch, 1), (vec![one], ChannelState::Open));
        assert_eq!(take(&channel, &mut batch, 9), (vec![other, one], ChannelState::Open));
        batch.ended.extend([one, other]);
        assert_eq!(take(&channel, &mut batch, 9), (vec![], ChannelState::Open));
        assert!(batch.detached.is_empty(), "one request is left");
        channel.close(other, &given());
        batch.ended.push(one);
        assert!(channel.open(disk()).unwrap().is_none(), "no file is open");
        assert_eq!(take(&channel, &mut batch, 9), (vec![], ChannelState::Closed));
        assert_eq!(batch.detached, [one, other]);
        channel.forget(&mut batch);
        assert!(channel.disk(one).is_none() && channel.disk(other).is_none());
    }

    #[test]
    fn c87_the_lock_of_a_closed_file_lasts_until_its_last_request_has_ended() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || BlockDevice::open_file(file.path(), OpenOptions::new()).unwrap();
        let is_free = || open().try_lock(FileLock::Exclusive).is_ok();
        for has_request in [true, false] {
            let disk: Arc<BlockDevice<dyn BlockMap>> = Arc::new(open());
            disk.try_lock(FileLock::Exclusive).unwrap();
            let channel = Channel::new(9, None).unwrap();
            let (number, mut batch) =
                (channel.open(disk.clone()).unwrap().unwrap(), Batch::default());
            if has_request {
                send(&channel, number);
                assert_eq!(take(&channel, &mut batch, 1).0, [number]);
            }
            let handle = HandleDisk::opened(disk.clone());
            channel.close(number, &handle);
            assert!(!is_free());
            drop(handle);
            assert_eq!(is_free(), !has_request);
            if has_request {
                channel.count_ended(&mut vec![number]);
            }
            take(&channel, &mut batch, 1);
            channel.forget(&mut batch);
            assert!(is_free());
        }
    }

    #[test]
    fn only_a_request_that_comes_while_the_driver_sleeps_wakes_it() {
        let (channel, [one, other]) = channel(9);
        let mut batch = Batch::default();
        let woken = || rustix::io::read(&channel.wake, &mut [0; 8]).is_ok();
        send(&channel, one);
        assert!(woken());
        send(&channel, other);
        assert!(!woken(), "it is awake already");
        assert_eq!(take(&channel, &mut batch, 9).0, [one, other]);
        send(&channel, one);
        assert!(!woken(), "it looks again before it sleeps");
        // There is no slot: it sleeps until a request ends, or one of another file comes.
        assert!(take(&channel, &mut batch, 0).0.is_empty());
        send(&channel, one);
        assert!(!woken());
        send(&channel, other);
        assert!(woken());
    }
}
