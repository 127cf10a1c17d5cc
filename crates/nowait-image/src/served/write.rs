//! Writing to a qcow2 image in use: clusters taken, filled, and only then entered in its tables.
//!
//! Invariant: a cluster is allocated by one request; what it holds besides that request's bytes is
//! what the disk held there before (C24), and is in place before anybody can find it.
//! Knows: breaks, image, layers, store, meta, overlay, known, busy, parts. Known by: image, which is asked by the engine.

use nowait::{Buffer, Doing, Error, Flags, Range};

use crate::breaks::{self, Flaw};
use crate::entry::Cluster;

use super::counts::Clusters;
use super::image::Live;
use super::known::Place;
use super::layers::Found;
use super::medium::Medium;
use super::meta::Meta;
use super::overlay::Stop;
use super::parts::{Gather, gather};

/// Bytes that are allocated for at once; at least a cluster.
const RUN_BYTES: u64 = 1 << 20;

/// Where clusters of the disk are to be.
struct Target {
    /// The first one's position in the file with the data.
    pos: u64,
    /// How many they are.
    count: u64,
    /// Whether nothing was ever written there, so that it is zeros.
    fresh: bool,
    /// Whether they were taken for this, and not the disk's already.
    taken: bool,
}

impl Live {
    fn bits(&self) -> u32 {
        self.layers.header().cluster_bits
    }

    fn cluster(&self) -> u64 {
        self.layers.header().cluster_bytes()
    }

    fn data(&self) -> &Medium {
        self.layers.store().data()
    }

    pub(super) fn write_all(&self, pos: u64, mut bytes: Gather<'_>) -> Result<(), Error> {
        let mut pos = pos;
        let mut left = bytes.len();
        while left > 0 {
            self.learn_about(pos);
            let len = match self.layers.top(pos, left)? {
                (Cluster::Data { host, copied: true }, len) => {
                    let inside = pos & (self.cluster() - 1);
                    self.data().write(host + inside, &bytes.take(len))?;
                    len
                }
                _ => self.allocate(pos, left, &mut bytes)?,
            };
            pos += len;
            left -= len;
        }
        Ok(())
    }

    /// Writes some of the first of `left` bytes at `pos` to clusters that are allocated for them.
    /// Returns how many; 0 where somebody else has allocated meanwhile.
    fn allocate(&self, pos: u64, left: u64, bytes: &mut Gather<'_>) -> Result<u64, Error> {
        let bits = self.bits();
        let first = pos >> bits;
        let most = (RUN_BYTES >> bits).max(1);
        let last = ((pos + left - 1) >> bits).min(first + most - 1);
        let store = self.layers.store();
        store.before_change()?;
        let _hold = self.busy.hold(first..last + 1);
        let Some(target) = self.target(first, last - first + 1)? else { return Ok(0) };
        let end = ((first + target.count) << bits).min(pos + left);
        let len = end - pos;
        let run = Range::new(first << bits, target.count << bits);
        let filled = self.fill(run, &target, Range::new(pos, len), &bytes.take(len));
        let entered = filled.map_or_else(|error| (0, Err(error)), |()| self.enter(first, &target));
        let (count, done) = entered;
        if count > 0 {
            store.after_change();
        }
        if target.taken && count < target.count {
            let first = (target.pos >> bits) + count;
            store.give_up(Clusters { first, count: target.count - count });
        }
        done.map(|()| len)
    }

    /// Where `count` clusters of the disk from `first` on, or fewer, are to be. `None` if the first
    /// is somewhere already.
    fn target(&self, first: u64, count: u64) -> Result<Option<Target>, Error> {
        let (bits, header) = (self.bits(), self.layers.header());
        let store = self.layers.store();
        let clusters = store.with(|meta| meta.look(first, count))?;
        let is_free = |cluster: &Cluster| {
            !matches!(
                cluster,
                Cluster::Data { copied: true, .. } | Cluster::Zero { host: Some(_), copied: true }
            )
        };
        match clusters.first() {
            Some(Cluster::Data { copied: true, .. }) => return Ok(None),
            Some(&Cluster::Zero { host: Some(pos), copied: true }) => {
                return Ok(Some(Target { pos, count: 1, fresh: false, taken: false }));
            }
            _ => {}
        }
        let count = clusters.iter().take_while(|cluster| is_free(cluster)).count().max(1) as u64;
        if header.has_data_file() {
            let pos = first << bits;
            return Ok(Some(Target { pos, count, fresh: false, taken: false }));
        }
        let (taken, fresh) = store.with(|meta| {
            let taken = meta.take(count)?;
            Ok((taken, meta.is_fresh(taken.first)))
        })?;
        let pos = taken.first << bits;
        if let Err(error) = store.cover((taken.first + taken.count) << bits) {
            store.give_up(taken);
            return Err(error);
        }
        Ok(Some(Target { pos, count: taken.count, fresh, taken: true }))
    }

    /// Puts in place what the clusters of `run` are to hold: `parts` in `range`, around it what the
    /// disk holds there now.
    fn fill(
        &self,
        run: Range,
        target: &Target,
        range: Range,
        parts: &[&[u8]],
    ) -> Result<(), Error> {
        // A data file ends where the disk does.
        let end = match self.layers.header().has_data_file() {
            true => run.end().min(self.layers.header().size),
            false => run.end(),
        };
        let before = Range::new(run.pos, range.pos - run.pos);
        let after = Range::new(range.end(), end - range.end());
        let whole = before.len == 0 && after.len == 0;
        let zeros = || Ok(self.layers.is_zeros(before)? && self.layers.is_zeros(after)?);
        if whole || target.fresh && zeros()? {
            return self.data().write(target.pos + before.len, parts);
        }
        let mut all = Buffer::zeroed((end - run.pos) as usize)?;
        let (head, rest) = all.split_at_mut(before.len as usize);
        let (middle, tail) = rest.split_at_mut(range.len as usize);
        self.layers.read(before.pos, head)?;
        gather(parts, middle);
        if !breaks::has(Flaw::ForgetTail) {
            self.layers.read(after.pos, tail)?;
        }
        self.data().write(target.pos, &[&all])
    }

    /// Enters in the tables that the clusters of the disk from `first` on are at `target`. Returns
    /// how many are entered, and what then went wrong.
    fn enter(&self, first: u64, target: &Target) -> (u64, Result<(), Error>) {
        for n in 0..target.count {
            let pos = target.pos + (n << self.bits());
            let set = self
                .change(first + n, Place::Writable { pos }, |meta| meta.set_data(first + n, pos));
            if set.is_err() {
                return (n, set);
            }
        }
        (target.count, Ok(()))
    }

    /// Changes what the tables say of `cluster` of the disk, which is then at `place`. That is known
    /// before anybody else can look at the tables: of two readers, the later one would else find
    /// what was there before (C18).
    fn change(
        &self,
        cluster: u64,
        place: Place,
        mut set: impl FnMut(&mut Meta) -> Result<(), Stop>,
    ) -> Result<(), Error> {
        let range = Range::new(cluster << self.bits(), self.cluster());
        self.layers.store().with(|meta| {
            set(meta)?;
            self.known.publish(range, place);
            Ok(())
        })
    }

    /// C52. What has a cluster of its own gives its storage back and keeps the cluster: whoever
    /// still reads or writes there reads the old bytes or zeros, and nobody else's. All else stays.
    pub(super) fn discard_all(&self, range: Range) -> Result<(), Error> {
        self.needs_holes()?;
        let mut pos = range.pos;
        while pos < range.end() {
            let (cluster, len) = self.layers.top(pos, range.end() - pos)?;
            if let Cluster::Data { host, copied: true } = cluster {
                let inside = pos & (self.cluster() - 1);
                self.data().clear(Range::new(host + inside, len), false)?;
            }
            pos += len;
        }
        Ok(())
    }

    fn needs_holes(&self) -> Result<(), Error> {
        match self.data().storage().punches_holes() {
            true => Ok(()),
            false => Err(Error::new(libc::EOPNOTSUPP, Doing::Zero)),
        }
    }

    /// Makes `range` zeros: in place where it has clusters of its own, by the flag where it has not.
    pub(super) fn zero_all(&self, range: Range, flags: Flags) -> Result<(), Error> {
        self.needs_holes()?;
        if self.layers.header().version < 3 {
            self.can_zero_in_place(range)?;
        }
        let mut pos = range.pos;
        while pos < range.end() {
            let rest = range.end() - pos;
            let (cluster, len) = self.layers.top(pos, rest)?;
            pos += match cluster {
                Cluster::Zero { .. } => len,
                Cluster::Data { host, copied: true } => {
                    let inside = pos & (self.cluster() - 1);
                    let keep = flags.has(Flags::NO_UNMAP);
                    self.data().clear(Range::new(host + inside, len), keep)?;
                    len
                }
                _ => self.zero_elsewhere(pos, len)?,
            };
        }
        Ok(())
    }

    /// Version 2 has no flag for zeros: what is not zero and not in place has to be written.
    fn can_zero_in_place(&self, range: Range) -> Result<(), Error> {
        let mut pos = range.pos;
        while pos < range.end() {
            let (found, len) = self.layers.find(pos, range.end() - pos)?;
            match found {
                Found::Zeros | Found::Data { writable: true, .. } => pos += len,
                _ => return Err(Error::new(libc::EOPNOTSUPP, Doing::Zero).at(range)),
            }
        }
        Ok(())
    }

    /// Makes some of the `len` bytes at `pos` zeros, which the top image has no cluster of its own
    /// for. Returns how many.
    fn zero_elsewhere(&self, pos: u64, len: u64) -> Result<u64, Error> {
        let (found, run) = self.layers.find(pos, len)?;
        if found == Found::Zeros {
            return Ok(run.min(len));
        }
        let cluster = self.cluster();
        let (start, size) = (pos & !(cluster - 1), self.layers.header().size);
        let end = (start + cluster).min(size);
        if pos == start && pos + len >= end && self.layers.header().version >= 3 {
            let store = self.layers.store();
            store.before_change()?;
            let number = pos >> self.bits();
            self.change(number, Place::Hole, |meta| meta.set_zero(number))?;
            store.after_change();
            return Ok(end - start);
        }
        let part = len.min(end - pos);
        let zeros = Buffer::zeroed(part as usize)?;
        self.write_all(pos, Gather::new(&[std::io::IoSlice::new(&zeros)]))?;
        Ok(part)
    }
}
