//! The requests between sites and origins, from the read that needs them to their end.
//!
//! Invariant: a request completes once, with its bytes or with an error, and what waits for it is told;
//! an event of an attempt that was given up changes nothing.

use std::time::Duration;

use nowait::sim::Random;
use nowait_remote::{BackOff, Pace, ReadAhead};
use slab::Slab;

use super::origin::{Answer, Origin};
use super::parameters::{GiveUp, IDLE_LIMIT, PREFETCH_ATTEMPTS, Parameters};
use super::request::{Attempt, Event, Fate, Purpose, Request, Waiter};
use super::site::Site;
use super::timeline::{Time, Timeline, seconds};

/// The store among the origins.
pub(super) const STORE: u32 = 0;
/// After this time without a byte an attempt is given up.
pub(super) const IDLE: Time = IDLE_LIMIT.as_nanos() as Time;

/// The transfer that was waited for is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wake {
    /// The machines of a host can start, or never will.
    Host { host: u32, well: bool },
    /// One of the requests that a process of a machine waits for.
    Lane { machine: u32, lane: u8, well: bool },
}

/// All requests, what they are sent from, and what to.
#[derive(Debug)]
pub(super) struct Transfers {
    pub(super) timeline: Timeline<Event>,
    pub(super) woken: Vec<Wake>,
    /// Attempts after the first ones of their requests.
    pub(super) retries: u64,
    requests: Slab<Request>,
    sites: Vec<Site>,
    origins: Vec<Origin>,
    random: Random,
    back_off: BackOff,
    reconnect: Time,
    give_up: GiveUp,
    attempts: u32,
}

impl Transfers {
    /// Without requests.
    pub(super) fn new(parameters: &Parameters, mut sites: Vec<Site>, origins: Vec<Origin>) -> Self {
        for site in sites.iter_mut().filter(|site| site.origin == STORE) {
            site.pace = parameters.paced.then(Pace::default);
            site.streams = parameters.read_ahead.then(ReadAhead::default);
        }
        Self {
            timeline: Timeline::new(IDLE),
            woken: Vec::new(),
            retries: 0,
            requests: Slab::new(),
            sites,
            origins,
            random: Random::part(parameters.seed, 2),
            back_off: parameters.back_off,
            reconnect: seconds(parameters.reconnect),
            give_up: parameters.give_up,
            attempts: 0,
        }
    }

    /// The load of the store.
    pub(super) fn store(&self) -> Option<&Origin> {
        self.origins.get(STORE as usize)
    }

    /// A host starts: it asks whether the image is the one it knows.
    pub(super) fn open(&mut self, host: u32) {
        self.ask(host, Purpose::Check, (0, 0), Vec::new());
    }

    /// `waiter` needs `len` bytes at `pos`. Returns the number of requests that it waits for.
    pub(super) fn read(&mut self, site: u32, pos: u64, len: u64, waiter: Waiter) -> u32 {
        let Some(at) = self.sites.get_mut(site as usize) else { return 0 };
        let mut missing = at.missing(pos, len);
        at.begin_read(pos, len, &mut missing);
        let count = missing.in_flight.len() + missing.ranges.len();
        for number in missing.in_flight {
            if let Some(request) = self.requests.get_mut(number as usize) {
                request.waiters.push(waiter);
            }
        }
        for range in missing.ranges {
            self.ask(site, Purpose::Guest, range, vec![waiter]);
        }
        self.fetch_ahead(site);
        count as u32
    }

    fn fetch_ahead(&mut self, site: u32) {
        let next = |sites: &mut Vec<Site>| sites.get_mut(site as usize)?.next_ahead();
        while let Some((purpose, pos, len)) = next(&mut self.sites) {
            self.ask(site, purpose, (pos, len), Vec::new());
        }
    }

    fn ask(&mut self, site: u32, purpose: Purpose, (pos, len): (u64, u64), waiters: Vec<Waiter>) {
        let number = self.requests.insert(Request {
            site,
            purpose,
            pos,
            len,
            waiters,
            failed: 0,
            first_failure: None,
            attempt: 0,
            waits: 0,
            left: 0,
            last_byte: 0,
            free: 0,
            slower: 1.0,
            fate: Fate::Failed,
        }) as u32;
        if let Some(site) = self.sites.get_mut(site as usize) {
            site.begin(number, purpose, pos, len);
        }
        let at = self.slot(site);
        if at > self.timeline.now() {
            let first = self.next_attempt(number);
            self.timeline.at(at, Event::Again(first));
        } else {
            self.attempt(number);
        }
    }

    /// When a request of a site may be sent.
    fn slot(&mut self, site: u32) -> Time {
        let now = self.timeline.now();
        let pace = self.sites.get_mut(site as usize).and_then(|site| site.pace.as_mut());
        pace.map_or(now, |pace| pace.slot(Duration::from_nanos(now)).as_nanos() as Time)
    }

    fn next_attempt(&mut self, number: u32) -> Attempt {
        self.attempts = self.attempts.wrapping_add(1);
        if let Some(request) = self.requests.get_mut(number as usize) {
            request.attempt = self.attempts;
        }
        Attempt { request: number, number: self.attempts }
    }

    /// Sends the request to its origin.
    fn attempt(&mut self, number: u32) {
        let attempt = self.next_attempt(number);
        let now = self.timeline.now();
        let Some(request) = self.requests.get_mut(number as usize) else { return };
        let Some(site) = self.sites.get(request.site as usize) else { return };
        let Some(origin) = self.origins.get_mut(site.origin as usize) else { return };
        request.last_byte = now;
        let (pos, len, rack) = (request.pos, request.len, origin.site);
        if rack.is_none() {
            self.timeline.start_timer(Event::Idle(attempt));
        }
        match origin.take(now, len, &mut self.random) {
            Answer::Silence => {}
            Answer::Error(at, fate) => {
                request.fate = fate;
                self.timeline.at(at, Event::Ended(attempt));
            }
            Answer::Body { at, bytes, slower, fate } => {
                (request.left, request.slower, request.fate) = (bytes, slower, fate);
                request.free = at;
                let event = if bytes == 0 { Event::Ended(attempt) } else { Event::Ready(attempt) };
                match rack.filter(|_| len > 0) {
                    None => self.timeline.at(at, event),
                    Some(rack) => self.wait_for_rack(rack, (pos, len), at, attempt),
                }
            }
        }
    }

    /// The response of a rack's server begins when that has the bytes.
    fn wait_for_rack(&mut self, rack: u32, (pos, len): (u64, u64), at: Time, attempt: Attempt) {
        let waits = self.read(rack, pos, len, Waiter::Attempt(attempt));
        if let Some(request) = self.requests.get_mut(attempt.request as usize) {
            request.waits = waits;
        }
        if waits == 0 {
            self.timeline.at(at, Event::Ready(attempt));
        }
    }

    /// Handles an event that is not one of machines.
    pub(super) fn handle(&mut self, event: Event) {
        match event {
            Event::Start(_) | Event::Read { .. } => {}
            Event::Ready(attempt) => self.ready(attempt),
            Event::Sent(origin) => self.sent(origin),
            Event::Again(attempt) if self.runs(attempt) => self.attempt(attempt.request),
            Event::Ended(attempt) if self.runs(attempt) => {
                self.completed(attempt.request);
            }
            Event::Idle(attempt) if self.runs(attempt) => self.idle(attempt),
            Event::Again(_) | Event::Ended(_) | Event::Idle(_) => {}
        }
    }

    /// The running attempt of a request has completed.
    fn completed(&mut self, number: u32) {
        let Some(request) = self.requests.get(number as usize) else { return };
        let (now, fate) = (Duration::from_nanos(self.timeline.now()), request.fate);
        let site = self.sites.get_mut(request.site as usize);
        if let Some(pace) = site.and_then(|site| site.pace.as_mut()) {
            match fate {
                Fate::SlowDown => pace.refused(now),
                _ => pace.answered(now),
            }
        }
        match fate {
            Fate::SlowDown | Fate::Failed => self.retry(number),
            Fate::Answered | Fate::Refused => self.finish(number, fate == Fate::Answered),
        }
    }

    /// An attempt fails if it has been without a byte for long.
    fn idle(&mut self, attempt: Attempt) {
        let Some(request) = self.requests.get_mut(attempt.request as usize) else { return };
        let limit = request.last_byte + IDLE;
        if limit > self.timeline.now() {
            return self.timeline.at(limit, Event::Idle(attempt));
        }
        request.fate = Fate::Failed;
        self.retry(attempt.request);
    }

    fn runs(&self, attempt: Attempt) -> bool {
        let request = self.requests.get(attempt.request as usize);
        request.is_some_and(|request| request.attempt == attempt.number)
    }

    fn ready(&mut self, attempt: Attempt) {
        if !self.runs(attempt) {
            return;
        }
        let request = self.requests.get(attempt.request as usize);
        let site = request.and_then(|request| self.sites.get(request.site as usize));
        let Some(number) = site.map(|site| site.origin) else { return };
        if let Some(origin) = self.origins.get_mut(number as usize) {
            origin.queue(attempt);
        }
        self.send(number);
    }

    /// Sends a part of the next response of an origin.
    fn send(&mut self, number: u32) {
        let requests = &self.requests;
        let left = |attempt: Attempt| {
            let request = requests.get(attempt.request as usize)?;
            (request.attempt == attempt.number).then_some(request.left)
        };
        let now = self.timeline.now();
        let origin = self.origins.get_mut(number as usize);
        if let Some(at) = origin.and_then(|origin| origin.send(now, left)) {
            self.timeline.at(at, Event::Sent(number));
        }
    }

    /// A part of a response is on its way: the next part follows when the client's network and the
    /// connection take it.
    fn sent(&mut self, number: u32) {
        let now = self.timeline.now();
        let Some(origin) = self.origins.get_mut(number as usize) else { return };
        if let Some((attempt, bytes)) = origin.sent(now)
            && let Some(request) = self.requests.get_mut(attempt.request as usize)
            && request.attempt == attempt.number
            && let Some(site) = self.sites.get_mut(request.site as usize)
        {
            let time = bytes as f64 * origin.nanoseconds_a_connection_byte() * request.slower;
            request.left -= bytes;
            request.free += time as Time;
            let at = request.free.max(site.receive(now, bytes));
            request.last_byte = at;
            let event =
                if request.left == 0 { Event::Ended(attempt) } else { Event::Ready(attempt) };
            self.timeline.at(at, event);
        }
        self.send(number);
    }

    /// An attempt has failed: another one follows after a pause.
    fn retry(&mut self, number: u32) {
        let attempt = self.next_attempt(number);
        let now = self.timeline.now();
        let Some(request) = self.requests.get_mut(number as usize) else { return };
        let Some(site) = self.sites.get_mut(request.site as usize) else { return };
        request.failed += 1;
        if request.fate != Fate::SlowDown || self.give_up == GiveUp::Request {
            request.first_failure.get_or_insert(now);
        }
        let outage = site.outage(now);
        let since = request.first_failure.map_or(outage, |first| first.min(outage));
        let gives_up = match request.purpose {
            Purpose::Download => false,
            Purpose::Prefetch if request.waiters.is_empty() => request.failed >= PREFETCH_ATTEMPTS,
            _ => now - since >= self.reconnect,
        };
        if gives_up {
            return self.finish(number, false);
        }
        self.retries += 1;
        let pause = self.back_off.pause(request.failed, self.random.next());
        let site = request.site;
        let at = self.slot(site).max(now + pause.as_nanos() as Time);
        self.timeline.at(at, Event::Again(attempt));
    }

    /// The request has completed.
    fn finish(&mut self, number: u32, well: bool) {
        let Some(request) = self.requests.try_remove(number as usize) else { return };
        let host = request.site;
        let Some(site) = self.sites.get_mut(host as usize) else { return };
        site.end(request.purpose, request.pos, request.len, well);
        let may_start = !well || !site.downloads();
        for waiter in request.waiters {
            match waiter {
                Waiter::Lane { machine, lane } => {
                    self.woken.push(Wake::Lane { machine, lane, well });
                }
                Waiter::Attempt(attempt) => self.rack_has_more(attempt, well),
            }
        }
        self.fetch_ahead(host);
        let downloaded = self.sites.get(host as usize).is_some_and(Site::is_downloaded);
        match request.purpose {
            Purpose::Check if may_start => self.woken.push(Wake::Host { host, well }),
            Purpose::Download if downloaded => {
                self.woken.push(Wake::Host { host, well: true });
            }
            _ => {}
        }
    }

    /// A part of what an attempt waits for has come to the rack's server, or never will.
    fn rack_has_more(&mut self, attempt: Attempt, well: bool) {
        let now = self.timeline.now();
        let Some(request) = self.requests.get_mut(attempt.request as usize) else { return };
        if request.attempt != attempt.number {
            return;
        }
        request.waits -= 1;
        if !well {
            request.fate = Fate::Refused;
            request.waits = 0;
            let end = self.next_attempt(attempt.request);
            self.timeline.at(now, Event::Ended(end));
        } else if request.waits == 0 {
            self.timeline.at(now, Event::Ready(attempt));
        }
    }
}
