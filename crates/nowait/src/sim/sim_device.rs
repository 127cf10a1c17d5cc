//! The interface of a simulated device for its queues and workers.
//!
//! Invariant: the device is locked for one step at a time, and never while it yields to other
//! tasks.
#![allow(unsafe_code)]

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::sim::fault::{Call, Fault, Faults};
use crate::sim::random::Random;
use crate::sim::sim_disk::SimDisk;
use crate::sim::sim_state::{AccessPath, PowerState, Report, SimOptions, SimState};
use crate::sim_hooks::yield_point;
use crate::types::byte_range::ByteRange;
use crate::types::token::Token;
use crate::types::transfer::{Outcome, Transfer};

/// A simulated device in memory, which any number of queues and workers may share.
pub struct SimDevice(Mutex<SimState>);

impl SimDevice {
    /// A device that is one hole, without faults.
    #[must_use]
    pub fn new(options: SimOptions) -> Self {
        Self(Mutex::new(SimState::new(options)))
    }

    fn lock(&self) -> MutexGuard<'_, SimState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The properties of the device.
    #[must_use]
    pub fn options(&self) -> SimOptions {
        self.lock().options
    }

    /// The present size of the device in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.lock().media.size()
    }

    /// The number of files: the device itself, and the read-only ones.
    #[must_use]
    pub fn files(&self) -> u16 {
        1 + self.lock().below.len() as u16
    }

    /// The present size of the file with this number in bytes.
    #[must_use]
    pub fn bytes_of(&self, file: u16) -> u64 {
        self.lock().file(file).size()
    }

    /// Moves the contents of the device to a new read-only file, number 1, and gives the device the
    /// durable contents `own`, followed by a hole or its end. No transfer may be in flight.
    pub fn put_on_top(&self, own: &[u8]) {
        let mut state = self.lock();
        let media = state.new_media(own);
        let old = std::mem::replace(&mut state.media, media);
        state.below.insert(0, old);
    }

    /// Like [`SimDevice::put_on_top`], but the only read-only file holds `below`, if that is given,
    /// with holes for whole blocks of zeros.
    pub fn put_on(&self, below: Option<&[u8]>, own: &[u8]) {
        let mut state = self.lock();
        let unit = state.options.unit;
        let file = |held: &[u8]| SimDisk::holding(held, held.len() as u64, unit, u64::MAX);
        state.below = below.into_iter().map(file).collect();
        state.media = state.new_media(own);
    }

    /// Copies the present contents of a file from `pos` on to `memory`, with zeros behind its end.
    /// This is not an operation: it takes no time, has no faults and does not yield.
    pub fn peek(&self, file: u16, pos: u64, memory: &mut [u8]) {
        let state = self.lock();
        let file = state.file(file);
        let inside = file.size().saturating_sub(pos).min(memory.len() as u64);
        let found = file.read(ByteRange::new(pos, inside));
        let (there, behind) = memory.split_at_mut(found.len());
        there.copy_from_slice(found);
        behind.fill(0);
    }

    /// Restarts the device's random numbers with `seed`.
    pub fn reseed(&self, seed: u64) {
        self.lock().random = Random::new(seed);
    }

    /// Calls `draw` with the device's random numbers.
    pub(crate) fn draw(&self, draw: impl FnOnce(&mut Random)) {
        draw(&mut self.lock().random);
    }

    /// Sets the faults from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.lock().faults = faults;
    }

    /// The virtual time in nanoseconds. The devices of one queue have one clock.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.lock().now
    }

    /// The number of operations so far, which is that of the latest one.
    #[must_use]
    pub fn operations(&self) -> u64 {
        self.lock().ops
    }

    /// Whether a fault has returned `errno` so far.
    #[must_use]
    pub fn has_injected(&self, errno: i32) -> bool {
        self.lock().injected >> errno.clamp(0, 127) & 1 == 1
    }

    /// Whether there was a fault so far other than `EAGAIN` and `EINTR`, which a retry resolves.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.lock().injected & !(1 << libc::EAGAIN | 1 << libc::EINTR) != 0
    }

    /// The invalid requests since the last call.
    #[must_use]
    pub fn take_violations(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().violations)
    }

    /// Completes no operation any more, until [`SimDevice::answer`] or a power cut.
    pub fn fall_silent(&self) {
        let mut state = self.lock();
        if state.power == PowerState::On {
            state.power = PowerState::Silent;
        }
    }

    /// Ends the silence of [`SimDevice::fall_silent`].
    pub fn answer(&self) {
        let mut state = self.lock();
        if state.power == PowerState::Silent {
            state.power = PowerState::On;
        }
    }

    /// Cuts the device to `bytes`, a multiple of its alignment. Requests behind the new end count
    /// as violations only after the next queue was added, whose owner knows the new size.
    pub fn shrink(&self, bytes: u64) {
        self.lock().media.shrink(bytes);
    }

    /// Cuts the power. Any data that is not durable may be lost or become garbage; the ranges of
    /// garbage are returned. Transfers in flight end with `EIO`, and so does every operation until
    /// [`SimDevice::power_on`].
    pub fn cut_power(&self) -> Vec<ByteRange> {
        let mut state = self.lock();
        state.power = PowerState::Off;
        state.power_cuts += 1;
        state.end_all();
        let SimState { media, random, faults, .. } = &mut *state;
        media.cut(random, faults.rot)
    }

    /// Ends the process that uses the device, in the middle of whatever it does: transfers in flight end with `EIO`, and so
    /// does every operation of storages that are open, also after [`SimDevice::power_on`]. All that was changed stays.
    pub fn kill(&self) {
        let mut state = self.lock();
        state.power = PowerState::Off;
        state.power_cuts += 1;
        state.end_all();
    }

    /// When the contents of the device changed last, as the times of a file tell it: a number that only grows, but for a
    /// power cut, after which it may be that of an earlier change.
    #[must_use]
    pub fn changed_at(&self) -> u64 {
        self.lock().media.changed_at()
    }

    /// Drops the page cache: what a failed flush has lost is read no more. It does not count as an operation.
    pub fn drop_cache(&self) {
        self.lock().media.forget_lost();
    }

    /// The number of power cuts and kills so far.
    #[must_use]
    pub fn power_cuts(&self) -> u64 {
        self.lock().power_cuts
    }

    /// Ends a power cut.
    pub fn power_on(&self) {
        self.lock().power = PowerState::On;
    }

    /// Adds a list for the completions of a new queue, whose owner knows the present size; returns
    /// its index.
    pub(crate) fn add_queue(&self) -> usize {
        let mut state = self.lock();
        state.options.bytes = state.media.size();
        let index = state.ended.iter().position(Option::is_none).unwrap_or(state.ended.len());
        if index == state.ended.len() {
            state.ended.push(None);
        }
        if let Some(ended) = state.ended.get_mut(index) {
            *ended = Some(Vec::with_capacity(64));
        }
        index
    }

    /// Removes a queue and its transfers in flight, which access no memory any more.
    pub(crate) fn remove_queue(&self, queue: usize) {
        let mut state = self.lock();
        state.in_flight.retain(|flight| flight.queue != queue);
        if let Some(ended) = state.ended.get_mut(queue) {
            *ended = None;
        }
    }

    /// Whether a queue has no room for another transfer now.
    pub(crate) fn is_full(&self) -> bool {
        let state = &mut *self.lock();
        state.applies_to_queue(Fault::Full, state.faults.full)
    }

    /// Whether a submission fails now.
    pub(crate) fn fails_submit(&self) -> bool {
        let state = &mut *self.lock();
        state.applies_to_queue(Fault::SubmitError, state.faults.submit_errors)
    }

    /// Starts transfers of `queue`.
    ///
    /// # Safety
    /// As for [`crate::IoQueue::push`].
    pub(crate) unsafe fn start(&self, queue: usize, transfers: &mut Vec<(Transfer, Token)>) {
        let mut state = self.lock();
        for (transfer, token) in transfers.drain(..) {
            // SAFETY: as promised by the caller.
            unsafe { state.start(queue, transfer, token) };
        }
    }

    /// Advances the time a little, and swaps the completions of `queue` with `reports`, which is
    /// empty.
    pub(crate) fn drain(&self, queue: usize, reports: &mut Vec<Report>) {
        let until = {
            let state = &mut *self.lock();
            let tick = state.options.latency / 8 + 1;
            state.now + state.random.below(tick)
        };
        self.drain_at(until, queue, reports);
    }

    /// Like [`SimDevice::drain`], at the time `until`, unless it is later.
    pub(crate) fn drain_at(&self, until: u64, queue: usize, reports: &mut Vec<Report>) {
        let mut state = self.lock();
        state.advance(until);
        if let Some(Some(ended)) = state.ended.get_mut(queue) {
            std::mem::swap(ended, reports);
        }
        for &(_, _, (from, to)) in reports.iter() {
            (from..to).for_each(|change| state.media.reported(change));
        }
    }

    /// Whether `queue` has completions.
    pub(crate) fn has_ended(&self, queue: usize) -> bool {
        matches!(self.lock().ended.get(queue), Some(Some(ended)) if !ended.is_empty())
    }

    /// When the next step of a transfer is due; `None` if none is in flight, or the device is silent.
    pub(crate) fn next_due(&self) -> Option<u64> {
        let state = self.lock();
        let next = state.in_flight.peek().filter(|_| state.power != PowerState::Silent);
        next.map(|flight| flight.due)
    }

    /// Advances the time to `until`, unless it is later.
    pub(crate) fn advance(&self, until: u64) {
        self.lock().advance(until);
    }

    /// Notes an invalid request.
    pub(crate) fn note_violation(&self, what: String) {
        self.lock().violation(what);
    }

    /// Makes a call that may wait, and yields before and after it.
    fn call<T>(&self, run: impl FnOnce(&mut SimState) -> Result<T, i32>) -> Result<T, i32> {
        let result = self.make_call(run);
        self.let_others_run();
        result
    }

    /// The same, but yields before the call only.
    fn make_call<T>(&self, run: impl FnOnce(&mut SimState) -> Result<T, i32>) -> Result<T, i32> {
        self.let_others_run();
        let mut state = self.lock();
        while state.power == PowerState::Silent {
            drop(state);
            if !yield_point::is_simulated() {
                // Without a simulation no other task could end the silence.
                return Err(libc::EIO);
            }
            yield_point::yield_now();
            state = self.lock();
        }
        if state.power == PowerState::Off {
            return Err(libc::EIO);
        }
        let longest = state.options.latency;
        let until = state.now + state.random.below(longest);
        state.advance(until);
        run(&mut state)
    }

    /// Yields to other tasks, with the probability [`SimOptions::pauses`].
    fn let_others_run(&self) {
        let draws = {
            let state = &mut *self.lock();
            state.random.chance(state.options.pauses)
        };
        if draws {
            yield_point::yield_now();
        }
    }

    /// Makes one transfer on a file that is open for direct I/O if `direct` is set, else through the
    /// page cache, and waits for its end.
    ///
    /// # Safety
    /// Until this returns, the memory that `transfer` names is valid and not accessed otherwise.
    pub(crate) unsafe fn transfer(&self, transfer: &Transfer, direct: bool) -> Outcome {
        let done = self.call(|state| {
            let path = if direct { AccessPath::Direct } else { AccessPath::Buffered };
            // SAFETY: as promised by the caller.
            let (outcome, (from, to)) = unsafe { state.perform(transfer, 0, transfer.len, path) };
            (from..to).for_each(|change| state.media.reported(change));
            Ok(outcome)
        });
        done.unwrap_or_else(|errno| -errno)
    }

    /// Zeroes `range` of the device itself; with `keep` it stays allocated.
    pub(crate) fn allocate(&self, range: ByteRange, keep: bool) -> Result<(), i32> {
        self.call(|state| {
            state.check(Call::Other)?;
            let able = if keep { state.options.zeroes } else { state.options.punches };
            if !able {
                return Err(libc::EOPNOTSUPP);
            }
            if range.end() > state.options.bytes {
                state.violation(format!("{range:?} is zeroed, which reaches behind the end"));
            }
            if range.end() > state.media.size() {
                return Err(libc::ENOSPC);
            }
            let change = state.media.zero(range, keep).ok_or(libc::ENOSPC)?;
            state.media.reported(change);
            Ok(())
        })
    }

    /// Allocates storage for the holes in `range` of the device itself.
    pub(crate) fn preallocate(&self, range: ByteRange) -> Result<(), i32> {
        self.call(|state| {
            state.check(Call::Other)?;
            if range.end() > state.options.bytes {
                state.violation(format!("{range:?} is preallocated, which reaches behind the end"));
            }
            if range.end() > state.media.size() {
                return Err(libc::ENOSPC);
            }
            if state.media.preallocate(range) { Ok(()) } else { Err(libc::ENOSPC) }
        })
    }

    /// The blocks in `range` of the device itself that have storage and were never written.
    pub(crate) fn unwritten(&self, range: ByteRange) -> Result<Vec<ByteRange>, i32> {
        self.call(|state| {
            state.check(Call::Other)?;
            Ok(state.media.unwritten(range))
        })
    }

    /// The bytes that the device itself takes.
    pub(crate) fn allocated(&self) -> u64 {
        self.lock().media.allocated()
    }

    /// Sets the size of the device to `bytes`, as ftruncate(2).
    pub(crate) fn resize(&self, bytes: u64) -> Result<(), i32> {
        if !self.options().grows {
            return Err(libc::EINVAL);
        }
        self.call(|state| {
            state.check(Call::Other)?;
            state.media.resize(bytes);
            state.options.bytes = bytes;
            Ok(())
        })
    }

    /// Makes the completed writes durable. The call yields before it returns, so the caller may see
    /// a failure only after other tasks have flushed and gone on.
    pub(crate) fn sync(&self) -> Result<(), i32> {
        self.call(|state| {
            let checked = state.check(Call::Flush);
            match checked {
                Ok(()) => state.media.flush(),
                Err(libc::EINTR) => {}
                Err(_) => state.media.lose(&mut state.random),
            }
            checked
        })
    }

    /// The first byte of a file from `pos` on that is data, or a hole, as lseek(2).
    pub(crate) fn seek(&self, file: u16, pos: u64, data: bool) -> Result<u64, i32> {
        self.call(|state| {
            state.check(Call::Other)?;
            state.file(file).seek(pos, data).ok_or(libc::ENXIO)
        })
    }
}
