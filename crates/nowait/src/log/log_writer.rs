//! Writes one group after the other.
//!
//! Invariant: a group is written when all before it are durable, and no block of a durable group is
//! written again while its segment is in the log.

use std::sync::Arc;

use crate::log::group_buffer::GroupBuffer;
use crate::log::log_format::Layout;
use crate::log::segments::{Segments, WriteFailure};
use crate::log::whole_blocks;
use crate::sim_hooks::injected_bug;
use crate::sim_hooks::injected_bug::EngineBug;
use crate::storage::Storage;
use crate::types::alignment::Alignment;
use crate::types::error::Error;
use crate::types::request::Flags;

/// The last segment, and where the next group goes.
pub(crate) struct LogWriter {
    number: u64,
    storage: Arc<dyn Storage>,
    /// The position of the next group.
    end: u64,
}

impl LogWriter {
    pub(crate) fn new((number, storage): (u64, Arc<dyn Storage>), end: u64) -> Self {
        Self { number, storage, end }
    }

    /// The position after the last durable group.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Whether the last segment has no room for a group.
    pub(crate) fn needs_segment(&self, group: &GroupBuffer, layout: Layout) -> bool {
        self.end + group.padded() > (self.number + 1) * layout.segment_bytes
    }

    /// Writes a group and makes it durable. Returns its position.
    ///
    /// # Errors
    /// The failures of [`Segments::begin`]. Refused also if there was no space for the write, broken if it failed
    /// otherwise, or the sync did.
    pub(crate) fn write(
        &mut self,
        group: &mut GroupBuffer,
        segments: &Segments,
    ) -> Result<u64, WriteFailure> {
        let layout = segments.layout;
        if self.needs_segment(group, layout) {
            self.storage = segments.begin(self.number + 1, self.end)?;
            self.number += 1;
            self.end = layout.first_group(self.number);
        }
        let position = self.end;
        let blocks = group.blocks(layout, position);
        self.write_durably(layout, blocks, position)?;
        self.end += blocks.len() as u64;
        Ok(position)
    }

    /// By one write where that makes it durable together with its data, else by a write and a sync.
    fn write_durably(
        &self,
        layout: Layout,
        blocks: &[u8],
        position: u64,
    ) -> Result<(), WriteFailure> {
        let properties = self.storage.properties();
        let skips = injected_bug::injected(EngineBug::AnswerUnsynced);
        let is_through = properties.align != Alignment::NONE && properties.shares_syncs && !skips;
        let flags = if is_through { Flags::DSYNC } else { Flags::NONE };
        let (_, at) = layout.place_of(position);
        whole_blocks::write(&*self.storage, blocks, at, flags).map_err(of_write)?;
        if is_through || skips {
            return Ok(());
        }
        match self.storage.sync() {
            Err(_) if injected_bug::injected(EngineBug::IgnoreFailedSync) => Ok(()),
            done => done.map_err(WriteFailure::Broken),
        }
    }
}

/// A file system that has no space says so before it has written all of the group.
fn of_write(error: Error) -> WriteFailure {
    match error.errno() {
        libc::ENOSPC | libc::EDQUOT => WriteFailure::Refused(error),
        _ => WriteFailure::Broken(error),
    }
}
