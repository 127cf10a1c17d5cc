//! A server behind: what the network brings, in what order it answers, and how it dies.
//!
//! Invariant: a request is done once on a connection, at its answer or at the end of the connection;
//! nothing of an ended connection is done after another one has begun.

use std::collections::VecDeque;
use std::time::Duration;

use nowait::ByteRange;
use nowait::sim::Random;
use nowait_nbd as nbd;
use nowait_nbd::client::Export;
use nowait_nbd::{ChunkPosition, ExtentList, ReplyEncoder, ReplyMode, RequestHeader};

use crate::model::Violation;
use crate::remote::remote_scenario::RemoteFault;
use crate::remote::volatile_disk::VolatileDisk;

/// A request that was not answered yet.
struct Taken {
    header: RequestHeader,
    data: Vec<u8>,
    /// When it is answered at the earliest.
    ready: Duration,
}

/// A reply that was not sent yet.
struct Unsent {
    cookie: u64,
    bytes: Vec<u8>,
}

/// Errors that the server still has to answer.
#[derive(Default)]
struct Faults {
    changes: (u32, u32),
    read: bool,
    flush: bool,
    shutdown: bool,
}

/// A server.
pub(super) struct FarServer {
    /// The export as it is told.
    pub(super) export: Export,
    disk: VolatileDisk,
    /// There is a connection.
    connected: bool,
    /// Bytes of a request that has not come whole.
    input: Vec<u8>,
    taken: Vec<Taken>,
    /// Replies to requests that are done, which go out in any order.
    unsent: Vec<Unsent>,
    /// Bytes on their way to the storage.
    output: VecDeque<u8>,
    refuses_until: Duration,
    hangs_until: Duration,
    faults: Faults,
    served: u64,
}

impl FarServer {
    /// A server of `export`, with a disk of zeros, that a storage is connected to.
    pub(super) fn new(export: Export) -> Self {
        Self {
            disk: VolatileDisk::new(export.size),
            export,
            connected: true,
            input: Vec::new(),
            taken: Vec::new(),
            unsent: Vec::new(),
            output: VecDeque::new(),
            refuses_until: Duration::ZERO,
            hangs_until: Duration::ZERO,
            faults: Faults::default(),
            served: 0,
        }
    }

    /// Whether it can do nothing at the time `now`.
    pub(super) fn is_idle(&self, now: Duration) -> bool {
        !self.connected
            || now < self.hangs_until
            || self.unsent.is_empty() && self.taken.iter().all(|taken| taken.ready > now)
    }

    /// Requests that were done.
    pub(super) fn served(&self) -> u64 {
        self.served
    }

    /// The bytes of its disk.
    pub(super) fn content(&self) -> &[u8] {
        self.disk.all()
    }

    /// Whether it has the other end of the storage's connection.
    pub(super) fn is_connected(&self) -> bool {
        self.connected
    }

    /// Takes a connection; false if it does not.
    pub(super) fn accept(&mut self, now: Duration) -> bool {
        self.connected = now >= self.refuses_until;
        self.output.clear();
        self.connected
    }

    /// Refuses connections from now on until `until`.
    pub(super) fn refuse(&mut self, until: Duration) {
        self.refuses_until = self.refuses_until.max(until);
    }

    /// Answers nothing until `until`.
    pub(super) fn hang(&mut self, until: Duration) {
        self.hangs_until = until;
    }

    /// Answers with errors.
    pub(super) fn fail(&mut self, fault: RemoteFault) {
        match fault {
            RemoteFault::Changes { error, count } => self.faults.changes = (error, count),
            RemoteFault::Read => self.faults.read = true,
            RemoteFault::Flush => self.faults.flush = true,
            RemoteFault::Shutdown => self.faults.shutdown = true,
        }
    }

    /// No fault is left, and it takes connections.
    pub(super) fn mend(&mut self) {
        self.faults = Faults::default();
        (self.refuses_until, self.hangs_until) = (Duration::ZERO, Duration::ZERO);
    }

    /// Takes bytes of the storage at the time `now`; the server answers within `latency`
    /// microseconds.
    ///
    /// # Errors
    /// They are not requests that a client may send.
    pub(super) fn take(
        &mut self,
        bytes: &[u8],
        now: Duration,
        latency: u64,
        random: &mut Random,
    ) -> Result<(), Violation> {
        if !self.connected {
            return Ok(());
        }
        self.input.extend_from_slice(bytes);
        while self.input.len() >= nbd::REQUEST_BYTES {
            let Some(header) = RequestHeader::parse(self.export.mode, &self.input) else {
                return Err(Violation::new("a request without a magic".to_owned()));
            };
            let end = nbd::REQUEST_BYTES + header.payload(self.export.mode) as usize;
            if self.input.len() < end {
                return Ok(());
            }
            self.check(&header)?;
            let data = self.input.get(nbd::REQUEST_BYTES..end).unwrap_or_default().to_vec();
            self.input.drain(..end);
            let ready = now + Duration::from_micros(random.below(latency));
            self.taken.push(Taken { header, data, ready });
        }
        Ok(())
    }

    fn check(&self, header: &RequestHeader) -> Result<(), Violation> {
        let RequestHeader { command, cookie, offset, length, .. } = *header;
        let Export { flags, size, min_block, max_bytes, .. } = self.export;
        let block = u64::from(min_block);
        let known = match command {
            nbd::CMD_READ | nbd::CMD_WRITE => length <= u64::from(max_bytes) && length > 0,
            nbd::CMD_FLUSH => flags & nbd::FLAG_SEND_FLUSH != 0,
            nbd::CMD_WRITE_ZEROES => flags & nbd::FLAG_SEND_WRITE_ZEROES != 0,
            nbd::CMD_BLOCK_STATUS => self.export.context.is_some(),
            _ => false,
        };
        let fua = header.flags & nbd::CMD_FLAG_FUA == 0 || flags & nbd::FLAG_SEND_FUA != 0;
        let placed = offset + length <= size && (offset | length) & (block - 1) == 0;
        let unique = self.taken.iter().all(|other| other.header.cookie != cookie)
            && self.unsent.iter().all(|reply| reply.cookie != cookie);
        match known && fua && placed && unique {
            true => Ok(()),
            false => Err(Violation::new(format!("no client may ask for {header:?}"))),
        }
    }

    /// Does one of the requests that are ready, and sends the reply or keeps it for later; or sends a
    /// reply. Returns the NBD error that it answers, if any.
    pub(super) fn serve(&mut self, now: Duration, random: &mut Random) -> Option<u32> {
        if !self.connected || now < self.hangs_until {
            return None;
        }
        let ready: Vec<_> = (0..self.taken.len())
            .filter(|&n| self.taken.get(n).is_some_and(|taken| taken.ready <= now))
            .collect();
        let choice = random.below((ready.len() + self.unsent.len()) as u64) as usize;
        let Some(&index) = ready.get(choice) else {
            let at = choice - ready.len();
            if at < self.unsent.len() {
                self.output.extend(self.unsent.swap_remove(at).bytes);
            }
            return None;
        };
        let taken = self.taken.swap_remove(index);
        let is_flush = taken.header.command == nbd::CMD_FLUSH;
        let (header, error) = (taken.header, self.act(taken, random));
        if error == 0 && random.below(2) == 0 {
            let before = std::mem::take(&mut self.output);
            self.reply(&header, error, random);
            let bytes = std::mem::replace(&mut self.output, before).into();
            self.unsent.push(Unsent { cookie: header.cookie, bytes });
            return None;
        }
        self.reply(&header, error, random);
        if is_flush && error != 0 {
            // Changes that it was to make durable are lost to the other flushes, too.
            while let Some(index) =
                self.taken.iter().position(|taken| taken.header.command == nbd::CMD_FLUSH)
            {
                let header = self.taken.swap_remove(index).header;
                self.reply(&header, error, random);
            }
        }
        (error != 0).then_some(error)
    }

    /// Does what is asked. Returns an NBD error, or 0.
    fn act(&mut self, taken: Taken, random: &mut Random) -> u32 {
        let Taken { header, data, .. } = taken;
        self.served += 1;
        if std::mem::take(&mut self.faults.shutdown) {
            return nbd::ESHUTDOWN;
        }
        let through = self.export.flags & nbd::FLAG_SEND_FLUSH == 0;
        let durable = through || header.flags & nbd::CMD_FLAG_FUA != 0;
        match header.command {
            nbd::CMD_WRITE | nbd::CMD_WRITE_ZEROES => {
                let (error, left) = &mut self.faults.changes;
                if *left > 0 {
                    *left -= 1;
                    return *error;
                }
                let zeros = header.command == nbd::CMD_WRITE_ZEROES;
                let data = if zeros { vec![0; header.length as usize] } else { data };
                self.disk.change(header.offset, data, durable);
            }
            nbd::CMD_FLUSH if std::mem::take(&mut self.faults.flush) => {
                self.disk.fail_flush(random);
                return nbd::EIO;
            }
            nbd::CMD_FLUSH => self.disk.flush(),
            nbd::CMD_READ if std::mem::take(&mut self.faults.read) => return nbd::EIO,
            _ => {}
        }
        0
    }

    fn reply(&mut self, header: &RequestHeader, error: u32, random: &mut Random) {
        let mode = self.export.mode;
        let encoder = ReplyEncoder::to(mode, header);
        let range = ByteRange::new(header.offset, header.length);
        let bytes = self.disk.bytes(range);
        match (header.command, mode) {
            (nbd::CMD_BLOCK_STATUS, _) if error == 0 => {
                let Some(context) = self.export.context else { return };
                // It may answer for less than was asked for.
                let end = if random.below(2) == 0 { bytes.len() } else { bytes.len().min(512) };
                let zero = bytes.get(..end).unwrap_or_default().iter().all(|&byte| byte == 0);
                let mut extents = ExtentList::with_capacity(mode, 1);
                extents.push(end as u64, if zero { nbd::STATE_ZERO } else { 0 });
                let head = encoder.status(ChunkPosition::Last, context, &extents);
                self.output.extend(head.as_slice());
                self.output.extend(extents.into_bytes());
            }
            (nbd::CMD_READ | nbd::CMD_BLOCK_STATUS, ReplyMode::Structured) if error != 0 => {
                self.output.extend(encoder.error(error).as_slice());
            }
            (nbd::CMD_READ, ReplyMode::Structured) => {
                let cut = random.below(range.len) as usize;
                let (first, second) = bytes.split_at(cut);
                if !first.is_empty() {
                    let head = encoder.data(ChunkPosition::NotLast, range.pos, cut as u32);
                    self.output.extend(head.as_slice());
                    self.output.extend(first);
                }
                let (pos, len) = (range.pos + cut as u64, second.len() as u32);
                if second.iter().all(|&byte| byte == 0) {
                    let head = encoder.hole(ChunkPosition::Last, pos, len);
                    self.output.extend(head.as_slice());
                } else {
                    let head = encoder.data(ChunkPosition::Last, pos, len);
                    self.output.extend(head.as_slice());
                    self.output.extend(second);
                }
            }
            (command, _) => {
                self.output.extend(encoder.simple(error).as_slice());
                if command == nbd::CMD_READ && error == 0 {
                    self.output.extend(bytes);
                }
            }
        }
    }

    /// At most `most` bytes that the network brings to the storage.
    pub(super) fn deliver(&mut self, most: usize) -> Vec<u8> {
        let count = self.output.len().min(most);
        self.output.drain(..count).collect()
    }

    /// The connection closes: some requests are done, and no reply to them is sent. The network brings
    /// some of the bytes that were sent. Returns whether a flush has failed, of which the storage does
    /// not learn.
    pub(super) fn disconnect(&mut self, random: &mut Random) -> bool {
        self.connected = false;
        self.input.clear();
        self.unsent.clear();
        let brought = random.below(1 + self.output.len() as u64) as usize;
        let mut failed = false;
        while !self.taken.is_empty() {
            let choice = random.below(self.taken.len() as u64) as usize;
            let taken = self.taken.swap_remove(choice);
            if random.below(2) == 0 {
                let is_flush = taken.header.command == nbd::CMD_FLUSH;
                failed |= self.act(taken, random) != 0 && is_flush;
            }
        }
        self.output.truncate(brought);
        failed
    }

    /// The server dies, and with it its connection and what was not flushed. As
    /// [`FarServer::disconnect`].
    pub(super) fn die(&mut self, random: &mut Random) -> bool {
        let failed = self.disconnect(random);
        self.disk.die(random);
        self.faults.shutdown = false;
        failed
    }
}
