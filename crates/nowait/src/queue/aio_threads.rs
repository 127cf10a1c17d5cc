//! Transfers by plain system calls: inline where that delays nothing else, otherwise by Linux AIO
//! or on a thread pool.
//!
//! Invariant: at depth 1 no other thread is involved. With more transfers in flight, or with
//! watched descriptors besides the engine's own, this thread makes no call that waits for a device. A device whose transfers
//! do not end takes neither all of AIO nor all threads of the pool: it has half of what is left, and three quarters.
#![allow(unsafe_code)]

use std::cell::OnceCell;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use crate::queue::epoll::Epoll;
use crate::queue::event_source::{EventSource, Interest};
use crate::queue::linux_aio::Aio;
use crate::queue::queue_files::NumberedFiles;
use crate::queue::{IoQueue, QueueFile, QueueFull, preadv2};
use crate::threads::completion_list::CompletionList;
use crate::threads::thread_pool::ThreadPool;
use crate::threads::work_item::WorkItem;
use crate::types::error::{Error, Operation};
use crate::types::token::{self, AIO_EVENT, THREADS_EVENT, Token};
use crate::types::transfer::{Outcome, Transfer};

/// Threads of a queue: enough to keep a disk busy, few enough for a fast start.
const POOL_THREADS: u32 = 16;
/// Watched descriptors that signal completions: the pool's, and that of the engine's workers.
const INTERNAL_FDS: usize = 2;
/// The greatest number of transfers in AIO; the pool runs those beyond it.
const AIO_TRANSFERS: u32 = 1024;

struct QueuedTransfer(Transfer, u32);

/// A transfer in the pool.
struct PoolTransfer {
    transfer: Transfer,
    token: u32,
    /// The number of its device.
    device: u32,
    /// `None`: the file is not attached.
    file: Option<Arc<OwnedFd>>,
}

// SAFETY: the caller of `push` promised that the memory stays valid and is not accessed otherwise
// until the token's completion was drained; the call may run on any thread.
unsafe impl Send for PoolTransfer {}

impl WorkItem for PoolTransfer {
    fn device(&self) -> u64 {
        u64::from(self.device)
    }

    /// Each transfer is a client of its own, so those of a device start in the order of their push.
    fn client(&self) -> u64 {
        u64::from(self.token)
    }
}

/// An attached file.
struct AttachedFile {
    file: Arc<OwnedFd>,
    /// It uses the page cache, so a call for cached data never waits for a device.
    cached: bool,
    /// The number of its device: that of its first file.
    device: u32,
}

/// How many transfers are in AIO.
struct InAio {
    all: usize,
    room: usize,
    /// By the number of their device.
    of_devices: Vec<usize>,
}

impl InAio {
    /// Counts a transfer of `device`, if that may have one more: half as many as there is room for.
    fn begin(&mut self, device: u32) -> bool {
        let device = device as usize;
        if self.of_devices.len() <= device {
            self.of_devices.resize(device + 1, 0);
        }
        let is_admitted = self.of_devices[device] < (self.room - self.all).div_ceil(2);
        self.of_devices[device] += usize::from(is_admitted);
        self.all += usize::from(is_admitted);
        is_admitted
    }

    /// A transfer of `device` has ended, or was not taken.
    fn end(&mut self, device: u32) {
        self.of_devices[device as usize] -= 1;
        self.all -= 1;
    }
}

/// A queue on preadv2(2) and pwritev2(2).
pub struct AioThreadQueue {
    pushed: Vec<QueuedTransfer>,
    ended: Vec<(Token, Outcome)>,
    /// Transfers in the pool.
    in_pool: usize,
    pool: ThreadPool<PoolTransfer>,
    completions: Arc<CompletionList>,
    watched: Epoll,
    /// Set up on first use; `None` inside means that there is no AIO.
    aio: OnceCell<Option<Aio>>,
    in_aio: InAio,
    /// The number of the device of each transfer, by the slot of its token.
    devices: Vec<u32>,
    files: NumberedFiles<AttachedFile>,
}

impl AioThreadQueue {
    /// A queue for tokens below `slots`, with no file attached.
    ///
    /// # Errors
    /// The errno of pipe2(2) or epoll_create1(2): `EMFILE`, `ENFILE`, `ENOMEM`.
    pub fn new(slots: u32) -> Result<Self, Error> {
        let completions = Arc::new(CompletionList::new(slots)?);
        let mut watched = Epoll::new()?;
        watched.watch(completions.fd(), THREADS_EVENT, Interest::Readable)?;
        let pool_completions = completions.clone();
        let run = move |PoolTransfer { transfer, token, file, .. }| {
            // SAFETY: see `PoolTransfer`.
            let outcome = unsafe { call(file.as_deref(), &transfer) };
            pool_completions.push(token, i64::from(outcome));
        };
        let run = move |jobs: &mut Vec<_>| jobs.drain(..).for_each(&run);
        let pool = ThreadPool::of_devices(POOL_THREADS, run);
        Ok(Self {
            pushed: Vec::with_capacity(64),
            ended: Vec::with_capacity(64),
            in_pool: 0,
            pool,
            completions,
            watched,
            aio: OnceCell::new(),
            in_aio: InAio { all: 0, room: 0, of_devices: Vec::new() },
            devices: Vec::new(),
            files: NumberedFiles::new(),
        })
    }

    /// Whether the file of a transfer uses the page cache. A file that is not attached fails in any case.
    fn is_cached(&self, transfer: &Transfer) -> bool {
        self.files.get(transfer.file).is_some_and(|file| file.cached)
    }
}

impl AioThreadQueue {
    /// Makes the pushed transfers of cached files with `RWF_NOWAIT`: no such call waits.
    fn make_cached(&mut self) {
        let Self { pushed, ended, files, .. } = self;
        pushed.retain(|QueuedTransfer(transfer, token)| {
            let attached = files.get(transfer.file);
            let Some(AttachedFile { file, cached: true, .. }) = attached else { return true };
            if transfer.rw_flags & libc::RWF_NOWAIT == 0 {
                return true;
            }
            // SAFETY: as promised by the caller of `push`.
            let outcome = unsafe { call(Some(file), transfer) };
            ended.push((token::of_slot(*token), outcome));
            false
        });
    }

    /// Submits the pushed transfers, none of a cached file with `RWF_NOWAIT`, to AIO as far as it has
    /// room for their devices, provided that all of them have `RWF_NOWAIT`.
    fn submit_aio(&mut self) {
        let waits = |QueuedTransfer(transfer, _): &QueuedTransfer| {
            transfer.rw_flags & libc::RWF_NOWAIT == 0
        };
        if self.pushed.iter().any(waits) {
            return;
        }
        let Self { watched, aio, in_aio, devices, files, pushed, .. } = self;
        aio.get_or_init(|| {
            // All processes of the system share `fs.aio-max-nr`, which may have no room for the whole.
            let rooms = [AIO_TRANSFERS, AIO_TRANSFERS / 8];
            let (aio, room) = rooms.iter().find_map(|room| Some((Aio::new(*room)?, *room)))?;
            in_aio.room = room as usize;
            watched.watch(aio.fd(), AIO_EVENT, Interest::Readable).ok()?;
            Some(aio)
        });
        let Some(Some(aio)) = aio.get_mut() else { return };
        let mut added = 0;
        for n in 0..pushed.len() {
            let QueuedTransfer(transfer, token) = &pushed[n];
            // A transfer to an unknown file goes to the pool.
            let Some(AttachedFile { file, .. }) = files.get(transfer.file) else { continue };
            if in_aio.begin(devices[*token as usize]) {
                aio.push(file.as_fd(), transfer, *token);
                // Both parts keep their order.
                pushed[added..=n].rotate_right(1);
                added += 1;
            }
        }
        // SAFETY: as promised by the caller of `push`.
        let taken = unsafe { aio.submit() };
        let refused = &pushed[taken..added];
        refused.iter().for_each(|QueuedTransfer(_, token)| in_aio.end(devices[*token as usize]));
        pushed.drain(..taken);
    }

    /// Whether there is a completion that can be drained without a system call.
    fn has_ended(&self) -> bool {
        let by_aio =
            matches!(self.aio.get(), Some(Some(aio)) if self.in_aio.all > 0 && aio.has_ended());
        by_aio || !self.ended.is_empty()
    }

    /// Whether descriptors besides the engine's own are watched.
    fn has_external_watches(&self) -> bool {
        let aio = matches!(self.aio.get(), Some(Some(_)));
        self.watched.count() > INTERNAL_FDS + usize::from(aio)
    }
}

/// Makes the transfer; `EBADF` without a file.
///
/// # Safety
/// As for `preadv2::transfer`.
unsafe fn call(file: Option<&OwnedFd>, transfer: &Transfer) -> Outcome {
    match file {
        // SAFETY: as promised by the caller.
        Some(file) => unsafe { preadv2::transfer(file.as_fd(), transfer) },
        None => -libc::EBADF,
    }
}

// SAFETY: each transfer is in exactly one of `pushed`, `ended`, AIO and the pool, which returns its
// token once, after the call. `Epoll` returns tokens of watched descriptors only.
unsafe impl IoQueue for AioThreadQueue {
    fn attach(&mut self, files: &[QueueFile<'_>]) -> Result<u32, Error> {
        let attached = files.iter().map(|file| {
            let (file, cached) = file.descriptor()?;
            let file = file.try_clone_to_owned();
            let file = file.map_err(|error| Error::from_io(&error, Operation::SetUp))?;
            Ok((Arc::new(file), cached))
        });
        let attached: Vec<_> = attached.collect::<Result<_, Error>>()?;
        let device = self.files.find_free(attached.len());
        (device..).zip(attached).for_each(|(number, (file, cached))| {
            self.files.put(number, AttachedFile { file, cached, device });
        });
        Ok(device)
    }

    fn detach(&mut self, first: u32, count: u32) {
        (first..first + count).for_each(|number| drop(self.files.take(number)));
    }

    // SAFETY: the caller promises what `QueuedTransfer` needs.
    unsafe fn push(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull> {
        let slot = token as usize;
        if self.devices.len() <= slot {
            self.devices.resize(slot + 1, 0);
        }
        let file = self.files.get(transfer.file);
        self.devices[slot] = file.map_or(transfer.file, |file| file.device);
        self.pushed.push(QueuedTransfer(*transfer, token as u32));
        Ok(())
    }

    /// A transfer that a thread of the pool makes, or that AIO has, is left to the kernel: the calls have no end but
    /// their own, and io_cancel(2) knows no file.
    fn cancel(&mut self, token: Token) {
        let slot = token::slot_of(token);
        let pushed = self.pushed.iter().position(|QueuedTransfer(_, number)| *number == slot);
        let device = self.devices.get(slot as usize).copied().unwrap_or_default();
        if let Some(n) = pushed {
            self.pushed.remove(n);
        } else if self.pool.remove(device.into(), slot.into(), |_| true).is_some() {
            self.in_pool -= 1;
        } else {
            return;
        }
        self.ended.push((token, -libc::ECANCELED));
    }

    fn submit(&mut self) -> Result<(), Error> {
        self.make_cached();
        // A device may take any time: the call must not delay other clients of this thread.
        let is_alone = self.in_pool + self.in_aio.all == 0
            && self.pushed.len() == 1
            && !self.has_external_watches()
            && !self.is_cached(&self.pushed[0].0);
        if is_alone && let Some(QueuedTransfer(transfer, token)) = self.pushed.pop() {
            let file = self.files.get(transfer.file).map(|attached| &*attached.file);
            // SAFETY: as promised by the caller of `push`.
            let outcome = unsafe { call(file, &transfer) };
            self.ended.push((token::of_slot(token), outcome));
        }
        if !self.pushed.is_empty() {
            self.submit_aio();
        }
        if !self.pushed.is_empty() {
            // The pool's threads may wait, so RWF_NOWAIT is removed unless the request asked for
            // it.
            self.in_pool += self.pushed.len();
            let Self { files, devices, pool, pushed, .. } = self;
            pool.push(pushed.drain(..).map(|QueuedTransfer(mut transfer, token)| {
                if !transfer.must_not_wait {
                    transfer.rw_flags &= !libc::RWF_NOWAIT;
                }
                let file = files.get(transfer.file).map(|attached| attached.file.clone());
                PoolTransfer { transfer, token, device: devices[token as usize], file }
            }));
        }
        Ok(())
    }

    fn drain_completions(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        let mut count = self.ended.len();
        if let Some(Some(aio)) = self.aio.get_mut()
            && self.in_aio.all > 0
        {
            let (in_aio, devices) = (&mut self.in_aio, &self.devices);
            count += aio.drain(|token, outcome| {
                in_aio.end(devices[token::slot_of(token) as usize]);
                sink(token, outcome);
            });
        }
        if count == 0 && !self.watched.is_ready() {
            // A caller that only polls gets events of watched descriptors, too. `wait` returns
            // errors.
            let _ = self.watched.wait(Some(Duration::ZERO));
        }
        self.ended.drain(..).for_each(|(token, outcome)| sink(token, outcome));
        if self.watched.is_ready() {
            let completions = &self.completions;
            self.watched.take(|token, bits| match token {
                THREADS_EVENT => completions.clear_wake(),
                AIO_EVENT => {}
                _ => {
                    count += 1;
                    sink(token, bits);
                }
            });
        }
        let returned =
            self.completions.take(|slot, outcome| sink(token::of_slot(slot), outcome as Outcome));
        self.in_pool -= returned;
        count + returned
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        self.submit()?;
        let timeout = if self.has_ended() { Some(Duration::ZERO) } else { timeout };
        self.watched.wait(timeout)
    }

    fn has_completions(&mut self) -> bool {
        self.has_ended()
            || self.watched.is_ready()
            || self.watched.wait(Some(Duration::ZERO)).is_ok() && self.watched.is_ready()
    }

    fn events(&self) -> &dyn EventSource {
        &self.watched
    }

    fn events_mut(&mut self) -> &mut dyn EventSource {
        &mut self.watched
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::types::token::FD_TOKEN;
    use std::io::Write;

    #[test]
    fn with_sockets_a_nowait_transfer_goes_to_aio_and_any_other_to_the_pool() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 4096]).unwrap();
        let sockets =
            [(); INTERNAL_FDS + 1].map(|()| std::os::unix::net::UnixStream::pair().unwrap());
        let mut queue = AioThreadQueue::new(8).unwrap();
        queue.attach(&[QueueFile::Descriptor { file: file.as_fd(), cached: false }]).unwrap();
        for (n, socket) in sockets.iter().enumerate() {
            queue
                .events_mut()
                .watch(socket.0.as_fd(), FD_TOKEN | n as Token, Interest::Readable)
                .unwrap();
        }
        for (rw_flags, wanted) in [(libc::RWF_NOWAIT, (0, 1)), (0, (1, 0))] {
            let mut memory = vec![0u8; 4096];
            let base = memory.as_mut_ptr();
            let read = Transfer { base, len: 4096, rw_flags, ..Transfer::NONE };
            // SAFETY: the memory outlives the completion.
            unsafe { queue.push(&read, 5) }.unwrap();
            queue.submit().unwrap();
            let in_flight = (queue.in_pool, queue.in_aio.all);
            let mut ended = Vec::new();
            while ended.is_empty() {
                queue.wait(Some(Duration::from_secs(60))).unwrap();
                queue.drain_completions(|token, outcome| ended.push((token, outcome)));
            }
            assert_eq!((ended, memory), (vec![(5, 4096)], vec![7; 4096]));
            if rw_flags != 0 && !matches!(queue.aio.get(), Some(Some(_))) {
                nowait_testkit::skip("no AIO");
                continue;
            }
            assert_eq!((in_flight, queue.in_pool, queue.in_aio.all), (wanted, 0, 0));
        }
    }

    /// Reads of a pipe, which never end, have half of what is left of AIO, and three quarters of the pool.
    #[test]
    fn a_device_whose_transfers_never_end_leaves_aio_and_threads_to_others() {
        const HANG: u32 = 64;
        let (reader, mut writer) = std::io::pipe().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 4096]).unwrap();
        let mut queue = AioThreadQueue::new(HANG + 1).unwrap();
        for file in [reader.as_fd(), file.as_fd()] {
            queue.attach(&[QueueFile::Descriptor { file, cached: false }]).unwrap();
        }
        let mut memory = [0u8; HANG as usize + 1];
        let base = memory.as_mut_ptr();
        let push = |queue: &mut AioThreadQueue, token: u32, file, pos| {
            let base = base.wrapping_add(token as usize);
            let read = Transfer { base, len: 1, pos, file, ..Transfer::NONE };
            // SAFETY: the memory outlives the completions.
            unsafe { queue.push(&read, Token::from(token)) }.unwrap();
        };
        // At this position preadv2(2) reads as read(2) does.
        (0..HANG).for_each(|token| push(&mut queue, token, 0, u64::MAX));
        queue.submit().unwrap();
        push(&mut queue, HANG, 1, 0);
        queue.submit().unwrap();
        let mut done = Vec::new();
        queue.wait(Some(Duration::from_secs(60))).unwrap();
        queue.drain_completions(|token, outcome| done.push((token, outcome)));
        assert_eq!(done, [(Token::from(HANG), 1)]);
        writer.write_all(&[7; HANG as usize]).unwrap();
        while done.len() <= HANG as usize {
            queue.wait(Some(Duration::from_secs(60))).unwrap();
            queue.drain_completions(|token, outcome| done.push((token, outcome)));
        }
        assert_eq!((memory, queue.in_pool), ([7; HANG as usize + 1], 0));
    }

    #[test]
    fn a_device_has_half_of_what_is_left_of_aio() {
        let mut in_aio = InAio { all: 0, room: 100, of_devices: Vec::new() };
        let mut begin = |device| (0..100).filter(|_| in_aio.begin(device)).count();
        assert_eq!([3, 0, 3, 1].map(&mut begin), [34, 22, 0, 15]);
        (0..34).for_each(|_| in_aio.end(3));
        assert_eq!((in_aio.all, in_aio.begin(3)), (37, true));
    }

    /// All threads of the pool wait for an empty pipe: what is behind them ends when it is cancelled, and nothing else.
    #[test]
    fn c89_transfers_behind_those_that_hang_in_the_pool_end_when_they_are_cancelled() {
        const ALL: u32 = POOL_THREADS + 4;
        let (reader, mut writer) = std::io::pipe().unwrap();
        let mut queue = AioThreadQueue::new(ALL).unwrap();
        queue.attach(&[QueueFile::Descriptor { file: reader.as_fd(), cached: false }]).unwrap();
        let mut memory = [0u8; ALL as usize];
        let base = memory.as_mut_ptr();
        for token in 0..ALL {
            let base = base.wrapping_add(token as usize);
            // At this position preadv2(2) reads as read(2) does.
            let read = Transfer { base, len: 1, pos: u64::MAX, ..Transfer::NONE };
            // SAFETY: the memory outlives the completions.
            unsafe { queue.push(&read, Token::from(token)) }.unwrap();
        }
        queue.submit().unwrap();
        let mut ended = Vec::new();
        // They begin in order, so that no thread has one of these. The second time there is none of this token.
        for token in [ALL - 1, ALL - 1, ALL - 3] {
            queue.cancel(Token::from(token));
        }
        queue.wait(Some(Duration::from_secs(60))).unwrap();
        queue.drain_completions(|token, outcome| ended.push((token, outcome)));
        let cancelled = [ALL - 1, ALL - 3].map(|token| (Token::from(token), -libc::ECANCELED));
        assert_eq!(ended, cancelled);
        writer.write_all(&[7; ALL as usize]).unwrap();
        while ended.len() < ALL as usize {
            queue.wait(Some(Duration::from_secs(60))).unwrap();
            queue.drain_completions(|token, outcome| ended.push((token, outcome)));
        }
        ended.sort_unstable();
        let is_cancelled = |token| token == ALL - 1 || token == ALL - 3;
        let expected = (0..ALL).map(|token| match is_cancelled(token) {
            true => (Token::from(token), -libc::ECANCELED),
            false => (Token::from(token), 1),
        });
        assert!(expected.eq(ended) && queue.in_pool == 0);
        let read = (0..ALL).map(|token| if is_cancelled(token) { 0 } else { 7 });
        assert!(read.eq(memory), "nothing was read for those that were cancelled");
    }
}
