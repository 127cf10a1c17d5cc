//! A disk as it was at an instant, while it goes on being written: copies before writes, and reads of what was.
//!
//! Invariant: a change reaches the disk only when each block that it touches is in scratch, or is wanted no more, or the
//! backup has ended. A read takes bytes from the disk, and looks after that whether their block was still unchanged:
//! a copy is complete before the change begins, so what was read from an unchanged block is old. Neither waits for the
//! other.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};

use nowait::internal::{ReadDevice, WriteGuard};
use nowait::{
    BlockMap, BlockingFile, ByteRange, Error, ExtentStatus, IoBuffer, Operation, ReadCursor,
};

use crate::backup::block_states::{BlockState, BlockStates};
use crate::backup::scratch::{Scratch, ScratchFailure};
use crate::dirty_bitmaps::dirty_bitmap::DirtyBitmap;
use crate::injected_bug::{ServerBug, injected};

/// Bytes that are copied or read in one step.
const STEP_BYTES: u64 = 1 << 20;

/// The end of a backup.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    /// It was committed or aborted.
    Asked,
    /// It has failed, because of this.
    Failed(String),
}

/// A disk as it was at an instant.
pub(crate) struct PointInTime {
    /// Bytes of the disk at that instant.
    size: u64,
    block_bytes: u64,
    states: BlockStates,
    scratch: Scratch,
    /// The bitmap outside of whose dirty granules nothing is wanted.
    only: Option<Arc<DirtyBitmap>>,
    end: OnceLock<End>,
    /// Bytes that were copied to scratch.
    copied: AtomicU64,
    name: String,
}

impl PointInTime {
    /// A disk of `size` bytes as it is, in blocks of `block_bytes`, a power of two; of it only what is dirty in `only`, if
    /// that is given. `name` is for the log. `None` if the disk is too large.
    pub(crate) fn new(
        name: String,
        size: u64,
        block_bytes: u64,
        scratch: Scratch,
        only: Option<Arc<DirtyBitmap>>,
    ) -> Option<Self> {
        let states = BlockStates::new(size, block_bytes)?;
        let (end, copied) = (OnceLock::new(), AtomicU64::new(0));
        Some(Self { size, block_bytes, states, scratch, only, end, copied, name })
    }

    /// Bytes of the disk.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Where old bytes are.
    pub(crate) fn scratch(&self) -> &Scratch {
        &self.scratch
    }

    /// Bytes that were copied to scratch so far.
    pub(crate) fn copied(&self) -> u64 {
        self.copied.load(SeqCst)
    }

    /// Why it has failed.
    pub(crate) fn failure(&self) -> Option<&str> {
        match self.end.get() {
            Some(End::Failed(why)) => Some(why),
            Some(End::Asked) | None => None,
        }
    }

    fn has_ended(&self) -> bool {
        self.end.get().is_some()
    }

    /// Copies nothing more; what is read from now on fails.
    pub(crate) fn finish(&self) {
        let _ = self.end.set(End::Asked);
        self.states.wake();
    }

    #[cold]
    fn fail(&self, why: String) {
        if self.end.set(End::Failed(why.clone())).is_ok() {
            tracing::error!("backup {:?} has failed: {why}", self.name);
        }
        self.states.wake();
    }

    /// The bytes of the disk in a block.
    fn bytes_of(&self, block: u64) -> ByteRange {
        let pos = block * self.block_bytes;
        ByteRange::new(pos, self.block_bytes.min(self.size - pos))
    }

    /// Whether the block is to be kept.
    fn is_wanted(&self, block: u64) -> bool {
        let Some(bitmap) = &self.only else { return true };
        let extents = bitmap.extents(self.bytes_of(block), 1, 2, u64::MAX);
        extents.iter().any(|extent| extent.is_dirty)
    }

    /// Claims unchanged blocks from the first of `blocks` on that are wanted, at most a step of them. Returns their
    /// number.
    fn claim(&self, blocks: std::ops::Range<u64>) -> u64 {
        let step = (STEP_BYTES / self.block_bytes).max(1);
        let end = blocks.end.min(blocks.start + step);
        let wanted = (blocks.start..end).take_while(|block| self.is_wanted(*block)).count() as u64;
        if wanted == 0 {
            self.states.release(blocks.start);
        }
        self.states.claim(blocks.start..blocks.start + wanted)
    }

    /// Copies the `count` claimed blocks from `first` on, and settles them.
    fn copy(&self, first: u64, count: u64, read: ReadDevice<'_>) -> Result<(), String> {
        let text = |error: Error| error.to_string();
        let pos = first * self.block_bytes;
        let mut bytes = IoBuffer::zeroed((count * self.block_bytes) as usize).map_err(text)?;
        let inside = (self.size - pos).min(bytes.len() as u64) as usize;
        let old = bytes.get_mut(..inside).unwrap_or_default();
        read(pos, old).map_err(|error| format!("the disk cannot be read: {error}"))?;
        let mut blocks = (first..).zip(bytes.chunks(self.block_bytes as usize)).peekable();
        while let Some((block, data)) = blocks.next() {
            if data.iter().all(|byte| *byte == 0) {
                self.states.settle(block, BlockState::Zeros);
                continue;
            }
            let mut end = block + 1;
            while blocks.next_if(|(_, data)| data.iter().any(|byte| *byte != 0)).is_some() {
                end += 1;
            }
            let at = |block: u64| ((block - first) * self.block_bytes) as usize;
            let run = bytes.get(at(block)..at(end)).unwrap_or_default();
            self.scratch.write(block * self.block_bytes, run).map_err(|why| why.to_string())?;
            self.copied.fetch_add(run.len() as u64, SeqCst);
            (block..end).for_each(|block| self.states.settle(block, BlockState::Copied));
        }
        Ok(())
    }

    /// Fills `memory` with the bytes from `pos` on as they were. `disk` is as it is.
    ///
    /// # Errors
    /// `EIO`: the backup has ended, or the bytes were released. `EPERM`: they are not wanted. The errno of the disk.
    pub(crate) fn read(
        &self,
        disk: &BlockingFile<dyn BlockMap>,
        pos: u64,
        memory: &mut ReadCursor<'_>,
    ) -> Result<(), Error> {
        let range = ByteRange::new(pos, memory.len());
        if !self.is_dirty(range) {
            return Err(Error::new(libc::EPERM, Operation::Read).at(range));
        }
        let mut bytes = IoBuffer::zeroed(range.len.min(STEP_BYTES) as usize)?;
        let mut at = pos;
        while !memory.is_empty() {
            let len = memory.len().min(STEP_BYTES);
            let step = bytes.get_mut(..len as usize).unwrap_or_default();
            self.read_step(disk, at, step)?;
            memory.copy_from(step);
            at += len;
        }
        Ok(())
    }

    /// Whether all of `range` is wanted.
    fn is_dirty(&self, range: ByteRange) -> bool {
        let Some(bitmap) = &self.only else { return true };
        let extents = bitmap.extents(range, 1, 2, u64::MAX);
        extents.iter().all(|extent| extent.is_dirty)
    }

    fn read_step(
        &self,
        disk: &BlockingFile<dyn BlockMap>,
        pos: u64,
        bytes: &mut [u8],
    ) -> Result<(), Error> {
        let range = ByteRange::new(pos, bytes.len() as u64);
        let lost = || Error::new(libc::EIO, Operation::Read).at(range);
        let blocks = || self.states.touched(range);
        let len = bytes.len();
        if blocks().any(|block| self.states.get(block).is_on_disk())
            && disk.read_at(bytes, pos)? != len
        {
            return Err(lost());
        }
        let mut block = blocks().start;
        while block < blocks().end {
            // States of now, which is after the read of the disk.
            let state = self.states.get(block);
            let same = |next: &u64| self.states.get(*next) == state;
            let end = block + 1 + (block + 1..blocks().end).take_while(same).count() as u64;
            let from = (block * self.block_bytes).max(pos);
            let to = (end * self.block_bytes).min(range.end());
            let part = bytes.get_mut((from - pos) as usize..(to - pos) as usize);
            let part = part.unwrap_or_default();
            match state {
                BlockState::Unchanged | BlockState::Claimed => {}
                BlockState::Zeros => part.fill(0),
                BlockState::Copied => self.read_scratch(from, part)?,
                BlockState::Released => return Err(lost()),
            }
            block = end;
        }
        let is_lost = blocks().any(|block| self.states.get(block) == BlockState::Released);
        if is_lost || self.has_ended() { Err(lost()) } else { Ok(()) }
    }

    fn read_scratch(&self, pos: u64, bytes: &mut [u8]) -> Result<(), Error> {
        let range = ByteRange::new(pos, bytes.len() as u64);
        self.scratch.read(pos, bytes).map_err(|why| {
            self.fail(why.to_string());
            match why {
                ScratchFailure::Storage(error) => error.at(range),
                ScratchFailure::Full(_) => Error::new(libc::EIO, Operation::Read).at(range),
            }
        })
    }

    /// Gives up the blocks that are in `range` as a whole: reads of them fail from now on.
    pub(crate) fn release(&self, range: ByteRange) {
        let blocks = self.states.contained(range, self.size);
        let mut to_free: Option<std::ops::Range<u64>> = None;
        let free = |run: std::ops::Range<u64>| {
            let len = (run.end - run.start) * self.block_bytes;
            self.scratch.free(ByteRange::new(run.start * self.block_bytes, len));
        };
        for block in blocks {
            let mut before = self.states.release(block);
            while before == BlockState::Claimed && !self.has_ended() {
                self.states.wait_settled(block, || self.has_ended());
                before = self.states.release(block);
            }
            to_free = match to_free.take() {
                Some(run) if before == BlockState::Copied => Some(run.start..block + 1),
                None if before == BlockState::Copied => Some(block..block + 1),
                run => {
                    run.into_iter().for_each(free);
                    None
                }
            };
        }
        to_free.into_iter().for_each(free);
    }

    /// Appends at most `limit` extents from the begin of `range` on, as they were.
    ///
    /// # Errors
    /// Those of the disk.
    pub(crate) fn status(
        &self,
        disk: &BlockingFile<dyn BlockMap>,
        range: ByteRange,
        limit: usize,
        extents: &mut Vec<ExtentStatus>,
    ) -> Result<(), Error> {
        let mut now = Vec::new();
        disk.status(range, &mut now)?;
        let (mut at, bytes) = (range.pos, self.block_bytes);
        for extent in now {
            let end = (at + extent.len).min(range.end());
            while at < end && extents.len() <= limit {
                let block = at / bytes;
                // States of now, which is after the query of the disk.
                let next = self.states.next_touched(block, end.div_ceil(bytes));
                let is_on_disk = next > block;
                let to = if is_on_disk { next * bytes } else { (block + 1) * bytes };
                let len = to.min(end) - at;
                let was = match is_on_disk {
                    true => ExtentStatus { len, ..extent },
                    false => ExtentStatus::top(len, self.states.get(block) == BlockState::Zeros),
                };
                push(extents, was);
                at += len;
            }
        }
        extents.truncate(limit);
        Ok(())
    }
}

/// Appends an extent, or makes the last one longer.
fn push(extents: &mut Vec<ExtentStatus>, extent: ExtentStatus) {
    match extents.last_mut() {
        Some(last) if (last.hole, last.depth) == (extent.hole, extent.depth) => {
            last.len += extent.len;
        }
        _ => extents.push(extent),
    }
}

/// Blocks that a thread has claimed. If it panics, the backup fails, and those who wait for them go on.
struct Claim<'a>(&'a PointInTime);

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail("a copy has panicked".to_owned());
        }
        self.0.states.wake();
    }
}

impl WriteGuard for PointInTime {
    fn is_open(&self, range: ByteRange) -> bool {
        let is_open = |block: u64| match self.states.get(block) {
            BlockState::Claimed => injected(ServerBug::WriteBeforeCopy),
            state => !state.is_on_disk(),
        };
        self.has_ended() || self.states.touched(range).all(is_open)
    }

    fn before_change(&self, range: ByteRange, read: ReadDevice<'_>) -> Result<(), Error> {
        let blocks = self.states.touched(range);
        let mut at = blocks.start;
        while at < blocks.end && !self.has_ended() {
            let claimed = self.claim(at..blocks.end);
            if claimed > 0 {
                let _claim = Claim(self);
                if let Err(why) = self.copy(at, claimed, read) {
                    self.fail(why);
                }
                at += claimed;
                continue;
            }
            // Another thread copies it, or has copied it.
            if !injected(ServerBug::WriteBeforeCopy) {
                self.states.wait_settled(at, || self.has_ended());
            }
            at += 1;
        }
        Ok(())
    }
}
