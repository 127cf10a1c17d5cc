//! The connections to one export as an endpoint of a copy.
//!
//! Invariant: all connections of an endpoint see the same export; a request uses one of them. There
//! is more than one only where the server says that a flush covers all of them
//! (NBD_FLAG_CAN_MULTI_CONN).

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::path::Path;

use nowait_nbd as nbd;
use nowait_nbd::client::{Credentials, Export, SplitRequest};
use nowait_nbd::{NbdUri, RequestHeader};
use rustix::event::PollFlags;
use slab::Slab;

use crate::endpoint::{Capabilities, Completed, CopyOperation, CopyRequest, Endpoint};
use crate::error::{Error, without_number};
use crate::nbd::connection::{Connection, Outgoing};
use crate::nbd::pending_requests::Pending;
use crate::zero_detection::DataRun;
use nowait_remote::Location;

/// The longest read or write on the wire in bytes, where the server allows it; longer requests are
/// sent in parts. A server can process one part while the next is in transit, and needs little
/// memory for it.
const PART_BYTES: u32 = 256 << 10;
/// Parts of a read at most.
const MAX_PARTS: u64 = 64;
/// The longest read or write in bytes.
const MAX_BYTES: u64 = 4 << 20;
/// The longest range that one request zeroes, in bytes: a server that has to write the zeros still
/// answers soon.
const MAX_ZERO_BYTES: u32 = 128 << 20;
/// The longest range of a block-status request in bytes, a multiple of every block size.
const MAX_STATUS_BYTES: u64 = 1 << 31;

/// How to connect to the servers of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Connecting<'a> {
    /// Connections at most, at least 1.
    pub(crate) connections: usize,
    /// The directory with certificates, where the URI names none.
    pub(crate) certificates: Option<&'a Path>,
    /// The dirty bitmap of the export of which block status tells what is clean; `None`: it tells what is zero.
    pub(crate) bitmap: Option<&'a str>,
}

/// Connects to an export as an endpoint.
///
/// # Errors
/// The server cannot be reached, its certificate is not accepted, it refused the export, or has no such bitmap, or
/// `writes` is true and the export is read-only.
pub(crate) fn connect(
    uri: &NbdUri,
    connecting: Connecting<'_>,
    writes: bool,
) -> Result<Box<dyn Endpoint>, Error> {
    let location = Location::Nbd(uri.clone());
    let failed = |what: String| Error::at(&location, what);
    let credentials = Credentials::for_uri(uri, connecting.certificates);
    let credentials = credentials.map_err(|error| failed(without_number(&error)))?;
    let connections = connecting.connections;
    let open = |number| {
        let (address, bitmap) = (&uri.address, connecting.bitmap);
        Connection::open(address, credentials.as_ref(), &uri.export, bitmap, number).map_err(failed)
    };
    let (first, export) = open(0)?;
    if let (Some(bitmap), None) = (connecting.bitmap, export.context) {
        return Err(Error::at(&location, format!("it has no dirty bitmap {bitmap}")));
    }
    if writes && export.flags & nbd::FLAG_READ_ONLY != 0 {
        return Err(Error::at(&location, "the export is read-only"));
    }
    let mut all = vec![first];
    let count = if export.flags & nbd::FLAG_CAN_MULTI_CONN == 0 { 1 } else { connections };
    while all.len() < count {
        let (next, other) = open(all.len())?;
        // The context's id may differ between connections.
        let same = Export { context: other.context, ..export };
        if same != other || other.context.is_some() != export.context.is_some() {
            return Err(Error::at(&location, "the export is not the same on each connection"));
        }
        all.push(next);
    }
    let (pending, done) = (Slab::new(), VecDeque::new());
    let name = location.to_string();
    let reports_unreadable = false;
    Ok(Box::new(NbdEndpoint { name, export, connections: all, pending, done, reports_unreadable }))
}

struct NbdEndpoint {
    name: String,
    export: Export,
    connections: Vec<Connection>,
    pending: Slab<Pending>,
    done: VecDeque<Completed>,
    /// Unreadable ranges are reported instead of failing the copy.
    reports_unreadable: bool,
}

impl NbdEndpoint {
    /// The index of the connection with the fewest bytes in flight.
    fn least_loaded(&self) -> usize {
        let all = self.connections.iter().enumerate();
        all.min_by_key(|(_, connection)| connection.in_flight).map_or(0, |(index, _)| index)
    }

    fn part_bytes(&self) -> u64 {
        u64::from(self.export.max_bytes.min(PART_BYTES))
    }

    fn has_write_zeroes(&self) -> bool {
        self.export.flags & nbd::FLAG_SEND_WRITE_ZEROES != 0
    }
}

/// Splits `run` into parts of at most `bytes`, which is not 0.
fn parts(run: DataRun, bytes: u64) -> impl Iterator<Item = DataRun> {
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX).max(1);
    let starts = (0..run.len).step_by(bytes);
    starts.map(move |at| DataRun { start: run.start + at, len: bytes.min(run.len - at), ..run })
}

/// Moves the requests that have just completed from `pending` to `done`.
fn collect(
    completed: &[usize],
    pending: &mut Slab<Pending>,
    connection: &mut Connection,
    done: &mut VecDeque<Completed>,
) {
    for &index in completed {
        let Pending { tag, range, memory, extents, unreadable, .. } = pending.remove(index);
        connection.in_flight = connection.in_flight.saturating_sub(range.len);
        done.push_back(Completed { tag, range, memory, extents, unreadable });
    }
}

impl Endpoint for NbdEndpoint {
    fn capabilities(&self) -> Capabilities {
        let block = self.export.min_block;
        Capabilities {
            size: self.export.size,
            block: u64::from(block),
            alignment: u64::from(block),
            max_bytes: (self.part_bytes() * MAX_PARTS).min(MAX_BYTES),
            max_zero_bytes: if self.has_write_zeroes() { u64::from(MAX_ZERO_BYTES) } else { 0 },
            has_status: self.export.context.is_some(),
            has_flush: self.export.flags & nbd::FLAG_SEND_FLUSH != 0,
        }
    }

    fn submit(&mut self, request: CopyRequest) {
        let CopyRequest { operation, mut range, tag, memory } = request;
        let whole = DataRun { start: 0, len: range.len as usize, zero: false };
        let has_write_zeroes = self.has_write_zeroes();
        let part_bytes = self.part_bytes();
        let (command, runs) = match operation {
            CopyOperation::Read => (nbd::CMD_READ, parts(whole, part_bytes).collect()),
            CopyOperation::Write(runs) => {
                let cut =
                    |run: DataRun| if run.zero && has_write_zeroes { u64::MAX } else { part_bytes };
                let runs = runs.into_iter().flat_map(|run| parts(run, cut(run)));
                (nbd::CMD_WRITE, runs.collect())
            }
            CopyOperation::Zero => (nbd::CMD_WRITE_ZEROES, vec![whole]),
            CopyOperation::Flush => (nbd::CMD_FLUSH, vec![whole]),
            CopyOperation::Status => {
                range.len = range.len.min(MAX_STATUS_BYTES);
                let whole = DataRun { len: range.len as usize, ..whole };
                (nbd::CMD_BLOCK_STATUS, vec![whole])
            }
        };
        if runs.is_empty() {
            let (extents, unreadable) = (Vec::new(), false);
            self.done.push_back(Completed { tag, range, memory, extents, unreadable });
            return;
        }
        let index = self.least_loaded();
        let Some(connection) = self.connections.get_mut(index) else { return };
        connection.in_flight += range.len;
        let pending = self.pending.insert(Pending {
            tag,
            range,
            memory,
            extents: Vec::new(),
            request: SplitRequest::new(command, range.pos, range.len, (runs.len(), part_bytes)),
            connection: index,
            may_be_unreadable: self.reports_unreadable
                && matches!(command, nbd::CMD_READ | nbd::CMD_BLOCK_STATUS),
            unreadable: false,
        });
        for (number, run) in runs.into_iter().enumerate() {
            let zero = run.zero && has_write_zeroes;
            let data =
                (command == nbd::CMD_WRITE && !zero).then_some((pending, run.start, run.len));
            let command = if zero { nbd::CMD_WRITE_ZEROES } else { command };
            let offset = range.pos + run.start as u64;
            let cookie = SplitRequest::cookie(pending, number);
            let length = run.len as u64;
            let header = RequestHeader { flags: 0, command, cookie, offset, length }.compact();
            connection.push(Outgoing { header, data });
        }
    }

    fn advance(&mut self) -> Result<(), Error> {
        let Self { name, connections, pending, done, .. } = self;
        let mut completed = Vec::new();
        for connection in connections {
            let result =
                connection.send(pending).and_then(|()| connection.receive(pending, &mut completed));
            result.map_err(|what| Error::at(name, what))?;
            collect(&completed, pending, connection, done);
            completed.clear();
        }
        Ok(())
    }

    fn next(&mut self) -> Option<Completed> {
        self.done.pop_front()
    }

    fn report_unreadable(&mut self) {
        self.reports_unreadable = true;
    }

    fn poll_fds<'a>(&'a self, poll_fds: &mut Vec<(BorrowedFd<'a>, PollFlags)>) {
        poll_fds.extend(self.connections.iter().map(Connection::poll_fd));
    }
}
