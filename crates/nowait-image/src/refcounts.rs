//! The reference counts of a qcow2 image, read from its file: how often each cluster is in use,
//! as the image has it.
//!
//! Invariant: a few refcount blocks are held, whatever the size of the image.
//! Knows: entry, header, host, tables. Known by: map, check. Source: QEMU
//! docs/interop/qcow2.txt, "Host cluster management".

use std::io;

use crate::entry::refcount_block;
use crate::header::Header;
use crate::host::HostFile;
use crate::tables::read_table;

/// Blocks that are held at most, to find counts in any order.
const HELD_BLOCKS: usize = 16;

/// The refcounts of an image.
pub(crate) struct Refcounts<'a> {
    file: &'a HostFile,
    header: &'a Header,
    table: Vec<u64>,
    /// Blocks at hand: each one's place in the table, and its bytes; none where there is no block.
    held: Vec<(u64, Option<Vec<u8>>)>,
    /// Which of them goes next.
    oldest: usize,
}

impl<'a> Refcounts<'a> {
    /// Of the image in `file`, whose refcount table is read.
    pub(crate) fn read(file: &'a HostFile, header: &'a Header) -> io::Result<Self> {
        let entries = header.refcount_table_entries();
        let table = read_table(file, header.refcount_table_pos, entries)?;
        Ok(Self { file, header, table, held: Vec::new(), oldest: 0 })
    }

    /// The entries of the refcount table.
    pub(crate) fn table(&self) -> &[u64] {
        &self.table
    }

    /// How often `cluster` is in use. Where the block that would say so is missing, or cannot be
    /// where the table says, that is 0.
    pub(crate) fn of(&mut self, cluster: u64) -> io::Result<u64> {
        let entries = self.header.block_entries();
        let order = self.header.refcount_order;
        let block = self.block(cluster / entries)?;
        Ok(block.map_or(0, |bytes| get(bytes, cluster % entries, order)))
    }

    /// The bytes of the block number `index`, if there is one.
    pub(crate) fn block(&mut self, index: u64) -> io::Result<Option<&[u8]>> {
        let at = match self.held.iter().position(|&(held, _)| held == index) {
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
                self.hold(index, block)
            }
        };
        Ok(self.held.get(at).and_then(|(_, block)| block.as_deref()))
    }

    fn hold(&mut self, index: u64, block: Option<Vec<u8>>) -> usize {
        if self.held.len() < HELD_BLOCKS {
            self.held.push((index, block));
            return self.held.len() - 1;
        }
        let at = self.oldest;
        self.oldest = (at + 1) % HELD_BLOCKS;
        self.held[at] = (index, block);
        at
    }
}

/// The count number `index` in the bytes of a refcount block, of 1 << `order` bits each.
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

/// Sets what [`get`] gives.
pub(crate) fn set(bytes: &mut [u8], index: u64, order: u32, count: u64) {
    let bits = 1u64 << order;
    let first = (index * bits / 8) as usize;
    if bits < 8 {
        if let Some(byte) = bytes.get_mut(first) {
            let shift = index * bits % 8;
            let mask = ((1u64 << bits) - 1) << shift;
            *byte = (u64::from(*byte) & !mask | (count << shift) & mask) as u8;
        }
    } else if let Some(place) = bytes.get_mut(first..first + bits as usize / 8) {
        let bytes = count.to_be_bytes();
        place.copy_from_slice(&bytes[bytes.len() - place.len()..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_is_got_in_every_width_and_the_neighbours_stay() {
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
