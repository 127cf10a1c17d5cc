//! Derives a scenario from a seed: a device, the engine's options, faults, and each step of a run.
//!
//! Invariant: a step depends only on the seed and its own number, not on previous steps: steps can
//! be removed from a run without changing the others.

#[cfg(test)]
mod tests;

use nowait::sim::{Fault, Faults, Random, SimOptions};
use nowait::{Alignment, ByteRange, Config, Direct, Flags, Op, OpenOptions};
use nowait_server::SimChange;

pub use crate::mode::Mode;

/// The longest request, in bytes.
pub const MAX_REQUEST_BYTES: u64 = 64 << 10;

/// The scenario of a seed.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The kind of run that was asked for.
    pub mode: Mode,
    /// The seed.
    pub seed: u64,
    /// The options of the device.
    pub device: SimOptions,
    /// The faults of the device.
    pub faults: Faults,
    /// The binary logarithm of the smallest cluster size, if the disk is a qcow2 image; the device
    /// is then larger than the disk.
    pub qcow2: Option<u32>,
    /// The engines' options.
    pub config: Config,
    /// Whether the page cache is bypassed, holes are cached, and storage is allocated ahead.
    pub disk: OpenOptions,
    /// Requests begin and end at multiples of this many bytes.
    pub grain: u64,
    /// The number of engines on the device, or of the server's threads.
    pub parts: u64,
    /// The limit of workers that run at the same time.
    pub workers: usize,
    /// Bytes at the start of the device that most requests go to.
    hot: u64,
    /// The longest length of most requests, in bytes.
    usual: u64,
    /// How often in 65536 steps the power fails.
    cuts: u16,
    /// How often in 65536 steps the device stops or resumes answering.
    silences: u16,
    /// How often in 65536 steps the device shrinks.
    shrinks: u16,
    /// How often in 65536 steps metadata is written back in the background.
    keeps: u16,
    /// How often in 65536 steps the refcounts of an image are damaged.
    damages: u16,
    /// How often in 65536 steps the export of a server is changed.
    changes: u16,
    /// How often in 65536 steps a server pauses, and how often its export is removed.
    pauses: u16,
    /// How often in 65536 steps a server pauses for another size of its disk.
    resizes: u16,
    /// Exports beside the first one on each thread of a server.
    pub neighbours: u64,
}

/// A request of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestSpec {
    /// The operation.
    pub op: Op,
    /// Its flags.
    pub flags: Flags,
    /// The range in bytes.
    pub range: ByteRange,
    /// Number of segments of user memory; 0: a buffer of the engine's.
    pub segments: u8,
}

/// One step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A client submits a request.
    Ask(RequestSpec),
    /// An engine polls its queue, or a server thread runs an event loop iteration.
    Poll,
    /// The same, but waits first if there is nothing to do.
    Wait,
    /// Another client connects.
    Connect,
    /// A client sends some of its unsent bytes.
    Send,
    /// A client receives some bytes.
    Receive,
    /// A client disconnects.
    Leave(DisconnectKind),
    /// The server dies, and another takes its place.
    Die,
    /// A worker runs until it would block.
    Work,
    /// Metadata is written back in the background.
    Keep,
    /// The power fails, and the device is reopened.
    Cut,
    /// All requests end, the image is closed, and the device is reopened.
    Reopen,
    /// The same, and the refcounts of a qcow2 image are damaged while it is closed.
    Damage,
    /// The export of a server is changed.
    Change(SimChange),
    /// The server pauses; others go on with its clients, on the image that is opened again.
    Pause,
    /// The same, with no request in flight, and the disk has another size then.
    Resize,
    /// The export is removed with its clients connected, and added again.
    Remove,
    /// One of several exports of a server is changed, and the others go on.
    ChangeExports(ExportsChange),
    /// The device stops answering.
    FallSilent,
    /// The device resumes answering.
    Answer,
    /// The device is truncated.
    Shrink,
}

/// An event of one of several exports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportsChange {
    /// One is paused; or the one that is paused goes on.
    Pause,
    /// The clients of a neighbour leave, and idle time passes.
    Idle,
    /// A neighbour is removed, and added again.
    Remove,
}

/// How a client disconnects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DisconnectKind {
    /// It sends NBD_CMD_DISC and waits for the answers to its requests.
    Goodbye,
    /// It shuts down its sending side, possibly within a request, and waits for the answers to its
    /// requests.
    HalfClose,
    /// It closes the connection immediately.
    Abrupt,
}

/// A step with its own random numbers.
#[derive(Clone, Debug)]
pub struct Step {
    /// The action.
    pub action: Action,
    /// The engine or thread concerned.
    pub part: usize,
    /// Random numbers for further choices: the memory layout, the next worker, the device's
    /// behaviour.
    pub random: Random,
}

impl Scenario {
    /// The scenario of `seed`.
    pub fn of(mode: Mode, seed: u64) -> Self {
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
        // The smaller the cells, the fewer bytes: the oracle checks each cell.
        let mut bytes = 4096 * (8 + random.below(56.min(grain)));
        if random.below(3) == 0 {
            bytes += random.below(4096);
        }
        let whole = grain.is_multiple_of(u64::from(block));
        let mut disk = OpenOptions::new().direct(direct);
        let mut scenario = Self {
            mode,
            seed,
            qcow2: None,
            device: SimOptions {
                seed,
                bytes,
                align,
                unit: random.pick(&[512, block]).unwrap_or(512),
                capacity: if random.below(4) == 0 { bytes / 4096 * 2 / 3 } else { u64::MAX },
                grows: false,
                punches: random.below(8) > 0,
                zeroes: random.below(8) > 0,
                nowait: random.below(8) > 0,
                shares_syncs: true,
                latency: 1 << (4 + random.below(12)),
                pauses: random.pick(&[0, 8000, 40_000]).unwrap_or(0),
            },
            faults: faults(&mut random),
            config: config(&mut random, &mut disk),
            disk,
            grain,
            parts: 1 + random.below(3),
            workers: 1 + random.below(6) as usize,
            hot: (bytes / (1 + random.below(16))).max(grain),
            usual: if whole { 4 * u64::from(block) } else { 3000.min(64 * grain) },
            cuts: random.pick(&[0, 40, 100, 400]).unwrap_or(0),
            silences: random.pick(&[0, 0, 0, 100]).unwrap_or(0),
            shrinks: random.pick(&[0, 0, 0, 0, 0, 0, 0, 20]).unwrap_or(0),
            keeps: 0,
            damages: 0,
            changes: 0,
            pauses: 0,
            resizes: 0,
            neighbours: 0,
        };
        if random.below(8) == 0 {
            scenario = scenario.in_qcow2(block.ilog2(), &mut random);
        }
        scenario.device.shares_syncs = random.below(2) == 0;
        scenario.config.group_syncs = random.below(8) > 0;
        if mode == Mode::VhostUser {
            scenario.in_blocks(512);
        } else if mode == Mode::Ublk {
            scenario.in_blocks(u64::from(scenario.device.align.offset).max(512));
        }
        scenario.disk = scenario.disk.allocate_ahead(random.below(8) > 0);
        scenario.draw_operator(&mut random);
        scenario.neighbours = neighbours(mode, seed);
        scenario
    }

    /// The scenario of neighbour number `n` from 1 on: a small raw disk of its own that never fails.
    pub fn neighbour(&self, n: u64) -> Self {
        let first = Random::part(self.seed, u64::MAX - 4 - n).next();
        let all = (first..=u64::MAX).chain(0..first).map(|seed| Self::of(Mode::Server, seed));
        let mut fits = all.filter(|it| it.qcow2.is_none() && it.device.capacity == u64::MAX);
        let mut own = fits.next().unwrap_or_else(|| self.clone()).without_faults();
        // The queue of a thread is that of all of its exports.
        own.faults.submit_errors = self.faults.submit_errors;
        own.faults.once = self.faults.once.filter(|(_, fault)| *fault == Fault::SubmitError);
        let disk = self.disk.direct(own.disk.direct);
        Self { config: self.config, disk, parts: self.parts, seed: self.seed, ..own }
    }

    /// Draws the actions of an operator on a server.
    fn draw_operator(&mut self, random: &mut Random) {
        if self.mode != Mode::Engine {
            self.changes = random.pick(&[0, 0, 0, 800]).unwrap_or(0);
            self.pauses = random.pick(&[0, 0, 0, 400]).unwrap_or(0);
            let often = random.pick(&[0, 400]).unwrap_or(0);
            // A device of a fixed size has no space for more tables.
            let resizes = self.qcow2.is_some() && self.device.grows;
            self.resizes = if resizes { often } else { 0 };
        }
    }

    /// Makes the device and the requests whole blocks.
    fn in_blocks(&mut self, block: u64) {
        self.device.bytes -= self.device.bytes % block;
        self.grain = self.grain.next_multiple_of(block);
        self.hot = self.hot.max(self.grain);
    }

    /// Makes the disk a qcow2 image. The device neither shrinks nor has garbage: an image does not
    /// survive the loss of its end, and garbage on the device is not at the same offset on the
    /// disk.
    fn in_qcow2(mut self, bits: u32, random: &mut Random) -> Self {
        self.qcow2 = Some(bits);
        self.keeps = random.pick(&[0, 200, 1600]).unwrap_or(0);
        // An update of the tables takes many calls; power cuts and faults between two of them
        // matter.
        self.cuts = self.cuts.max(100);
        self.device.grows = random.below(2) == 0;
        self.device.pauses = random.pick(&[8000, 40_000, 60_000]).unwrap_or(0);
        self.faults.errors = random.pick(&[0, 0, 100, 1000]).unwrap_or(0);
        self.faults.flush_errors = random.pick(&[0, 0, 500, 4000]).unwrap_or(0);
        self.device.bytes &= !511;
        // The storage has room for half of the disk and a few blocks of tables.
        self.device.capacity = match random.below(4) {
            0 => 16 + self.device.bytes / 4096 / 2,
            _ => u64::MAX,
        };
        (self.faults.rot, self.shrinks) = (0, 0);
        self.damages = random.pick(&[0, 0, 200]).unwrap_or(0);
        if self.damages > 0 {
            // A repair needs space.
            self.device.capacity = u64::MAX;
        }
        // Without faults the oracle knows the reason for each error.
        if self.damages > 0 && random.below(2) == 0 { self.without_faults() } else { self }
    }

    /// Removes all faults except power cuts.
    pub fn without_faults(mut self) -> Self {
        self.faults = Faults { rot: self.faults.rot, ..Faults::default() };
        (self.silences, self.shrinks) = (0, 0);
        self
    }

    /// Whether an operator changes the export of the server.
    pub fn has_operator(&self) -> bool {
        self.changes > 0
    }

    /// Whether the server is paused.
    pub fn has_pauses(&self) -> bool {
        self.pauses > 0
    }

    /// Whether neighbours come and go.
    pub fn has_neighbours(&self) -> bool {
        self.neighbours > 0
    }

    /// Step number `n`.
    pub fn step(&self, n: u64) -> Step {
        let mut step = self.drawn_step(n);
        if self.continues(n)
            && let Step { action: Action::Ask(before), part, .. } = self.step(n - 1)
            && let Some(neighbour) = self.neighbour_of(&before, &mut step.random)
        {
            (step.action, step.part) = (Action::Ask(neighbour), part);
        }
        step
    }

    /// Whether step `n` continues a read or write of the step before: in every fourth 64 steps, six
    /// of eight.
    fn continues(&self, n: u64) -> bool {
        n / 64 % 4 == self.seed % 4 && (1..7).contains(&(n % 8))
    }

    /// A request of the same kind as the read or write `before`, which begins where that one ends:
    /// the engine merges such requests. `None` behind the end of the device.
    fn neighbour_of(&self, before: &RequestSpec, random: &mut Random) -> Option<RequestSpec> {
        let RequestSpec { op, flags, range, .. } = *before;
        let len = (1 + random.below((self.usual / 4 / self.grain).max(1))) * self.grain;
        let range = ByteRange::new(range.pos + range.len, len);
        let fits = range.pos.is_multiple_of(self.grain) && range.pos + len <= self.device.bytes;
        let data = matches!(op, Op::Read | Op::Write);
        (data && fits).then_some(RequestSpec { op, flags, range, segments: 0 })
    }

    fn drawn_step(&self, n: u64) -> Step {
        let mut random = Random::part(self.seed, n);
        let part = random.below(self.parts) as usize;
        let drawn = random.next() & 0xffff;
        let usual = match self.mode {
            Mode::Engine | Mode::Remote | Mode::Log | Mode::Backup | Mode::Bitmaps | Mode::Move => {
                self.engine_action(drawn, &mut random)
            }
            Mode::Server => self.server_action(drawn, &mut random),
            Mode::VhostUser | Mode::Ublk => self.machine_action(drawn, &mut random),
        };
        let action = usual.unwrap_or_else(|| self.device_action(&mut random));
        Step { action, part, random }
    }

    fn engine_action(&self, drawn: u64, random: &mut Random) -> Option<Action> {
        Some(match drawn {
            0..36_000 => Action::Ask(self.request(random)),
            36_000..48_000 => Action::Poll,
            48_000..50_000 => Action::Wait,
            50_000..64_000 => Action::Work,
            _ => return None,
        })
    }

    fn server_action(&self, drawn: u64, random: &mut Random) -> Option<Action> {
        Some(match drawn {
            0..24_000 => Action::Ask(self.request(random)),
            24_000..36_000 => Action::Poll,
            36_000..38_000 => Action::Wait,
            38_000..43_000 => Action::Send,
            43_000..53_000 => Action::Receive,
            53_000..63_000 => Action::Work,
            63_000..63_600 => Action::Connect,
            63_600..64_000 => {
                let all =
                    [DisconnectKind::Goodbye, DisconnectKind::HalfClose, DisconnectKind::Abrupt];
                Action::Leave(random.pick(&all).unwrap_or(DisconnectKind::Abrupt))
            }
            _ => return None,
        })
    }

    fn machine_action(&self, drawn: u64, random: &mut Random) -> Option<Action> {
        Some(match drawn {
            0..24_000 => Action::Ask(self.request(random)),
            24_000..38_000 => Action::Poll,
            38_000..41_000 => Action::Wait,
            41_000..53_000 => Action::Receive,
            53_000..63_600 => Action::Work,
            63_600..64_000 => Action::Die,
            _ => return None,
        })
    }

    fn device_action(&self, random: &mut Random) -> Action {
        match () {
            () if self.neighbours > 0 && random.chance(30_000) => {
                let all = [
                    ExportsChange::Pause,
                    ExportsChange::Pause,
                    ExportsChange::Idle,
                    ExportsChange::Idle,
                    ExportsChange::Remove,
                ];
                Action::ChangeExports(random.pick(&all).unwrap_or(ExportsChange::Idle))
            }
            () if random.chance(self.cuts.saturating_mul(40)) => Action::Cut,
            () if random.chance(if self.qcow2.is_some() { 8000 } else { 400 }) => Action::Reopen,
            () if random.chance(self.damages.saturating_mul(40)) => Action::Damage,
            () if random.chance(self.keeps.saturating_mul(40)) => Action::Keep,
            () if random.chance(self.shrinks.saturating_mul(40)) => Action::Shrink,
            () if random.chance(self.silences.saturating_mul(8)) => Action::FallSilent,
            () if self.changes > 0 && random.chance(self.changes.saturating_mul(40)) => {
                Action::Change(change(random))
            }
            () if self.pauses > 0 && random.chance(self.pauses.saturating_mul(40)) => {
                if random.below(4) == 0 { Action::Remove } else { Action::Pause }
            }
            () if self.resizes > 0 && random.chance(self.resizes.saturating_mul(40)) => {
                Action::Resize
            }
            () if self.silences > 0 => Action::Answer,
            () => Action::Work,
        }
    }

    /// A request.
    pub fn request(&self, random: &mut Random) -> RequestSpec {
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
                flags |= flag;
            }
        }
        let data = matches!(op, Op::Read | Op::Write);
        let segments = if data && random.below(3) == 0 { 1 + random.below(6) as u8 } else { 0 };
        RequestSpec { op, flags, range: self.range(op, random), segments }
    }

    /// A range of whole cells; sometimes it begins or ends beyond the end of the device.
    fn range(&self, op: Op, random: &mut Random) -> ByteRange {
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
        // A write covers whole cells, and there are none beyond the end.
        let across = pos + len > bytes;
        if across && (op != Op::Read || random.below(2) == 0) && pos < bytes {
            len = bytes - pos;
        }
        ByteRange::new(pos, len)
    }
}

/// How many neighbours an export has, by random numbers of their own: seeds without them mean what they
/// meant before.
fn neighbours(mode: Mode, seed: u64) -> u64 {
    let mut random = Random::part(seed, u64::MAX - 30);
    let count = random.pick(&[0, 0, 0, 0, 1, 2]).unwrap_or(0);
    if mode == Mode::Server { count } else { 0 }
}

/// A change of an export. Limits, which hold clients up, hold for two fifths of the time.
fn change(random: &mut Random) -> SimChange {
    match random.below(8) {
        0 => SimChange::LimitExport,
        1 => SimChange::LimitClients,
        2..5 => SimChange::LiftLimits,
        5..7 => SimChange::Protect,
        _ => SimChange::Unprotect,
    }
}

fn faults(random: &mut Random) -> Faults {
    let scale = random.pick(&[0, 0, 1, 8]).unwrap_or(0);
    let mut times = |often: u64| match random.below(2) {
        0 => 0,
        _ => random.below(1 + often * scale) as u16,
    };
    let faults = Faults {
        errors: times(40),
        flush_errors: times(100),
        shorts: times(400),
        refusals: times(2000),
        interrupts: times(100),
        full: times(2000),
        submit_errors: times(40),
        rot: 0,
        once: None,
    };
    Faults { rot: random.pick(&[0, 0, 6000]).unwrap_or(0), ..faults }
}

/// The engine's configuration and, between two of its draws, whether holes are cached.
fn config(random: &mut Random, disk: &mut OpenOptions) -> Config {
    let mut on = || random.below(8) > 0;
    let base = Config {
        simple: on(),
        inline_completion: on(),
        vectored: on(),
        pool: on(),
        merge: on(),
        nowait_first: on(),
        ..Config::default()
    };
    *disk = disk.cache_holes(on());
    Config {
        strict: random.below(16) == 0,
        slots: 2 + random.below(60) as u32,
        // The pool is small because it is zeroed at each open; a buffer that does not fit is
        // allocated separately.
        buffer_bytes: if random.below(16) == 0 { 4 << 20 } else { 512 << 10 },
        ..base
    }
}
