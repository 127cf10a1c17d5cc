//! A storage, a server behind and the network between them, to which steps are applied.
//!
//! Invariant: after each step the storage has done what it can at that time, and every end was checked.

use std::time::Duration;

use nowait::sim::Random;
use nowait::{ByteRange, Op};
use nowait_remote::{SimNbdRequest, SimNext, SimulatedNbd};

use crate::model::Violation;
use crate::remote::far_server::FarServer;
use crate::remote::remote_oracle::{Outlook, RemoteOracle};
use crate::remote::remote_scenario::{RemoteAction, RemoteRequest, RemoteScenario};
use crate::remote::volatile_disk::UNIT;
use crate::simulation::Counts;

/// Iterations after which a request that has not completed is considered stuck, and the time that each of
/// them takes.
const MAX_ITERATIONS: u32 = 20_000;
const ITERATION: Duration = Duration::from_millis(20);
/// More bytes than are ever to be sent.
const ALL: usize = 1 << 30;
/// The longest read at the end of a run.
const READ_BYTES: u64 = 16 << 10;

/// The state of a run.
pub struct RemoteSimulation {
    scenario: RemoteScenario,
    server: FarServer,
    storage: SimulatedNbd,
    oracle: RemoteOracle,
    now: Duration,
    /// Since when the storage has no connection.
    down_since: Option<Duration>,
    /// When the connection was lost first since the server's last answer that a client has seen.
    lost_at: Option<Duration>,
    /// The export has become another one.
    is_exchanged: bool,
    /// The server has said that it shuts down.
    says_goodbye: bool,
    deaths: u64,
}

impl RemoteSimulation {
    /// A new simulation of `scenario`.
    pub fn new(scenario: RemoteScenario) -> Self {
        let RemoteScenario { export, reconnect, limits, .. } = scenario;
        Self {
            server: FarServer::new(export),
            storage: SimulatedNbd::new(export, reconnect, limits),
            oracle: RemoteOracle::new(&scenario),
            now: Duration::ZERO,
            down_since: None,
            lost_at: None,
            is_exchanged: false,
            says_goodbye: false,
            deaths: 0,
            scenario,
        }
    }

    /// The counters so far; the deaths of the server count as power cuts.
    pub fn counts(&self) -> Counts {
        let (requests, operations) = (self.oracle.requests(), self.server.served());
        Counts { requests, cuts: self.deaths, operations }
    }

    /// Executes an action.
    pub fn step(&mut self, action: RemoteAction, mut random: Random) -> Result<(), Violation> {
        let random = &mut random;
        match action {
            RemoteAction::Ask(request) => {
                if self.oracle.in_flight() < self.scenario.depth {
                    self.ask(request);
                }
            }
            RemoteAction::Send => self.send(some_bytes(random), random)?,
            RemoteAction::Serve => (0..=random.below(3)).for_each(|_| self.serve(random)),
            RemoteAction::Receive => self.receive(some_bytes(random), random)?,
            RemoteAction::Pass(time) => self.now += time,
            RemoteAction::Break => self.disconnect(random),
            RemoteAction::Die(away) => {
                self.die(random);
                self.server.refuse(self.now + away);
            }
            RemoteAction::Refuse(time) => self.server.refuse(self.now + time),
            RemoteAction::Hang(time) => self.server.hang(self.now + time),
            RemoteAction::Fail(fault) => self.server.fail(fault),
            RemoteAction::Cut => return self.cut(random),
            RemoteAction::Exchange => {
                self.die(random);
                self.server.export.size = self.scenario.export.size + UNIT;
            }
        }
        self.poll(random)
    }

    fn die(&mut self, random: &mut Random) {
        self.deaths += 1;
        if self.server.die(random) {
            self.oracle.doubt();
        }
    }

    fn disconnect(&mut self, random: &mut Random) {
        if self.server.disconnect(random) {
            self.oracle.doubt();
        }
    }

    fn ask(&mut self, request: RemoteRequest) {
        let (tag, data) = self.oracle.begin(request);
        let RemoteRequest { op, range, durable } = request;
        self.storage.ask(SimNbdRequest { tag, op, range, durable, data });
    }

    fn send(&mut self, most: usize, random: &mut Random) -> Result<(), Violation> {
        let bytes = self.storage.send(most).map_err(Violation::new)?;
        let latency = self.scenario.latency();
        self.server.take(&bytes, self.now, latency, random)
    }

    /// The server does something, if it can.
    fn serve(&mut self, random: &mut Random) {
        if let Some(error) = self.server.serve(self.now, random) {
            self.oracle.told(error);
            self.says_goodbye |= error == nowait_nbd::ESHUTDOWN;
        }
    }

    /// The network brings at most `most` bytes to the storage, or the end of the connection.
    fn receive(&mut self, most: usize, random: &mut Random) -> Result<(), Violation> {
        if !self.storage.is_connected() {
            return Ok(());
        }
        let bytes = self.server.deliver(most);
        if bytes.is_empty() && !self.server.is_connected() {
            self.storage.lose("the server has closed the connection", self.now);
        } else {
            self.storage.receive(&bytes, self.now);
        }
        if !self.storage.is_connected() {
            if self.server.is_connected() {
                if !std::mem::take(&mut self.says_goodbye) {
                    let what = "the storage left a server for no reason".to_owned();
                    return Err(Violation::new(what));
                }
                self.disconnect(random);
            }
            self.down_since = Some(self.now);
            self.lost_at.get_or_insert(self.now);
        }
        Ok(())
    }

    /// The storage does what it can now, and its ends are checked.
    fn poll(&mut self, random: &mut Random) -> Result<(), Violation> {
        for _ in 0..MAX_ITERATIONS {
            let next = self.storage.poll(self.now);
            self.check_ends()?;
            match next {
                SimNext::Exchange(true) => {}
                SimNext::Connect => self.connect(random)?,
                SimNext::Exchange(false) | SimNext::Wait(_) => return self.check_state(),
            }
        }
        Err(Violation::new("the storage's thread never sleeps".to_owned()))
    }

    fn connect(&mut self, random: &mut Random) -> Result<(), Violation> {
        if !self.server.accept(self.now) {
            self.storage.unreachable(self.now);
            return Ok(());
        }
        self.says_goodbye = false;
        let same = self.server.export == self.scenario.export;
        let used = self.storage.connected(self.server.export, self.now);
        if used != same {
            let what = format!("another export is used ({used}), the same one ({same})");
            return Err(Violation::new(what));
        }
        if used {
            self.down_since = None;
        } else {
            self.is_exchanged = true;
            self.disconnect(random);
        }
        Ok(())
    }

    /// Whether requests have waited as long as they may.
    fn is_late(&self, since: Option<Duration>) -> bool {
        since.is_some_and(|since| self.now >= since + self.scenario.reconnect)
    }

    fn check_ends(&mut self) -> Result<(), Violation> {
        let is_gone = self.is_exchanged || self.is_late(self.lost_at);
        let outlook = Outlook { is_gone, has_lost: self.storage.has_lost() };
        let mut answered = false;
        for end in self.storage.ends() {
            answered |= self.oracle.end(end, outlook)?;
        }
        if answered && self.storage.is_connected() {
            self.lost_at = None;
        }
        self.oracle.polled(outlook)
    }

    /// Checks what has to be true when the storage sleeps.
    fn check_state(&self) -> Result<(), Violation> {
        if (self.is_exchanged || self.is_late(self.down_since))
            && let Some(request) = self.oracle.first()
        {
            return Err(Violation::new(format!("{request:?} waits for a server that is gone")));
        }
        let (changes, bytes) = self.storage.log_size();
        let limits = self.scenario.limits;
        // Requests that were asked before the log was full come too: one at least.
        let (asked, asked_bytes) = limits.asked;
        let most = limits.most.1 + asked_bytes.max(READ_BYTES * 2);
        match bytes <= most && changes <= 2 * (limits.most.0 + asked) {
            true => Ok(()),
            false => Err(Violation::new(format!(
                "{changes} changes of {bytes} bytes are in the replay log: {limits:?}"
            ))),
        }
    }

    /// The server, the storage and its clients die, and start again.
    fn cut(&mut self, random: &mut Random) -> Result<(), Violation> {
        self.die(random);
        self.oracle.cut(self.server.content())?;
        let RemoteScenario { export, reconnect, limits, .. } = self.scenario;
        self.server.export = export;
        self.server.mend();
        self.server.accept(self.now);
        self.storage = SimulatedNbd::new(export, reconnect, limits);
        (self.down_since, self.lost_at) = (None, None);
        (self.is_exchanged, self.says_goodbye) = (false, false);
        Ok(())
    }

    /// Runs until all requests have completed, with a server that is well.
    fn settle(&mut self, random: &mut Random) -> Result<(), Violation> {
        self.server.mend();
        for _ in 0..MAX_ITERATIONS {
            if self.oracle.in_flight() == 0 {
                return Ok(());
            }
            self.now += ITERATION;
            self.send(ALL, random)?;
            while !self.server.is_idle(self.now) {
                self.serve(random);
            }
            self.receive(ALL, random)?;
            self.poll(random)?;
        }
        Err(Violation::new(format!("never completes: {:?}", self.oracle.first())))
    }

    /// Ends the run: all requests end, all content is read, and what was flushed survives.
    pub fn end(&mut self) -> Result<(), Violation> {
        let random = &mut Random::part(self.scenario.seed, u64::MAX - 1);
        self.settle(random)?;
        let size = self.scenario.export.size;
        let mut pos = 0;
        while pos < size {
            let range = ByteRange::new(pos, READ_BYTES.min(size - pos));
            self.ask(RemoteRequest { op: Op::Read, range, durable: false });
            pos = range.end();
        }
        self.poll(random)?;
        self.settle(random)?;
        let range = ByteRange::new(0, 0);
        self.ask(RemoteRequest { op: Op::Flush, range, durable: false });
        self.poll(random)?;
        self.settle(random)?;
        self.cut(random)
    }
}

/// How many bytes the network brings together: a few, less than a header, or many.
fn some_bytes(random: &mut Random) -> usize {
    let most = random.pick(&[8, 64, 5000, 1 << 20, 1 << 20, 1 << 20, 1 << 20]).unwrap_or(8);
    1 + random.below(most) as usize
}
