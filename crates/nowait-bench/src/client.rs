//! The load: one thread that keeps a fixed number of requests in flight, and sleeps while all are out.
//!
//! Invariant: between two calls of [`Client::run_for`] each slot is either in flight or free, never both; a
//! reply that fits no slot in flight is an error. All that became free is sent again with one system call,
//! and nothing is copied but what the socket copies, so that the server is the limit and not the client.
//! Knows: address, wire, workload, certificates, session, stop. Known by: turn, target (random bytes).

use std::io::{self, Read, Write};
use std::ops::Range;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::retry_on_intr;
use rustix::time::Timespec;

use crate::address::{Address, SILENCE_MAX, Stream};
use crate::certificates::Certificates;
use crate::session::Session;
use crate::stop::Stop;
use crate::wire::{self, Command, Export, REQUEST_BYTES, ReplyParser, Request};
use crate::workload::{Direction, Order, Workload};

/// More than a Unix socket holds by default, so that one receive can take all that is there.
const RECEIVE_BYTES: usize = 256 * 1024;
/// What [`Payload::Plain`] is made of; not 0, which some servers look for.
const PLAIN: u8 = 0x6e;
/// [`SILENCE_MAX`], for poll(2).
const SILENCE_MAX_POLL: Timespec = Timespec { tv_sec: SILENCE_MAX.as_secs() as i64, tv_nsec: 0 };

/// What one stretch of load came to.
pub(crate) struct Stretch {
    pub(crate) requests: u64,
    pub(crate) elapsed: Duration,
}

impl Stretch {
    /// Finished requests per second.
    pub(crate) fn per_second(&self) -> f64 {
        self.requests as f64 / self.elapsed.as_secs_f64()
    }
}

/// How a server is reached.
pub(crate) struct Door<'a> {
    pub(crate) address: &'a Address,
    pub(crate) export: &'static str,
    /// What the server is known by, if TLS is to be used.
    pub(crate) secret: Option<&'a Certificates>,
}

impl Door<'_> {
    /// Connects, up to the first request.
    fn open(&self) -> io::Result<(Channel, Export)> {
        let mut stream = self.address.connect()?;
        wire::greet(&mut stream)?;
        let mut channel = match self.secret {
            None => Channel::Plain { stream, received: vec![0; RECEIVE_BYTES] },
            Some(certificates) => {
                wire::starttls(&mut stream)?;
                Channel::Tls(Box::new(Session::begin(stream, certificates)?))
            }
        };
        let export = wire::go(&mut channel, self.export)?;
        Ok((channel, export))
    }
}

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Payload {
    /// Nothing that could be stored as less than it is.
    Random,
    /// The same byte everywhere: storage that packs what it gets has little to do with it. For what is to show
    /// what a write costs a server, not a processor that stands in for a disk.
    Plain,
}

/// All connections of one workload to one server.
pub(crate) struct Client {
    connections: Vec<Connection>,
}

impl Client {
    /// Opens `door` `connections` times and lays the load over the bytes `over` of the export.
    pub(crate) fn connect(
        door: &Door<'_>,
        workload: &Workload,
        connections: usize,
        over: Range<u64>,
        payload: Payload,
    ) -> io::Result<Client> {
        let blocks = (over.end - over.start) / workload.block_bytes as u64;
        let connections = (0..connections)
            .map(|index| {
                let (channel, offered) = door.open()?;
                if offered.bytes < over.end {
                    return Err(io::Error::other("the export is smaller than the file"));
                }
                if offered.read_only && workload.direction == Direction::Write {
                    return Err(io::Error::other("the export is read-only"));
                }
                let first = blocks * index as u64 / connections as u64;
                let positions = Positions::new(workload, over.start, first, blocks);
                Ok(Connection::new(channel, Batch::new(workload, payload), workload, positions))
            })
            .collect::<io::Result<_>>()?;
        Ok(Client { connections })
    }

    /// Keeps all slots busy for `duration`, or until `stop`; adds the latency of each finished request to
    /// `latencies_ns`. Requests in flight at the end stay in flight, so the next stretch starts under load.
    pub(crate) fn run_for(
        &mut self,
        duration: Duration,
        latencies_ns: &mut Histogram<u64>,
        stop: &Stop,
    ) -> io::Result<Stretch> {
        let begin = Instant::now();
        let mut requests = 0;
        let mut readable = vec![true; self.connections.len()];
        for connection in &mut self.connections {
            connection.send(begin)?;
        }
        loop {
            self.wait(&mut readable)?;
            for (connection, _) in
                self.connections.iter_mut().zip(&readable).filter(|(_, readable)| **readable)
            {
                requests += connection.receive(latencies_ns)?;
            }
            let now = Instant::now();
            if now - begin >= duration || stop.requested() {
                return Ok(Stretch { requests, elapsed: now - begin });
            }
            for connection in &mut self.connections {
                connection.send(now)?;
            }
        }
    }

    /// Takes in the replies to all that is in flight and says goodbye.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        let mut unused = latency_histogram()?;
        for connection in &mut self.connections {
            while connection.in_flight() > 0 {
                connection.receive(&mut unused)?;
            }
            let goodbye =
                Request { command: Command::Disconnect, cookie: 0, position: 0, bytes: 0 };
            connection.channel.write_all(&goodbye.header())?;
        }
        Ok(())
    }

    /// Says which connections have something. A single one is not asked: its receive sleeps by itself.
    fn wait(&self, readable: &mut [bool]) -> io::Result<()> {
        if self.connections.len() == 1 {
            return Ok(());
        }
        let mut fds: Vec<PollFd<'_>> = self
            .connections
            .iter()
            .map(|c| PollFd::new(c.channel.stream(), PollFlags::IN))
            .collect();
        if retry_on_intr(|| poll(&mut fds, Some(&SILENCE_MAX_POLL)))? == 0 {
            return Err(silent());
        }
        for (fd, readable) in fds.iter().zip(readable) {
            *readable = !fd.revents().is_empty();
        }
        Ok(())
    }
}

fn silent() -> io::Error {
    let seconds = SILENCE_MAX.as_secs();
    io::Error::new(io::ErrorKind::TimedOut, format!("no reply for {seconds} s"))
}

/// A histogram of nanoseconds, good to three digits up to a minute; longer counts as a minute.
pub(crate) fn latency_histogram() -> io::Result<Histogram<u64>> {
    const MINUTE_NS: u64 = 60_000_000_000;
    Histogram::new_with_bounds(1, MINUTE_NS, 3).map_err(io::Error::other)
}

/// The bytes' way to a server and back.
enum Channel {
    Plain { stream: Stream, received: Vec<u8> },
    Tls(Box<Session>),
}

impl Channel {
    fn stream(&self) -> &Stream {
        match self {
            Channel::Plain { stream, .. } => stream,
            Channel::Tls(session) => session.stream(),
        }
    }

    /// Sleeps until something has come, and gives all of that to `sink`. False at the end.
    fn receive(&mut self, mut sink: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<bool> {
        match self {
            Channel::Plain { stream, received } => {
                let count = stream.read(received)?;
                sink(&received[..count])?;
                Ok(count > 0)
            }
            Channel::Tls(session) => session.receive(sink),
        }
    }
}

/// For the handshake, in which the server says nothing that was not asked for.
impl Read for Channel {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Channel::Plain { stream, .. } => stream.read(buffer),
            Channel::Tls(session) => session.read(buffer),
        }
    }
}

impl Write for Channel {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Channel::Plain { stream, .. } => stream.write(bytes),
            Channel::Tls(session) => session.send(bytes).map(|()| bytes.len()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Connection {
    channel: Channel,
    batch: Batch,
    parser: ReplyParser,
    /// By slot: when the request in flight was sent; `None` when the slot is free.
    sent: Vec<Option<Instant>>,
    free: Vec<usize>,
    positions: Positions,
}

impl Connection {
    fn new(
        channel: Channel,
        batch: Batch,
        workload: &Workload,
        positions: Positions,
    ) -> Connection {
        let data_in_reply = match workload.direction {
            Direction::Read => workload.block_bytes,
            Direction::Write => 0,
        };
        Connection {
            channel,
            batch,
            parser: ReplyParser::new(data_in_reply),
            sent: vec![None; workload.depth],
            free: (0..workload.depth).rev().collect(),
            positions,
        }
    }

    fn in_flight(&self) -> usize {
        self.sent.len() - self.free.len()
    }

    /// Sends a request for every free slot. The system call may take a while; the clock runs from `now`.
    fn send(&mut self, now: Instant) -> io::Result<()> {
        let mut count = 0;
        while let Some(slot) = self.free.pop() {
            self.batch.set(count, slot as u64, self.positions.next());
            self.sent[slot] = Some(now);
            count += 1;
        }
        self.channel.write_all(self.batch.first(count))
    }

    /// Sleeps until there is something, takes all that is there, and returns how many requests it ended.
    fn receive(&mut self, latencies_ns: &mut Histogram<u64>) -> io::Result<u64> {
        let Connection { channel, parser, sent, free, .. } = self;
        let mut requests = 0;
        let outcome = channel.receive(|bytes| {
            let now = Instant::now();
            parser.feed(bytes, |cookie| {
                let slot = usize::try_from(cookie).unwrap_or(usize::MAX);
                let Some(sent) = sent.get_mut(slot).and_then(Option::take) else {
                    let problem = "the server answered a request that was never made";
                    return Err(io::Error::other(problem));
                };
                let ns = u64::try_from((now - sent).as_nanos()).unwrap_or(u64::MAX);
                latencies_ns.saturating_record(ns);
                free.push(slot);
                requests += 1;
                Ok(())
            })
        });
        match outcome {
            Ok(true) => Ok(requests),
            Ok(false) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server hung up")),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(0),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Err(silent()),
            Err(e) => Err(e),
        }
    }
}

/// Requests one behind the other as they go over the wire. The data written is in place from the start, so
/// that only headers change.
struct Batch {
    bytes: Vec<u8>,
    command: Command,
    block_bytes: u32,
    /// Bytes from one request to the next.
    stride: usize,
}

impl Batch {
    fn new(workload: &Workload, payload: Payload) -> Batch {
        let (command, data_bytes) = match workload.direction {
            Direction::Read => (Command::Read, 0),
            Direction::Write => (Command::Write, workload.block_bytes),
        };
        let stride = REQUEST_BYTES + data_bytes;
        let mut bytes = vec![0; stride * workload.depth];
        match payload {
            Payload::Random => Random::seeded(0).fill(&mut bytes),
            Payload::Plain => bytes.fill(PLAIN),
        }
        Batch { bytes, command, block_bytes: workload.block_bytes as u32, stride }
    }

    fn set(&mut self, index: usize, cookie: u64, position: u64) {
        let request = Request { command: self.command, cookie, position, bytes: self.block_bytes };
        let at = index * self.stride;
        self.bytes[at..at + REQUEST_BYTES].copy_from_slice(&request.header());
    }

    fn first(&self, count: usize) -> &[u8] {
        &self.bytes[..count * self.stride]
    }
}

/// Where the next request goes.
struct Positions {
    order: Order,
    random: Random,
    /// The first block's.
    start: u64,
    next_block: u64,
    blocks: u64,
    block_bytes: u64,
}

impl Positions {
    /// Over `blocks` blocks that begin at `start`, from block `first` on when sequential.
    fn new(workload: &Workload, start: u64, first: u64, blocks: u64) -> Positions {
        Positions {
            order: workload.order,
            random: Random::seeded(first + 1),
            start,
            next_block: first,
            blocks,
            block_bytes: workload.block_bytes as u64,
        }
    }

    fn next(&mut self) -> u64 {
        let block = match self.order {
            Order::Random => self.random.below(self.blocks),
            Order::Sequential => {
                let block = self.next_block;
                self.next_block = if block + 1 < self.blocks { block + 1 } else { 0 };
                block
            }
        };
        self.start + block * self.block_bytes
    }
}

/// Marsaglia's xorshift with Vigna's multiplication (xorshift64*): cheap, and random enough for positions and
/// for data that does not compress.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn seeded(seed: u64) -> Random {
        // The state must not be zero; the odd constant spreads neighbouring seeds apart.
        Random((seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d).max(1))
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        for piece in bytes.chunks_mut(8) {
            piece.copy_from_slice(&self.next().to_ne_bytes()[..piece.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(order: Order) -> Workload {
        Workload { direction: Direction::Read, order, block_bytes: 4096, depth: 1, beside: None }
    }

    #[test]
    fn random_positions_are_aligned_inside_and_reach_both_ends() {
        let mut positions = Positions::new(&workload(Order::Random), 0, 0, 8);
        let seen: Vec<u64> = (0..1000).map(|_| positions.next()).collect();
        assert!(seen.iter().all(|position| position % 4096 == 0));
        assert_eq!(seen.iter().min(), Some(&0));
        assert_eq!(seen.iter().max(), Some(&(7 * 4096)));
    }

    #[test]
    fn sequential_positions_start_where_told_and_wrap() {
        let mut positions = Positions::new(&workload(Order::Sequential), 4096, 2, 4);
        let seen: Vec<u64> = (0..5).map(|_| positions.next() / 4096).collect();
        assert_eq!(seen, [3, 4, 1, 2, 3]);
    }

    #[test]
    fn a_latency_longer_than_the_histogram_counts_as_its_longest() {
        let mut latencies = latency_histogram().unwrap();
        latencies.saturating_record(u64::MAX);
        latencies.saturating_record(1_000);
        assert_eq!(latencies.len(), 2);
        assert!(latencies.max() >= 60_000_000_000);
        assert!(latencies.value_at_quantile(0.5).abs_diff(1_000) <= 1);
    }

    #[test]
    fn a_batch_holds_its_requests_one_behind_the_other() {
        let load = Workload { direction: Direction::Write, depth: 2, ..workload(Order::Random) };
        let mut batch = Batch::new(&load, Payload::Random);
        batch.set(0, 7, 4096);
        batch.set(1, 8, 8192);
        let sent = batch.first(2);
        assert_eq!(sent.len(), 2 * (REQUEST_BYTES + 4096));
        let second = Request { command: Command::Write, cookie: 8, position: 8192, bytes: 4096 };
        assert_eq!(sent[REQUEST_BYTES + 4096..][..REQUEST_BYTES], second.header());
    }
}
