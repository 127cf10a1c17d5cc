//! Allocate ahead: a worker that writes into a hole behind written bytes also allocates the storage
//! behind its write, so that the next writes are overwrites to the engine and need no worker. The
//! switch [`crate::OpenOptions::allocate_ahead`] turns it off.
//!
//! A file system takes a write to storage that was never written without waiting (XFS, ext4), and
//! reports that storage as a hole. What is allocated and unused is bounded by a share of the file,
//! and given back when the device is closed, when space runs out, or when other writes need the
//! place of its window. After a crash it stays allocated, which harms nothing.
//!
//! Invariant: storage is given back only where it was allocated here, no write of this device has
//! reached it since, and the file system still reports it as unwritten, with its range locked
//! exclusively. So neither a client's bytes nor storage that was allocated before are lost. Bytes
//! that another opener of the file wrote stay too, unless it writes them between the question and
//! the answer's use: no lock excludes other openers.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use crate::block::ahead_map::AheadMap;
use crate::block::range_lock::{LockMode, RangeLocks};
use crate::sim_hooks::yield_point;
use crate::storage::Storage;
use crate::types::alignment::{Alignment, round_down};
use crate::types::byte_range::ByteRange;

/// The least that is allocated ahead in bytes, and how many bytes must precede the write for it.
const LEAST_BYTES: u64 = 16 << 10;
/// The most that is allocated ahead at a time, in bytes.
const MOST_BYTES: u64 = 1 << 20;
/// The most that is given back under one lock, in bytes.
const PART_BYTES: u64 = 64 << 10;
/// Windows whose unused part is tracked.
const WINDOWS: usize = 64;
/// Bytes that precede a write for which the oldest window gives its unused part back.
const EVICTING_BYTES: u64 = 256 << 10;
/// Space that is allocated and unused is at most this part of what the file takes without it.
const USED_PART: u64 = 10;
/// Free bytes of the file system below which nothing is allocated ahead.
const FREE_BYTES: u64 = 256 << 20;

/// The windows of one device that were allocated ahead. Workers take turns; a worker that finds
/// another one here only writes.
#[derive(Default)]
pub(crate) struct AllocateAhead {
    windows: Mutex<VecDeque<ByteRange>>,
    /// The storage cannot, or is full.
    off: AtomicBool,
    /// Bytes that were allocated ahead so far.
    total: AtomicU64,
}

/// The parts of a device that are needed here.
#[derive(Clone, Copy)]
pub(crate) struct AheadTarget<'a> {
    pub(crate) map: &'a dyn AheadMap,
    pub(crate) storage: &'a dyn Storage,
    pub(crate) ranges: &'a RangeLocks,
    /// Size of the device in bytes.
    pub(crate) size: u64,
}

impl AllocateAhead {
    /// Allocates ahead if a write to `range` comes next, and follows others. The range is locked.
    pub(crate) fn before_write(&self, target: AheadTarget<'_>, range: ByteRange) {
        if !target.map.begins_in_hole(range) || self.off.load(Ordering::Relaxed) {
            return;
        }
        let before = target.map.written_before(range.pos, MOST_BYTES);
        if before < LEAST_BYTES {
            return;
        }
        let Ok(mut windows) = self.windows.try_lock() else { return };
        let block = target.storage.properties().align.offset;
        let end = round_down((range.end() + before.min(MOST_BYTES)).min(target.size), block);
        let len = end.saturating_sub(range.pos);
        let window = ByteRange::new(range.pos, len);
        // A discard, or a write of a part of a block, has the lock now: no storage for it.
        if len <= range.len || !target.ranges.try_lock(window, LockMode::Shared) {
            return;
        }
        let allocated = !target.has_room(&mut windows, before)
            || target.allocate(&mut windows, window, range.len, &self.total);
        target.ranges.unlock(window, LockMode::Shared);
        if !allocated {
            self.off.store(true, Ordering::Relaxed);
            target.give_back(&mut windows);
        }
    }

    /// Gives back all unused storage whose range is not locked. True if there was some: a write
    /// that found no space may find some now.
    pub(crate) fn give_back(&self, target: AheadTarget<'_>) -> bool {
        let mut windows = self.lock_windows();
        let before = target.map.ahead_bytes();
        target.give_back(&mut windows);
        target.map.ahead_bytes() < before
    }

    /// Like [`AllocateAhead::give_back`], and allocates nothing ahead from now on.
    pub(crate) fn turn_off(&self, target: AheadTarget<'_>) -> bool {
        self.off.store(true, Ordering::Relaxed);
        self.give_back(target)
    }

    /// Bytes that were allocated ahead so far, those that were given back included.
    pub(crate) fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Waits until no other thread has the windows; in a simulation, where the task that has them
    /// runs on this thread, yields to the other tasks.
    fn lock_windows(&self) -> MutexGuard<'_, VecDeque<ByteRange>> {
        while yield_point::is_simulated() {
            match self.windows.try_lock() {
                Ok(windows) => return windows,
                Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => yield_point::yield_now(),
            }
        }
        self.windows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AheadTarget<'_> {
    /// Whether another window can be tracked. Only a write behind `before` >= [`EVICTING_BYTES`]
    /// makes room at the cost of the oldest window: isolated writes would make each other's windows
    /// come and go.
    fn has_room(self, windows: &mut VecDeque<ByteRange>, before: u64) -> bool {
        if windows.len() >= WINDOWS {
            windows.retain(|&window| self.map.next_ahead(window).is_some());
        }
        if windows.len() >= WINDOWS
            && before >= EVICTING_BYTES
            && let Some(oldest) = windows.pop_front()
            && !self.give_back_window(oldest)
        {
            windows.push_back(oldest);
        }
        windows.len() < WINDOWS
    }

    /// Allocates `window` as far as the file's share allows, for a write to its first `write`
    /// bytes, and adds the rest to `total`; its range is locked. False if the storage cannot, or is
    /// full.
    fn allocate(
        self,
        windows: &mut VecDeque<ByteRange>,
        window: ByteRange,
        write: u64,
        total: &AtomicU64,
    ) -> bool {
        let properties = self.storage.properties();
        if properties.device || !properties.punch_hole || properties.align == Alignment::NONE {
            return false;
        }
        let Ok(space) = self.storage.space() else { return false };
        if space.free < FREE_BYTES {
            return true;
        }
        let ahead = self.map.ahead_bytes();
        let share = (space.allocated.saturating_sub(ahead) / USED_PART).saturating_sub(ahead);
        if share < LEAST_BYTES {
            return true;
        }
        let share = round_down(share, properties.align.offset);
        let window = ByteRange::new(window.pos, window.len.min(write + share));
        // Storage that the file had before, as by fallocate(1), is not given back later.
        let mut unwritten = Vec::new();
        if self.storage.unwritten(window, &mut unwritten).is_err() {
            return false;
        }
        for range in unwritten {
            let from = range.pos.max(window.pos);
            let to = range.end().min(window.end());
            self.map.forget_holes(ByteRange::new(from, to.saturating_sub(from)));
        }
        let done = self.storage.preallocate(window);
        // The bytes of the write itself are marked by the write. After an error a part may have
        // storage, which is given back.
        self.map.mark_ahead(ByteRange::new(window.pos + write, window.len - write));
        windows.push_back(window);
        total.fetch_add(window.len - write, Ordering::Relaxed);
        done.is_ok()
    }

    /// Gives back the unused storage of all windows; those that are locked stay.
    fn give_back(self, windows: &mut VecDeque<ByteRange>) {
        windows.retain(|&window| !self.give_back_window(window));
    }

    /// Gives back the unused storage of a window. False if a part of it is locked, or the storage
    /// has failed.
    fn give_back_window(self, window: ByteRange) -> bool {
        let (mut rest, mut all) = (window, true);
        while let Some(unused) = self.map.next_ahead(rest) {
            // Small parts, because a write next to one may have the lock.
            let to = (unused.pos + 1).next_multiple_of(PART_BYTES).min(unused.end());
            let part = ByteRange::new(unused.pos, to - unused.pos);
            all &= self.ranges.try_lock(part, LockMode::Exclusive) && {
                let done = self.punch(part);
                self.ranges.unlock(part, LockMode::Exclusive);
                done
            };
            rest = ByteRange::new(to, window.end() - to);
        }
        all
    }

    /// Deallocates what is still unused in `range`, which is locked exclusively. The file system is
    /// asked too: bytes that another opener has written there meanwhile stay.
    fn punch(self, range: ByteRange) -> bool {
        let mut rest = range;
        while let Some(unused) = self.map.next_ahead(rest) {
            let mut unwritten = Vec::new();
            if self.storage.unwritten(unused, &mut unwritten).is_err() {
                return false;
            }
            for part in unwritten {
                let from = part.pos.max(unused.pos);
                let len = part.end().min(unused.end()).saturating_sub(from);
                let part = ByteRange::new(from, len);
                if len > 0 && self.storage.punch(part).is_err() {
                    return false;
                }
                self.map.unmark_ahead(part);
            }
            self.map.forget_ahead(unused);
            rest = ByteRange::new(unused.end(), range.end() - unused.end());
        }
        true
    }
}
