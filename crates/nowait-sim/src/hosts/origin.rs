//! Origins that requests are sent to: the store, or a rack's server. Its responses share one link.
//!
//! Invariant: a response waits for its turn on the link for as long as one part of each other
//! response takes, so that connections share it evenly.

use std::collections::VecDeque;

use nowait::sim::Random;

use super::parameters::{Parameters, StoreParameters};
use super::rates::{Peak, RequestLimit};
use super::request::{Attempt, Fate};
use super::timeline::{Time, seconds};

/// Bytes that a response sends before it is the next one's turn.
const QUANTUM: u64 = 256 << 10;
/// The time until a rack's server answers, in seconds.
const RACK_LATENCY: f64 = 0.0003;
/// A slow body takes longer by this factor.
const SLOW: f64 = 50.0;

/// The nanoseconds that a byte takes at `bandwidth` bits a second.
pub(super) fn nanoseconds_a_byte(bandwidth: f64) -> f64 {
    8e9 / bandwidth
}

/// The fate of a request at an origin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Answer {
    /// It answers `503 Slow Down` or an error of its own, at that time.
    Error(Time, Fate),
    /// It never answers.
    Silence,
    /// It begins to send that many bytes at that time, slower by a factor, and ends so.
    Body { at: Time, bytes: u64, slower: f64, fate: Fate },
}

/// Requests and bytes, over all time and in the fullest second.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Load {
    pub(super) requests: Peak,
    pub(super) bytes: Peak,
    /// Requests above the limit.
    pub(super) refused: u64,
    /// Attempts that went wrong otherwise.
    pub(super) faults: u64,
}

/// The store, or a rack's server.
#[derive(Debug)]
pub(super) struct Origin {
    /// The cache of a rack's server; `None`: the store.
    pub(super) site: Option<u32>,
    store: StoreParameters,
    limit: RequestLimit,
    nanoseconds_a_byte: f64,
    queue: VecDeque<Attempt>,
    /// The response whose bytes are on the link, and their number.
    sending: Option<(Attempt, u64)>,
    pub(super) load: Load,
}

impl Origin {
    /// The store.
    pub(super) fn store(parameters: &Parameters) -> Self {
        Self::new(parameters, None, parameters.store.bandwidth)
    }

    /// The server of a rack with the cache of site `site`.
    pub(super) fn rack(parameters: &Parameters, site: u32) -> Self {
        Self::new(parameters, Some(site), parameters.rack_bandwidth)
    }

    fn new(parameters: &Parameters, site: Option<u32>, bandwidth: f64) -> Self {
        Self {
            site,
            store: parameters.store,
            limit: RequestLimit::new(parameters.store.request_rate),
            nanoseconds_a_byte: nanoseconds_a_byte(bandwidth),
            queue: VecDeque::new(),
            sending: None,
            load: Load::default(),
        }
    }

    /// The nanoseconds that a byte takes on one connection.
    pub(super) fn nanoseconds_a_connection_byte(&self) -> f64 {
        match self.site {
            None => nanoseconds_a_byte(self.store.request_bandwidth),
            Some(_) => self.nanoseconds_a_byte,
        }
    }

    /// Takes a request for `len` bytes.
    pub(super) fn take(&mut self, now: Time, len: u64, random: &mut Random) -> Answer {
        self.load.requests.add(now, 1);
        let whole = |at| Answer::Body { at, bytes: len, slower: 1.0, fate: Fate::Answered };
        if self.site.is_some() {
            return whole(now + seconds(RACK_LATENCY));
        }
        let at = now + self.latency(random);
        if !self.limit.admits(now) {
            self.load.refused += 1;
            return Answer::Error(at, Fate::SlowDown);
        }
        if !random.chance(self.store.faults) {
            return whole(at);
        }
        self.load.faults += 1;
        match random.below(4) {
            0 => Answer::Error(at, Fate::Failed),
            1 => Answer::Silence,
            2 => Answer::Body {
                at,
                bytes: random.below(len.max(1)),
                slower: 1.0,
                fate: Fate::Failed,
            },
            _ => Answer::Body { at, bytes: len, slower: SLOW, fate: Fate::Answered },
        }
    }

    /// Half of the requests take up to the median, half up to twice, one in 100 up to ten times that.
    fn latency(&self, random: &mut Random) -> Time {
        let part = random.below(1 << 20) as f64 / (1 << 20) as f64;
        let factor = match random.below(100) {
            0 => 2.0 + 8.0 * part,
            1..50 => 1.0 + part,
            _ => 0.5 + 0.5 * part,
        };
        seconds(self.store.latency * factor)
    }

    /// A response has bytes to send.
    pub(super) fn queue(&mut self, attempt: Attempt) {
        self.queue.push_back(attempt);
    }

    /// Begins to send a part of the next response, if the link is idle. `left` says how many bytes an
    /// attempt has, `None` if its client has given it up. Returns when the part is sent.
    pub(super) fn send(
        &mut self,
        now: Time,
        left: impl Fn(Attempt) -> Option<u64>,
    ) -> Option<Time> {
        if self.sending.is_some() {
            return None;
        }
        while let Some(attempt) = self.queue.pop_front() {
            if let Some(left) = left(attempt) {
                let bytes = left.min(QUANTUM);
                self.sending = Some((attempt, bytes));
                return Some(now + (bytes as f64 * self.nanoseconds_a_byte) as Time);
            }
        }
        None
    }

    /// The part of a response that is sent now, and its bytes.
    pub(super) fn sent(&mut self, now: Time) -> Option<(Attempt, u64)> {
        let sent = self.sending.take();
        self.load.bytes.add(now, sent.map_or(0, |(_, bytes)| bytes));
        sent
    }
}
