//! The refcounts of a qcow2 image, as recorded in its file.
//!
//! Invariant: only a few refcount blocks are cached, whatever the size of the image.

use std::io;

use crate::formats::qcow2::entries::refcount_block;
use crate::formats::qcow2::header::Header;
use crate::formats::qcow2::lookup::read_table;
use crate::image_file::ImageFile;

/// The most refcount blocks that a check keeps for lookups.
/// Beyond it: the one that was read first goes.
const MAX_CACHED_BLOCKS: usize = 16;

/// The refcounts of an image.
pub(crate) struct Refcounts<'a> {
    file: &'a ImageFile,
    header: &'a Header,
    table: Vec<u64>,
    /// Cached blocks: each one's index in the table, and its bytes; `None` where there is no block.
    cached: Vec<(u64, Option<Vec<u8>>)>,
    /// The index of the one to evict next.
    oldest: usize,
}

impl<'a> Refcounts<'a> {
    /// For the image in `file`, whose refcount table is read.
    pub(crate) fn read(file: &'a ImageFile, header: &'a Header) -> io::Result<Self> {
        let entries = header.refcount_table_entries();
        let table = read_table(file, header.refcount_table_pos, entries)?;
        Ok(Self { file, header, table, cached: Vec::new(), oldest: 0 })
    }

    /// The entries of the refcount table.
    pub(crate) fn table(&self) -> &[u64] {
        &self.table
    }

    /// The refcount of `cluster`; 0 where its block is missing or the table's entry is invalid.
    pub(crate) fn of(&mut self, cluster: u64) -> io::Result<u64> {
        let entries = self.header.block_entries();
        let order = self.header.refcount_order;
        let block = self.block(cluster / entries)?;
        Ok(block.map_or(0, |bytes| get(bytes, cluster % entries, order)))
    }

    /// The bytes of refcount block number `index`, if there is one.
    pub(crate) fn block(&mut self, index: u64) -> io::Result<Option<&[u8]>> {
        let at = match self.cached.iter().position(|&(cached_index, _)| cached_index == index) {
            Some(at) => at,
            None => {
                let entry = self.table.get(index as usize).copied().unwrap_or_default();
                let block = match refcount_block(entry, self.header) {
                    Ok(Some(pos)) => {
                        let mut bytes = vec![0; self.header.cluster_bytes() as usize];
                        self.file.read_at(pos, &mut bytes)?;
                        Some(bytes)
                    }
                    Ok(None) | Err(_) => None,
                };
                self.cache_block(index, block)
            }
        };
        Ok(self.cached.get(at).and_then(|(_, block)| block.as_deref()))
    }

    fn cache_block(&mut self, index: u64, block: Option<Vec<u8>>) -> usize {
        if self.cached.len() < MAX_CACHED_BLOCKS {
            self.cached.push((index, block));
            return self.cached.len() - 1;
        }
        let at = self.oldest;
        self.oldest = (at + 1) % MAX_CACHED_BLOCKS;
        self.cached[at] = (index, block);
        at
    }
}

/// The refcount number `index` in the bytes of a refcount block, of 1 << `order` bits each.
pub(crate) fn get(bytes: &[u8], index: u64, order: u32) -> u64 {
    let bits = 1u64 << order;
    let first = (index * bits / 8) as usize;
    if bits < 8 {
        let byte = u64::from(bytes.get(first).copied().unwrap_or_default());
        return byte >> (index * bits % 8) & ((1 << bits) - 1);
    }
    let count = bytes.get(first..first + bits as usize / 8).unwrap_or_default();
    count.iter().fold(0, |count, &byte| count << 8 | u64::from(byte))
}

/// Sets the refcount that [`get`] returns.
pub(crate) fn set(bytes: &mut [u8], index: u64, order: u32, count: u64) {
    let bits = 1u64 << order;
    let first = (index * bits / 8) as usize;
    if bits < 8 {
        if let Some(byte) = bytes.get_mut(first) {
            let shift = index * bits % 8;
            let mask = ((1u64 << bits) - 1) << shift;
            *byte = (u64::from(*byte) & !mask | (count << shift) & mask) as u8;
        }
    } else if let Some(field) = bytes.get_mut(first..first + bits as usize / 8) {
        let bytes = count.to_be_bytes();
        field.copy_from_slice(&bytes[bytes.len() - field.len()..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refcount_of_any_width_can_be_set_without_changing_its_neighbours() {
        for order in 0..=6 {
            let all = if order == 6 { u64::MAX } else { (1 << (1u32 << order)) - 1 };
            let mut bytes = vec![0xff; 72];
            for index in [0, 3, 7] {
                for count in [0, 1, all] {
                    set(&mut bytes, index, order, count);
                    assert_eq!(get(&bytes, index, order), count, "order {order}");
                    assert_eq!(get(&bytes, index + 1, order), all, "order {order}");
                }
            }
        }
    }
}
