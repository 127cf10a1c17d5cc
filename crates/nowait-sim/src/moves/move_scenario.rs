//! Derives a scenario from a seed: two devices, and each step of a run.
//!
//! Invariant: a step depends only on the seed and its own number.

use nowait::sim::{Faults, Random, SimOptions};
use nowait::{ByteRange, Config};

/// Bytes of the disk, before some are cut off: several of the granules in which changes are noted.
const DISK_BYTES: u64 = 320 << 10;

/// The scenario of a seed.
#[derive(Clone, Debug)]
pub struct MoveScenario {
    /// The seed.
    pub seed: u64,
    /// The devices; the disk is on the first one at first.
    pub devices: [SimOptions; 2],
    /// Faults of the new place of a disk.
    pub faults: Faults,
    /// How often in 65536 times a copy in the pause comes too late.
    pub late: u16,
    /// Which ranges of the disk are holes is cached.
    pub cache_holes: bool,
    /// The switches of the engine.
    pub config: Config,
    /// Workers, one of which the copy takes.
    pub workers: usize,
    /// The most requests in flight.
    pub depth: usize,
}

/// One step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveAction {
    /// A range of the disk is written.
    Write(ByteRange),
    /// A range of the disk is zeroed.
    Zero(ByteRange),
    /// A range of the disk is discarded.
    Discard(ByteRange),
    /// A range of the disk is read.
    Read(ByteRange),
    /// The disk is flushed.
    Flush,
    /// A worker, or the copy, runs until it would block.
    Work,
    /// The engine takes what has completed.
    Poll,
    /// A move begins, if there is none.
    Begin,
    /// The move, if there is one, is cancelled.
    Cancel,
    /// The clients of a disk of which all was copied once are held back, and the rest is copied.
    Pivot,
    /// The process is killed.
    Kill,
    /// The power fails.
    Cut,
}

impl MoveScenario {
    /// The scenario of `seed`.
    #[must_use]
    pub fn of(seed: u64) -> Self {
        let mut random = Random::part(seed, u64::MAX);
        let errors = random.pick(&[0, 0, 200]).unwrap_or(0);
        let cut = random.pick(&[0, 512, 1536]).unwrap_or(0);
        let mut options = || SimOptions {
            pauses: random.pick(&[8000, 30_000, u16::MAX]).unwrap_or(0),
            punches: random.below(4) > 0,
            zeroes: random.below(4) > 0,
            nowait: random.below(4) > 0,
            align: nowait::Alignment { memory: 512, offset: 512, read_offset: 512 },
            ..SimOptions::able(DISK_BYTES - cut)
        };
        let devices = [options(), options()];
        let config = Config::default();
        Self {
            seed,
            devices,
            faults: Faults { errors, flush_errors: errors, ..Faults::default() },
            late: random.pick(&[0, 2000, 30_000]).unwrap_or(0),
            cache_holes: random.below(2) == 0,
            config: Config {
                nowait_first: random.below(4) > 0,
                simple: random.below(4) > 0,
                merge: random.below(2) == 0,
                ..config
            },
            workers: 2 + random.below(6) as usize,
            depth: 1 + random.below(10) as usize,
        }
    }

    /// Some bytes of the disk, whole sectors or not.
    fn some_range(&self, random: &mut Random) -> ByteRange {
        let unit = random.pick(&[1, 512, 512, 4096]).unwrap_or(512);
        let size = self.devices[0].bytes;
        let pos = random.below(size / unit) * unit;
        let most = random.pick(&[600, 600, 4096, 48 << 10]).unwrap_or(600);
        let len = (1 + random.below(most)).next_multiple_of(unit).min(size - pos);
        ByteRange::new(pos, len)
    }

    /// Step number `n`, and random numbers for its further choices.
    #[must_use]
    pub fn step(&self, n: u64) -> (MoveAction, Random) {
        let mut random = Random::part(self.seed, n);
        let drawn = random.below(1000);
        let range = self.some_range(&mut random);
        let action = match drawn {
            0..160 => MoveAction::Write(range),
            160..170 => MoveAction::Zero(range),
            170..180 => MoveAction::Discard(range),
            180..220 => MoveAction::Read(range),
            220..230 => MoveAction::Flush,
            230..730 => MoveAction::Work,
            730..960 => MoveAction::Poll,
            960..975 => MoveAction::Begin,
            975..976 => MoveAction::Cancel,
            976..997 => MoveAction::Pivot,
            997..998 => MoveAction::Kill,
            _ => MoveAction::Cut,
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
            let scenario = MoveScenario::of(seed);
            for n in 0..1000 {
                let (action, _) = scenario.step(n);
                kinds.insert(std::mem::discriminant(&action));
                assert_eq!(action, MoveScenario::of(seed).step(n).0);
                if let MoveAction::Write(range) = action {
                    assert!(range.len > 0 && range.end() <= scenario.devices[0].bytes, "{range:?}");
                }
            }
        }
        assert_eq!(kinds.len(), 12);
    }
}
