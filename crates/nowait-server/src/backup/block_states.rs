//! The state of each block of a disk since a backup began.
//!
//! Invariant: a state only moves forward, in the order of [`BlockState`], and at most one thread has claimed a block.
//! All operations on states have one order.

use std::sync::atomic::{AtomicU8, Ordering::SeqCst};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};

use nowait::ByteRange;
use nowait::internal::{is_simulated, yield_now};

use crate::locking::lock;

/// Blocks whose states are allocated together, when the first of them changes.
const CHUNK_BLOCKS: u64 = 4096;
/// Bytes of the largest disk, whose empty table has 96 MiB.
/// Beyond it: it gets no backup.
const MAX_DISK_BYTES: u64 = 1 << 50;

/// The state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum BlockState {
    /// The disk has it as it was.
    Unchanged,
    /// It is being copied, and the disk has it as it was.
    Claimed,
    /// Scratch has it as it was.
    Copied,
    /// It was all zeros.
    Zeros,
    /// It was discarded, or is not wanted.
    Released,
}

impl BlockState {
    const ALL: [Self; 5] =
        [Self::Unchanged, Self::Claimed, Self::Copied, Self::Zeros, Self::Released];

    fn of(byte: u8) -> Self {
        Self::ALL.get(usize::from(byte)).copied().unwrap_or(Self::Released)
    }

    /// Whether the disk has it, so that a change of it must wait.
    pub(crate) fn is_on_disk(self) -> bool {
        self < Self::Copied
    }
}

/// The states of the blocks of a disk.
pub(crate) struct BlockStates {
    chunks: Box<[OnceLock<Box<[AtomicU8]>>]>,
    /// Blocks of the disk.
    count: u64,
    block_bytes: u64,
    /// Held while claimed blocks are settled, so that no wake-up is missed.
    settling: Mutex<()>,
    settled: Condvar,
}

impl BlockStates {
    /// The states of a disk of `size` bytes in blocks of `block_bytes`, none of which has changed. `None` if it is too
    /// large: there is no memory for its table, or it has more than 1 PiB.
    pub(crate) fn new(size: u64, block_bytes: u64) -> Option<Self> {
        let count = (size <= MAX_DISK_BYTES).then(|| size.div_ceil(block_bytes))?;
        let mut chunks = Vec::new();
        let len = count.div_ceil(CHUNK_BLOCKS) as usize;
        chunks.try_reserve_exact(len).ok()?;
        chunks.resize_with(len, OnceLock::new);
        let (settling, settled) = Default::default();
        Some(Self { chunks: chunks.into(), count, block_bytes, settling, settled })
    }

    /// The blocks that `range` touches, as far as the disk has them.
    pub(crate) fn touched(&self, range: ByteRange) -> std::ops::Range<u64> {
        let end = range.pos.saturating_add(range.len).div_ceil(self.block_bytes).min(self.count);
        (range.pos / self.block_bytes).min(end)..end
    }

    /// The blocks that are in `range` as a whole; the last one of the disk may be shorter.
    pub(crate) fn contained(&self, range: ByteRange, size: u64) -> std::ops::Range<u64> {
        let end = range.pos.saturating_add(range.len);
        let end = if end >= size { self.count } else { end / self.block_bytes };
        range.pos.div_ceil(self.block_bytes).min(end)..end
    }

    /// The state of a block.
    pub(crate) fn get(&self, block: u64) -> BlockState {
        match self.chunks.get((block / CHUNK_BLOCKS) as usize).map(OnceLock::get) {
            Some(Some(chunk)) => {
                let state = chunk.get((block % CHUNK_BLOCKS) as usize);
                state.map_or(BlockState::Released, |state| BlockState::of(state.load(SeqCst)))
            }
            Some(None) => BlockState::Unchanged,
            None => BlockState::Released,
        }
    }

    /// The first block of `from..to` that was changed or claimed; `to` if there is none.
    pub(crate) fn next_touched(&self, from: u64, to: u64) -> u64 {
        let mut at = from;
        while at < to {
            let has_states = |chunk: &OnceLock<_>| chunk.get().is_some();
            if !self.chunks.get((at / CHUNK_BLOCKS) as usize).is_some_and(has_states) {
                at = (at / CHUNK_BLOCKS + 1) * CHUNK_BLOCKS;
            } else if self.get(at).is_on_disk() {
                at += 1;
            } else {
                return at;
            }
        }
        to
    }

    /// Moves a block from one state to a later one. False if it has another one.
    fn change(&self, block: u64, from: BlockState, to: BlockState) -> bool {
        let Some(chunk) = self.chunks.get((block / CHUNK_BLOCKS) as usize) else { return false };
        let states = chunk.get_or_init(|| (0..CHUNK_BLOCKS).map(|_| AtomicU8::default()).collect());
        let state = states.get((block % CHUNK_BLOCKS) as usize);
        state.is_some_and(|it| it.compare_exchange(from as u8, to as u8, SeqCst, SeqCst).is_ok())
    }

    /// Claims unchanged blocks from the first of `blocks` on, one after the other. Returns their number.
    pub(crate) fn claim(&self, blocks: std::ops::Range<u64>) -> u64 {
        let claims = |block: &u64| self.change(*block, BlockState::Unchanged, BlockState::Claimed);
        blocks.take_while(claims).count() as u64
    }

    /// A claimed block has been copied, or need not be.
    pub(crate) fn settle(&self, block: u64, to: BlockState) {
        self.change(block, BlockState::Claimed, to);
    }

    /// Wakes those who wait for claimed blocks.
    pub(crate) fn wake(&self) {
        drop(lock(&self.settling));
        self.settled.notify_all();
    }

    /// Waits until `block` is not claimed, or `is_over`, after which [`BlockStates::wake`] is called.
    pub(crate) fn wait_settled(&self, block: u64, is_over: impl Fn() -> bool) {
        let waits = || self.get(block) == BlockState::Claimed && !is_over();
        if is_simulated() {
            while waits() {
                yield_now();
            }
            return;
        }
        let settling = lock(&self.settling);
        let waited = self.settled.wait_while(settling, |()| waits());
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Releases a block that is not claimed. Returns the state that it had; [`BlockState::Claimed`] if it is claimed.
    pub(crate) fn release(&self, block: u64) -> BlockState {
        loop {
            let state = self.get(block);
            let is_done = match state {
                BlockState::Claimed | BlockState::Released => true,
                _ => self.change(block, state, BlockState::Released),
            };
            if is_done {
                return state;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK_BYTES: u64 = 64 << 10;
    const SIZE: u64 = CHUNK_BLOCKS * BLOCK_BYTES + 1;

    #[test]
    fn blocks_are_touched_by_a_byte_and_contained_as_a_whole_or_to_the_end_of_the_disk() {
        let states = BlockStates::new(3 * BLOCK_BYTES + 1, BLOCK_BYTES).unwrap();
        let size = 3 * BLOCK_BYTES + 1;
        let of = |pos, len| {
            let range = ByteRange::new(pos, len);
            (states.touched(range), states.contained(range, size))
        };
        assert_eq!(of(0, 1), (0..1, 0..0));
        assert_eq!(of(BLOCK_BYTES - 1, 2), (0..2, 1..1));
        assert_eq!(of(BLOCK_BYTES, BLOCK_BYTES), (1..2, 1..2));
        assert_eq!(of(1, 2 * BLOCK_BYTES), (0..3, 1..2));
        assert_eq!(of(3 * BLOCK_BYTES, 1), (3..4, 3..4));
        assert_eq!(of(0, u64::MAX), (0..4, 0..4));
        assert_eq!(of(u64::MAX, 1), (4..4, 4..4));
    }

    #[test]
    fn a_disk_has_at_most_a_pebibyte() {
        assert!(BlockStates::new(MAX_DISK_BYTES, BLOCK_BYTES).is_some());
        assert!(BlockStates::new(MAX_DISK_BYTES + 1, BLOCK_BYTES).is_none());
        assert!(BlockStates::new(0, BLOCK_BYTES).is_some());
    }

    #[test]
    fn states_move_forward_and_each_block_is_claimed_once() {
        let states = BlockStates::new(SIZE, BLOCK_BYTES).unwrap();
        let last = CHUNK_BLOCKS;
        assert_eq!(states.next_touched(0, last + 1), last + 1);
        assert_eq!(states.claim(last - 1..last + 1), 2);
        assert_eq!(states.claim(last - 2..last + 1), 1, "the others are claimed");
        states.settle(last, BlockState::Copied);
        assert_eq!(
            (states.get(last - 1), states.get(last)),
            (BlockState::Claimed, BlockState::Copied)
        );
        assert_eq!(states.next_touched(0, last + 1), last);
        assert_eq!(states.release(last - 1), BlockState::Claimed);
        assert_eq!(states.release(last), BlockState::Copied);
        assert_eq!(states.release(last), BlockState::Released);
        states.settle(last - 1, BlockState::Zeros);
        assert_eq!(states.release(last - 1), BlockState::Zeros);
        assert_eq!(states.release(0), BlockState::Unchanged);
        assert_eq!(states.claim(0..1), 0);
        assert_eq!(states.get(last + 1), BlockState::Unchanged);
        assert_eq!(states.get(2 * CHUNK_BLOCKS), BlockState::Released, "it is behind the disk");
    }
}
