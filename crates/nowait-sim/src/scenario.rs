//! What a seed stands for: a device, an engine's switches, what goes wrong, and each step of a run.
//!
//! Invariant: a step follows from the seed and its own number alone, not from what came before: so
//! steps may be left out of a run and the others stay what they are.
//! Knows: nothing here. Known by: world, run, trace.

use nowait::sim::{Faults, Random, SimOptions};
use nowait::{Alignment, Config, Direct, Flags, Op, Range};

/// The longest request, in bytes.
pub const MAX_REQUEST_BYTES: u64 = 64 << 10;

/// What a seed stands for.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The seed.
    pub seed: u64,
    /// The device, and its luck.
    pub device: SimOptions,
    /// What goes wrong on it.
    pub faults: Faults,
    /// The engines' switches and sizes.
    pub config: Config,
    /// Whether the page cache is bypassed.
    pub direct: Direct,
    /// Requests begin and end at multiples of so many bytes.
    pub grain: u64,
    /// Engines on the device, each of which could be a thread's.
    pub engines: u64,
    /// Workers that run at the same time.
    pub workers: usize,
    /// Bytes of the part of the device that most requests go to.
    hot: u64,
    /// The longest of most requests, in bytes.
    usual: u64,
    /// How often in 65536 steps the power fails.
    cuts: u16,
    /// How often in 65536 steps the device stops answering, or begins again.
    silences: u16,
}

/// A request of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// What to do.
    pub op: Op,
    /// How.
    pub flags: Flags,
    /// Where.
    pub range: Range,
    /// Pieces of memory that it comes with; 0: a buffer of the engine's.
    pub segments: u8,
}

/// One step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A client asks an engine.
    Ask(Asked),
    /// An engine looks at its queue.
    Poll,
    /// An engine waits.
    Wait,
    /// A worker goes on.
    Work,
    /// The power fails, and the device is opened anew.
    Cut,
    /// Everything ends, and the device is opened anew.
    Reopen,
    /// The device stops answering.
    FallSilent,
    /// It begins again.
    Answer,
}

/// A step, with the chance of its own.
#[derive(Clone, Debug)]
pub struct Step {
    /// What happens.
    pub action: Action,
    /// The engine concerned.
    pub engine: usize,
    /// What is still open: where memory lies, who works, what the device does.
    pub random: Random,
}

impl Scenario {
    /// The scenario of `seed`.
    #[must_use]
    pub fn of(seed: u64) -> Self {
        let mut random = Random::part(seed, u64::MAX);
        let block = [512, 4096].get(random.below(2) as usize).copied().unwrap_or(512);
        let memory = random.pick(&[4, 512, block]).unwrap_or(512);
        let read_offset = if random.below(4) == 0 { memory.max(512) } else { block };
        let direct = if random.below(8) == 0 { Direct::Off } else { Direct::On };
        let align = match direct {
            Direct::Off => Alignment::NONE,
            _ => Alignment { memory, offset: block, read_offset },
        };
        let odd = random.pick(&[1, 37, 64, 100, 512, 1000]).unwrap_or(64);
        let grain = if random.below(2) == 0 { odd } else { u64::from(align.offset).max(64) };
        // The smaller the cells, the fewer bytes: the judge looks at each.
        let mut bytes = 4096 * (8 + random.below(56.min(grain)));
        if random.below(3) == 0 {
            bytes += random.below(4096);
        }
        let whole = grain.is_multiple_of(u64::from(block));
        Self {
            seed,
            device: SimOptions {
                seed,
                bytes,
                align,
                unit: random.pick(&[512, block]).unwrap_or(512),
                capacity: if random.below(4) == 0 { bytes / 4096 * 2 / 3 } else { u64::MAX },
                punches: random.below(8) > 0,
                zeroes: random.below(4) > 0,
                nowait: random.below(8) > 0,
                latency: 1 << (4 + random.below(12)),
                pauses: random.pick(&[0, 8000, 40_000]).unwrap_or(0),
            },
            faults: faults(&mut random),
            config: config(&mut random),
            direct,
            grain,
            engines: 1 + random.below(3),
            workers: 1 + random.below(6) as usize,
            hot: (bytes / (1 + random.below(16))).max(grain),
            usual: if whole { 4 * u64::from(block) } else { 3000.min(64 * grain) },
            cuts: random.pick(&[0, 40, 100, 400]).unwrap_or(0),
            silences: random.pick(&[0, 0, 0, 100]).unwrap_or(0),
        }
    }

    /// Nothing goes wrong but the power.
    #[must_use]
    pub fn without_faults(mut self) -> Self {
        self.faults = Faults { rot: self.faults.rot, ..Faults::default() };
        self.silences = 0;
        self
    }

    /// Step number `n`.
    #[must_use]
    pub fn step(&self, n: u64) -> Step {
        let mut random = Random::part(self.seed, n);
        let engine = random.below(self.engines) as usize;
        let action = match random.next() & 0xffff {
            0..36_000 => Action::Ask(self.asked(&mut random)),
            36_000..48_000 => Action::Poll,
            48_000..50_000 => Action::Wait,
            50_000..64_000 => Action::Work,
            _ if random.chance(self.cuts.saturating_mul(40)) => Action::Cut,
            _ if random.chance(400) => Action::Reopen,
            _ if random.chance(self.silences.saturating_mul(8)) => Action::FallSilent,
            _ if self.silences > 0 => Action::Answer,
            _ => Action::Work,
        };
        Step { action, engine, random }
    }

    fn asked(&self, random: &mut Random) -> Asked {
        let op = match random.below(64) {
            0..28 => Op::Read,
            28..50 => Op::Write,
            50..54 => Op::Flush,
            54..58 => Op::Zero,
            58..61 => Op::Discard,
            _ => Op::Status,
        };
        let mut flags = Flags::NONE;
        let choices = [
            (8, op.changes(), Flags::DSYNC),
            (16, op != Op::Flush, Flags::NOWAIT),
            (2, op == Op::Zero, Flags::NO_UNMAP),
            (3, op == Op::Zero, Flags::FAST_ZERO),
            (16, true, Flags::HIPRI),
        ];
        for (rare, fits, flag) in choices {
            if fits && random.below(rare) == 0 {
                flags = flags.with(flag);
            }
        }
        let data = matches!(op, Op::Read | Op::Write);
        let segments = if data && random.below(3) == 0 { 1 + random.below(6) as u8 } else { 0 };
        Asked { op, flags, range: self.range(op, random), segments }
    }

    /// A range of whole cells; sometimes one that begins or ends behind the device.
    fn range(&self, op: Op, random: &mut Random) -> Range {
        let bytes = self.device.bytes;
        let longest = match random.below(64) {
            0 => MAX_REQUEST_BYTES.min(1024 * self.grain),
            1..16 => self.usual,
            _ => self.usual / 4,
        };
        let part = if random.below(8) == 0 { bytes } else { self.hot };
        let grain = self.grain;
        let pos = match random.below(256) {
            0 => bytes.saturating_sub(random.below(3 * grain)) / grain * grain,
            1 => bytes.div_ceil(grain) * grain,
            _ => random.below(part.min(bytes) / grain) * grain,
        };
        let mut len = (1 + random.below((longest / grain).max(1))) * grain;
        // A write's cells are whole ones, and behind the end there are none.
        let across = pos + len > bytes;
        if across && (op != Op::Read || random.below(2) == 0) && pos < bytes {
            len = bytes - pos;
        }
        Range::new(pos, len)
    }
}

fn faults(random: &mut Random) -> Faults {
    let mut some = |rare: u64, often: u64| {
        if random.below(rare) == 0 { 0 } else { random.below(often) as u16 }
    };
    let scale = [0, 0, 1, 8].get(some(1, 4) as usize).copied().unwrap_or(0);
    let mut times = |often: u64| if scale == 0 { 0 } else { some(2, often * scale) };
    let faults = Faults {
        errors: times(40),
        flush_errors: times(100),
        shorts: times(400),
        refusals: times(2000),
        interrupts: times(100),
        full: times(2000),
        rot: 0,
        once: None,
    };
    Faults { rot: random.pick(&[0, 0, 6000]).unwrap_or(0), ..faults }
}

fn config(random: &mut Random) -> Config {
    let mut on = || random.below(8) > 0;
    let base = Config {
        simple: on(),
        inline_completion: on(),
        vectored: on(),
        pool: on(),
        nowait_first: on(),
        hint: on(),
        ..Config::default()
    };
    Config {
        strict: random.below(16) == 0,
        slots: 2 + random.below(60) as u32,
        workers: 4,
        // What no chunk fits into is allocated for each buffer.
        buffer_bytes: if random.below(4) == 0 { 4 << 20 } else { 512 << 10 },
        ..base
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_and_number_give_the_same_step() {
        let (one, other) = (Scenario::of(9), Scenario::of(9));
        assert!((0..1000).all(|n| one.step(n).action == other.step(n).action));
        assert!((0..1000).any(|n| one.step(n).action != Scenario::of(10).step(n).action));
    }

    #[test]
    fn requests_are_whole_cells_but_for_the_last() {
        for seed in 0..50 {
            let scenario = Scenario::of(seed);
            for n in 0..2000 {
                let Action::Ask(asked) = scenario.step(n).action else { continue };
                let Range { pos, len } = asked.range;
                assert!(pos.is_multiple_of(scenario.grain) && len > 0);
                let to_end = pos + len == scenario.device.bytes;
                assert!(len.is_multiple_of(scenario.grain) || to_end, "{asked:?}");
                assert!(len <= MAX_REQUEST_BYTES.max(scenario.grain));
            }
        }
    }
}
