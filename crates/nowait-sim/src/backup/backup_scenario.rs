//! Derives a scenario from a seed: a disk, its scratch, and each step of a run.
//!
//! Invariant: a step depends only on the seed and its own number.

use nowait::sim::{Faults, Random, SimOptions};
use nowait::{ByteRange, Config};

use crate::random_disk::{some_config, some_disk, some_range};

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
        let size = BLOCKS * BLOCK_BYTES;
        let disk = some_disk(&mut random, size - cut);
        let scratch = some_disk(&mut random, size);
        Self {
            seed,
            faults,
            disk: SimOptions { grows: false, ..disk },
            scratch: SimOptions { punches: true, ..scratch },
            scratch_bytes: random.pick(&[2, BLOCKS / 2, BLOCKS, BLOCKS]).unwrap_or(BLOCKS)
                * BLOCK_BYTES,
            cache_holes: random.below(2) == 0,
            config: some_config(&mut random),
            workers: 1 + random.below(6) as usize,
            depth: 1 + random.below(10) as usize,
        }
    }

    /// Step number `n`, and random numbers for its further choices.
    #[must_use]
    pub fn step(&self, n: u64) -> (BackupAction, Random) {
        let mut random = Random::part(self.seed, n);
        let drawn = random.below(1000);
        let range = some_range(&mut random, self.disk.bytes, 6 * BLOCK_BYTES);
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
    use crate::random_disk::kinds_of_steps;

    #[test]
    fn each_kind_of_step_happens_and_is_the_same_again() {
        let step = |seed, n| BackupScenario::of(seed).step(n).0;
        let check = |seed, action: &BackupAction| {
            if let BackupAction::Read(range) = action {
                let bytes = BackupScenario::of(seed).disk.bytes;
                assert!(range.len > 0 && range.end() <= bytes, "{range:?}");
            }
        };
        assert_eq!(kinds_of_steps(20, step, check), 9);
    }
}
