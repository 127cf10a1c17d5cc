//! Writes to a served qcow2 image: clusters are allocated, filled, and only then linked into its
//! tables.
//!
//! Invariant: a cluster is allocated by one request. Around that request's bytes it holds what the
//! disk held there before (C24), and all of it is in place before any other request can find the
//! cluster.

use nowait::{ByteRange, Error, Flags, IoBuffer, Operation, Storage, WriteCursor};

use crate::formats::qcow2::entries::Cluster;
use crate::injected_bug;
use crate::injected_bug::ImageBug;

use crate::formats::qcow2::backing_tables::{bytes_of, clusters_of};
use crate::qcow2_disk::backing_chain::Mapping;
use crate::qcow2_disk::cluster_locks::ClusterGuard;
use crate::qcow2_disk::disk::Qcow2Disk;
use crate::qcow2_disk::extent_cache::CachedMapping;
use crate::qcow2_disk::metadata::Metadata;
use crate::qcow2_disk::metadata_cache::MetadataError;
use crate::qcow2_disk::refcount_allocator::ClusterRun;

/// Most bytes that are allocated together; at least a cluster.
const RUN_BYTES: u64 = 1 << 20;

/// The target of a run of units of the disk.
struct Allocation {
    /// The first unit of the disk.
    first: u64,
    /// Its position in the file with the data.
    pos: u64,
    /// Units in the run: some of one cluster, or all of one or more.
    count: u64,
    /// Whether the target was never written, so that it reads as zeros.
    fresh: bool,
    /// Whether the target was allocated now; if not, it belonged to the disk already.
    allocated: bool,
}

impl Qcow2Disk {
    fn bits(&self) -> u32 {
        self.images.header().unit_bits()
    }

    fn unit(&self) -> u64 {
        self.images.header().unit_bytes()
    }

    /// Waits until no other request allocates the clusters of `range`, which is not empty, and holds them.
    fn hold_clusters(&self, range: ByteRange) -> ClusterGuard<'_> {
        let (first, count) = clusters_of(range.pos, range.len, self.images.header().cluster_bits);
        self.cluster_locks.lock(first..first + count)
    }

    fn data(&self) -> &dyn Storage {
        &**self.images.writeback().data()
    }

    /// Writes `data` to the file with the data, from its byte `pos` on. No other request writes to
    /// the blocks that it covers in part.
    fn write_data(&self, pos: u64, mut data: WriteCursor<'_>) -> Result<(), Error> {
        self.data().write_at(pos, &mut data, None)
    }

    /// Writes all of `data` from byte `pos` of the disk on.
    pub(crate) fn write_all(&self, pos: u64, mut data: WriteCursor<'_>) -> Result<(), Error> {
        let mut pos = pos;
        while !data.is_empty() {
            self.fill_extent_cache(pos);
            pos += self.write_some(pos, &mut data)?;
        }
        Ok(())
    }

    /// Writes the first of `data` at `pos`: in place, or to clusters that it allocates. Returns the
    /// bytes written. The clusters are held before they are looked up, so that one lookup is
    /// enough; a cluster that is written in place stays where it is, and is not held during the
    /// write.
    fn write_some(&self, pos: u64, data: &mut WriteCursor<'_>) -> Result<u64, Error> {
        let (bits, left) = (self.bits(), data.len());
        let (first, count) = clusters_of(pos, left, bits);
        let guard = self.hold_clusters(ByteRange::new(pos, left));
        let writeback = self.images.writeback();
        let (cluster, run) = writeback.update(|metadata| metadata.lookup(first, count))?;
        if let Cluster::Data { host, copied: true } = cluster {
            drop(guard);
            let len = bytes_of(run, pos, left, bits);
            self.write_data(host + (pos & (self.unit() - 1)), data.take(len))?;
            return Ok(len);
        }
        writeback.throttle_dirty()?;
        let target = self.allocate_for(first, cluster, run, count)?;
        let end = ((target.first + target.count) << bits).min(pos + left);
        let len = end - pos;
        let run = ByteRange::new(target.first << bits, target.count << bits);
        let copied = self.copy_on_write(run, &target, ByteRange::new(pos, len), data.take(len));
        let linked = copied.map_or_else(|error| (0, Err(error)), |()| self.link_clusters(&target));
        let (count, done) = linked;
        if count > 0 {
            writeback.mark_dirty();
        }
        if target.allocated && count < target.count {
            writeback.defer_free(self.clusters_behind(&target, count));
        }
        done.map(|()| len)
    }

    /// The clusters of the file that `target` has behind its first `count` units, which are whole clusters.
    fn clusters_behind(&self, target: &Allocation, count: u64) -> ClusterRun {
        let header = self.images.header();
        let first = (target.pos + (count << self.bits())) >> header.cluster_bits;
        let end = target.pos + (target.count << self.bits());
        ClusterRun { first, count: end.div_ceil(header.cluster_bytes()) - first }
    }

    /// The target for `count` units of the disk from `first` on, or for fewer; for the whole cluster where that has to
    /// move. The first `run` of them are mapped as `cluster` tells, which cannot be written in place.
    fn allocate_for(
        &self,
        first: u64,
        cluster: Cluster,
        run: u64,
        count: u64,
    ) -> Result<Allocation, Error> {
        let (bits, header) = (self.bits(), self.images.header());
        let writeback = self.images.writeback();
        let per_cluster = 1 << header.unit_shift();
        let inside = first & (per_cluster - 1);
        if let Cluster::Zero { host: Some(pos), copied: true }
        | Cluster::Reserved { host: pos, copied: true } = cluster
        {
            let count = run.min(count).min(per_cluster - inside);
            return Ok(Allocation { first, pos, count, fresh: false, allocated: false });
        }
        let is_without_host =
            matches!(cluster, Cluster::Unallocated | Cluster::Zero { host: None, .. });
        let (first, count) = match per_cluster {
            1 => (first, self.free_to_allocate(first, run, count)),
            _ if !is_without_host => (first - inside, per_cluster),
            _ if inside > 0 || count < per_cluster => (first, count.min(per_cluster - inside)),
            _ => {
                let free = self.free_to_allocate(first, run, count);
                (first, (free & !(per_cluster - 1)).max(per_cluster))
            }
        };
        if header.has_data_file() {
            let pos = first << bits;
            return Ok(Allocation { first, pos, count, fresh: false, allocated: false });
        }
        let (allocated, fresh) = writeback.update(|metadata| {
            let allocated = metadata.allocate(count.div_ceil(per_cluster))?;
            Ok((allocated, metadata.is_beyond_eof(allocated.first)))
        })?;
        let end = (allocated.first + allocated.count) << header.cluster_bits;
        if let Err(error) = writeback.grow_file_to(end) {
            writeback.defer_free(allocated);
            return Err(error);
        }
        let inside = first & (per_cluster - 1);
        let pos = (allocated.first << header.cluster_bits) + (inside << bits);
        let count = count.min(allocated.count << header.unit_shift());
        Ok(Allocation { first, pos, count, fresh, allocated: true })
    }

    /// How many of the `count` units of the disk from `first` on are allocated together: none that has a place already,
    /// and of an image with subclusters none that has to move. Of the first `run` that is known.
    fn free_to_allocate(&self, first: u64, mut run: u64, count: u64) -> u64 {
        let count = count.min((RUN_BYTES >> self.bits()).max(1));
        let has_subclusters = self.images.header().has_extended_l2();
        let writeback = self.images.writeback();
        while run < count {
            let found = writeback.with(|metadata| metadata.lookup(first + run, count - run));
            match found {
                Ok((Cluster::Unallocated | Cluster::Zero { host: None, .. }, more)) => run += more,
                Ok((
                    Cluster::Data { copied: true, .. }
                    | Cluster::Zero { host: Some(_), copied: true },
                    _,
                ))
                | Err(_) => break,
                Ok(_) if has_subclusters => break,
                Ok((_, more)) => run += more,
            }
        }
        run.min(count)
    }

    /// Fills the target of `run`: `data` goes to `range`, the rest is copied from the disk as it is
    /// now.
    fn copy_on_write(
        &self,
        run: ByteRange,
        target: &Allocation,
        range: ByteRange,
        mut data: WriteCursor<'_>,
    ) -> Result<(), Error> {
        // A data file ends where the disk does.
        let end = match self.images.header().has_data_file() {
            true => run.end().min(self.images.header().size),
            false => run.end(),
        };
        let before = ByteRange::new(run.pos, range.pos - run.pos);
        let after = ByteRange::new(range.end(), end - range.end());
        let whole = before.len == 0 && after.len == 0;
        let zeros = || Ok(self.images.is_zeros(before)? && self.images.is_zeros(after)?);
        if whole || target.fresh && zeros()? {
            return self.write_data(target.pos + before.len, data);
        }
        let mut all = IoBuffer::zeroed((end - run.pos) as usize)?;
        let (head, rest) = all.split_at_mut(before.len as usize);
        let (middle, tail) = rest.split_at_mut(range.len as usize);
        self.images.read(before.pos, head)?;
        data.copy_to(middle);
        if !injected_bug::injected(ImageBug::ForgetTail) {
            self.images.read(after.pos, tail)?;
        }
        self.write_data(target.pos, WriteCursor::from(&all[..]))
    }

    /// Enters `target` in the tables, a cluster at a time. Returns how many units were entered, and the error that
    /// stopped it, if any.
    fn link_clusters(&self, target: &Allocation) -> (u64, Result<(), Error>) {
        let per_cluster = 1 << self.images.header().unit_shift();
        let mut done = 0;
        while done < target.count {
            let (unit, pos) = (target.first + done, target.pos + (done << self.bits()));
            let count = (per_cluster - (unit & (per_cluster - 1))).min(target.count - done);
            let mapping = CachedMapping::Writable { pos };
            let set = self.update_mapping(unit, count, mapping, |metadata| {
                metadata.set_data(unit, count, pos)
            });
            if set.is_err() {
                return (done, set);
            }
            done += count;
        }
        (done, Ok(()))
    }

    /// Changes the table entry of `count` units of the disk, which are then at `mapping`. The extent
    /// cache is updated before other threads can see the tables: otherwise the later of two reads
    /// could find the older contents (C18).
    fn update_mapping(
        &self,
        unit: u64,
        count: u64,
        mapping: CachedMapping,
        mut set: impl FnMut(&mut Metadata) -> Result<(), MetadataError>,
    ) -> Result<(), Error> {
        let range = ByteRange::new(unit << self.bits(), count << self.bits());
        self.images.writeback().update(|metadata| {
            set(metadata)?;
            self.extents.update(range, mapping);
            Ok(())
        })
    }

    /// C52. An exclusive cluster gives its storage back and stays mapped: a request that still
    /// reads or writes there meets the old bytes or zeros, and never another cluster's bytes. All
    /// other mappings stay as they are.
    pub(crate) fn discard_all(&self, range: ByteRange) -> Result<(), Error> {
        self.require_punch_hole()?;
        let mut pos = range.pos;
        while pos < range.end() {
            let (cluster, len) = self.images.lookup_top_for_write(pos, range.end() - pos)?;
            if let Cluster::Data { host, copied: true } = cluster {
                let inside = pos & (self.unit() - 1);
                self.clear_data(ByteRange::new(host + inside, len), false)?;
            }
            pos += len;
        }
        Ok(())
    }

    fn require_punch_hole(&self) -> Result<(), Error> {
        match self.data().properties().punch_hole {
            true => Ok(()),
            false => Err(Error::new(libc::EOPNOTSUPP, Operation::Zero)),
        }
    }

    /// Makes `range` of the file with the data read as zeros: gives its storage back, or keeps it
    /// if `keep` is set or the file system can do no better.
    fn clear_data(&self, range: ByteRange, keep: bool) -> Result<(), Error> {
        let data = self.data();
        match if keep { data.zero(range) } else { data.punch(range) } {
            Err(error) if !keep && error.errno() == libc::EOPNOTSUPP => data.zero(range),
            done => done,
        }
    }

    /// Makes `range` zeros: in place in exclusive clusters, by the zero flag elsewhere.
    pub(crate) fn zero_all(&self, range: ByteRange, flags: Flags) -> Result<(), Error> {
        self.require_punch_hole()?;
        if self.images.header().version < 3 {
            self.can_zero_in_place(range)?;
        }
        let mut pos = range.pos;
        while pos < range.end() {
            let rest = range.end() - pos;
            let (cluster, len) = self.images.lookup_top_for_write(pos, rest)?;
            pos += match cluster {
                Cluster::Zero { .. } => len,
                Cluster::Data { host, copied: true } => {
                    let inside = pos & (self.unit() - 1);
                    let keep = flags.contains(Flags::NO_UNMAP);
                    self.clear_data(ByteRange::new(host + inside, len), keep)?;
                    len
                }
                _ => self.zero_unallocated(pos, len)?,
            };
        }
        Ok(())
    }

    /// Version 2 has no zero flag: bytes that are neither zero nor in exclusive clusters would have
    /// to be written.
    fn can_zero_in_place(&self, range: ByteRange) -> Result<(), Error> {
        let mut pos = range.pos;
        while pos < range.end() {
            let (found, len) = self.images.resolve(pos, range.end() - pos)?;
            match found {
                Mapping::Zeros | Mapping::Data { writable: true, .. } => pos += len,
                _ => return Err(Error::new(libc::EOPNOTSUPP, Operation::Zero).at(range)),
            }
        }
        Ok(())
    }

    /// Makes some of the `len` bytes at `pos` zeros, for which the top image has no exclusive
    /// cluster. Returns how many.
    fn zero_unallocated(&self, pos: u64, len: u64) -> Result<u64, Error> {
        let (found, run) = self.images.resolve(pos, len)?;
        if found == Mapping::Zeros {
            return Ok(run.min(len));
        }
        let header = self.images.header();
        let (unit, cluster, size) = (self.unit(), header.cluster_bytes(), header.size);
        let (start, cluster_end) =
            (pos & !(unit - 1), ((pos & !(cluster - 1)) + cluster).min(size));
        let mut end = (start + unit).min(size);
        if pos == start && pos + len >= end && header.version >= 3 {
            let whole = (pos + len).min(cluster_end);
            let whole = if whole == size { whole } else { whole & !(unit - 1) };
            match self.set_zeros(ByteRange::new(pos, whole - pos))? {
                Some(done) => return Ok(done),
                // A compressed cluster is allocated as a whole.
                None => end = cluster_end,
            }
        }
        let len_in_cluster = len.min(end - pos);
        let zeros = IoBuffer::zeroed(len_in_cluster as usize)?;
        self.write_all(pos, WriteCursor::from(&zeros[..]))?;
        Ok(len_in_cluster)
    }

    /// Makes some of `range`, whole units of one cluster, zeros in the tables. Returns how many bytes: none if they were
    /// written meanwhile, and have to be looked up again; `None` where the tables cannot tell it.
    fn set_zeros(&self, range: ByteRange) -> Result<Option<u64>, Error> {
        let (header, writeback) = (self.images.header(), self.images.writeback());
        let unit = range.pos >> self.bits();
        let mut count = range.len.div_ceil(self.unit());
        // The subclusters beside these may be moving to another cluster, with the states that they have now.
        let _guard = header.has_extended_l2().then(|| self.hold_clusters(range));
        if header.has_extended_l2() {
            let (cluster, run) = writeback.update(|metadata| metadata.lookup(unit, count))?;
            let is_first = unit & ((1 << header.unit_shift()) - 1) == 0;
            let is_last = count == 1 << header.unit_shift() || range.end() == header.size;
            match cluster {
                Cluster::Data { copied: true, .. } => return Ok(Some(0)),
                Cluster::Compressed { .. } if is_first && is_last => {}
                Cluster::Compressed { .. } => return Ok(None),
                _ => count = run.min(count),
            }
        }
        writeback.throttle_dirty()?;
        let mapping = CachedMapping::Hole;
        self.update_mapping(unit, count, mapping, |metadata| metadata.set_zero(unit, count))?;
        writeback.mark_dirty();
        Ok(Some((count << self.bits()).min(range.len)))
    }
}
