//! Empties an overlay whose data is all in its backing file.
//!
//! Invariant: a cluster is freed only after the pointer to it is durably gone; a kill or a power
//! cut at any moment leaves an image whose every cluster is either as it was or not allocated, with
//! leaks at worst.

use std::collections::BTreeSet;
use std::io;

use crate::formats::qcow2::editor::write_entries;
use crate::formats::qcow2::entries::refcount_block;
use crate::formats::qcow2::header::Header;
use crate::formats::qcow2::layout::write_numbers;
use crate::formats::qcow2::lookup::read_table;
use crate::formats::qcow2::refcounts;
use crate::image_file::ImageFile;

/// Empties the image in `file`, which has neither snapshots nor bitmaps, and frees its space.
pub(crate) fn make_empty(file: &ImageFile, header: &Header) -> io::Result<()> {
    write_numbers(file, header.l1_pos, u64::from(header.l1_entries), |_| [0; 8])?;
    file.sync()?;
    let mut table = read_table(file, header.refcount_table_pos, header.refcount_table_entries())?;
    let (used, blocks) = still_used(header, &table)?;
    for (index, entry) in table.iter_mut().enumerate() {
        if !blocks.contains(&(index as u64)) {
            *entry = 0;
        }
    }
    write_entries(file, header.refcount_table_pos, &table)?;
    // The refcounts of freed refcount blocks are lowered only after the table's new entries are
    // durable.
    file.sync()?;
    for &index in &blocks {
        let mut bytes = vec![0; header.cluster_bytes() as usize];
        let first = index * header.block_entries();
        for &cluster in used.range(first..first + header.block_entries()) {
            refcounts::set(&mut bytes, cluster - first, header.refcount_order, 1);
        }
        let pos = table.get(index as usize).copied().unwrap_or_default();
        file.write_at(pos, &bytes)?;
    }
    file.sync()?;
    free_space(file, header, &used)?;
    file.sync()
}

/// The clusters that an empty image needs, and the indexes of the refcount blocks that count them.
fn still_used(header: &Header, table: &[u64]) -> io::Result<(BTreeSet<u64>, BTreeSet<u64>)> {
    let bits = header.cluster_bits;
    let cluster = header.cluster_bytes();
    let mut used = BTreeSet::from([0]);
    let table_first = header.refcount_table_pos >> bits;
    used.extend(table_first..table_first + u64::from(header.refcount_table_clusters));
    let l1_first = header.l1_pos >> bits;
    used.extend(l1_first..l1_first + (u64::from(header.l1_entries) * 8).div_ceil(cluster));
    let mut blocks = BTreeSet::new();
    loop {
        let needed: BTreeSet<u64> =
            used.iter().map(|cluster| cluster / header.block_entries()).collect();
        if needed == blocks {
            return Ok((used, blocks));
        }
        for &index in &needed {
            let entry = table.get(index as usize).copied().unwrap_or_default();
            let Ok(Some(pos)) = refcount_block(entry, header) else {
                return Err(io::Error::other("its refcounts are damaged"));
            };
            used.insert(pos >> bits);
        }
        blocks = needed;
    }
}

/// Makes holes between the clusters in use, and ends the file behind the last of them.
fn free_space(file: &ImageFile, header: &Header, used: &BTreeSet<u64>) -> io::Result<()> {
    let bits = header.cluster_bits;
    let end = used.last().map_or(0, |last| (last + 1) << bits);
    if !file.is_block_device() && file.size()? > end {
        file.set_len(end)?;
    }
    let mut next = 0;
    for &cluster in used {
        if cluster > next {
            // If the hole cannot be made, only space is lost.
            let _ = file.punch(next << bits, (cluster - next) << bits);
        }
        next = cluster + 1;
    }
    Ok(())
}
