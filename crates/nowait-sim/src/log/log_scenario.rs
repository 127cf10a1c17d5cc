//! Derives a scenario from a seed: the files of a log, its options, and each step of a run.
//!
//! Invariant: a step depends only on the seed and its own number.

use nowait::sim::{Faults, Random, SimOptions};

/// Size of a segment in bytes, the smallest.
pub(super) const SEGMENT_BYTES: u64 = 64 << 10;

/// The scenario of a seed.
#[derive(Clone, Debug)]
pub struct LogScenario {
    /// The seed.
    pub seed: u64,
    /// The files.
    pub device: SimOptions,
    /// Their faults.
    pub faults: Faults,
    /// How often in 65536 a change of the directory fails.
    pub name_errors: u16,
    /// The most files that there is space for.
    pub most_files: usize,
    /// Spare segments that are kept.
    pub spares: u32,
    /// Spare segments are made ahead.
    pub prepare_ahead: bool,
    /// The most records that wait at a time.
    pub depth: usize,
    /// The lengths of most records, in bytes. A few repeat, so that groups end where older ones did.
    lens: [u64; 3],
    /// How often in 65536 steps the power fails, the process is killed, and segments are freed.
    cuts: u16,
    kills: u16,
    truncations: u16,
}

/// One step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogAction {
    /// A task appends a record of this many bytes.
    Append(u64),
    /// A thread of the log runs until it would block.
    Work,
    /// A record is read.
    Read,
    /// All records are read.
    Iterate,
    /// The records before one that was acknowledged are truncated.
    Truncate,
    /// The process is killed, and another opens the log.
    Kill,
    /// The power fails; then a process opens the log.
    Cut,
}

impl LogScenario {
    /// The scenario of `seed`.
    pub fn of(seed: u64) -> Self {
        let mut random = Random::part(seed, u64::MAX);
        let mut often =
            |most: u64| if random.below(2) == 0 { 0 } else { random.below(most) as u16 };
        let faults = Faults {
            errors: often(600),
            flush_errors: often(2000),
            shorts: often(4000),
            interrupts: often(1000),
            ..Faults::default()
        };
        let name_errors = often(600);
        let rot = random.pick(&[0, 8000, u16::MAX]).unwrap_or(0);
        let pauses = random.pick(&[8000, 30_000, u16::MAX]).unwrap_or(0);
        Self {
            seed,
            faults: Faults { rot, ..faults },
            name_errors,
            device: SimOptions {
                unit: random.pick(&[512, 1024, 4096]).unwrap_or(512),
                shares_syncs: random.below(3) == 0,
                pauses,
                ..SimOptions::able(SEGMENT_BYTES)
            },
            most_files: random.pick(&[3, 5, 1000]).unwrap_or(1000),
            spares: random.pick(&[0, 1, 2, 100]).unwrap_or(2),
            prepare_ahead: random.below(2) == 0,
            depth: 1 + random.below(12) as usize,
            lens: [(); 3].map(|()| Self::some_len(&mut random)),
            cuts: random.pick(&[20, 100, 400]).unwrap_or(20),
            kills: random.pick(&[0, 20, 100]).unwrap_or(0),
            truncations: random.pick(&[50, 400, 2000]).unwrap_or(50),
        }
    }

    fn some_len(random: &mut Random) -> u64 {
        let most = random.pick(&[30, 300, 5000, 5000, 20_000, 60_000]).unwrap_or(300);
        8 + random.below(most)
    }

    /// Step number `n`, and random numbers for its further choices.
    pub fn step(&self, n: u64) -> (LogAction, Random) {
        let mut random = Random::part(self.seed, n);
        let action = match random.next() & 0xffff {
            0..20_000 => LogAction::Append(match random.below(8) {
                0 => Self::some_len(&mut random),
                _ => random.pick(&self.lens).unwrap_or(8),
            }),
            20_000..60_000 => LogAction::Work,
            60_000..64_000 => LogAction::Read,
            64_000..64_400 => LogAction::Iterate,
            _ => self.event(&mut random),
        };
        (action, random)
    }

    /// Something rare, or a thread works.
    fn event(&self, random: &mut Random) -> LogAction {
        // One step in 57 comes here.
        let often = |times: u16| times.saturating_mul(57);
        match () {
            () if random.chance(often(self.truncations)) => LogAction::Truncate,
            () if random.chance(often(self.cuts)) => LogAction::Cut,
            () if random.chance(often(self.kills)) => LogAction::Kill,
            () => LogAction::Work,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random_disk::kinds_of_steps;

    #[test]
    fn each_kind_of_step_happens_and_is_the_same_again() {
        let step = |seed, n| LogScenario::of(seed).step(n).0;
        let check = |_, action: &LogAction| {
            if let LogAction::Append(len) = action {
                assert!((8..=60_008).contains(len), "{len}");
            }
        };
        assert_eq!(kinds_of_steps(100, step, check), 7);
    }
}
