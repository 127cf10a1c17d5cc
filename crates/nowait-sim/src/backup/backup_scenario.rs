//! Derives a scenario from a seed: a disk, its scratch, and each step of a run.
//!
//! Invariant: a step depends only on the seed and its own number.

use nowait::sim::{Faults, Random, SimOptions};
use nowait::{ByteRange, Config};

/// Bytes of a block of a backup: as small as a simulated disk needs them.
pub(super) const BLOCK_BYTES: u64 = 4096;
/// Blocks of the disk.
const BLOCKS: u64 = 12;

/// The scenario of a seed.
#[derive(Clone, Debug)]
pub struct BackupScenario {
    /// The seed.
    pub seed: u64,
    /// The disk.
    pub disk: SimOptions,
    /// The scratch.
    pub scratch: SimOptions,
    /// Faults of the scratch.
    pub faults: Faults,
    /// Bytes of scratch that a backup may use.
    pub scratch_bytes: u64,
    /// Which ranges of the disk are holes is cached.
    pub cache_holes: bool,
    /// The switches of the engines.
    pub config: Config,
    /// Workers.
    pub workers: usize,
    /// The most requests in flight, of the disk and of the backup each.
    pub depth: usize,
}

/// One step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackupAction {
    /// A range of the disk is written.
    Write(ByteRange),
    /// A range of the disk is zeroed.
    Zero(ByteRange),
    /// A range of the disk is discarded.
    Discard(ByteRange),
    /// The disk is flushed.
    Flush,
    /// A range of the backup is read.
    Read(ByteRange),
    /// A range of the backup is discarded.
    Release(ByteRange),
    /// A worker runs until it would block.
    Work,
    /// An engine takes what has completed.
    Poll,
    /// The backup ends, and another one begins.
    Again,
}

impl BackupScenario {
    /// The scenario of `seed`.
    #[must_use]
    pub fn of(seed: u64) -> Self {
        let mut random = Random::part(seed, u64::MAX);
        let mut often = |most: u64| if random.below(3) > 0 { 0 } else { random.below(most) as u16 };
        let faults = Faults { errors: often(2000), shorts: often(4000), ..Faults::default() };
        let cut = random.pick(&[0, 512, 1536]).unwrap_or(0);
        let mut options = |bytes| SimOptions {
            pauses: random.pick(&[8000, 30_000, u16::MAX]).unwrap_or(0),
            punches: random.below(4) > 0,
            zeroes: random.below(4) > 0,
            nowait: random.below(4) > 0,
            align: nowait::Alignment { memory: 512, offset: 512, read_offset: 512 },
            ..SimOptions::able(bytes)
        };
        let size = BLOCKS * BLOCK_BYTES;
        let (disk, scratch) = (options(size - cut), options(size));
        let config = Config::default();
        Self {
            seed,
            faults,
            disk: SimOptions { grows: false, ..disk },
            scratch: SimOptions { punches: true, ..scratch },
            scratch_bytes: random.pick(&[2, BLOCKS / 2, BLOCKS, BLOCKS]).unwrap_or(BLOCKS)
                * BLOCK_BYTES,
            cache_holes: random.below(2) == 0,
            config: Config {
                nowait_first: random.below(4) > 0,
                simple: random.below(4) > 0,
                merge: random.below(2) == 0,
                ..config
            },
            workers: 1 + random.below(6) as usize,
            depth: 1 + random.below(10) as usize,
        }
    }

    /// Some bytes of the disk, whole sectors or not.
    fn some_range(&self, random: &mut Random) -> ByteRange {
        let unit = random.pick(&[1, 512, 512, BLOCK_BYTES]).unwrap_or(512);
        let size = self.disk.bytes;
        let pos = random.below(size / unit) * unit;
        let most = random.pick(&[600, 600, BLOCK_BYTES, 6 * BLOCK_BYTES]).unwrap_or(600);
        let len = (1 + random.below(most)).next_multiple_of(unit).min(size - pos);
        ByteRange::new(pos, len)
    }

    /// Step number `n`, and random numbers for its further choices.
    #[must_use]
    pub fn step(&self, n: u64) -> (BackupAction, Random) {
        let mut random = Random::part(self.seed, n);
        let drawn = random.below(1000);
        let range = self.some_range(&mut random);
        let action = match drawn {
            0..200 => BackupAction::Write(range),
            200..220 => BackupAction::Zero(range),
            220..240 => BackupAction::Discard(range),
            240..250 => BackupAction::Flush,
            250..400 => BackupAction::Read(range),
            400..410 => BackupAction::Release(range),
            410..750 => BackupAction::Work,
            750..985 => BackupAction::Poll,
            _ => BackupAction::Again,
        };
        (action, random)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_step_happens_and_is_the_same_again() {
        let mut kinds = std::collections::HashSet::new();
        for seed in 0..20 {
            let scenario = BackupScenario::of(seed);
            for n in 0..1000 {
                let (action, _) = scenario.step(n);
                kinds.insert(std::mem::discriminant(&action));
                assert_eq!(action, BackupScenario::of(seed).step(n).0);
                if let BackupAction::Read(range) = action {
                    assert!(range.len > 0 && range.end() <= scenario.disk.bytes, "{range:?}");
                }
            }
        }
        assert_eq!(kinds.len(), 9);
    }
}
