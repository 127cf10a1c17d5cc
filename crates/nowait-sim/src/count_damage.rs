//! Damage to the refcounts of a qcow2 image, and to the entries of its tables that name clusters.
//!
//! Invariant: the image is not open meanwhile. The disk's bytes change only as [`Damage::copies`]
//! says. The tables are parsed here again: this is the judge of the code that parses them elsewhere.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use nowait::sim::{Random, SimDevice};
use nowait_image::ImageFile;

/// The flag of an entry: only this entry refers to the cluster.
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
/// The flag of an L2 entry: the cluster reads as zeros.
const ZERO: u64 = 1;
/// The position in an entry.
const POSITION: u64 = 0x00ff_ffff_ffff_fe00;
/// Bytes of a refcount; new images have this size only.
const COUNT_BYTES: u64 = 2;

/// Damage that was done to an image.
#[derive(Clone, Debug, Default)]
pub struct Damage {
    /// Changes of the disk may fail.
    pub refuses_changes: bool,
    /// A repair makes the image consistent, but two L1 entries share a table still.
    pub lasts: bool,
    /// Ranges of the disk, each with the position on the disk of the bytes that it got. They apply
    /// one after the other.
    pub copies: Vec<(Range<usize>, usize)>,
}

/// A table entry, and its position in the file.
#[derive(Clone, Copy, Debug)]
struct Entry {
    at: u64,
    value: u64,
}

impl Entry {
    fn target(self) -> Option<u64> {
        let pos = self.value & POSITION;
        (pos != 0 && self.value & COMPRESSED == 0).then_some(pos)
    }

    fn is_unallocated(self) -> bool {
        self.value & !COPIED == 0
    }
}

/// The tables of an image.
struct Tables {
    file: ImageFile,
    cluster_bits: u32,
    /// Bytes of the disk.
    size: u64,
    l1_pos: u64,
    l1: Vec<Entry>,
    /// The L2 table of each entry of L1, empty if there is none.
    l2: Vec<Vec<Entry>>,
    refcount_table_pos: u64,
    refcount_table: Vec<Entry>,
}

/// Damages the top image of `device` in one to three ways.
///
/// # Errors
/// Those of the simulated device.
pub fn damage(device: &Arc<SimDevice>, random: &mut Random) -> io::Result<Damage> {
    let mut damage = Damage::default();
    for _ in 0..=random.below(3) {
        let tables = Tables::read(device)?;
        match random.below(8) {
            0..4 => damage.refuses_changes |= tables.set_a_count(0, random)?,
            4..6 => _ = tables.set_a_count(random.pick(&[2, 3, u16::MAX]).unwrap_or(2), random)?,
            _ => tables.share_data(&mut damage, random)?,
        }
    }
    let tables = Tables::read(device)?;
    if random.below(4) == 0 {
        tables.share_l2_table(&mut damage, random)?;
    }
    tables.file.sync()?;
    Ok(damage)
}

fn number<const BYTES: usize>(file: &ImageFile, at: u64) -> io::Result<u64> {
    let mut bytes = [0; BYTES];
    file.read_at(at, &mut bytes)?;
    Ok(bytes.iter().fold(0, |number, &byte| number << 8 | u64::from(byte)))
}

/// The `count` entries from `pos` on.
fn entries(file: &ImageFile, pos: u64, count: u64) -> io::Result<Vec<Entry>> {
    (pos..)
        .step_by(8)
        .take(count as usize)
        .map(|at| Ok(Entry { at, value: number::<8>(file, at)? }))
        .collect()
}

impl Tables {
    fn read(device: &Arc<SimDevice>) -> io::Result<Self> {
        let file = ImageFile::simulated(device, 0);
        let cluster_bits = number::<4>(&file, 20)? as u32;
        let (l1_entries, l1_pos) = (number::<4>(&file, 36)?, number::<8>(&file, 40)?);
        let (refcount_table_pos, clusters) = (number::<8>(&file, 48)?, number::<4>(&file, 56)?);
        let l1 = entries(&file, l1_pos, l1_entries)?;
        let l2_entries = (1 << cluster_bits) / 8;
        let l2_table = |entry: &Entry| match entry.target() {
            Some(pos) => entries(&file, pos, l2_entries),
            None => Ok(Vec::new()),
        };
        Ok(Self {
            cluster_bits,
            size: number::<8>(&file, 24)?,
            l1_pos,
            l2: l1.iter().map(l2_table).collect::<io::Result<_>>()?,
            l1,
            refcount_table_pos,
            refcount_table: entries(&file, refcount_table_pos, clusters * l2_entries)?,
            file,
        })
    }

    fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Entries of an L2 table.
    fn l2_entries(&self) -> u64 {
        self.cluster_bytes() / 8
    }

    fn write(&self, entry: Entry) -> io::Result<()> {
        self.file.write_at(entry.at, &entry.value.to_be_bytes())
    }

    /// Sets the refcount of the cluster at `pos`, if it has one.
    fn set_count(&self, pos: u64, count: u16) -> io::Result<()> {
        let (cluster, per_block) = (pos >> self.cluster_bits, self.cluster_bytes() / COUNT_BYTES);
        let block = self.refcount_table.get((cluster / per_block) as usize);
        let Some(block) = block.and_then(|entry| entry.target()) else { return Ok(()) };
        self.file.write_at(block + cluster % per_block * COUNT_BYTES, &count.to_be_bytes())
    }

    /// Sets the refcount of any cluster in use; each kind is equally likely. Returns true.
    fn set_a_count(&self, count: u16, random: &mut Random) -> io::Result<bool> {
        let table = |pos: u64, entries: &[Entry]| -> Vec<u64> {
            let step = self.cluster_bytes() as usize;
            (pos..pos + entries.len() as u64 * 8).step_by(step).collect()
        };
        let targets =
            |entries: &[Entry]| entries.iter().filter_map(|entry| entry.target()).collect();
        let kinds: [Vec<u64>; 6] = [
            vec![0],
            table(self.refcount_table_pos, &self.refcount_table),
            targets(&self.refcount_table),
            table(self.l1_pos, &self.l1),
            targets(&self.l1),
            targets(&self.l2.concat()),
        ];
        let kind = kinds.get(random.below(kinds.len() as u64) as usize);
        let pos = kind.and_then(|all| random.pick(all)).unwrap_or_default();
        self.set_count(pos, count)?;
        Ok(true)
    }

    /// The entry of a cluster of the disk, with the cluster's number.
    fn any_entry(&self, random: &mut Random) -> Option<(u64, Entry)> {
        let index = random.below(self.l1.len() as u64);
        let at = random.below(self.l2_entries());
        let entry = self.l2.get(index as usize)?.get(at as usize)?;
        Some((index * self.l2_entries() + at, *entry))
    }

    /// Makes two entries name one data cluster, without the flag that it is exclusive.
    fn share_data(&self, damage: &mut Damage, random: &mut Random) -> io::Result<()> {
        let mut tries = (0..100).filter_map(|_| self.any_entry(random));
        let is_data = |entry: Entry| entry.target().is_some() && entry.value & ZERO == 0;
        let found = tries.find(|&(_, entry)| is_data(entry));
        let Some((from, source)) = found else { return Ok(()) };
        let Some((to, target)) = tries.find(|&(to, _)| to != from) else { return Ok(()) };
        drop(tries);
        let len = self.cluster_bytes().min(self.size.saturating_sub(to << self.cluster_bits));
        if len == 0 || self.size < (from << self.cluster_bits) + len {
            return Ok(());
        }
        let value = source.value & !COPIED;
        self.write(Entry { value, ..source })?;
        self.write(Entry { value, ..target })?;
        let count = random.pick(&[0, 1, 2]).unwrap_or(1);
        self.set_count(value & POSITION, count)?;
        damage.refuses_changes |= count == 0;
        damage.copies.push(self.copy(from, to, len));
        Ok(())
    }

    fn copy(&self, from: u64, to: u64, len: u64) -> (Range<usize>, usize) {
        let [from, to] = [from, to].map(|cluster| (cluster << self.cluster_bits) as usize);
        (to..to + len as usize, from)
    }

    /// Makes two entries of L1 name one L2 table. The two parts of the disk then have the same
    /// mappings; a cluster without one keeps its bytes in a backing image, so it needs to have had
    /// none before.
    fn share_l2_table(&self, damage: &mut Damage, random: &mut Random) -> io::Result<()> {
        let index = |random: &mut Random| random.below(self.l1.len() as u64);
        let (from, to) = (index(random), index(random));
        let l2 = |index: u64| self.l2.get(index as usize).map(Vec::as_slice).unwrap_or_default();
        let span = self.l2_entries() << self.cluster_bits;
        let len = span.min(self.size.saturating_sub(to * span));
        let clusters = len.div_ceil(self.cluster_bytes()) as usize;
        let old = |at: usize| l2(to).get(at).is_none_or(|entry| entry.is_unallocated());
        let fits = (0..clusters).zip(l2(from)).all(|(at, new)| !new.is_unallocated() || old(at));
        let (Some(&source), Some(&target)) = (self.l1.get(from as usize), self.l1.get(to as usize))
        else {
            return Ok(());
        };
        if from == to || l2(from).is_empty() || self.size < from * span + len || !fits {
            return Ok(());
        }
        let mask = random.pick(&[0, COPIED]).unwrap_or(0);
        let value = source.value & !mask;
        self.write(Entry { value, ..source })?;
        self.write(Entry { value, ..target })?;
        for (at, entry) in (0..clusters as u64).zip(l2(from)) {
            if !entry.is_unallocated() {
                let len = self.cluster_bytes().min(len - (at << self.cluster_bits));
                let [from, to] = [from, to].map(|table| table * self.l2_entries() + at);
                damage.copies.push(self.copy(from, to, len));
            }
        }
        (damage.refuses_changes, damage.lasts) = (true, true);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use nowait::{BlockingFile, Flags};
    use nowait_image::{Chain, ChainOptions, Format, check};

    use super::*;
    use crate::image;
    use crate::image::{Image, Opening};
    use crate::scenario::{Mode, Scenario};

    #[test]
    fn each_kind_of_damage_occurs_and_a_check_finds_it() {
        let fits = |it: &Scenario| {
            it.qcow2 == Some(9) && it.device.bytes > 160 << 10 && it.device.capacity == u64::MAX
        };
        let all = (0..2000).map(|seed| Scenario::of(Mode::Engine, seed)).filter(fits);
        let (mut refuses, mut lasts, mut copies, mut corrupt, mut leaking) = (0, 0, 0, 0, 0);
        for (scenario, seed) in all.cycle().zip(0..300) {
            let (device, _) = image::device(&scenario).unwrap();
            let mut image = Image::open(&scenario, &device, Opening::Consistent).unwrap();
            let file = BlockingFile::new(image.disk.clone());
            file.write_at(&[7; 64 << 10], 512, Flags::NONE).unwrap();
            image.close().unwrap().unwrap();
            let damage = damage(&device, &mut Random::new(seed)).unwrap();
            refuses += u32::from(damage.refuses_changes);
            lasts += u32::from(damage.lasts);
            copies += u32::from(!damage.copies.is_empty());
            let top = vec![(ImageFile::simulated(&device, 0), Format::Qcow2)];
            let chain = Chain::simulated(top, ChainOptions::default()).unwrap();
            let report = check::check(&chain, &mut |_, _| {}).unwrap();
            corrupt += u32::from(report.corruptions > 0);
            leaking += u32::from(report.leaks > 0);
            assert!(report.corruptions > 0 || !damage.lasts, "seed {seed}");
        }
        let counts = [refuses, lasts, copies, corrupt, leaking];
        assert!(counts.iter().all(|count| (3..300).contains(count)), "{counts:?}");
    }
}
