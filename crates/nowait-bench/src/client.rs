//! The load generator for NBD: one thread that keeps a fixed number of requests in flight, and sleeps while
//! it waits for replies.
//!
//! Invariant: between two calls of [`Client::run_for`] each slot is either in flight or free, never
//! both; a reply that fits no slot in flight is an error. All free slots are sent again with one
//! system call, and only the socket copies data, so that the server is the bottleneck and not the
//! client.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use fastrand::Rng;
use hdrhistogram::Histogram;
use nowait_nbd::client::{self, ClientError, Export, Outcome, Replies, Wanted};
use nowait_nbd::{Address, CMD_READ, CMD_WRITE, FLAG_READ_ONLY, REQUEST_BYTES, RequestHeader};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::retry_on_intr;
use rustix::time::Timespec;

use crate::address::SILENCE_MAX;
use crate::cancel::CancelFlag;
use crate::certificates::Certificates;
use crate::offsets::{Offsets, Region};
use crate::workload::{Direction, Workload};

/// More than a Unix socket buffers by default, so that one receive can take all of it.
const RECEIVE_BYTES: usize = 256 * 1024;
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
    /// Whether errors count as answers.
    pub(crate) takes_errors: bool,
}

impl<'a> ConnectOptions<'a> {
    /// Options of a connection without TLS, whose requests succeed.
    pub(crate) const fn plain(address: &'a Address, export: &'static str) -> Self {
        Self { address, export, certificates: None, takes_errors: false }
    }

    /// Connects and negotiates; the next bytes are requests.
    fn open(&self) -> io::Result<(client::Connection, Export)> {
        let (wanted, timeout, receive_bytes) = (Wanted::default(), SILENCE_MAX, RECEIVE_BYTES);
        let credentials = self.certificates.map(Certificates::credentials);
        let Self { address, export, .. } = *self;
        let options =
            client::ConnectOptions { address, credentials, export, wanted, timeout, receive_bytes };
        Ok(client::Connection::open(&options)?)
    }
}

/// A load on a server.
pub(crate) trait Load {
    /// Keeps all slots busy for `duration`, or until `stop`; adds the latency of each completed
    /// request to `latencies_ns`. Requests in flight at the end stay in flight, so the next
    /// interval starts under load.
    fn run_for(
        &mut self,
        duration: Duration,
        latencies_ns: &mut Histogram<u64>,
        stop: &CancelFlag,
    ) -> io::Result<Interval>;

    /// Awaits the ends of all requests in flight and disconnects.
    fn finish(self) -> io::Result<()>;
}

/// All connections of one workload to one server.
pub(crate) struct Client {
    connections: Vec<Connection>,
}

impl Client {
    /// Opens `connections` connections with `connect_options` and applies the load to the first
    /// `bytes` of the export.
    pub(crate) fn connect(
        connect_options: &ConnectOptions<'_>,
        workload: &Workload,
        connections: usize,
        bytes: u64,
    ) -> io::Result<Client> {
        let region = Region { start: 0, bytes, block: workload.block_bytes as u64 };
        let connections = (0..connections)
            .map(|index| {
                let first = region.blocks() * index as u64 / connections as u64;
                let offsets = Offsets::endless(workload.order, region, first);
                Connection::open(connect_options, workload, offsets, bytes)
            })
            .collect::<io::Result<_>>()?;
        Ok(Client { connections })
    }

    /// Opens one connection whose requests are at the start of each `spacing` bytes of the first `bytes` of the export,
    /// each once, in the order of the workload. An interval is over when all are answered.
    pub(crate) fn of_firsts(
        connect_options: &ConnectOptions<'_>,
        workload: &Workload,
        bytes: u64,
        spacing: u64,
    ) -> io::Result<Client> {
        let region = Region { start: 0, bytes, block: spacing };
        let offsets = Offsets::once(workload.order, region, 0);
        let connection = Connection::open(connect_options, workload, offsets, bytes)?;
        Ok(Client { connections: vec![connection] })
    }

    /// The socket of its only connection.
    pub(crate) fn socket(&self) -> io::Result<OwnedFd> {
        let first = self.connections.first().ok_or(io::ErrorKind::NotConnected)?;
        first.nbd.as_fd().try_clone_to_owned()
    }

    /// Marks the connections that are readable. A single connection is not polled: its receive
    /// blocks.
    fn wait(&self, readable: &mut [bool]) -> io::Result<()> {
        if self.connections.len() == 1 {
            return Ok(());
        }
        let mut fds: Vec<PollFd<'_>> =
            self.connections.iter().map(|c| PollFd::new(&c.nbd, PollFlags::IN)).collect();
        if retry_on_intr(|| poll(&mut fds, Some(&SILENCE_MAX_POLL)))? == 0 {
            return Err(silent());
        }
        for (fd, readable) in fds.iter().zip(readable) {
            *readable = !fd.revents().is_empty();
        }
        Ok(())
    }
}

impl Load for Client {
    fn run_for(
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
            if self.connections.iter().all(|it| it.in_flight() == 0) {
                return Ok(Interval { requests, elapsed: now - begin });
            }
        }
    }

    fn finish(mut self) -> io::Result<()> {
        let mut unused = latency_histogram()?;
        for connection in &mut self.connections {
            while connection.in_flight() > 0 {
                connection.receive(&mut unused)?;
            }
            connection.nbd.disconnect();
        }
        Ok(())
    }
}

/// The error of a server that does not answer.
pub(crate) fn silent() -> io::Error {
    let seconds = SILENCE_MAX.as_secs();
    io::Error::new(io::ErrorKind::TimedOut, format!("no reply for {seconds} s"))
}

/// A histogram of nanoseconds with three significant digits up to a minute; longer latencies count
/// as a minute.
pub(crate) fn latency_histogram() -> io::Result<Histogram<u64>> {
    const MINUTE_NS: u64 = 60_000_000_000;
    Histogram::new_with_bounds(1, MINUTE_NS, 3).map_err(io::Error::other)
}

struct Connection {
    nbd: client::Connection,
    batch: Batch,
    slots: Slots,
    offsets: Offsets,
}

impl Connection {
    /// Connects to an export of at least `bytes` bytes.
    fn open(
        connect_options: &ConnectOptions<'_>,
        workload: &Workload,
        offsets: Offsets,
        bytes: u64,
    ) -> io::Result<Connection> {
        let (nbd, offered) = connect_options.open()?;
        if offered.size < bytes {
            return Err(io::Error::other("the export is smaller than the file"));
        }
        if offered.flags & FLAG_READ_ONLY != 0 && workload.direction == Direction::Write {
            return Err(io::Error::other("the export is read-only"));
        }
        let takes_errors = connect_options.takes_errors;
        let data_bytes = match workload.direction {
            Direction::Read => workload.block_bytes as u64,
            Direction::Write => 0,
        };
        let (sent, free) = (vec![None; workload.depth], (0..workload.depth).rev().collect());
        let slots = Slots { data_bytes, takes_errors, sent, free };
        Ok(Connection { nbd, batch: Batch::new(workload), slots, offsets })
    }

    fn in_flight(&self) -> usize {
        self.slots.sent.len() - self.slots.free.len()
    }

    /// Sends a request for every free slot. Latencies start at `now`, because the system call may
    /// take a while.
    fn send(&mut self, now: Instant) -> io::Result<()> {
        let mut count = 0;
        while !self.slots.free.is_empty()
            && let Some(position) = self.offsets.next()
            && let Some(slot) = self.slots.free.pop()
        {
            self.batch.set(count, slot as u64, position);
            self.slots.sent[slot] = Some(now);
            count += 1;
        }
        self.nbd.send_all(self.batch.first(count))
    }

    /// Waits for data, receives all of it, and returns the number of requests that it completed.
    fn receive(&mut self, latencies_ns: &mut Histogram<u64>) -> io::Result<u64> {
        let free = self.slots.free.len();
        let mut finished = Finished { slots: &mut self.slots, now: None, latencies_ns };
        match self.nbd.receive(&mut finished) {
            Ok(_) => Ok((self.slots.free.len() - free) as u64),
            Err(ClientError::Lost(e)) if e.kind() == io::ErrorKind::WouldBlock => Err(silent()),
            Err(e) => Err(e.into()),
        }
    }
}

/// The requests that a connection keeps in flight; a cookie is the index of a slot.
struct Slots {
    /// The data of each reply.
    data_bytes: u64,
    takes_errors: bool,
    /// For each slot the time when its request was sent; `None` if the slot is free.
    sent: Vec<Option<Instant>>,
    free: Vec<usize>,
}

/// The slots during one receive.
struct Finished<'a> {
    slots: &'a mut Slots,
    /// When the receive returned, once a reply was parsed.
    now: Option<Instant>,
    latencies_ns: &'a mut Histogram<u64>,
}

impl Replies for Finished<'_> {
    #[inline]
    fn simple(&mut self, _: u64, error: u32) -> Outcome<Option<(u64, u64)>> {
        match error {
            0 => Ok(Some((0, self.slots.data_bytes))),
            _ if self.slots.takes_errors => Ok(None),
            error => Err(format!("the server answered a request with NBD error {error}")),
        }
    }

    #[inline]
    fn done(&mut self, cookie: u64) -> Outcome<()> {
        let slot = usize::try_from(cookie).unwrap_or(usize::MAX);
        let Some(sent) = self.slots.sent.get_mut(slot).and_then(Option::take) else {
            return Err("the server answered a request that was never made".into());
        };
        let now = *self.now.get_or_insert_with(Instant::now);
        let ns = u64::try_from((now - sent).as_nanos()).unwrap_or(u64::MAX);
        self.latencies_ns.saturating_record(ns);
        self.slots.free.push(slot);
        Ok(())
    }

    /// The data are dropped where they were received.
    #[inline]
    fn memory(&mut self, _: u64, _: u64) -> Option<&mut [u8]> {
        None
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
    fn new(workload: &Workload) -> Batch {
        let (command, data_bytes) = match workload.direction {
            Direction::Read => (CMD_READ, 0),
            Direction::Write => (CMD_WRITE, workload.block_bytes),
        };
        let stride = REQUEST_BYTES + data_bytes;
        let mut bytes = vec![0; stride * workload.depth];
        // Data that cannot be compressed.
        Rng::with_seed(0).fill(&mut bytes);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::Order;

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
        let (direction, order) = (Direction::Write, Order::Random);
        let (durable, beside) = (false, None);
        let load = Workload { direction, order, block_bytes: 4096, depth: 2, durable, beside };
        let mut batch = Batch::new(&load);
        batch.set(0, 7, 4096);
        batch.set(1, 8, 8192);
        let sent = batch.first(2);
        assert_eq!(sent.len(), 2 * (REQUEST_BYTES + 4096));
        let second = request(CMD_WRITE, 8, 8192, 4096);
        assert_eq!(sent[REQUEST_BYTES + 4096..][..REQUEST_BYTES], second);
    }
}
