//! Runs a simulation: hosts start, their machines boot, their reads become requests.
//!
//! Invariant: every machine comes up or fails; a machine that has failed reads no more.

use std::collections::VecDeque;
use std::sync::Arc;

use nowait::sim::Random;
use nowait_remote::{PrefetchCursor, PrefetchOrder};

use super::block_set::BlockSet;
use super::boot_trace::BootTrace;
use super::machine::{Machine, State};
use super::origin::Origin;
use super::outcome::Outcome;
use super::parameters::{Parameters, Plan};
use super::request::{Event, Waiter};
use super::site::{Contents, Site};
use super::timeline::{Time, seconds};
use super::transfers::{STORE, Transfers, Wake};

/// The time that a read takes from a host's cache: that of the device, and of a byte at 2 GB/s.
const HIT: Time = 100_000;
const HIT_NANOSECONDS_A_BYTE: f64 = 0.5;

/// A simulation that runs.
struct Fleet {
    trace: BootTrace,
    transfers: Transfers,
    machines: Vec<Machine>,
    machines_each: u32,
    /// When each host starts.
    starts: Vec<Time>,
    boots: Vec<Time>,
    failed: u64,
    longest_read: Time,
    last_end: Time,
}

/// Runs the simulation of `parameters`.
pub fn simulate(parameters: &Parameters) -> Outcome {
    let mut fleet = Fleet::new(parameters);
    for (host, &start) in (0..).zip(&fleet.starts) {
        fleet.transfers.timeline.at(start, Event::Start(host));
    }
    while let Some(event) = fleet.transfers.timeline.next() {
        match event {
            Event::Start(host) => fleet.transfers.open(host),
            Event::Read { machine, lane } => fleet.read(machine, lane),
            _ => fleet.transfers.handle(event),
        }
        while let Some(wake) = fleet.transfers.woken.pop() {
            fleet.wake(wake);
        }
    }
    fleet.outcome(parameters)
}

/// The sites, first the hosts and then the servers of racks, and what they send requests to.
fn network(parameters: &Parameters, trace: &BootTrace) -> (Vec<Site>, Vec<Origin>) {
    let Parameters { hosts, plan, host_bandwidth, rack_bandwidth, .. } = *parameters;
    let blocks = trace.blocks();
    let record = match plan {
        Plan::Download => Some(Arc::new(PrefetchOrder::new(0..blocks))),
        Plan::Prefetch | Plan::RackPrefetch => Some(Arc::new(trace.record())),
        _ => None,
    };
    let empty = || Contents::Blocks(BlockSet::new(blocks));
    let fill = |mut site: Site| {
        if let Some(order) = &record {
            site.fetch_ahead(PrefetchCursor::new(Arc::clone(order)), plan == Plan::Download);
        }
        site
    };
    let mut origins = vec![Origin::store(parameters)];
    if plan.has_racks() {
        let racks = hosts.div_ceil(parameters.rack_hosts);
        let rack_of = |host| 1 + host / parameters.rack_hosts;
        let host = |host| Site::new(rack_of(host), Contents::Nothing, blocks, host_bandwidth);
        let server = |_| fill(Site::new(STORE, empty(), blocks, rack_bandwidth));
        origins.extend((0..racks).map(|rack| Origin::rack(parameters, hosts + rack)));
        return ((0..hosts).map(host).chain((0..racks).map(server)).collect(), origins);
    }
    let host = |_| {
        let contents = match plan {
            Plan::NoCache => Contents::Recent(BlockSet::new(blocks), VecDeque::new()),
            Plan::WarmCache => Contents::Everything,
            _ => empty(),
        };
        fill(Site::new(STORE, contents, blocks, host_bandwidth))
    };
    ((0..hosts).map(host).collect(), origins)
}

impl Fleet {
    fn new(parameters: &Parameters) -> Self {
        let trace = BootTrace::new(&parameters.boot, parameters.seed);
        let (sites, origins) = network(parameters, &trace);
        let mut random = Random::part(parameters.seed, 3);
        let window = seconds(parameters.window);
        let hosts = 0..parameters.hosts;
        let machines = hosts
            .clone()
            .flat_map(|host| (0..parameters.machines).map(move |_| Machine::new(host)))
            .collect();
        Self {
            trace,
            transfers: Transfers::new(parameters, sites, origins),
            machines,
            machines_each: parameters.machines,
            starts: hosts.map(|_| random.below(window + 1)).collect(),
            boots: Vec::new(),
            failed: 0,
            longest_read: 0,
            last_end: 0,
        }
    }

    fn wake(&mut self, wake: Wake) {
        match wake {
            Wake::Host { host, well } => {
                let first = host * self.machines_each;
                for number in first..first + self.machines_each {
                    if well {
                        self.begin_phase(number, self.transfers.timeline.now());
                    } else {
                        self.end(number, State::Failed, self.transfers.timeline.now());
                    }
                }
            }
            Wake::Lane { machine, lane, well } => {
                let now = self.transfers.timeline.now();
                let Some(at) = self.machines.get_mut(machine as usize) else { return };
                let Some(waiting) = at.lanes.get_mut(usize::from(lane)) else { return };
                if at.state != State::Boots {
                    return;
                }
                waiting.waits -= 1;
                self.longest_read = self.longest_read.max(now - waiting.since);
                if !well {
                    self.end(machine, State::Failed, now);
                } else if waiting.waits == 0 {
                    self.go_on(machine, lane, now);
                }
            }
        }
    }

    /// Begins the next phase of a machine, whose processes have ended the last one at `time`.
    fn begin_phase(&mut self, number: u32, time: Time) {
        let Some(machine) = self.machines.get_mut(number as usize) else { return };
        let Some(lanes) = self.trace.phase(machine.phase as usize) else {
            return self.end(number, State::Up, time);
        };
        machine.running = lanes.len() as u32;
        machine.phase_end = time;
        for (lane, (state, reads)) in (0..).zip(machine.lanes.iter_mut().zip(lanes)) {
            state.read = 0;
            let think = reads.first().map_or(0, |read| read.think);
            self.transfers.timeline.at(time + think, Event::Read { machine: number, lane });
        }
    }

    /// A process of a machine reads.
    fn read(&mut self, number: u32, lane: u8) {
        let now = self.transfers.timeline.now();
        let Some(machine) = self.machines.get_mut(number as usize) else { return };
        let Some(state) = machine.lanes.get_mut(usize::from(lane)) else { return };
        if machine.state != State::Boots {
            return;
        }
        let phase = machine.phase as usize;
        let reads = self.trace.phase(phase).and_then(|lanes| lanes.get(usize::from(lane)));
        let Some(read) = reads.and_then(|reads| reads.get(state.read as usize)) else { return };
        let index = [phase, usize::from(lane), state.read as usize];
        let pos = self.trace.place(u64::from(number), index, read);
        let waiter = Waiter::Lane { machine: number, lane };
        state.since = now;
        state.waits = self.transfers.read(machine.host, pos, read.len, waiter);
        if state.waits == 0 {
            let bytes = read.len as f64 * HIT_NANOSECONDS_A_BYTE;
            self.go_on(number, lane, now + HIT + bytes as Time);
        }
    }

    /// The read of a process ends at `time`.
    fn go_on(&mut self, number: u32, lane: u8, time: Time) {
        let Some(machine) = self.machines.get_mut(number as usize) else { return };
        let Some(state) = machine.lanes.get_mut(usize::from(lane)) else { return };
        let lanes = self.trace.phase(machine.phase as usize);
        let reads = lanes.and_then(|lanes| lanes.get(usize::from(lane)));
        state.read += 1;
        if let Some(next) = reads.and_then(|reads| reads.get(state.read as usize)) {
            let event = Event::Read { machine: number, lane };
            return self.transfers.timeline.at(time + next.think, event);
        }
        machine.running -= 1;
        machine.phase_end = machine.phase_end.max(time);
        if machine.running == 0 {
            machine.phase += 1;
            let end = machine.phase_end;
            self.begin_phase(number, end);
        }
    }

    /// The boot of a machine ends at `time`.
    fn end(&mut self, number: u32, state: State, time: Time) {
        let Some(machine) = self.machines.get_mut(number as usize) else { return };
        if machine.state != State::Boots {
            return;
        }
        machine.state = state;
        self.last_end = self.last_end.max(time);
        let start = self.starts.get(machine.host as usize).copied().unwrap_or(0);
        match state {
            State::Up => self.boots.push(time - start),
            _ => self.failed += 1,
        }
    }

    fn outcome(mut self, parameters: &Parameters) -> Outcome {
        self.boots.sort_unstable();
        let last = self.boots.len().saturating_sub(1);
        let boot =
            |percent: usize| self.boots.get(last * percent / 100).map(|&time| time as f64 / 1e9);
        let load = self.transfers.store().map(|store| store.load).unwrap_or_default();
        Outcome {
            plan: parameters.plan.name(),
            hosts: parameters.hosts,
            machines: self.machines.len() as u64,
            store_requests: load.requests.all,
            store_refused: load.refused,
            store_faults: load.faults,
            store_bytes: load.bytes.all,
            peak_requests: load.requests.peak,
            peak_bytes: load.bytes.peak,
            boots: self.boots.len() as u64,
            boot_p50: boot(50),
            boot_p95: boot(95),
            boot_p99: boot(99),
            longest_read: self.longest_read as f64 / 1e9,
            retries: self.transfers.retries,
            failed: self.failed,
            seconds: self.last_end as f64 / 1e9,
        }
    }
}
