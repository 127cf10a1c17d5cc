//! Disks of scenarios, drawn in an order that seeds depend on.

use nowait::sim::{Random, SimOptions};
use nowait::{Alignment, ByteRange, Config};

/// A disk of `bytes` bytes with sectors of 512.
pub(crate) fn some_disk(random: &mut Random, bytes: u64) -> SimOptions {
    SimOptions {
        pauses: random.pick(&[8000, 30_000, u16::MAX]).unwrap_or(0),
        punches: random.below(4) > 0,
        zeroes: random.below(4) > 0,
        nowait: random.below(4) > 0,
        align: Alignment { memory: 512, offset: 512, read_offset: 512 },
        ..SimOptions::able(bytes)
    }
}

/// The switches of engines.
pub(crate) fn some_config(random: &mut Random) -> Config {
    Config {
        nowait_first: random.below(4) > 0,
        simple: random.below(4) > 0,
        merge: random.below(2) == 0,
        ..Config::default()
    }
}

/// Some bytes of a disk of `size`, whole sectors or not, or whole blocks of 4096; at most `longest`.
pub(crate) fn some_range(random: &mut Random, size: u64, longest: u64) -> ByteRange {
    let unit = random.pick(&[1, 512, 512, 4096]).unwrap_or(512);
    let pos = random.below(size / unit) * unit;
    let most = random.pick(&[600, 600, 4096, longest]).unwrap_or(600);
    let len = (1 + random.below(most)).next_multiple_of(unit).min(size - pos);
    ByteRange::new(pos, len)
}

/// The number of kinds of steps in 1000 steps of each of `seeds`, which are the same when they are drawn again. `check` is
/// called with the seed and the action of each.
#[cfg(test)]
pub(crate) fn kinds_of_steps<A: PartialEq + std::fmt::Debug>(
    seeds: u64,
    step: impl Fn(u64, u64) -> A,
    check: impl Fn(u64, &A),
) -> usize {
    let mut kinds = std::collections::HashSet::new();
    for seed in 0..seeds {
        for n in 0..1000 {
            let action = step(seed, n);
            kinds.insert(std::mem::discriminant(&action));
            assert_eq!(action, step(seed, n));
            check(seed, &action);
        }
    }
    kinds.len()
}
