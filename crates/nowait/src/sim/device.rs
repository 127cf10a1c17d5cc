//! A simulated device as its queues and workers see it.
//!
//! Invariant: it is locked for as long as one thing happens, never while others run.
//! Knows: random, fault, state, pause. Known by: queue, descriptor.
#![allow(unsafe_code)]

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::fault::{Call, Fault, Faults};
use super::media::Media;
use super::random::Random;
use super::state::{Door, Power, Report, SimOptions, State};
use crate::error::Range;
use crate::io::{Outcome, Transfer};
use crate::pause;
use crate::queue::Token;

/// A device in memory. It may be shared by any number of queues and workers.
pub struct SimDevice(Mutex<State>);

impl SimDevice {
    /// A device that is one hole, on which nothing goes wrong.
    #[must_use]
    pub fn new(options: SimOptions) -> Self {
        Self(Mutex::new(State::new(options)))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What it is like.
    #[must_use]
    pub fn options(&self) -> SimOptions {
        self.lock().options
    }

    /// Bytes of it, now.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.lock().media.size()
    }

    /// Files on it: the device itself, and those that are read only.
    #[must_use]
    pub fn files(&self) -> u16 {
        1 + self.lock().below.len() as u16
    }

    /// Bytes of the file with this number, now.
    #[must_use]
    pub fn bytes_of(&self, file: u16) -> u64 {
        self.lock().file(file).size()
    }

    /// What was on the device is in a file that is read only from now on, before the others; the
    /// device holds `own`, for good, behind which it is a hole, or ends. Nothing may be in flight.
    pub fn put_on_top(&self, own: &[u8]) {
        let mut state = self.lock();
        let media = state.new_media(own);
        let old = std::mem::replace(&mut state.media, media);
        state.below.insert(0, old);
    }

    /// As [`SimDevice::put_on_top`], but the only file that is read only holds `below`, if there is
    /// one, with holes for whole blocks of zeros.
    pub fn put_on(&self, below: Option<&[u8]>, own: &[u8]) {
        let mut state = self.lock();
        let unit = state.options.unit;
        let file = |held: &[u8]| Media::holding(held, held.len() as u64, unit, u64::MAX);
        state.below = below.into_iter().map(file).collect();
        state.media = state.new_media(own);
    }

    /// Makes `memory` what is in the file with this number now from `pos` on, and zeros behind its
    /// end. That is no operation: it takes no time, nothing goes wrong with it, and nobody else
    /// runs meanwhile.
    pub fn peek(&self, file: u16, pos: u64, memory: &mut [u8]) {
        let state = self.lock();
        let file = state.file(file);
        let inside = file.size().saturating_sub(pos).min(memory.len() as u64);
        let found = file.read(Range::new(pos, inside));
        let (there, behind) = memory.split_at_mut(found.len());
        there.copy_from_slice(found);
        behind.fill(0);
    }

    /// What happens by chance follows from `seed` from now on.
    pub fn reseed(&self, seed: u64) {
        self.lock().random = Random::new(seed);
    }

    /// Lets `draw` use what the device's own chances come from.
    pub(crate) fn draw(&self, draw: impl FnOnce(&mut Random)) {
        draw(&mut self.lock().random);
    }

    /// What goes wrong from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.lock().faults = faults;
    }

    /// Operations so far; the next one has the number after this.
    #[must_use]
    pub fn operations(&self) -> u64 {
        self.lock().ops
    }

    /// Whether `errno` was made up by a fault so far.
    #[must_use]
    pub fn has_injected(&self, errno: i32) -> bool {
        self.lock().injected >> errno.clamp(0, 127) & 1 == 1
    }

    /// Whether anything went wrong so far that a second try does not put right.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.lock().injected & !(1 << libc::EAGAIN | 1 << libc::EINTR) != 0
    }

    /// What it was asked wrongly since this was asked last.
    #[must_use]
    pub fn take_violations(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().violations)
    }

    /// Nothing is answered any more, until [`SimDevice::answer`] or the power is cut.
    pub fn fall_silent(&self) {
        let mut state = self.lock();
        if state.power == Power::On {
            state.power = Power::Silent;
        }
    }

    /// What was not answered is.
    pub fn answer(&self) {
        let mut state = self.lock();
        if state.power == Power::Silent {
            state.power = Power::On;
        }
    }

    /// The device ends at byte `bytes` from now on, a multiple of its alignment. Whoever has
    /// opened it before may ask for what is gone; whoever does later knows better.
    pub fn shrink(&self, bytes: u64) {
        self.lock().media.shrink(bytes);
    }

    /// The power fails: of what was not made durable anything may be lost, or garbage, which is
    /// returned. All that is in flight ends, and until [`SimDevice::power_on`] everything, with
    /// `EIO`.
    pub fn cut_power(&self) -> Vec<Range> {
        let mut state = self.lock();
        state.power = Power::Off;
        state.end_all();
        let State { media, random, faults, .. } = &mut *state;
        media.cut(random, faults.rot)
    }

    /// The device is used again.
    pub fn power_on(&self) {
        self.lock().power = Power::On;
    }

    /// A place for the reports of a new queue, whose owner knows the size of now.
    pub(crate) fn add_queue(&self) -> usize {
        let mut state = self.lock();
        state.options.bytes = state.media.size();
        let place = state.ended.iter().position(Option::is_none).unwrap_or(state.ended.len());
        if place == state.ended.len() {
            state.ended.push(None);
        }
        if let Some(ended) = state.ended.get_mut(place) {
            *ended = Some(Vec::with_capacity(64));
        }
        place
    }

    /// The queue is gone: its transfers touch nothing any more.
    pub(crate) fn remove_queue(&self, queue: usize) {
        let mut state = self.lock();
        state.flights.retain(|flight| flight.queue != queue);
        if let Some(ended) = state.ended.get_mut(queue) {
            *ended = None;
        }
    }

    /// Whether a queue has no room for another transfer just now.
    pub(crate) fn is_full(&self) -> bool {
        let state = &mut *self.lock();
        state.befalls_queue(Fault::Full, state.faults.full)
    }

    /// Whether a hand-over fails.
    pub(crate) fn refuses_kick(&self) -> bool {
        let state = &mut *self.lock();
        state.befalls_queue(Fault::Kick, state.faults.kicks)
    }

    /// Takes transfers of `queue` in.
    ///
    /// # Safety
    /// As for [`crate::Queue::place`].
    pub(crate) unsafe fn start(&self, queue: usize, placed: &mut Vec<(Transfer, Token)>) {
        let mut state = self.lock();
        for (transfer, token) in placed.drain(..) {
            // SAFETY: as promised by the caller.
            unsafe { state.start(queue, transfer, token) };
        }
    }

    /// Lets some time pass, and swaps what `queue` has to report with `reports`, which is empty.
    pub(crate) fn reap(&self, queue: usize, reports: &mut Vec<Report>) {
        let mut state = self.lock();
        let tick = state.options.latency / 8 + 1;
        let until = state.now + state.random.below(tick);
        state.advance(until);
        if let Some(Some(ended)) = state.ended.get_mut(queue) {
            std::mem::swap(ended, reports);
        }
        for &(_, _, (from, to)) in reports.iter() {
            (from..to).for_each(|change| state.media.reported(change));
        }
    }

    /// Whether `queue` has something to report.
    pub(crate) fn has_ended(&self, queue: usize) -> bool {
        matches!(self.lock().ended.get(queue), Some(Some(ended)) if !ended.is_empty())
    }

    /// Lets time pass until `queue` has something to report, or nothing more will.
    pub(crate) fn wait(&self, queue: usize) {
        let mut state = self.lock();
        while matches!(state.ended.get(queue), Some(Some(ended)) if ended.is_empty())
            && state.power != Power::Silent
        {
            let Some(due) = state.flights.peek().map(|flight| flight.due) else { return };
            state.advance(due);
        }
    }

    /// Runs a call that may wait, while others run before and after it.
    fn call<T>(&self, run: impl FnOnce(&mut State) -> Result<T, i32>) -> Result<T, i32> {
        let result = self.made(run);
        self.let_others_run();
        result
    }

    /// The same, where nobody runs after it.
    fn made<T>(&self, run: impl FnOnce(&mut State) -> Result<T, i32>) -> Result<T, i32> {
        self.let_others_run();
        let mut state = self.lock();
        while state.power == Power::Silent {
            drop(state);
            if !pause::is_possible() {
                // Nobody is there who could make it answer.
                return Err(libc::EIO);
            }
            pause::here();
            state = self.lock();
        }
        if state.power == Power::Off {
            return Err(libc::EIO);
        }
        let longest = state.options.latency;
        let until = state.now + state.random.below(longest);
        state.advance(until);
        run(&mut state)
    }

    fn let_others_run(&self) {
        let draws = {
            let state = &mut *self.lock();
            state.random.chance(state.options.pauses)
        };
        if draws {
            pause::here();
        }
    }

    /// Makes one transfer, through the page cache unless `direct`, and waits for it.
    ///
    /// # Safety
    /// The memory that `transfer` names is valid and nobody else's until this returns.
    pub(crate) unsafe fn transfer(&self, transfer: &Transfer, direct: bool) -> Outcome {
        let done = self.call(|state| {
            let door = if direct { Door::Direct } else { Door::Buffered };
            // SAFETY: as promised by the caller.
            let (outcome, (from, to)) = unsafe { state.perform(transfer, 0, transfer.len, door) };
            (from..to).for_each(|change| state.media.reported(change));
            Ok(outcome)
        });
        done.unwrap_or_else(|errno| -errno)
    }

    /// Zeros `range` of the device itself, and keeps or gives back its storage.
    pub(crate) fn allocate(&self, range: Range, keep: bool) -> Result<(), i32> {
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

    /// Gives the device `bytes`: ftruncate(2).
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

    /// Makes durable what was reported. Who is told that it failed may be the last to hear of it:
    /// others flush, and go on, before it does.
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

    /// The first byte of a file from `pos` on that is data, or hole: lseek(2).
    pub(crate) fn seek(&self, file: u16, pos: u64, data: bool) -> Result<u64, i32> {
        self.call(|state| {
            state.check(Call::Other)?;
            state.file(file).seek(pos, data).ok_or(libc::ENXIO)
        })
    }
}
