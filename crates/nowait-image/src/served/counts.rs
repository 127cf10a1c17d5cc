//! Which clusters of an image's file are free, and taking them.
//!
//! Invariant: a cluster is given out once; its count is raised before anybody learns of it, and
//! nothing is lowered while the image is in use. What no count tells of is free only behind all
//! that counts tell of, or behind the end that the file had when it was opened.
//! Knows: overlay, entry, header, refcounts. Known by: meta. Source: QEMU docs/interop/qcow2.txt,
//! "Host cluster management".

use crate::entry::refcount_block;
use crate::header::{Header, MAX_POS, MAX_REFCOUNT_TABLE_BYTES};
use crate::refcounts;

use super::overlay::{Overlay, Stage, Stop};

/// Where the header has the place and the size of the refcount table.
const TABLE_POS_AT: usize = 48;
const TABLE_CLUSTERS_AT: usize = 56;

/// Neighbouring clusters of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Clusters {
    pub(crate) first: u64,
    pub(crate) count: u64,
}

/// Clusters that are remembered until they can be given back; what is beyond that leaks.
const MAX_GIVEN_UP: usize = 1 << 20;

/// The counts of an image that is written to.
pub(crate) struct Counts {
    /// The refcount table.
    table: Vec<u64>,
    table_pos: u64,
    table_clusters: u64,
    /// Entries of the table up to the last that is one: what lies behind them nobody uses, as on a
    /// block device that is larger than its image. 0: nothing is counted, and nothing known.
    counted: u64,
    /// No cluster before this one is free.
    cursor: u64,
    /// Clusters of the file when it was opened.
    file_end: u64,
    /// The first cluster behind all that were given out or in the file.
    end: u64,
    given_up: Vec<u64>,
}

impl Counts {
    /// With the refcount `table` of a file of `file_bytes`.
    pub(crate) fn new(header: &Header, table: Vec<u64>, file_bytes: u64) -> Self {
        let file_end = file_bytes.div_ceil(header.cluster_bytes());
        let counted = table.iter().rposition(|&entry| entry != 0).map_or(0, |last| last as u64 + 1);
        Self {
            table,
            counted,
            table_pos: header.refcount_table_pos,
            table_clusters: u64::from(header.refcount_table_clusters),
            cursor: 0,
            file_end,
            end: file_end,
            given_up: Vec::new(),
        }
    }

    /// The first cluster behind all that are in use.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Whether `cluster` was behind the end of the file when that was opened, and so is zeros until
    /// it is first written.
    pub(crate) fn is_fresh(&self, cluster: u64) -> bool {
        cluster >= self.file_end
    }

    /// Whether the refcount table is in `cluster`.
    pub(crate) fn is_table(&self, header: &Header, cluster: u64) -> bool {
        let first = self.table_pos >> header.cluster_bits;
        (first..first + self.table_clusters).contains(&cluster)
    }

    /// Takes at least one and at most `most` free clusters.
    pub(crate) fn take(
        &mut self,
        overlay: &mut Overlay,
        header: &Header,
        most: u64,
    ) -> Result<Clusters, Stop> {
        let per_block = header.block_entries();
        // What one block of the overlay has of a refcount block.
        let per_part = (overlay.block() * 8) >> header.refcount_order;
        loop {
            let first = self.cursor;
            if first >= MAX_POS >> header.cluster_bits {
                return Err(Stop::Full);
            }
            let index = first / per_block;
            let Some(&entry) = self.table.get(index as usize) else {
                self.grow(overlay, header)?;
                continue;
            };
            let Some(block) = refcount_block(entry, header).map_err(|_| Stop::Damaged)? else {
                if first < self.file_end && (self.counted == 0 || index < self.counted) {
                    self.cursor = ((index + 1) * per_block).min(self.file_end);
                } else {
                    self.add_block(overlay, header, index)?;
                }
                continue;
            };
            let (pos, at) = part_of(overlay, header, block, first);
            let counts = overlay.get(pos).map_err(|stop| widen(stop, block, header))?;
            let free = |at: u64| refcounts::get(counts, at, header.refcount_order) == 0;
            let Some(skip) = (at..per_part).position(&free) else {
                self.cursor = first + (per_part - at);
                continue;
            };
            let (first, at) = (first + skip as u64, at + skip as u64);
            let count = (at..per_part).take(most as usize).take_while(|&at| free(at)).count();
            let counts = overlay.edit(pos, Stage::Ahead)?;
            for at in at..at + count as u64 {
                refcounts::set(counts, at, header.refcount_order, 1);
            }
            let count = count as u64;
            self.cursor = first + count;
            self.end = self.end.max(self.cursor);
            return Ok(Clusters { first, count });
        }
    }

    /// Takes the cluster at the cursor for the refcount block that counts it.
    fn add_block(
        &mut self,
        overlay: &mut Overlay,
        header: &Header,
        index: u64,
    ) -> Result<(), Stop> {
        let first = self.cursor;
        let mut block = vec![0; header.cluster_bytes() as usize];
        let own = first % header.block_entries();
        refcounts::set(&mut block, own, header.refcount_order, 1);
        let entry_pos = self.table_pos + index * 8;
        let start = entry_pos & !(overlay.block() - 1);
        let entry = first << header.cluster_bits;
        put(overlay.edit(start, Stage::CountTables)?, (entry_pos - start) as usize, entry);
        overlay.put_new(entry, &block);
        if let Some(known) = self.table.get_mut(index as usize) {
            *known = entry;
        }
        self.cursor = first + 1;
        self.end = self.end.max(self.cursor);
        Ok(())
    }

    /// Makes a longer refcount table behind all that the old one counts, with the blocks that count
    /// it and themselves: first these, then the table.
    fn grow(&mut self, overlay: &mut Overlay, header: &Header) -> Result<(), Stop> {
        let cluster = header.cluster_bytes();
        let per_block = header.block_entries();
        let base = self.cursor.max(self.end);
        let first_block = base / per_block;
        let (mut blocks, mut clusters) = (1, 1);
        loop {
            let needed = (first_block + blocks).max(self.table.len() as u64 * 3 / 2);
            let table = (needed * 8).div_ceil(cluster);
            let last = base + blocks + table - 1;
            let counting = last / per_block - first_block + 1;
            if (blocks, clusters) == (counting, table) {
                break;
            }
            (blocks, clusters) = (counting, table);
        }
        if clusters * cluster > MAX_REFCOUNT_TABLE_BYTES.max(cluster) {
            return Err(Stop::Full);
        }
        let head = overlay.edit(0, Stage::CountTables)?;
        let table_pos = (base + blocks) << header.cluster_bits;
        put(head, TABLE_POS_AT, table_pos);
        if let Some(place) = head.get_mut(TABLE_CLUSTERS_AT..TABLE_CLUSTERS_AT + 4) {
            place.copy_from_slice(&(clusters as u32).to_be_bytes());
        }
        let mut table = self.table.clone();
        table.resize((clusters * cluster / 8) as usize, 0);
        let end = base + blocks + clusters;
        for block in 0..blocks {
            let (pos, index) = ((base + block) << header.cluster_bits, first_block + block);
            let mut bytes = vec![0; cluster as usize];
            for counted in base.max(index * per_block)..end.min((index + 1) * per_block) {
                refcounts::set(&mut bytes, counted % per_block, header.refcount_order, 1);
            }
            overlay.put_new(pos, &bytes);
            if let Some(entry) = table.get_mut(index as usize) {
                *entry = pos;
            }
        }
        let old = self.table_pos >> header.cluster_bits;
        (old..old + self.table_clusters).for_each(|cluster| self.give_up(cluster));
        let bytes: Vec<u8> = table.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        overlay.put_new(table_pos, &bytes);
        (self.table, self.table_pos, self.table_clusters) = (table, table_pos, clusters);
        (self.cursor, self.end) = (end, end);
        Ok(())
    }

    /// Nothing points to `cluster` any more, or nothing ever did. It is given back when the image is
    /// closed: until then a request may still be reading it, and a power cut would bring back what
    /// pointed to it.
    pub(crate) fn give_up(&mut self, cluster: u64) {
        if self.given_up.len() < MAX_GIVEN_UP {
            self.given_up.push(cluster);
        }
    }

    /// Takes the clusters that were given up.
    pub(crate) fn take_given_up(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.given_up)
    }

    /// Lowers the count of `cluster`, to which nothing on storage points any more.
    pub(crate) fn give_back(
        &self,
        overlay: &mut Overlay,
        header: &Header,
        cluster: u64,
    ) -> Result<(), Stop> {
        let index = cluster / header.block_entries();
        let entry = self.table.get(index as usize).copied().unwrap_or_default();
        let Some(block) = refcount_block(entry, header).map_err(|_| Stop::Damaged)? else {
            return Err(Stop::Damaged);
        };
        let (pos, at) = part_of(overlay, header, block, cluster);
        let count = refcounts::get(overlay.get(pos)?, at, header.refcount_order);
        let less = count.checked_sub(1).ok_or(Stop::Damaged)?;
        refcounts::set(overlay.edit(pos, Stage::Ahead)?, at, header.refcount_order, less);
        Ok(())
    }
}

/// Where the block of the overlay begins that has the count of `cluster`, and which one in it that
/// is; the refcount block begins at `block`.
fn part_of(overlay: &Overlay, header: &Header, block: u64, cluster: u64) -> (u64, u64) {
    let per_part = (overlay.block() * 8) >> header.refcount_order;
    let index = cluster % header.block_entries();
    (block + index / per_part * overlay.block(), index % per_part)
}

/// When counts are looked through, whole refcount blocks are read.
fn widen(stop: Stop, block: u64, header: &Header) -> Stop {
    match stop {
        Stop::Missing { .. } => Stop::Missing { pos: block, len: header.cluster_bytes() },
        other => other,
    }
}

/// Puts a big-endian number at `at`, if that is in `bytes`.
pub(crate) fn put(bytes: &mut [u8], at: usize, value: u64) {
    if let Some(place) = bytes.get_mut(at..at + 8) {
        place.copy_from_slice(&value.to_be_bytes());
    }
}
