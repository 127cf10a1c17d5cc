//! The block allocation table of a VHDX image: where each block of the disk is.
//!
//! Invariant: a block that is told is inside the file, as far as the disk needs it, and behind the headers.

use nowait::Error;

use crate::formats::mapped_disk::{Place, RunTable, damaged};
use crate::formats::table_blocks::TableBlocks;
use crate::formats::vhdx::region_table::{MIB, Region};
use crate::formats::vhdx::vhdx_metadata::Sizes;

const ENTRY_BYTES: u64 = 8;
/// Sectors whose bits one sector bitmap block has.
const BITMAP_SECTORS: u64 = 1 << 23;
const STATE: u64 = 7;
const NOT_PRESENT: u64 = 0;
const UNDEFINED: u64 = 1;
const ZERO: u64 = 2;
const UNMAPPED: u64 = 3;
const FULLY_PRESENT: u64 = 6;

/// The table of an image.
#[derive(Debug)]
pub(super) struct BlockTable {
    sizes: Sizes,
    /// Position of the table in the file.
    pos: u64,
    blocks: TableBlocks,
    /// Bytes of the file.
    end: u64,
}

impl BlockTable {
    /// The table in `region` of a file of `end` bytes.
    ///
    /// # Errors
    /// A message, if the disk has more blocks than that holds.
    pub(super) fn new(
        sizes: Sizes,
        region: Region,
        blocks: TableBlocks,
        end: u64,
    ) -> Result<Self, String> {
        let table = Self { sizes, pos: region.pos, blocks, end };
        let last = table.index((sizes.disk - 1) / sizes.block);
        match (last + 1) * ENTRY_BYTES <= region.len {
            true => Ok(table),
            false => Err("its block table is damaged: it is too short for the disk".into()),
        }
    }

    /// The entry of the block with this number: behind the entries of as many blocks as a sector bitmap has
    /// bits for, there is one for that bitmap.
    fn index(&self, block: u64) -> u64 {
        block + block / self.ratio()
    }

    /// Blocks to a sector bitmap block.
    fn ratio(&self) -> u64 {
        BITMAP_SECTORS * self.sizes.sector / self.sizes.block
    }
}

impl RunTable for BlockTable {
    fn lookup(&self, pos: u64, len: u64, reads: &mut usize) -> Result<(Place, u64), Error> {
        let Sizes { block: bytes, .. } = self.sizes;
        let (block, inside) = (pos / bytes, pos % bytes);
        let ratio = self.ratio();
        // Up to the entry of a sector bitmap.
        let most = (ratio - block % ratio) as usize;
        let entries = self.blocks.entries(self.pos + self.index(block) * ENTRY_BYTES, reads)?;
        let mut entries = entries.map(u64::from_le_bytes).take(most);
        let first = entries.next().unwrap_or_default();
        let run = |count: u64| len.min(count * bytes - inside);
        let state = first & STATE;
        match state {
            NOT_PRESENT | UNDEFINED | ZERO | UNMAPPED => {
                let more = entries.take_while(|entry| entry & STATE == state).count() as u64;
                Ok((Place::Zeros { present: state != NOT_PRESENT }, run(1 + more)))
            }
            FULLY_PRESENT => {
                let start = first / MIB * MIB;
                let mut next = start.checked_add(bytes);
                let follows = entries.take_while(|entry| {
                    let is_next = entry & STATE == FULLY_PRESENT && next == Some(entry / MIB * MIB);
                    next = next.and_then(|next| next.checked_add(bytes));
                    is_next
                });
                let all = run(1 + follows.count() as u64);
                let fits = |len: u64| {
                    let end = start.checked_add(inside).and_then(|at| at.checked_add(len));
                    start >= MIB && end.is_some_and(|end| end <= self.end)
                };
                // The block itself may be there, and the ones that follow it not.
                let len = [all, run(1)].into_iter().find(|&len| fits(len)).ok_or_else(damaged)?;
                Ok((Place::Data { file: 0, pos: start + inside }, len))
            }
            // States of images with a parent, and unknown ones.
            _ => Err(damaged()),
        }
    }
}
