//! The disk of a server behind, with a cache that dies with the server.
//!
//! Invariant: each unit of what is durable is what some prefix of the changes has left there, and none
//! that was durable before is undone.

use nowait::ByteRange;
use nowait::sim::Random;

/// The unit in bytes that no death tears.
pub(super) const UNIT: u64 = 512;

/// A disk.
pub(super) struct VolatileDisk {
    durable: Vec<u8>,
    cached: Vec<u8>,
    /// The changes since the last flush: position and bytes.
    changes: Vec<(u64, Vec<u8>)>,
    /// Of each unit, how many of these changes are durable in it.
    applied: Vec<usize>,
}

impl VolatileDisk {
    /// A disk of `size` bytes, whole units, of zeros.
    pub(super) fn new(size: u64) -> Self {
        let bytes = vec![0; size as usize];
        let applied = vec![0; (size / UNIT) as usize];
        Self { durable: bytes.clone(), cached: bytes, changes: Vec::new(), applied }
    }

    /// The bytes that a read of `range` finds.
    pub(super) fn bytes(&self, range: ByteRange) -> &[u8] {
        self.cached.get(range.pos as usize..range.end() as usize).unwrap_or_default()
    }

    /// All bytes that a read finds.
    pub(super) fn all(&self) -> &[u8] {
        &self.cached
    }

    /// Changes the bytes from `pos` on, which are on the disk.
    pub(super) fn change(&mut self, pos: u64, bytes: Vec<u8>, durable: bool) {
        let end = pos + bytes.len() as u64;
        if let Some(place) = self.cached.get_mut(pos as usize..end as usize) {
            place.copy_from_slice(&bytes);
        }
        self.changes.push((pos, bytes));
        if durable {
            let all = self.changes.len();
            (pos / UNIT..end.div_ceil(UNIT)).for_each(|unit| self.apply(unit as usize, all));
        }
    }

    /// Makes the first `upto` changes durable in a unit.
    fn apply(&mut self, unit: usize, upto: usize) {
        let Some(applied) = self.applied.get_mut(unit) else { return };
        let from = unit as u64 * UNIT;
        for (pos, bytes) in self.changes.get(*applied..upto).unwrap_or_default() {
            let (start, end) = ((*pos).max(from), (*pos + bytes.len() as u64).min(from + UNIT));
            if start < end
                && let Some(place) = self.durable.get_mut(start as usize..end as usize)
                && let Some(part) = bytes.get((start - pos) as usize..(end - pos) as usize)
            {
                place.copy_from_slice(part);
            }
        }
        *applied = upto.max(*applied);
    }

    /// Makes all changes durable.
    pub(super) fn flush(&mut self) {
        let all = self.changes.len();
        (0..self.applied.len()).for_each(|unit| self.apply(unit, all));
        self.forget_changes();
    }

    fn forget_changes(&mut self) {
        self.changes.clear();
        self.applied.fill(0);
    }

    /// Some changes become durable in some units, others never: what a failed flush may leave, whose
    /// reads still find all of them.
    pub(super) fn fail_flush(&mut self, random: &mut Random) {
        let all = self.changes.len() as u64;
        let mood = random.below(4);
        for unit in 0..self.applied.len() {
            let least = self.applied.get(unit).copied().unwrap_or_default() as u64;
            let upto = match mood {
                0 => least,
                1 => all,
                _ => least + random.below(all - least + 1),
            };
            self.apply(unit, upto as usize);
        }
        self.forget_changes();
    }

    /// The server dies with its cache.
    pub(super) fn die(&mut self, random: &mut Random) {
        self.fail_flush(random);
        self.cached.clone_from(&self.durable);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_death_loses_unflushed_changes_of_some_units_and_nothing_that_was_durable() {
        let (mut kept, mut lost) = (0, 0);
        for seed in 0..50 {
            let mut disk = VolatileDisk::new(4 * UNIT);
            disk.change(0, vec![1; 2048], false);
            disk.flush();
            disk.change(100, vec![2; 100], true);
            disk.change(0, vec![3; 2048], false);
            disk.change(0, vec![4; 1024], false);
            disk.die(&mut Random::new(seed));
            let all = disk.all();
            assert!(all[150] != 1, "it was durable");
            assert!(all.iter().all(|byte| (1..5).contains(byte)));
            assert!(all[512..1024].iter().all(|&byte| byte == all[512]), "torn within a unit");
            kept += u32::from(all[2047] == 3);
            lost += u32::from(all[2047] == 1);
        }
        assert!(kept > 5 && lost > 5, "{kept} {lost}");
    }
}
