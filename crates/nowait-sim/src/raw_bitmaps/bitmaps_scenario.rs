//! Derives a scenario from a seed: a disk, raw or in a qcow2 image, the file with its bitmaps, and each step of a run.
//!
//! Invariant: a step depends only on the seed and its own number.

use nowait::sim::{Faults, Random, SimOptions};
use nowait::{ByteRange, Config};

use crate::random_disk::{some_config, some_disk, some_range};

/// Bytes of the disk, before some are cut off: several regions of a bitmap, which are small in a simulation.
const DISK_BYTES: u64 = 160 << 10;

/// The scenario of a seed.
#[derive(Clone, Debug)]
pub struct BitmapsScenario {
    /// The seed.
    pub seed: u64,
    /// The disk.
    pub disk: SimOptions,
    /// The binary logarithm of the bytes of a cluster, if the disk is in a qcow2 image.
    pub qcow2: Option<u32>,
    /// The file with the bitmaps of a raw disk.
    pub file: SimOptions,
    /// Faults of the disk and of the file.
    pub faults: [Faults; 2],
    /// Bytes of the disk for each bit.
    pub granularity: u64,
    /// Which ranges of the disk are holes is cached.
    pub cache_holes: bool,
    /// The switches of the engine.
    pub config: Config,
    /// Workers.
    pub workers: usize,
    /// The most requests in flight.
    pub depth: usize,
}

/// How the use of the disk ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The power fails.
    Cut,
    /// The process is killed.
    Kill,
    /// The disk is closed in order, if neither of the others comes first.
    Close,
}

/// One step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitmapsAction {
    /// A range of the disk is written.
    Write(ByteRange),
    /// A range of the disk is zeroed.
    Zero(ByteRange),
    /// A range of the disk is discarded.
    Discard(ByteRange),
    /// The disk is flushed.
    Flush,
    /// A worker runs until it would block.
    Work,
    /// The engine takes what has completed.
    Poll,
    /// The use ends, and the disk is opened again.
    Reopen(End),
    /// The disk is closed, another program writes a range of it, and it is opened again.
    Foreign(ByteRange),
    /// The bitmap is cleared while the disk is closed.
    Clear,
    /// The bitmap is removed, or added again.
    Remove,
    /// The bitmap records no more, or again.
    Switch,
    /// Regions rest, or those that rest are closed.
    Cool,
}

impl BitmapsScenario {
    /// The scenario of `seed`.
    #[must_use]
    pub fn of(seed: u64) -> Self {
        let mut random = Random::part(seed, u64::MAX);
        let scale = random.pick(&[0, 0, 1000, 4000]).unwrap_or(0);
        let mut faults = || Faults {
            errors: random.below(1 + scale / 4) as u16,
            flush_errors: random.below(1 + scale) as u16,
            ..Faults::default()
        };
        let faults = [faults(), faults()];
        let cut = random.pick(&[0, 512, 1536]).unwrap_or(0);
        let disk = some_disk(&mut random, DISK_BYTES - cut);
        let file = some_disk(&mut random, 0);
        // Not one of the numbers above: the seeds of raw disks are those of before.
        let qcow2 = Random::part(seed, u64::MAX - 2).pick(&[None, None, Some(9), Some(12)]);
        Self {
            seed,
            disk,
            qcow2: qcow2.flatten(),
            file: SimOptions { grows: true, ..file },
            faults,
            granularity: random.pick(&[512, 4096, 16 << 10]).unwrap_or(4096),
            cache_holes: random.below(2) == 0,
            config: some_config(&mut random),
            workers: 1 + random.below(6) as usize,
            depth: 1 + random.below(10) as usize,
        }
    }

    /// Step number `n`, and random numbers for its further choices.
    #[must_use]
    pub fn step(&self, n: u64) -> (BitmapsAction, Random) {
        let mut random = Random::part(self.seed, n);
        let drawn = random.below(1000);
        let range = some_range(&mut random, self.disk.bytes, 48 << 10);
        let action = match drawn {
            0..220 => BitmapsAction::Write(range),
            220..240 => BitmapsAction::Zero(range),
            240..260 => BitmapsAction::Discard(range),
            260..280 => BitmapsAction::Flush,
            280..300 => BitmapsAction::Cool,
            300..650 => BitmapsAction::Work,
            650..940 => BitmapsAction::Poll,
            940..955 => BitmapsAction::Reopen(End::Cut),
            955..965 => BitmapsAction::Reopen(End::Kill),
            965..980 => BitmapsAction::Reopen(End::Close),
            980..985 => BitmapsAction::Foreign(range),
            985..990 => BitmapsAction::Clear,
            990..995 => BitmapsAction::Switch,
            _ => BitmapsAction::Remove,
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
        let step = |seed, n| BitmapsScenario::of(seed).step(n).0;
        let check = |seed, action: &BitmapsAction| {
            if let BitmapsAction::Write(range) = action {
                let bytes = BitmapsScenario::of(seed).disk.bytes;
                assert!(range.len > 0 && range.end() <= bytes, "{range:?}");
            }
        };
        assert_eq!(kinds_of_steps(20, step, check), 12);
    }
}
