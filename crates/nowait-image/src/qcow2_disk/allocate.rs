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
use crate::qcow2_disk::disk::Qcow2Disk;
use crate::qcow2_disk::extent_cache::CachedMapping;
use crate::qcow2_disk::metadata::Metadata;
use crate::qcow2_disk::metadata_cache::MetadataError;
use crate::qcow2_disk::refcount_allocator::ClusterRun;

/// Most bytes that are allocated at once; at least a cluster.
const RUN_BYTES: u64 = 1 << 20;

/// The target of a run of clusters of the disk.
struct Allocation {
    /// The first cluster's position in the file with the data.
    pos: u64,
    /// Clusters in the run.
    count: u64,
    /// Whether the target was never written, so that it reads as zeros.
    fresh: bool,
    /// Whether the target was allocated now; if not, it belonged to the disk already.
    allocated: bool,
}

impl Qcow2Disk {
    fn bits(&self) -> u32 {
        self.images.header().cluster_bits
    }

    fn cluster(&self) -> u64 {
        self.images.header().cluster_bytes()
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
        let guard = self.cluster_locks.lock(first..first + count);
        let writeback = self.images.writeback();
        let (cluster, run) = writeback.update(|metadata| metadata.lookup(first, count))?;
        if let Cluster::Data { host, copied: true } = cluster {
            drop(guard);
            let len = bytes_of(run, pos, left, bits);
            self.write_data(host + (pos & (self.cluster() - 1)), data.take(len))?;
            return Ok(len);
        }
        writeback.throttle_dirty()?;
        let target = self.allocate_for(first, cluster, run, count)?;
        let end = ((first + target.count) << bits).min(pos + left);
        let len = end - pos;
        let run = ByteRange::new(first << bits, target.count << bits);
        let copied = self.copy_on_write(run, &target, ByteRange::new(pos, len), data.take(len));
        let linked =
            copied.map_or_else(|error| (0, Err(error)), |()| self.link_clusters(first, &target));
        let (count, done) = linked;
        if count > 0 {
            writeback.mark_dirty();
        }
        if target.allocated && count < target.count {
            let first = (target.pos >> bits) + count;
            writeback.defer_free(ClusterRun { first, count: target.count - count });
        }
        done.map(|()| len)
    }

    /// The target for `count` clusters of the disk from `first` on, or for fewer. The first `run`
    /// of them are mapped as `cluster` tells, which cannot be written in place.
    fn allocate_for(
        &self,
        first: u64,
        cluster: Cluster,
        mut run: u64,
        count: u64,
    ) -> Result<Allocation, Error> {
        let (bits, header) = (self.bits(), self.images.header());
        let writeback = self.images.writeback();
        if let Cluster::Zero { host: Some(pos), copied: true } = cluster {
            return Ok(Allocation { pos, count: 1, fresh: false, allocated: false });
        }
        let count = count.min((RUN_BYTES >> bits).max(1));
        while run < count {
            match writeback.with(|metadata| metadata.lookup(first + run, count - run)) {
                Ok((
                    Cluster::Data { copied: true, .. }
                    | Cluster::Zero { host: Some(_), copied: true },
                    _,
                ))
                | Err(_) => break,
                Ok((_, more)) => run += more,
            }
        }
        let count = run.min(count);
        if header.has_data_file() {
            let pos = first << bits;
            return Ok(Allocation { pos, count, fresh: false, allocated: false });
        }
        let (allocated, fresh) = writeback.update(|metadata| {
            let allocated = metadata.allocate(count)?;
            Ok((allocated, metadata.is_beyond_eof(allocated.first)))
        })?;
        let pos = allocated.first << bits;
        if let Err(error) = writeback.grow_file_to((allocated.first + allocated.count) << bits) {
            writeback.defer_free(allocated);
            return Err(error);
        }
        Ok(Allocation { pos, count: allocated.count, fresh, allocated: true })
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

    /// Enters `target` in the tables for the clusters of the disk from `first` on. Returns how many
    /// were entered, and the error that stopped it, if any.
    fn link_clusters(&self, first: u64, target: &Allocation) -> (u64, Result<(), Error>) {
        for n in 0..target.count {
            let pos = target.pos + (n << self.bits());
            let set = self.update_mapping(first + n, CachedMapping::Writable { pos }, |metadata| {
                metadata.set_data(first + n, pos)
            });
            if set.is_err() {
                return (n, set);
            }
        }
        (target.count, Ok(()))
    }

    /// Changes the table entry of `cluster` of the disk, which is then at `mapping`. The extent
    /// cache is updated before other threads can see the tables: otherwise the later of two reads
    /// could find the older contents (C18).
    fn update_mapping(
        &self,
        cluster: u64,
        mapping: CachedMapping,
        mut set: impl FnMut(&mut Metadata) -> Result<(), MetadataError>,
    ) -> Result<(), Error> {
        let range = ByteRange::new(cluster << self.bits(), self.cluster());
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
                let inside = pos & (self.cluster() - 1);
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
                    let inside = pos & (self.cluster() - 1);
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
        let cluster = self.cluster();
        let (start, size) = (pos & !(cluster - 1), self.images.header().size);
        let end = (start + cluster).min(size);
        if pos == start && pos + len >= end && self.images.header().version >= 3 {
            let writeback = self.images.writeback();
            writeback.throttle_dirty()?;
            let number = pos >> self.bits();
            self.update_mapping(number, CachedMapping::Hole, |metadata| metadata.set_zero(number))?;
            writeback.mark_dirty();
            return Ok(end - start);
        }
        let len_in_cluster = len.min(end - pos);
        let zeros = IoBuffer::zeroed(len_in_cluster as usize)?;
        self.write_all(pos, WriteCursor::from(&zeros[..]))?;
        Ok(len_in_cluster)
    }
}
