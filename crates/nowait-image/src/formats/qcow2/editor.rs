//! Changes a qcow2 image that no other process uses: writes, zeroes and frees whole clusters, and
//! grows or shrinks the disk.
//!
//! Invariant: after a kill or a power cut at any moment, every cluster that the tables in the file
//! point to has a refcount and its bytes; clusters that are not yet committed by
//! [`Editor::commit_batch`] read as before, except for data that was written in place. At worst
//! clusters leak.
//!
//! Data, new L2 tables and raised refcounts are written first, when no pointer refers to them.
//! After a sync the pointers follow, and after another one the refcounts of the clusters that they
//! replaced are lowered.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use crate::error::ImageError;
use crate::formats::layer::Layer;
use crate::formats::qcow2::check;
use crate::formats::qcow2::content::header_of;
use crate::formats::qcow2::entries::{BadEntry, Cluster, L1Entry, ZERO, with_copied};
use crate::formats::qcow2::header::{Header, MAX_L1_BYTES};
use crate::formats::qcow2::layout;
use crate::formats::qcow2::lookup::read_table;
use crate::formats::qcow2::offline_allocator::RefcountAllocator;
use crate::formats::qcow2::subclusters::{whole, words_of_whole};
use crate::image_file::ImageFile;

/// Bytes of new data and of tables after which a batch is committed; small in tests, so that these
/// have several batches.
const BATCH_BYTES: u64 = if cfg!(test) { 64 << 10 } else { 64 << 20 };
const SIZE_AT: u64 = 24;
const L1_AT: u64 = 36;

/// An L2 table that is being changed.
struct Table {
    pos: u64,
    /// The words of its entries.
    entries: Vec<u64>,
    /// Whether the L1 table in the file points to it.
    linked: bool,
    /// Words that are not in the file yet; empty if there are none.
    changed: Range<usize>,
}

/// A qcow2 image that is being changed.
pub(crate) struct Editor<'a> {
    file: &'a ImageFile,
    header: Header,
    allocator: RefcountAllocator<'a>,
    l1: Vec<u64>,
    /// Keyed by the index of the L1 entry.
    tables: BTreeMap<u64, Table>,
    /// Clusters that entries of this batch pointed to before.
    deferred_free: Vec<u64>,
    /// Clusters of the previous batch, whose entries become durable with the next sync.
    deferred_free_before: Vec<u64>,
    /// Clusters that several entries named, each with the number of those that were removed.
    shared: BTreeMap<u64, u64>,
    batch_bytes: u64,
}

/// Checks that the image of `layer` can be changed, and clears the feature bits that a change would
/// invalidate. Returns its header.
///
/// # Errors
/// One line with the reason for not changing it.
pub(crate) fn check_editable(layer: &Layer) -> Result<Header, ImageError> {
    let file = &layer.file;
    let refused = |why: &str| Err(ImageError::refused(file.path(), why));
    header_of(layer)?;
    // Its bitmaps may have been changed since the image was opened.
    let header = Header::read(file)?;
    if header.has_data_file() {
        return refused(
            "its data is in a file of its own, and it is only read here (use qemu-img)",
        );
    }
    let found = check::find(file, &header, &mut |_, _| {});
    let (report, _) = found.map_err(|error| ImageError::os(file.path(), "read", &error))?;
    if report.corruptions > 0 {
        return refused("its metadata is damaged (look at it with nowait check)");
    }
    if let Some(kept) = header.autoclear_to_write() {
        let cleared = file.write_at(Header::AUTOCLEAR_AT, &kept.to_be_bytes());
        let cleared = cleared.and_then(|()| file.sync());
        cleared.map_err(|error| ImageError::os(file.path(), "write", &error))?;
    }
    Ok(header)
}

impl<'a> Editor<'a> {
    /// Opens the image of `layer`, whose file is open for writing.
    ///
    /// # Errors
    /// Like [`check_editable`].
    pub(crate) fn open(layer: &'a Layer) -> Result<Self, ImageError> {
        let (file, header) = (&*layer.file, check_editable(layer)?);
        let failed = |error: io::Error| ImageError::os(file.path(), "read", &error);
        let l1 = read_table(file, header.l1_pos, u64::from(header.l1_entries)).map_err(failed)?;
        for entry in &l1 {
            // There are no snapshots, so the other user is another part of this disk.
            if let Ok(L1Entry::Table { copied: false, .. }) = L1Entry::parse(*entry, &header) {
                let why = "two parts of its disk share a table of clusters, and it is only read \
                           here (nowait copy -O qcow2 makes an image without that)";
                return Err(ImageError::refused(file.path(), why));
            }
        }
        let allocator = RefcountAllocator::read(file, &header).map_err(failed)?;
        let tables = BTreeMap::new();
        Ok(Self {
            file,
            header,
            allocator,
            l1,
            tables,
            deferred_free: Vec::new(),
            deferred_free_before: Vec::new(),
            shared: BTreeMap::new(),
            batch_bytes: 0,
        })
    }

    /// Bytes of a cluster.
    pub(crate) const fn cluster_bytes(&self) -> u64 {
        self.header.cluster_bytes()
    }

    /// Size of the disk in bytes.
    pub(crate) const fn size(&self) -> u64 {
        self.header.size
    }

    /// The mapping of cluster number `index` of the disk.
    pub(crate) fn cluster(&mut self, index: u64) -> io::Result<Cluster> {
        let (l1_index, at) = self.entry_location(index);
        if !self.load(l1_index)? {
            return Ok(Cluster::Unallocated);
        }
        let table = self.tables.get(&l1_index);
        let words = table.and_then(|table| table.entries.get(at..at + self.header.entry_words()));
        whole(words.unwrap_or_default(), &self.header).map_err(damaged)
    }

    /// The position of the data of cluster `index` in the file, if all of it may be written in place.
    pub(crate) fn in_place(&mut self, index: u64) -> io::Result<Option<u64>> {
        match self.cluster(index)? {
            Cluster::Data { host, copied: true } => Ok(Some(host)),
            _ => Ok(None),
        }
    }

    /// Like [`Editor::in_place`], also of a cluster that has data in some of its subclusters only.
    pub(crate) fn exclusive_host(&mut self, index: u64) -> io::Result<Option<u64>> {
        match self.cluster(index)? {
            Cluster::Mixed { host, copied: true } => Ok(host),
            _ => self.in_place(index),
        }
    }

    /// Writes `bytes`, a whole cluster, to cluster number `index` of the disk.
    pub(crate) fn write_cluster(&mut self, index: u64, bytes: &[u8]) -> io::Result<()> {
        debug_assert_eq!(bytes.len() as u64, self.cluster_bytes());
        let old = self.cluster(index)?;
        let host = match old {
            Cluster::Data { host, copied: true } => return self.file.write_at(host, bytes),
            // This cluster is reserved for the data.
            Cluster::Zero { host: Some(host), copied: true } => host,
            _ => self.allocator.allocate(1)?,
        };
        self.file.write_at(host, bytes)?;
        self.replace(index, old, with_copied(host))?;
        self.batch_bytes += self.cluster_bytes();
        self.commit_if_full()
    }

    /// Makes cluster number `index` of the disk read as zeros. `below` tells whether a backing file
    /// is visible where no cluster is allocated.
    pub(crate) fn zero_cluster(&mut self, index: u64, below: bool) -> io::Result<()> {
        match self.cluster(index)? {
            Cluster::Unallocated if !below => Ok(()),
            Cluster::Zero { .. } => Ok(()),
            old if self.header.version >= 3 => {
                self.replace(index, old, ZERO)?;
                self.commit_if_full()
            }
            _ if below => {
                let zeros = vec![0; self.cluster_bytes() as usize];
                self.write_cluster(index, &zeros)
            }
            old => {
                self.replace(index, old, 0)?;
                self.commit_if_full()
            }
        }
    }

    /// Makes the L1 table large enough for a disk of `size` bytes, without changing the size yet.
    /// Commits the batch first if the table has to grow.
    pub(crate) fn make_room(&mut self, size: u64) -> io::Result<()> {
        let entries = size.div_ceil(self.header.l2_reach());
        if entries <= u64::from(self.header.l1_entries) {
            return Ok(());
        }
        if entries * 8 > MAX_L1_BYTES {
            return Err(layout::tables_full());
        }
        self.commit_batch()?;
        let cluster = self.cluster_bytes();
        let clusters = (entries * 8).div_ceil(cluster);
        let pos = self.allocator.allocate(clusters)?;
        self.l1.resize(entries as usize, 0);
        let mut bytes: Vec<u8> = self.l1.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        bytes.resize((clusters * cluster) as usize, 0);
        self.file.write_at(pos, &bytes)?;
        self.allocator.write()?;
        self.file.sync()?;
        let mut field = [0; 12];
        field[..4].copy_from_slice(&(entries as u32).to_be_bytes());
        field[4..].copy_from_slice(&pos.to_be_bytes());
        self.file.write_at(L1_AT, &field)?;
        let old = self.header.l1_pos >> self.header.cluster_bits;
        let old_clusters = (u64::from(self.header.l1_entries) * 8).div_ceil(cluster);
        (self.header.l1_entries, self.header.l1_pos) = (entries as u32, pos);
        self.deferred_free_before.extend(old..old + old_clusters);
        Ok(())
    }

    /// Commits the batch, then makes the disk `size` bytes large, durably.
    pub(crate) fn set_size(&mut self, size: u64) -> io::Result<()> {
        self.commit_batch()?;
        self.file.sync()?;
        self.file.write_at(SIZE_AT, &size.to_be_bytes())?;
        self.header.size = size;
        self.file.sync()
    }

    /// Frees every cluster behind the first `size` bytes of the disk.
    pub(crate) fn truncate(&mut self, size: u64) -> io::Result<()> {
        let reach = self.header.l2_reach();
        let first = size.div_ceil(self.cluster_bytes());
        for l1_index in size / reach..self.l1.len() as u64 {
            if !self.load(l1_index)? {
                continue;
            }
            let table_first = l1_index * self.header.l2_entries();
            for index in first.max(table_first)..table_first + self.header.l2_entries() {
                let old = self.cluster(index)?;
                if old != Cluster::Unallocated {
                    self.replace(index, old, 0)?;
                }
            }
            if first <= table_first {
                self.drop_table(l1_index)?;
            }
            self.commit_if_full()?;
        }
        Ok(())
    }

    /// Ends a batch: links the written clusters into the tables. A committed batch survives a kill
    /// immediately, and a power cut after the next sync.
    pub(crate) fn commit_batch(&mut self) -> io::Result<()> {
        self.allocator.write()?;
        for table in self.tables.values().filter(|table| !table.linked) {
            write_entries(self.file, table.pos, &table.entries)?;
        }
        self.file.sync()?;
        for cluster in std::mem::take(&mut self.deferred_free_before) {
            self.allocator.free(cluster)?;
        }
        for (&l1_index, table) in &self.tables {
            if table.linked {
                let changed = table.entries.get(table.changed.clone()).unwrap_or_default();
                write_entries(self.file, table.pos + table.changed.start as u64 * 8, changed)?;
            } else {
                let at = self.header.l1_pos + l1_index * 8;
                self.file.write_at(at, &with_copied(table.pos).to_be_bytes())?;
            }
        }
        self.tables.clear();
        self.deferred_free_before = std::mem::take(&mut self.deferred_free);
        self.batch_bytes = 0;
        Ok(())
    }

    /// Commits all changes and makes them durable, including the lowered refcounts. With `trim` the
    /// file ends at the end of its last cluster.
    pub(crate) fn finish(mut self, trim: bool) -> io::Result<()> {
        // The first round writes the pointers, the second lowers refcounts, the third writes those.
        self.commit_batch()?;
        self.free_shared()?;
        for _ in 0..2 {
            self.commit_batch()?;
        }
        self.file.sync()?;
        if trim && !self.file.is_block_device() {
            let end = self.allocator.end()?;
            if end < self.file.size()? {
                self.file.set_len(end)?;
            }
        }
        self.file.sync()
    }

    /// Defers the free of the shared clusters that no entry names any more. While one does, the
    /// refcount stays as it is: at 1, an entry without [`COPIED`](crate::formats::qcow2::entries::COPIED)
    /// would be a corruption.
    fn free_shared(&mut self) -> io::Result<()> {
        for (cluster, pointers) in std::mem::take(&mut self.shared) {
            if self.allocator.count(cluster)? == Some(pointers) {
                let each = std::iter::repeat_n(cluster, pointers as usize);
                self.deferred_free_before.extend(each);
            }
        }
        Ok(())
    }

    fn commit_if_full(&mut self) -> io::Result<()> {
        let tables = self.tables.len() as u64 * self.cluster_bytes();
        if self.batch_bytes + tables > BATCH_BYTES { self.commit_batch() } else { Ok(()) }
    }

    /// The index of the L1 entry for cluster `index`, and of the entry's first word in its L2 table.
    const fn entry_location(&self, index: u64) -> (u64, usize) {
        let entries = self.header.l2_entries();
        (index / entries, (index % entries) as usize * self.header.entry_words())
    }

    /// Changes entry `index` from `old` to `entry`, which is that of an image without subclusters.
    fn replace(&mut self, index: u64, old: Cluster, entry: u64) -> io::Result<()> {
        let (l1_index, at) = self.entry_location(index);
        if !self.load(l1_index)? {
            self.add_table(l1_index)?;
        }
        let Some(table) = self.tables.get_mut(&l1_index) else { return Ok(()) };
        let end = at + self.header.entry_words();
        if let Some(slots) = table.entries.get_mut(at..end) {
            let words = words_of_whole(entry, &self.header);
            slots.iter_mut().zip(words).for_each(|(slot, word)| *slot = word);
            table.changed = match table.changed.is_empty() {
                true => at..end,
                false => table.changed.start.min(at)..table.changed.end.max(end),
            };
        }
        let is_kept = |host: u64| entry & !ZERO == with_copied(host);
        let bits = self.header.cluster_bits;
        match old {
            Cluster::Data { host, copied }
            | Cluster::Zero { host: Some(host), copied }
            | Cluster::Mixed { host: Some(host), copied }
                if !is_kept(host) =>
            {
                match copied {
                    true => self.deferred_free.push(host >> bits),
                    false => *self.shared.entry(host >> bits).or_default() += 1,
                }
            }
            Cluster::Compressed { pos, len } => {
                self.deferred_free.extend(pos >> bits..=(pos + len - 1) >> bits);
            }
            _ => {}
        }
        Ok(())
    }

    /// Loads the L2 table of L1 entry `l1_index`. False if there is none.
    fn load(&mut self, l1_index: u64) -> io::Result<bool> {
        if self.tables.contains_key(&l1_index) {
            return Ok(true);
        }
        let entry = self.l1.get(l1_index as usize).copied().unwrap_or_default();
        let pos = match L1Entry::parse(entry, &self.header).map_err(damaged)? {
            L1Entry::Empty => return Ok(false),
            L1Entry::Table { pos, .. } => pos,
        };
        if self.tables.len() as u64 * self.cluster_bytes() >= BATCH_BYTES {
            self.commit_batch()?;
        }
        let words = self.header.l2_entries() * self.header.entry_words() as u64;
        let entries = read_table(self.file, pos, words)?;
        self.tables.insert(l1_index, Table { pos, entries, linked: true, changed: 0..0 });
        Ok(true)
    }

    fn add_table(&mut self, l1_index: u64) -> io::Result<()> {
        let pos = self.allocator.allocate(1)?;
        let entries = vec![0; self.header.l2_entries() as usize * self.header.entry_words()];
        self.tables.insert(l1_index, Table { pos, entries, linked: false, changed: 0..0 });
        if let Some(entry) = self.l1.get_mut(l1_index as usize) {
            *entry = with_copied(pos);
        }
        Ok(())
    }

    /// Frees the L2 table of L1 entry `l1_index`, whose clusters were freed before.
    fn drop_table(&mut self, l1_index: u64) -> io::Result<()> {
        let Some(table) = self.tables.remove(&l1_index).filter(|table| table.linked) else {
            return Ok(());
        };
        if let Some(entry) = self.l1.get_mut(l1_index as usize) {
            *entry = 0;
        }
        // The batch has written no cluster that this table maps, so its pointer may go immediately.
        self.file.write_at(self.header.l1_pos + l1_index * 8, &[0; 8])?;
        self.deferred_free.push(table.pos >> self.header.cluster_bits);
        Ok(())
    }
}

fn damaged(bad: BadEntry) -> io::Error {
    io::Error::other(format!("its metadata is damaged: an entry {}", bad.words()))
}

/// Writes the `entries` of a table, one after the other from `pos` on.
pub(crate) fn write_entries(file: &ImageFile, pos: u64, entries: &[u64]) -> io::Result<()> {
    let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_be_bytes()).collect();
    file.write_at(pos, &bytes)
}
