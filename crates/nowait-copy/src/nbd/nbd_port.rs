//! The connections to one export as one side of a copy.
//!
//! Invariant: all connections of a port see the same export; a request goes over one of them. There
//! is more than one only where the server says that a flush covers all of them.
//! Knows: wire, receiver, credentials, connection. Known by: nbd.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::path::Path;

use rustix::event::PollFlags;
use slab::Slab;

use super::connection::{Connection, Outgoing};
use super::credentials::Credentials;
use super::handshake::Export;
use super::receiver::{Pending, cookie};
use super::wire;
use crate::error::Error;
use crate::place::{Address, Security, Uri};
use crate::port::{Done, Facts, Port, Request, What};
use crate::zeros::Run;

/// The longest read or write on the wire in bytes, where the server allows it; what is longer is sent
/// in parts. A server can work on one while the next is on its way, and has memory for it at hand.
const PART_BYTES: u32 = 256 << 10;
/// Parts of a read at most.
const MAX_PARTS: u64 = 64;
/// The longest read or write in bytes.
const MAX_BYTES: u64 = 4 << 20;
/// The longest range that is made zero at once, in bytes: a server that can only do it by writing
/// is not silent for long.
const MAX_ZERO_BYTES: u32 = 128 << 20;
/// The longest range that a server is asked about at once, in bytes, a multiple of every block.
const MAX_STATUS_BYTES: u64 = 1 << 31;

/// How the servers of a copy are connected to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Connecting<'a> {
    /// Connections at most, at least 1.
    pub(crate) connections: usize,
    /// The directory with certificates, where the URI names none.
    pub(crate) certificates: Option<&'a Path>,
}

/// An export as a side.
///
/// # Errors
/// There is no such server, it is not believed, it refused the export, or `writes` and the export is
/// read-only.
pub(crate) fn connect(
    uri: &Uri,
    connecting: Connecting<'_>,
    writes: bool,
) -> Result<Box<dyn Port>, Error> {
    let place = crate::place::Place::Nbd(uri.clone());
    let failed = |what: String| Error::at(&place, what);
    let credentials = credentials(uri, connecting.certificates).map_err(failed)?;
    let connections = connecting.connections;
    let open = |number| {
        Connection::open(&uri.address, credentials.as_ref(), &uri.export, number).map_err(failed)
    };
    let (first, export) = open(0)?;
    if writes && export.flags & wire::FLAG_READ_ONLY != 0 {
        return Err(Error::at(&place, "the export is read-only"));
    }
    let mut all = vec![first];
    let count = if export.flags & wire::FLAG_CAN_MULTI_CONN == 0 { 1 } else { connections };
    while all.len() < count {
        let (next, other) = open(all.len())?;
        // What the context is called is each connection's own.
        let same = Export { context: other.context, ..export };
        if same != other || other.context.is_some() != export.context.is_some() {
            return Err(Error::at(&place, "the export is not the same on each connection"));
        }
        all.push(next);
    }
    let (pending, done) = (Slab::new(), VecDeque::new());
    Ok(Box::new(NbdPort { name: place.to_string(), export, connections: all, pending, done }))
}

/// What TLS begins with, where the URI asks for it.
fn credentials(uri: &Uri, certificates: Option<&Path>) -> Result<Option<Credentials>, String> {
    let Security::Tls { certificates: own, name } = &uri.security else { return Ok(None) };
    let directory = own.as_deref().or(certificates).ok_or(
        "TLS needs certificates (give their directory with --tls-certs, or ?tls-certificates=DIR)",
    )?;
    let host = match &uri.address {
        Address::Tcp { host, .. } => Some(host),
        Address::Unix(_) => None,
    };
    let name = name.as_ref().or(host).map(String::as_str);
    Credentials::load(directory, name).map(Some)
}

struct NbdPort {
    name: String,
    export: Export,
    connections: Vec<Connection>,
    pending: Slab<Pending>,
    done: VecDeque<Done>,
}

impl NbdPort {
    /// The connection with the least to do.
    fn idlest(&self) -> usize {
        let all = self.connections.iter().enumerate();
        all.min_by_key(|(_, connection)| connection.in_flight).map_or(0, |(index, _)| index)
    }

    fn part_bytes(&self) -> u64 {
        u64::from(self.export.max_bytes.min(PART_BYTES))
    }

    fn zeroes(&self) -> bool {
        self.export.flags & wire::FLAG_SEND_WRITE_ZEROES != 0
    }
}

/// `run` in pieces of at most `bytes`, which is not 0.
fn parts(run: Run, bytes: u64) -> impl Iterator<Item = Run> {
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX).max(1);
    let starts = (0..run.len).step_by(bytes);
    starts.map(move |at| Run { start: run.start + at, len: bytes.min(run.len - at), ..run })
}

/// The pending requests that have just ended, as answers.
fn collect(
    ended: &[usize],
    pending: &mut Slab<Pending>,
    connection: &mut Connection,
    done: &mut VecDeque<Done>,
) {
    for &index in ended {
        let Pending { tag, range, memory, spans, .. } = pending.remove(index);
        connection.in_flight = connection.in_flight.saturating_sub(range.len);
        done.push_back(Done { tag, range, memory, spans });
    }
}

impl Port for NbdPort {
    fn facts(&self) -> Facts {
        let block = self.export.min_block;
        Facts {
            size: self.export.size,
            block: u64::from(block),
            granule: u64::from(block),
            max_bytes: (self.part_bytes() * MAX_PARTS).min(MAX_BYTES),
            max_zero_bytes: if self.zeroes() { u64::from(MAX_ZERO_BYTES) } else { 0 },
            tells_status: self.export.context.is_some(),
            flushes: self.export.flags & wire::FLAG_SEND_FLUSH != 0,
        }
    }

    fn submit(&mut self, request: Request) {
        let Request { what, mut range, tag, memory } = request;
        let whole = Run { start: 0, len: range.len as usize, zero: false };
        let zeroes = self.zeroes();
        let part_bytes = self.part_bytes();
        let (command, runs) = match what {
            What::Read => (wire::CMD_READ, parts(whole, part_bytes).collect()),
            What::Write(runs) => {
                let cut = |run: Run| if run.zero && zeroes { u64::MAX } else { part_bytes };
                let runs = runs.into_iter().flat_map(|run| parts(run, cut(run)));
                (wire::CMD_WRITE, runs.collect())
            }
            What::Zero => (wire::CMD_WRITE_ZEROES, vec![whole]),
            What::Flush => (wire::CMD_FLUSH, vec![whole]),
            What::Status => {
                range.len = range.len.min(MAX_STATUS_BYTES);
                let whole = Run { len: range.len as usize, ..whole };
                (wire::CMD_BLOCK_STATUS, vec![whole])
            }
        };
        if runs.is_empty() {
            self.done.push_back(Done { tag, range, memory, spans: Vec::new() });
            return;
        }
        let index = self.idlest();
        let Some(connection) = self.connections.get_mut(index) else { return };
        connection.in_flight += range.len;
        let pending = self.pending.insert(Pending {
            tag,
            range,
            memory,
            spans: Vec::new(),
            command,
            left: runs.len() as u32,
            connection: index,
            covered: 0,
            part_bytes,
            answered: 0,
        });
        for (number, run) in runs.into_iter().enumerate() {
            let zero = run.zero && zeroes;
            let data =
                (command == wire::CMD_WRITE && !zero).then_some((pending, run.start, run.len));
            let command = if zero { wire::CMD_WRITE_ZEROES } else { command };
            let offset = range.pos + run.start as u64;
            let cookie = cookie(pending, number as u32);
            let header = wire::request(command, 0, cookie, offset, run.len as u32);
            connection.push(Outgoing { header, data });
        }
    }

    fn advance(&mut self) -> Result<(), Error> {
        let Self { name, connections, pending, done, .. } = self;
        let mut ended = Vec::new();
        for connection in connections {
            let moved = connection
                .send(pending)
                .and_then(|()| connection.receive(pending, &mut |index| ended.push(index)));
            moved.map_err(|what| Error::at(name, what))?;
            collect(&ended, pending, connection, done);
            ended.clear();
        }
        Ok(())
    }

    fn next(&mut self) -> Option<Done> {
        self.done.pop_front()
    }

    fn watched<'a>(&'a self, watched: &mut Vec<(BorrowedFd<'a>, PollFlags)>) {
        watched.extend(self.connections.iter().map(Connection::watched));
    }
}
