//! The copy of a disk that moves: all of it, then what has changed again and again, and the rest in a pause.
//!
//! Invariant: the steps, and what is taken and put back, are those of the mover of a server.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use nowait::sim::{Random, yield_now};
use nowait::{BlockDevice, BlockMap, BlockingFile, ByteRange, Error, Flags};
use nowait_server::{SimChanges, copy_changes};

/// Bytes that are copied together.
const PIECE_BYTES: u64 = 32 << 10;

/// A disk.
pub type Disk = Arc<BlockDevice<dyn BlockMap>>;

/// How far a move is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// All is copied for the first time.
    Copying,
    /// Changes are copied.
    Following,
    /// No request is in flight, and the rest is copied.
    Paused,
    /// The rest was copied and flushed in the pause.
    Complete,
    /// It has failed, or was cancelled.
    Ended,
}

/// A move.
pub struct Mover {
    source: BlockingFile<dyn BlockMap>,
    target: BlockingFile<dyn BlockMap>,
    size: u64,
    /// Changes since it began.
    pub changes: SimChanges,
    stage: Cell<Stage>,
    is_cancelled: Cell<bool>,
    /// How often in 65536 pieces the pause is over.
    late: u16,
    random: RefCell<Random>,
}

impl Mover {
    /// The move of `source` to `target`, which has its size. Changes are noted from now on.
    #[must_use]
    pub fn new(source: Disk, target: Disk, late: u16, random: Random) -> Option<Self> {
        let size = source.size();
        Some(Self {
            source: BlockingFile::new(source),
            target: BlockingFile::new(target),
            size,
            changes: SimChanges::new(size).ok()?,
            stage: Cell::new(Stage::Copying),
            is_cancelled: Cell::new(false),
            late,
            random: RefCell::new(random),
        })
    }

    /// How far it is.
    #[must_use]
    pub const fn stage(&self) -> Stage {
        self.stage.get()
    }

    /// No request of a client is in flight, nor follows before it has another stage.
    pub fn on_paused(&self) {
        self.stage.set(Stage::Paused);
    }

    /// It is to end.
    pub fn cancel(&self) {
        self.is_cancelled.set(true);
    }

    /// Copies until it is complete or has ended.
    pub fn run(self: Rc<Self>) {
        let is_complete = self.copy().unwrap_or(false);
        self.stage.set(if is_complete { Stage::Complete } else { Stage::Ended });
    }

    /// Returns whether it is complete.
    fn copy(&self) -> Result<bool, Error> {
        for pos in (0..self.size).step_by(PIECE_BYTES as usize) {
            if self.is_cancelled.get() {
                return Ok(false);
            }
            self.copy_piece(ByteRange::new(pos, PIECE_BYTES.min(self.size - pos)))?;
        }
        self.target.flush()?;
        self.stage.set(Stage::Following);
        while !self.is_cancelled.get() {
            let is_paused = self.stage.get() == Stage::Paused;
            let is_copied = copy_changes(&self.changes, |ranges| self.copy_ranges(ranges))?;
            self.target.flush()?;
            match is_paused {
                true if is_copied => return Ok(true),
                // The pause did not suffice.
                true => self.stage.set(Stage::Following),
                false => yield_now(),
            }
        }
        Ok(false)
    }

    fn copy_ranges(&self, ranges: &[ByteRange]) -> Result<bool, Error> {
        for range in ranges {
            for pos in (range.pos..range.end()).step_by(PIECE_BYTES as usize) {
                let is_paused = self.stage.get() == Stage::Paused;
                if is_paused && self.random.borrow_mut().chance(self.late) {
                    return Ok(false);
                }
                self.copy_piece(ByteRange::new(pos, PIECE_BYTES.min(range.end() - pos)))?;
            }
        }
        Ok(true)
    }

    fn copy_piece(&self, range: ByteRange) -> Result<(), Error> {
        let mut bytes = vec![0; range.len as usize];
        self.source.read_at(&mut bytes, range.pos)?;
        self.target.write_at(&bytes, range.pos, Flags::NONE).map(drop)
    }
}
