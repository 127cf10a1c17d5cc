//! The disk of a point, to be restored.
//!
//! Invariant: each byte that is read has the checksum that was made when it was backed up.

use std::fmt;
use std::sync::Arc;

use nowait::{ByteRange, ExtentStatus};
use nowait_copy::{Error, SourceDisk};

use crate::chain::Chain;
use crate::data_files::DataFiles;
use crate::table::Table;

/// The most extents of an answer about holes.
const ANSWER_EXTENTS: usize = 4096;

/// The disk of a point.
pub struct PointDisk {
    /// Holds the lock of a chain that is read.
    chain: Chain,
    number: u32,
    table: Table,
    files: DataFiles,
    size: u64,
    block_bytes: u64,
}

impl PointDisk {
    /// The disk of the point `number` of `chain`; of the last one without a number.
    ///
    /// # Errors
    /// There is no such point; it, or one that it stands on, cannot be used.
    pub fn open(chain: Chain, number: Option<u32>) -> Result<Arc<Self>, Error> {
        let number = number.or(chain.last()).ok_or_else(|| chain.error("it has no points"))?;
        let table = chain.table(number).map_err(|what| chain.error(what))?;
        let Some(Ok(point)) = chain.points.get(&number) else {
            return Err(chain.error("the point is damaged"));
        };
        let (size, block_bytes) = (point.header.size, point.header.block_bytes);
        let files = DataFiles::new(chain.place.clone());
        Ok(Arc::new(Self { chain, number, table, files, size, block_bytes }))
    }

    /// Its name in errors.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}@{}", self.chain.name, self.number)
    }

    fn read_block(&self, block: u64, memory: &mut [u8]) -> Result<(), String> {
        let Some(entry) = u32::try_from(block).ok().and_then(|block| self.table.get(block)) else {
            memory.fill(0);
            return Ok(());
        };
        let damaged = |why: String| {
            let from = block * self.block_bytes;
            let end = (from + self.block_bytes).min(self.size);
            format!("bytes {from} to {} are damaged: {why}", end - 1)
        };
        if memory.len() as u64 == self.block_bytes {
            return self.files.read(&self.table.files, entry, memory).map_err(damaged);
        }
        // The last block is cut off by the end of the disk.
        let mut whole = vec![0; self.block_bytes as usize];
        self.files.read(&self.table.files, entry, &mut whole).map_err(damaged)?;
        memory.copy_from_slice(whole.get(..memory.len()).unwrap_or_default());
        Ok(())
    }
}

impl fmt::Debug for PointDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

impl SourceDisk for PointDisk {
    fn size(&self) -> u64 {
        self.size
    }

    fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    fn read(&self, pos: u64, memory: &mut [u8]) -> Result<(), String> {
        let blocks = memory.chunks_mut(self.block_bytes as usize);
        (pos / self.block_bytes..)
            .zip(blocks)
            .try_for_each(|(block, memory)| self.read_block(block, memory))
    }

    fn extents(&self, range: ByteRange) -> Vec<ExtentStatus> {
        let entries = &self.table.entries;
        let first = (range.pos / self.block_bytes) as u32;
        let from = entries.partition_point(|entry| entry.block < first);
        let (mut at, mut extents) = (range.pos, Vec::new());
        let mut add = |at: &mut u64, end: u64, hole| {
            let end = end.min(range.end());
            if *at < end {
                extents.push(ExtentStatus::top(end - *at, hole));
                *at = end;
            }
        };
        for entry in entries.iter().skip(from).take(ANSWER_EXTENTS) {
            let begin = u64::from(entry.block) * self.block_bytes;
            add(&mut at, begin, true);
            add(&mut at, begin + self.block_bytes, false);
            if at >= range.end() {
                return extents;
            }
        }
        if entries.len() <= from + ANSWER_EXTENTS {
            add(&mut at, range.end(), true);
        }
        extents
    }
}
