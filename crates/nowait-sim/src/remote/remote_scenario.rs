//! Derives a scenario from a seed: an export, the storage's limits, and each step of a run.
//!
//! Invariant: a step depends only on the seed and its own number.

use std::time::Duration;

use nowait::sim::Random;
use nowait::{ByteRange, Op};
use nowait_nbd as nbd;
use nowait_nbd::ReplyMode;
use nowait_nbd::client::Export;
use nowait_remote::SimLimits;

use crate::remote::volatile_disk::UNIT;

/// The longest request, in bytes.
const MAX_REQUEST_BYTES: u64 = 32 << 10;
/// For as many steps there are changes, and for as many again only reads and flushes.
const QUIET_STEPS: u64 = 96;
/// The id of the block status context.
const CONTEXT: u32 = 7;

/// The scenario of a seed.
#[derive(Clone, Debug)]
pub struct RemoteScenario {
    /// The seed.
    pub seed: u64,
    /// The export.
    pub export: Export,
    /// The limits of the storage.
    pub limits: SimLimits,
    /// How long requests wait for the server.
    pub reconnect: Duration,
    /// Requests begin and end at multiples of this many bytes.
    pub grain: u64,
    /// The most requests of clients at a time.
    pub depth: usize,
    /// Cells at the start of the export that most requests are for.
    hot: u64,
    /// The cells of the longest of most requests.
    usual: u64,
    /// How many of 32 requests are flushes.
    flushes: u64,
    /// The longest time in microseconds that the server takes for a request.
    latency: u64,
    /// How often in 65536 steps the connection is lost, the server dies, refuses connections, does not
    /// answer, answers with an error, and dies with its client.
    losses: u16,
    deaths: u16,
    refusals: u16,
    hangs: u16,
    errors: u16,
    cuts: u16,
    /// How often the server comes back with another export.
    exchanges: u16,
}

/// A request of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteRequest {
    /// The operation.
    pub op: Op,
    /// The range in bytes.
    pub range: ByteRange,
    /// A write is durable when it completes.
    pub durable: bool,
}

/// The wrong answer of a server that does not do what is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteFault {
    /// The next changes fail with this NBD error.
    Changes {
        /// The error.
        error: u32,
        /// The number of changes.
        count: u32,
    },
    /// The next read fails with `EIO`.
    Read,
    /// The next flush fails with `EIO`, and may lose what it was to make durable.
    Flush,
    /// The next request is answered by `ESHUTDOWN`.
    Shutdown,
}

/// One step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteAction {
    /// A client submits a request.
    Ask(RemoteRequest),
    /// The network takes some bytes to the server.
    Send,
    /// The server answers one request, not always the oldest one.
    Serve,
    /// The network takes some bytes to the storage.
    Receive,
    /// Time passes.
    Pass(Duration),
    /// The connection is lost, in any byte; the server lives.
    Break,
    /// The server dies, and is there again after a time.
    Die(Duration),
    /// The server refuses connections for a time.
    Refuse(Duration),
    /// The server answers nothing for a time.
    Hang(Duration),
    /// The server answers with errors.
    Fail(RemoteFault),
    /// The server dies, and so do the storage and its clients; all is started again.
    Cut,
    /// The server dies, and has another export when it is there again.
    Exchange,
}

impl RemoteScenario {
    /// The scenario of `seed`.
    pub fn of(seed: u64) -> Self {
        let mut random = Random::part(seed, u64::MAX);
        let whole = random.below(3) > 0;
        let grain = match whole {
            true => random.pick(&[512, 1024, 4096]),
            false => random.pick(&[37, 64, 100, 1000]),
        };
        let grain = grain.unwrap_or(512);
        let mode = random.pick(&[ReplyMode::Simple, ReplyMode::Structured]);
        let mode = mode.unwrap_or(ReplyMode::Simple);
        let mut flags = nbd::FLAG_HAS_FLAGS;
        for (flag, rare) in
            [(nbd::FLAG_SEND_FLUSH, 16), (nbd::FLAG_SEND_FUA, 3), (nbd::FLAG_SEND_WRITE_ZEROES, 8)]
        {
            flags |= if random.below(rare) > 0 { flag } else { 0 };
        }
        let most_changes = random.pick(&[8, 64, 4096]).unwrap_or(8);
        let most_bytes = random.pick(&[8 << 10, 64 << 10, 64 << 20]).unwrap_or(64 << 20);
        let often = random.pick(&[0, 1, 2, 8]).unwrap_or(1);
        let mut times = |most: u64| random.below(1 + most) as u16 * often;
        Self {
            seed,
            losses: times(200),
            deaths: times(200),
            refusals: times(100),
            hangs: times(50),
            errors: times(100) / 2,
            cuts: times(60),
            exchanges: if times(16) == 1 { 20 } else { 0 },
            export: Export {
                size: UNIT * (8 + random.below(120)) / grain.max(UNIT) * grain.max(UNIT),
                flags,
                context: (mode == ReplyMode::Structured).then_some(CONTEXT),
                mode,
                min_block: if whole { UNIT as u32 } else { 1 },
                max_bytes: if whole && random.below(2) == 0 { 4096 } else { 32 << 20 },
            },
            limits: SimLimits {
                asked: (2 + random.below(30) as usize, 4096 << random.below(6)),
                trim: (most_changes / 2, most_bytes / 2),
                most: (most_changes, most_bytes),
            },
            reconnect: Duration::from_millis(random.pick(&[0, 500, 5000, 30_000]).unwrap_or(0)),
            grain,
            depth: 3 + random.below(22) as usize,
            hot: random.pick(&[1, 2, 4, 16, 1024]).unwrap_or(4),
            usual: random.pick(&[1, 1, 2, 8]).unwrap_or(1),
            flushes: random.pick(&[1, 4]).unwrap_or(1),
            latency: 1 << random.below(20),
        }
        .with_whole_size()
    }

    /// Makes the size whole units and whole cells.
    fn with_whole_size(mut self) -> Self {
        let odd = self.grain >> self.grain.trailing_zeros();
        let cells = odd << self.grain.trailing_zeros().max(UNIT.trailing_zeros());
        self.export.size = self.export.size.next_multiple_of(cells);
        self
    }

    /// The longest time in microseconds that the server takes for a request.
    pub const fn latency(&self) -> u64 {
        self.latency
    }

    /// Whether many requests for the same bytes are in flight when connections are lost, and some time
    /// passes between losses.
    pub fn is_crowded(&self) -> bool {
        let has_cache = self.export.flags & nbd::FLAG_SEND_FLUSH != 0;
        let losses = (100..600).contains(&(self.losses + self.deaths));
        has_cache && losses && self.hot <= 4
    }

    /// Step number `n`, and random numbers for its further choices.
    pub fn step(&self, n: u64) -> (RemoteAction, Random) {
        let mut random = Random::part(self.seed, n);
        let drawn = random.next() & 0xffff;
        let action = match drawn {
            0..14_000 => {
                let request = self.request(&mut random);
                // The last change before a loss shows only if no other one is in flight.
                let quiet = n / QUIET_STEPS % 2 == 1 && request.op.changes();
                RemoteAction::Ask(match quiet {
                    true => RemoteRequest { op: Op::Read, durable: false, ..request },
                    false => request,
                })
            }
            14_000..26_000 => RemoteAction::Send,
            26_000..40_000 => RemoteAction::Serve,
            40_000..52_000 => RemoteAction::Receive,
            52_000..60_000 => RemoteAction::Pass(self.some_time(&mut random)),
            _ => self.event(&mut random),
        };
        (action, random)
    }

    /// A time that passes: mostly about as long as an answer takes, sometimes longer than requests wait.
    fn some_time(&self, random: &mut Random) -> Duration {
        Duration::from_micros(match random.below(64) {
            0 => random.below(40_000_000),
            1..4 => random.below(1_000_000),
            _ => random.below(2 * self.latency),
        })
    }

    /// Something rare, or time passes.
    fn event(&self, random: &mut Random) -> RemoteAction {
        // One step in twelve comes here.
        let often = |times: u16| times.saturating_mul(12);
        let span = |random: &mut Random| {
            let most = [1_000, 1_000, 20_000, 20_000, 100_000, 100_000, 1_000_000, 60_000_000];
            let most = random.pick(&most).unwrap_or(0);
            Duration::from_micros(random.below(most))
        };
        match () {
            () if random.chance(often(self.losses)) => RemoteAction::Break,
            () if random.chance(often(self.deaths)) => RemoteAction::Die(span(random)),
            () if random.chance(often(self.refusals)) => RemoteAction::Refuse(span(random)),
            () if random.chance(often(self.hangs)) => RemoteAction::Hang(span(random)),
            () if random.chance(often(self.errors)) => RemoteAction::Fail(fault(random)),
            () if random.chance(often(self.cuts)) => RemoteAction::Cut,
            () if random.chance(often(self.exchanges)) => RemoteAction::Exchange,
            () => RemoteAction::Pass(self.some_time(random)),
        }
    }

    fn request(&self, random: &mut Random) -> RemoteRequest {
        let op = match random.below(32) {
            drawn if drawn < self.flushes => Op::Flush,
            ..16 => Op::Read,
            16..27 => Op::Write,
            27..29 => Op::Zero,
            29..31 => Op::Discard,
            _ => Op::Status,
        };
        let zeroes = self.export.flags & nbd::FLAG_SEND_WRITE_ZEROES != 0;
        let op = if matches!(op, Op::Zero | Op::Discard) && !zeroes { Op::Write } else { op };
        let cells = self.export.size / self.grain;
        let hot = if random.below(4) == 0 { cells } else { cells.min(self.hot) };
        let first = random.below(hot);
        let longest = match random.below(16) {
            0 => (MAX_REQUEST_BYTES / self.grain).max(1),
            _ => self.usual,
        };
        let count = (1 + random.below(longest)).min(cells - first);
        let range = ByteRange::new(first * self.grain, count * self.grain);
        let range = if op == Op::Flush { ByteRange::new(0, 0) } else { range };
        RemoteRequest { op, range, durable: op == Op::Write && random.below(6) == 0 }
    }
}

fn fault(random: &mut Random) -> RemoteFault {
    match random.below(8) {
        0 => RemoteFault::Shutdown,
        1 => RemoteFault::Read,
        2 => RemoteFault::Flush,
        _ => RemoteFault::Changes {
            error: random.pick(&[nbd::EIO, nbd::ENOSPC]).unwrap_or(nbd::EIO),
            count: 1 + random.below(3) as u32,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_whole_cells_on_the_export_and_each_kind_of_event_happens() {
        let mut kinds = std::collections::HashSet::new();
        for seed in 0..100 {
            let scenario = RemoteScenario::of(seed);
            let Export { size, min_block, .. } = scenario.export;
            assert!(size.is_multiple_of(scenario.grain) && size.is_multiple_of(UNIT));
            assert!(scenario.grain.is_multiple_of(u64::from(min_block)));
            for n in 0..1000 {
                let (action, _) = scenario.step(n);
                kinds.insert(std::mem::discriminant(&action));
                assert_eq!(action, RemoteScenario::of(seed).step(n).0);
                let RemoteAction::Ask(request) = action else { continue };
                let ByteRange { pos, len } = request.range;
                assert!(pos.is_multiple_of(scenario.grain) && len.is_multiple_of(scenario.grain));
                assert!(pos + len <= size && (len > 0) == (request.op != Op::Flush));
            }
        }
        assert_eq!(kinds.len(), 12);
    }
}
