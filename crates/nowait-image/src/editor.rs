//! A qcow2 image changed by somebody who has it for himself: whole clusters written, made zero,
//! given up; the disk made larger or smaller.
//!
//! Invariant: whenever the process is killed or the power is cut, every cluster that the tables in
//! the file point to is counted and has its bytes; what was not [`Editor::settle`]d yet reads as
//! before, but for data that was written in its place. At worst clusters leak.
//! Knows: chain, check, counts, entry, error, header, host, tables. Known by: resize, commit.
//!
//! What is written first, is not pointed to: data, new L2 tables, higher counts. One sync later the
//! pointers follow, and after another one the counts of what they pointed to before go down.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::ops::Range;

use crate::chain::{Content, Layer};
use crate::check;
use crate::counts::Counts;
use crate::entry::{BadEntry, Cluster, L1Entry, ZERO, sole};
use crate::error::ImageError;
use crate::header::{Header, MAX_L1_BYTES};
use crate::host::HostFile;
use crate::tables::read_table;

/// Bytes of new data and of tables after which a batch is settled; tests have several batches of it.
const BATCH_BYTES: u64 = if cfg!(test) { 64 << 10 } else { 64 << 20 };
const SIZE_AT: u64 = 24;
const L1_AT: u64 = 36;

/// An L2 table that is being changed.
struct Table {
    pos: u64,
    entries: Vec<u64>,
    /// Whether the L1 table in the file points to it.
    linked: bool,
    /// Entries that are not in the file yet; empty if there are none.
    changed: Range<usize>,
}

/// A qcow2 image that is being changed.
pub(crate) struct Editor<'a> {
    file: &'a HostFile,
    header: Header,
    counts: Counts<'a>,
    l1: Vec<u64>,
    /// By number of the L1 entry.
    tables: BTreeMap<u64, Table>,
    /// Clusters that entries of this batch pointed to before.
    given_up: Vec<u64>,
    /// Those of the batch before: its entries are durable at the next sync.
    given_up_before: Vec<u64>,
    batch_bytes: u64,
}

/// Makes sure that the image of `layer` can be changed, and that nothing in it promises what a
/// change would break. Gives its header.
///
/// # Errors
/// One line that says why it is left alone.
pub(crate) fn admit(layer: &Layer) -> Result<&Header, ImageError> {
    let file = &layer.file;
    let refused = |why: &str| Err(ImageError::refused(file.path(), why));
    let Content::Qcow2 { header, data } = &layer.content else {
        return refused("it is no qcow2 image");
    };
    if data.is_some() {
        return refused(
            "its data is in a file of its own, and it is only read here (use qemu-img)",
        );
    }
    let found = check::find(file, header, &mut |_, _| {});
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
    /// For the image of `layer`, which is open for writing.
    ///
    /// # Errors
    /// As [`admit`].
    pub(crate) fn open(layer: &'a Layer) -> Result<Self, ImageError> {
        let (file, header) = (&*layer.file, admit(layer)?.clone());
        let failed = |error: io::Error| ImageError::os(file.path(), "read", &error);
        let l1 = read_table(file, header.l1_pos, u64::from(header.l1_entries)).map_err(failed)?;
        let counts = Counts::read(file, &header).map_err(failed)?;
        let (given_up, given_up_before) = (Vec::new(), Vec::new());
        let tables = BTreeMap::new();
        Ok(Self { file, header, counts, l1, tables, given_up, given_up_before, batch_bytes: 0 })
    }

    /// Bytes of a cluster.
    pub(crate) const fn cluster_bytes(&self) -> u64 {
        self.header.cluster_bytes()
    }

    /// Size of the disk in bytes.
    pub(crate) const fn size(&self) -> u64 {
        self.header.size
    }

    /// What the disk has as its cluster number `index`.
    pub(crate) fn cluster(&mut self, index: u64) -> io::Result<Cluster> {
        let (l1_index, at) = self.place(index);
        if !self.load(l1_index)? {
            return Ok(Cluster::Unallocated);
        }
        let table = self.tables.get(&l1_index);
        let entry = table.and_then(|table| table.entries.get(at)).copied().unwrap_or_default();
        Cluster::parse(entry, &self.header).map_err(damaged)
    }

    /// Where the data of cluster `index` is in the file, if it may be written over there.
    pub(crate) fn in_place(&mut self, index: u64) -> io::Result<Option<u64>> {
        match self.cluster(index)? {
            Cluster::Data { host, copied: true } => Ok(Some(host)),
            _ => Ok(None),
        }
    }

    /// Makes `bytes`, a whole cluster, the cluster number `index` of the disk.
    pub(crate) fn write_cluster(&mut self, index: u64, bytes: &[u8]) -> io::Result<()> {
        debug_assert_eq!(bytes.len() as u64, self.cluster_bytes());
        let old = self.cluster(index)?;
        let host = match old {
            Cluster::Data { host, copied: true } => return self.file.write_at(host, bytes),
            // It is kept for this.
            Cluster::Zero { host: Some(host), copied: true } => host,
            _ => self.counts.take(1)?,
        };
        self.file.write_at(host, bytes)?;
        self.replace(index, old, sole(host))?;
        self.batch_bytes += self.cluster_bytes();
        self.settle_if_due()
    }

    /// Makes the cluster number `index` of the disk read as zeros. `below` tells whether something
    /// shows through where nothing is allocated.
    pub(crate) fn zero_cluster(&mut self, index: u64, below: bool) -> io::Result<()> {
        match self.cluster(index)? {
            Cluster::Unallocated if !below => Ok(()),
            Cluster::Zero { .. } => Ok(()),
            old if self.header.version >= 3 => {
                self.replace(index, old, ZERO)?;
                self.settle_if_due()
            }
            _ if below => {
                let zeros = vec![0; self.cluster_bytes() as usize];
                self.write_cluster(index, &zeros)
            }
            old => {
                self.replace(index, old, 0)?;
                self.settle_if_due()
            }
        }
    }

    /// Settles what was done so far and makes the disk reach up to `size` bytes, without changing
    /// the size yet.
    pub(crate) fn make_room(&mut self, size: u64) -> io::Result<()> {
        let entries = size.div_ceil(self.header.l2_reach());
        if entries <= u64::from(self.header.l1_entries) {
            return Ok(());
        }
        if entries * 8 > MAX_L1_BYTES {
            return Err(ErrorKind::FileTooLarge.into());
        }
        self.settle()?;
        let cluster = self.cluster_bytes();
        let clusters = (entries * 8).div_ceil(cluster);
        let pos = self.counts.take(clusters)?;
        self.l1.resize(entries as usize, 0);
        let mut bytes: Vec<u8> = self.l1.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        bytes.resize((clusters * cluster) as usize, 0);
        self.file.write_at(pos, &bytes)?;
        self.counts.write()?;
        self.file.sync()?;
        let mut place = [0; 12];
        place[..4].copy_from_slice(&(entries as u32).to_be_bytes());
        place[4..].copy_from_slice(&pos.to_be_bytes());
        self.file.write_at(L1_AT, &place)?;
        let old = self.header.l1_pos >> self.header.cluster_bits;
        let old_clusters = (u64::from(self.header.l1_entries) * 8).div_ceil(cluster);
        (self.header.l1_entries, self.header.l1_pos) = (entries as u32, pos);
        self.given_up_before.extend(old..old + old_clusters);
        Ok(())
    }

    /// Settles what was done so far, then makes the disk `size` bytes large, for good.
    pub(crate) fn set_size(&mut self, size: u64) -> io::Result<()> {
        self.settle()?;
        self.file.sync()?;
        self.file.write_at(SIZE_AT, &size.to_be_bytes())?;
        self.header.size = size;
        self.file.sync()
    }

    /// Gives up every cluster behind the first `size` bytes of the disk.
    pub(crate) fn cut(&mut self, size: u64) -> io::Result<()> {
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
                self.unlink(l1_index)?;
            }
            self.settle_if_due()?;
        }
        Ok(())
    }

    /// Ends a batch: what was written is pointed to. What is settled survives a kill at once, and a
    /// power cut after the next sync.
    pub(crate) fn settle(&mut self) -> io::Result<()> {
        self.counts.write()?;
        for table in self.tables.values().filter(|table| !table.linked) {
            write_entries(self.file, table.pos, &table.entries)?;
        }
        self.file.sync()?;
        for cluster in std::mem::take(&mut self.given_up_before) {
            self.counts.give_back(cluster)?;
        }
        for (&l1_index, table) in &self.tables {
            if table.linked {
                let changed = table.entries.get(table.changed.clone()).unwrap_or_default();
                write_entries(self.file, table.pos + table.changed.start as u64 * 8, changed)?;
            } else {
                let at = self.header.l1_pos + l1_index * 8;
                self.file.write_at(at, &sole(table.pos).to_be_bytes())?;
            }
        }
        self.tables.clear();
        self.given_up_before = std::mem::take(&mut self.given_up);
        self.batch_bytes = 0;
        Ok(())
    }

    /// Settles everything and makes it durable, the counts of what was given up too. With `trim`
    /// the file ends where its last cluster does.
    pub(crate) fn finish(mut self, trim: bool) -> io::Result<()> {
        // The first makes the pointers, the second lowers counts, the third writes those.
        for _ in 0..3 {
            self.settle()?;
        }
        self.file.sync()?;
        if trim && self.file.is_regular()? {
            let end = self.counts.end()?;
            if end < self.file.size()? {
                self.file.set_len(end)?;
            }
        }
        self.file.sync()
    }

    fn settle_if_due(&mut self) -> io::Result<()> {
        let tables = self.tables.len() as u64 * self.cluster_bytes();
        if self.batch_bytes + tables > BATCH_BYTES { self.settle() } else { Ok(()) }
    }

    /// Which L1 entry stands for cluster `index`, and which entry of its table.
    const fn place(&self, index: u64) -> (u64, usize) {
        let entries = self.header.l2_entries();
        (index / entries, (index % entries) as usize)
    }

    /// Makes entry `index`, which says `old`, say `entry`.
    fn replace(&mut self, index: u64, old: Cluster, entry: u64) -> io::Result<()> {
        let (l1_index, at) = self.place(index);
        if !self.load(l1_index)? {
            self.add_table(l1_index)?;
        }
        let Some(table) = self.tables.get_mut(&l1_index) else { return Ok(()) };
        if let Some(place) = table.entries.get_mut(at) {
            *place = entry;
            table.changed = match table.changed.is_empty() {
                true => at..at + 1,
                false => table.changed.start.min(at)..table.changed.end.max(at + 1),
            };
        }
        let kept = |host: u64| entry & !ZERO == sole(host);
        let bits = self.header.cluster_bits;
        match old {
            Cluster::Data { host, .. } | Cluster::Zero { host: Some(host), .. } if !kept(host) => {
                self.given_up.push(host >> bits);
            }
            Cluster::Compressed { pos, len } => {
                self.given_up.extend(pos >> bits..=(pos + len - 1) >> bits);
            }
            _ => {}
        }
        Ok(())
    }

    /// Has the table of entry `l1_index` at hand. False if there is none.
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
            self.settle()?;
        }
        let entries = read_table(self.file, pos, self.header.l2_entries())?;
        self.tables.insert(l1_index, Table { pos, entries, linked: true, changed: 0..0 });
        Ok(true)
    }

    fn add_table(&mut self, l1_index: u64) -> io::Result<()> {
        let pos = self.counts.take(1)?;
        let entries = vec![0; self.header.l2_entries() as usize];
        self.tables.insert(l1_index, Table { pos, entries, linked: false, changed: 0..0 });
        if let Some(entry) = self.l1.get_mut(l1_index as usize) {
            *entry = sole(pos);
        }
        Ok(())
    }

    /// Gives up the table of entry `l1_index`, whose entries were given up before.
    fn unlink(&mut self, l1_index: u64) -> io::Result<()> {
        let Some(table) = self.tables.remove(&l1_index).filter(|table| table.linked) else {
            return Ok(());
        };
        if let Some(entry) = self.l1.get_mut(l1_index as usize) {
            *entry = 0;
        }
        // Nothing that was written in this batch is behind it: it may go at once.
        self.file.write_at(self.header.l1_pos + l1_index * 8, &[0; 8])?;
        self.given_up.push(table.pos >> self.header.cluster_bits);
        Ok(())
    }
}

fn damaged(bad: BadEntry) -> io::Error {
    io::Error::other(format!("its metadata is damaged: an entry {}", bad.words()))
}

fn write_entries(file: &HostFile, pos: u64, entries: &[u64]) -> io::Result<()> {
    let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_be_bytes()).collect();
    file.write_at(pos, &bytes)
}
