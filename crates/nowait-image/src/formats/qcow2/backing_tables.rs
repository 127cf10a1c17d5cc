//! The tables of an image that is only read, such as one below the top one: read on demand and cached.
//!
//! Invariant: no process writes to such an image, so that cached tables stay valid. The cache is
//! bounded, whatever the image contains.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use nowait::{Error, Operation};

use crate::formats::qcow2::entries::{Cluster, L1Entry};
use crate::formats::qcow2::header::{Header, be64};
use crate::formats::qcow2::lookup::run_of;
use crate::formats::qcow2::read_ahead::near;
use crate::formats::qcow2::subclusters::units;
use crate::image_file::ImageFile;

/// Bytes of tables that are read together, aligned to that. A table that crosses the border of a
/// block is cut between two entries.
const BLOCK_BYTES: u64 = 4096;
/// The most tables that a scan of the allocation looks up ahead of the one it needs.
/// Beyond it: the next read looks up further ones.
const MAX_AHEAD: usize = 256;
/// The most blocks of tables of a backing image that are cached.
/// Beyond it: the one that was read first goes.
const MAX_BLOCKS: usize = 64;

#[derive(Debug, Default)]
struct CachedBlocks {
    blocks: HashMap<u64, Arc<[u8]>>,
    /// Positions, the oldest block first.
    order: VecDeque<u64>,
}

/// The tables of an image that is only read.
#[derive(Debug)]
pub(crate) struct BackingTables {
    header: Box<Header>,
    host: Arc<ImageFile>,
    /// The end of the file's last cluster, which may be there only in part.
    end: u64,
    cached: Mutex<CachedBlocks>,
}

/// The error of a read that met damaged metadata or compressed data.
pub(crate) fn damaged() -> Error {
    Error::new(libc::EIO, Operation::Read)
}

/// The first of the clusters of `1 << bits` bytes that contain the `len` bytes of the disk from
/// `pos` on, and how many they are. `len` is not 0.
pub(crate) fn clusters_of(pos: u64, len: u64, bits: u32) -> (u64, u64) {
    let (first, last) = (pos >> bits, (pos + len - 1) >> bits);
    (first, last - first + 1)
}

/// Bytes from `pos` on in `count` clusters of `1 << bits` bytes, the first of which contains `pos`:
/// at most `len`.
pub(crate) fn bytes_of(count: u64, pos: u64, len: u64, bits: u32) -> u64 {
    ((count << bits) - (pos & ((1 << bits) - 1))).min(len)
}

impl BackingTables {
    /// For the image in `host`, which has `bytes` bytes.
    pub(crate) fn new(header: Box<Header>, host: Arc<ImageFile>, bytes: u64) -> Self {
        let end = bytes.next_multiple_of(header.cluster_bytes());
        Self { header, host, end, cached: Mutex::default() }
    }

    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    /// Looks up `pos` of the disk: the mapping of its cluster, and for how many bytes, at most
    /// `len`, the clusters continue it.
    ///
    /// # Errors
    /// `EIO` where a pointer leads to where no table or data can be; the errno of a failed read.
    pub(crate) fn lookup(&self, pos: u64, len: u64) -> Result<(Cluster, u64), Error> {
        self.run_from(pos, len, true, &mut 0)
    }

    /// Like [`BackingTables::lookup`], for a caller that does no I/O there: compressed clusters form
    /// one run, and near tables of the following clusters are read in the same transfer. Returns
    /// last the number of reads.
    ///
    /// # Errors
    /// Like [`BackingTables::lookup`].
    pub(crate) fn scan(&self, pos: u64, len: u64) -> Result<(Cluster, u64, usize), Error> {
        let mut reads = 0;
        let (cluster, run) = self.run_from(pos, len, false, &mut reads)?;
        Ok((cluster, run, reads))
    }

    fn run_from(
        &self,
        pos: u64,
        len: u64,
        for_io: bool,
        reads: &mut usize,
    ) -> Result<(Cluster, u64), Error> {
        let (header, bits) = (&*self.header, self.header.unit_bits());
        let (first, max_clusters) = clusters_of(pos, len, bits);
        let last = first + max_clusters - 1;
        let (index, inside) = (first / header.l2_units(), first % header.l2_units());
        let block = self.block(header.l1_pos + index * 8, std::iter::empty(), reads)?;
        let mut tables = entries(&block, header.l1_pos + index * 8)
            .take((last / header.l2_units() - index + 1) as usize)
            .map(|entry| L1Entry::parse(entry, header));
        let table = match tables.next() {
            Some(Ok(L1Entry::Table { pos, .. })) => pos,
            Some(Err(_)) => return Err(damaged()),
            Some(Ok(L1Entry::Empty)) | None => {
                let empty_tables =
                    tables.take_while(|next| *next == Ok(L1Entry::Empty)).count() as u64;
                let run = (empty_tables + 1) * header.l2_units() - inside;
                return Ok((Cluster::Unallocated, bytes_of(run, pos, len, bits)));
            }
        };
        if table + header.cluster_bytes() > self.end {
            return Err(damaged());
        }
        let max_clusters = max_clusters.min(header.l2_units() - inside);
        let (entry, unit) =
            (inside >> header.unit_shift(), inside & (header.l2_units() / header.l2_entries() - 1));
        let entry_pos = table + entry * header.entry_bytes();
        let ahead = tables.filter_map(table_pos).take(if for_io { 0 } else { MAX_AHEAD });
        let block = self.block(entry_pos, ahead, reads)?;
        let clusters = units(behind(&block, entry_pos), unit, header).take(max_clusters as usize);
        // Compressed clusters are decompressed one by one.
        let goes_on = |last: Cluster, _| !for_io || !last.is_compressed();
        let (cluster, run) =
            run_of(clusters, header.unit_bytes(), goes_on).map_err(|_| damaged())?;
        match cluster {
            Cluster::Data { host, .. } if !header.has_data_file() => {
                let inside = self.end.saturating_sub(host) >> bits;
                match run.min(inside) {
                    0 => Err(damaged()),
                    run => Ok((cluster, bytes_of(run, pos, len, bits))),
                }
            }
            _ => Ok((cluster, bytes_of(run, pos, len, bits))),
        }
    }

    /// The block of the file that contains `pos`. If it has to be read, near blocks behind it that
    /// contain the positions `ahead` are read with it.
    fn block(
        &self,
        pos: u64,
        ahead: impl Iterator<Item = u64>,
        reads: &mut usize,
    ) -> Result<Arc<[u8]>, Error> {
        let start = pos & !(BLOCK_BYTES - 1);
        let lock = || self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(block) = lock().blocks.get(&start) {
            return Ok(block.clone());
        }
        let mut wanted: Vec<_> = ahead.map(|pos| pos & !(BLOCK_BYTES - 1)).collect();
        wanted.push(start);
        wanted.retain(|&pos| pos >= start);
        wanted.sort_unstable();
        wanted.dedup();
        let mut wanted = near(&wanted, start, BLOCK_BYTES);
        wanted.truncate(MAX_BLOCKS / 2 + 1);
        let end = wanted.last().map_or(start, |&last| last) + BLOCK_BYTES;
        let mut bytes = vec![0; (end - start) as usize];
        let failed = |error: std::io::Error| Error::from_io(&error, Operation::Read);
        self.host.read_at(start, &mut bytes).map_err(failed)?;
        *reads += 1;
        let block_at = |pos: u64| {
            let at = (pos - start) as usize;
            Arc::<[u8]>::from(bytes.get(at..at + BLOCK_BYTES as usize).unwrap_or_default())
        };
        let block = block_at(start);
        let mut cached = lock();
        for pos in wanted.into_iter().filter(|&pos| pos != start) {
            cached.insert(pos, block_at(pos));
        }
        cached.insert(start, block.clone());
        Ok(block)
    }
}

impl CachedBlocks {
    /// Caches a block, and evicts the oldest one if the cache is full.
    fn insert(&mut self, start: u64, block: Arc<[u8]>) {
        if self.blocks.insert(start, block).is_none() {
            self.order.push_back(start);
        }
        if self.order.len() > MAX_BLOCKS
            && let Some(oldest) = self.order.pop_front()
        {
            self.blocks.remove(&oldest);
        }
    }
}

/// The position of the table that an L1 entry points to, if any.
fn table_pos(entry: Result<L1Entry, crate::formats::qcow2::entries::BadEntry>) -> Option<u64> {
    match entry {
        Ok(L1Entry::Table { pos, .. }) => Some(pos),
        _ => None,
    }
}

/// The part of `block` from the byte at `pos` in the file on.
fn behind(block: &[u8], pos: u64) -> &[u8] {
    block.get((pos & (BLOCK_BYTES - 1)) as usize..).unwrap_or_default()
}

/// The entries of an L1 table from the one at `pos` in the file on, as far as they are in `block`.
fn entries(block: &[u8], pos: u64) -> impl Iterator<Item = u64> {
    behind(block, pos).chunks_exact(8).map(|entry| be64(entry, 0))
}
