//! The tables of an image that is only read, read on demand and cached.
//!
//! Invariant: no process writes to such an image, so that cached blocks stay valid. The cache is bounded,
//! whatever the image contains.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use nowait::{Error, Operation};

use crate::image_file::ImageFile;

/// Bytes that are read at a time, at a multiple of that.
const BLOCK_BYTES: u64 = 4096;
/// The most blocks of tables of an image in memory, 4 KiB each.
/// Beyond it: the block that was used longest ago goes.
const MAX_BLOCKS: usize = 256;

#[derive(Debug, Default)]
struct Cached {
    blocks: HashMap<u64, Arc<[u8]>>,
    /// Positions, the oldest block first.
    order: VecDeque<u64>,
}

/// The tables of a file.
#[derive(Debug)]
pub(crate) struct TableBlocks {
    file: Arc<ImageFile>,
    cached: Mutex<Cached>,
}

impl TableBlocks {
    pub(crate) fn new(file: Arc<ImageFile>) -> Self {
        Self { file, cached: Mutex::default() }
    }

    /// The entries of `N` bytes from the one at `pos` on, as far as they are in the same block of the
    /// file; zeros behind its end. `pos` is a multiple of `N`, which is a power of two.
    ///
    /// # Errors
    /// The errno of a failed read.
    pub(crate) fn entries<const N: usize>(
        &self,
        pos: u64,
        reads: &mut usize,
    ) -> Result<impl Iterator<Item = [u8; N]> + use<N>, Error> {
        let block = self.block(pos & !(BLOCK_BYTES - 1), reads)?;
        let inside = (pos & (BLOCK_BYTES - 1)) as usize;
        let count = (block.len() - inside) / N;
        Ok((0..count).map(move |index| {
            let at = inside + index * N;
            block.get(at..at + N).and_then(|bytes| bytes.try_into().ok()).unwrap_or([0; N])
        }))
    }

    fn block(&self, start: u64, reads: &mut usize) -> Result<Arc<[u8]>, Error> {
        let lock = || self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(block) = lock().blocks.get(&start) {
            return Ok(block.clone());
        }
        let mut bytes = vec![0; BLOCK_BYTES as usize];
        let failed = |error: std::io::Error| Error::from_io(&error, Operation::Read);
        self.file.read_at(start, &mut bytes).map_err(failed)?;
        *reads += 1;
        let block = Arc::<[u8]>::from(bytes);
        let cached = &mut *lock();
        if cached.blocks.insert(start, block.clone()).is_none() {
            cached.order.push_back(start);
        }
        if cached.order.len() > MAX_BLOCKS
            && let Some(oldest) = cached.order.pop_front()
        {
            cached.blocks.remove(&oldest);
        }
        Ok(block)
    }
}
