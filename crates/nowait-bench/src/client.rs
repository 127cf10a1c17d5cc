//! The load generator: one thread that keeps a fixed number of requests in flight, and sleeps while
//! it waits for replies.
//!
//! Invariant: between two calls of [`Client::run_for`] each slot is either in flight or free, never
//! both; a reply that fits no slot in flight is an error. All free slots are sent again with one
//! system call, and only the socket copies data, so that the server is the bottleneck and not the
//! client.

use std::io::{self, Read, Write};
use std::ops::Range;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use nowait_nbd::client::Export;
use nowait_nbd::{CMD_DISC, CMD_READ, CMD_WRITE, FLAG_READ_ONLY, REQUEST_BYTES, RequestHeader};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::retry_on_intr;
use rustix::time::Timespec;

use crate::address::{Address, SILENCE_MAX, Stream};
use crate::cancel::CancelFlag;
use crate::certificates::Certificates;
use crate::session::Session;
use crate::wire::{self, ReplyParser};
use crate::workload::{Direction, Order, Workload};

/// More than a Unix socket buffers by default, so that one receive can take all of it.
const RECEIVE_BYTES: usize = 256 * 1024;
/// The byte of [`Payload::Plain`]; not 0, because some servers detect zeros.
const PLAIN: u8 = 0x6e;
/// [`SILENCE_MAX`], for poll(2).
const SILENCE_MAX_POLL: Timespec = Timespec { tv_sec: SILENCE_MAX.as_secs() as i64, tv_nsec: 0 };

/// The requests and the busy time of one interval of load.
pub(crate) struct Interval {
    pub(crate) requests: u64,
    pub(crate) elapsed: Duration,
}

impl Interval {
    /// Finished requests per second.
    pub(crate) fn per_second(&self) -> f64 {
        self.requests as f64 / self.elapsed.as_secs_f64()
    }
}

/// How to connect to a server.
pub(crate) struct ConnectOptions<'a> {
    pub(crate) address: &'a Address,
    pub(crate) export: &'static str,
    /// The certificates to verify the server with, if TLS is used.
    pub(crate) certificates: Option<&'a Certificates>,
}

impl ConnectOptions<'_> {
    /// Connects and negotiates; the next bytes are requests.
    fn open(&self) -> io::Result<(Channel, Export)> {
        let mut stream = self.address.connect()?;
        wire::begin(&mut stream, self.certificates.is_some())?;
        let mut channel = match self.certificates {
            None => Channel::Plain { stream, received: vec![0; RECEIVE_BYTES] },
            Some(certificates) => Channel::Tls(Box::new(Session::begin(stream, certificates)?)),
        };
        let export = wire::open_export(&mut channel, self.export)?;
        Ok((channel, export))
    }
}

/// The data of writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Payload {
    /// Data that cannot be compressed.
    Random,
    /// The same byte everywhere, which storage that compresses can handle cheaply. For measurements
    /// of the cost of a write in the server, not of a processor that emulates a disk.
    Plain,
}

/// All connections of one workload to one server.
pub(crate) struct Client {
    connections: Vec<Connection>,
}

impl Client {
    /// Opens `connections` connections with `connect_options` and applies the load to the bytes
    /// `over` of the export.
    pub(crate) fn connect(
        connect_options: &ConnectOptions<'_>,
        workload: &Workload,
        connections: usize,
        over: Range<u64>,
        payload: Payload,
    ) -> io::Result<Client> {
        let blocks = (over.end - over.start) / workload.block_bytes as u64;
        let connections = (0..connections)
            .map(|index| {
                let (channel, offered) = connect_options.open()?;
                if offered.size < over.end {
                    return Err(io::Error::other("the export is smaller than the file"));
                }
                if offered.flags & FLAG_READ_ONLY != 0 && workload.direction == Direction::Write {
                    return Err(io::Error::other("the export is read-only"));
                }
                let first = blocks * index as u64 / connections as u64;
                let positions = Positions::new(workload, over.start, first, blocks);
                Ok(Connection::new(channel, Batch::new(workload, payload), workload, positions))
            })
            .collect::<io::Result<_>>()?;
        Ok(Client { connections })
    }

    /// Keeps all slots busy for `duration`, or until `stop`; adds the latency of each completed
    /// request to `latencies_ns`. Requests in flight at the end stay in flight, so the next
    /// interval starts under load.
    pub(crate) fn run_for(
        &mut self,
        duration: Duration,
        latencies_ns: &mut Histogram<u64>,
        stop: &CancelFlag,
    ) -> io::Result<Interval> {
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
                return Ok(Interval { requests, elapsed: now - begin });
            }
            for connection in &mut self.connections {
                connection.send(now)?;
            }
        }
    }

    /// Receives the replies to all requests in flight and disconnects.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        let mut unused = latency_histogram()?;
        for connection in &mut self.connections {
            while connection.in_flight() > 0 {
                connection.receive(&mut unused)?;
            }
            connection.channel.write_all(&request(CMD_DISC, 0, 0, 0))?;
        }
        Ok(())
    }

    /// Marks the connections that are readable. A single connection is not polled: its receive
    /// blocks.
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

/// A histogram of nanoseconds with three significant digits up to a minute; longer latencies count
/// as a minute.
pub(crate) fn latency_histogram() -> io::Result<Histogram<u64>> {
    const MINUTE_NS: u64 = 60_000_000_000;
    Histogram::new_with_bounds(1, MINUTE_NS, 3).map_err(io::Error::other)
}

/// The transport of a connection.
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

    /// Waits for data and passes all of it to `sink`. False at the end of the stream.
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

/// For the handshake, in which the server sends only replies.
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
    /// For each slot the time when its request was sent; `None` if the slot is free.
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

    /// Sends a request for every free slot. Latencies start at `now`, because the system call may
    /// take a while.
    fn send(&mut self, now: Instant) -> io::Result<()> {
        let mut count = 0;
        while let Some(slot) = self.free.pop() {
            self.batch.set(count, slot as u64, self.positions.next());
            self.sent[slot] = Some(now);
            count += 1;
        }
        self.channel.write_all(self.batch.first(count))
    }

    /// Waits for data, receives all of it, and returns the number of requests that it completed.
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

/// The header of a request of `length` bytes from byte `offset` of the export on.
fn request(command: u16, cookie: u64, offset: u64, length: u32) -> [u8; REQUEST_BYTES] {
    RequestHeader { flags: 0, command, cookie, offset, length: length.into() }.compact()
}

/// Consecutive requests in wire format. The data of writes is in place from the start, so that only
/// headers change.
struct Batch {
    bytes: Vec<u8>,
    command: u16,
    block_bytes: u32,
    /// Bytes from one request to the next.
    stride: usize,
}

impl Batch {
    fn new(workload: &Workload, payload: Payload) -> Batch {
        let (command, data_bytes) = match workload.direction {
            Direction::Read => (CMD_READ, 0),
            Direction::Write => (CMD_WRITE, workload.block_bytes),
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
        let header = request(self.command, cookie, position, self.block_bytes);
        let at = index * self.stride;
        self.bytes[at..at + REQUEST_BYTES].copy_from_slice(&header);
    }

    fn first(&self, count: usize) -> &[u8] {
        &self.bytes[..count * self.stride]
    }
}

/// The positions of requests.
struct Positions {
    order: Order,
    random: Random,
    /// The position of the first block.
    start: u64,
    next_block: u64,
    blocks: u64,
    block_bytes: u64,
}

impl Positions {
    /// Positions of `blocks` blocks from `start` on; sequential ones begin with block `first`.
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

/// Marsaglia's xorshift with Vigna's multiplication (xorshift64*): cheap, and random enough for
/// positions and incompressible data.
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
    fn sequential_positions_start_at_the_given_block_and_wrap() {
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
    fn a_batch_contains_consecutive_requests() {
        let load = Workload { direction: Direction::Write, depth: 2, ..workload(Order::Random) };
        let mut batch = Batch::new(&load, Payload::Random);
        batch.set(0, 7, 4096);
        batch.set(1, 8, 8192);
        let sent = batch.first(2);
        assert_eq!(sent.len(), 2 * (REQUEST_BYTES + 4096));
        let second = request(CMD_WRITE, 8, 8192, 4096);
        assert_eq!(sent[REQUEST_BYTES + 4096..][..REQUEST_BYTES], second);
    }
}
