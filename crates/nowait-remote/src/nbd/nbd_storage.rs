//! An export of an NBD server as a storage: what an engine asks of it.
//!
//! Invariant: a call waits for its own request only; the properties are those of the first connection,
//! and the thread uses no connection to an export that lacks them.

use std::io::{IoSlice, IoSliceMut, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nowait::{
    Alignment, AsyncTransfers, ByteRange, Error, ExtentStatus, Flags, Operation, Storage,
    StorageProperties,
};
use nowait_nbd as nbd;
use nowait_nbd::NbdUri;
use nowait_nbd::client::Export;

use crate::nbd::connector::{Connector, NbdOptions};
use crate::nbd::inbox::Inbox;
use crate::nbd::job::{Answer, Command, Job};
use crate::nbd::link::{Link, OPEN_TIMEOUT};

/// The longest read or write of one call in bytes, a multiple of every block.
const CALL_BYTES: u64 = 4 << 20;
/// The longest range that one request zeroes in bytes: a server that has to write the zeros still
/// answers soon.
const ZERO_BYTES: u64 = 128 << 20;
/// The longest range of a block-status request in bytes.
const STATUS_BYTES: u64 = 1 << 31;
/// Block-status requests for one range at most.
const STATUS_CALLS: usize = 4096;
/// The smallest longest request in bytes that a server may ask for: no request has too many parts.
const MIN_MAX_BYTES: u32 = 4096;

/// An export of an NBD server.
pub struct NbdStorage {
    inbox: Arc<Inbox>,
    export: Export,
    read_only: bool,
    /// A write that had completed was lost, or a flush refused.
    lost: Arc<AtomicBool>,
}

impl NbdStorage {
    /// Connects to the export at `uri`, and starts the thread that has the connection.
    ///
    /// # Errors
    /// A message of one line: the server cannot be reached, one side rejects the other, the server
    /// refuses the export, or it says of the export what cannot be used.
    pub fn open(uri: &NbdUri, options: &NbdOptions) -> Result<Self, String> {
        let connector = Connector::new(uri, options)?;
        let (connection, export) = connector.connect(OPEN_TIMEOUT)?;
        let read_only = export.flags & nbd::FLAG_READ_ONLY != 0;
        if read_only && !options.read_only {
            return Err("the export is read-only (try --read-only)".into());
        }
        if export.size % u64::from(export.min_block) != 0 {
            let (size, block) = (export.size, export.min_block);
            return Err(format!("the server says that {size} bytes are blocks of {block}"));
        }
        if export.max_bytes < MIN_MAX_BYTES.max(export.min_block) {
            let most = export.max_bytes;
            return Err(format!("the server takes no request of more than {most} bytes"));
        }
        let inbox = Inbox::new().map_err(|error| error.to_string())?;
        let (inbox, place) = (Arc::new(inbox), uri.to_string());
        let link = Link::new(inbox.clone(), connector, (connection, export), place, options);
        let lost = link.lost();
        let thread = std::thread::Builder::new().name("nowait-remote".into());
        thread
            .spawn(move || link.run())
            .map_err(|error| format!("cannot start a thread: {error}"))?;
        Ok(Self { inbox, export, read_only: read_only || options.read_only, lost })
    }

    /// Whether the server refuses writes.
    #[must_use]
    pub fn is_export_read_only(&self) -> bool {
        self.has(nbd::FLAG_READ_ONLY)
    }

    /// Whether the server says which ranges read as zeros.
    #[must_use]
    pub fn tells_extents(&self) -> bool {
        self.export.context.is_some()
    }

    /// Abilities of the server, reads and writes aside, in the protocol's words.
    #[must_use]
    pub fn abilities(&self) -> Vec<&'static str> {
        let flags = [
            (nbd::FLAG_SEND_FLUSH, "flush"),
            (nbd::FLAG_SEND_FUA, "FUA"),
            (nbd::FLAG_SEND_WRITE_ZEROES, "write zeroes"),
            (nbd::FLAG_SEND_TRIM, "trim"),
            (nbd::FLAG_CAN_MULTI_CONN, "multi-conn"),
        ];
        let known = flags.into_iter().filter(|(flag, _)| self.has(*flag)).map(|(_, words)| words);
        known.chain(self.tells_extents().then_some("block status")).collect()
    }

    fn has(&self, flag: u16) -> bool {
        self.export.flags & flag != 0
    }

    /// Asks for `command` and waits for the answer.
    fn call(
        &self,
        command: Command,
        range: ByteRange,
        durable: bool,
        data: Vec<u8>,
        operation: Operation,
    ) -> Result<Answer, Error> {
        let (job, call) = Job::of_call(command, range, durable, data);
        self.inbox.push(std::iter::once(job));
        let answer = call.wait();
        match answer.result {
            Ok(()) => Ok(answer),
            Err(errno) => Err(Error::new(errno, operation).at(range)),
        }
    }

    /// Zeroes `range` in steps.
    fn zero_in_steps(
        &self,
        range: ByteRange,
        keep: bool,
        operation: Operation,
    ) -> Result<(), Error> {
        if !self.has(nbd::FLAG_SEND_WRITE_ZEROES) {
            return Err(Error::new(libc::EOPNOTSUPP, operation).at(range));
        }
        let mut pos = range.pos;
        while pos < range.end() {
            let step = ByteRange::new(pos, (range.end() - pos).min(ZERO_BYTES));
            self.call(Command::Zero { keep }, step, false, Vec::new(), operation)?;
            pos = step.end();
        }
        Ok(())
    }
}

impl Storage for NbdStorage {
    fn properties(&self) -> StorageProperties {
        let block = self.export.min_block;
        let align = Alignment { memory: 1, offset: block, read_offset: block };
        StorageProperties {
            read_only: self.read_only,
            punch_hole: !self.read_only && self.has(nbd::FLAG_SEND_WRITE_ZEROES),
            // Its bytes may be a guest's, and its size is not ours to change.
            device: true,
            zeroing_block: block,
            shares_syncs: self.has(nbd::FLAG_SEND_FUA),
            ..StorageProperties::new(align)
        }
    }

    fn size(&self) -> Result<u64, Error> {
        Ok(self.export.size)
    }

    fn read(&self, bufs: &mut [IoSliceMut<'_>], pos: u64) -> Result<usize, Error> {
        let len: u64 = bufs.iter().map(|buf| buf.len() as u64).sum();
        let len = len.min(CALL_BYTES).min(self.export.size.saturating_sub(pos));
        if len == 0 {
            return Ok(0);
        }
        let range = ByteRange::new(pos, len);
        let answer = self.call(Command::Read, range, false, Vec::new(), Operation::Read)?;
        let copied = answer.data.as_slice().read_vectored(bufs);
        copied.map_err(|error| Error::from_io(&error, Operation::Read))
    }

    fn write(&self, bufs: &[IoSlice<'_>], pos: u64, flags: Flags) -> Result<usize, Error> {
        let room = self.export.size.saturating_sub(pos).min(CALL_BYTES) as usize;
        let mut data = Vec::new();
        for buf in bufs {
            let len = buf.len().min(room - data.len());
            data.extend_from_slice(buf.get(..len).unwrap_or_default());
        }
        let range = ByteRange::new(pos, data.len() as u64);
        if range.len == 0 {
            return match bufs.iter().all(|buf| buf.is_empty()) {
                true => Ok(0),
                false => Err(Error::new(libc::ENOSPC, Operation::Write).at(range)),
            };
        }
        let durable = flags.contains(Flags::DSYNC);
        self.call(Command::Write, range, durable, data, Operation::Write)?;
        Ok(range.len as usize)
    }

    fn sync(&self) -> Result<(), Error> {
        let range = ByteRange::new(0, 0);
        self.call(Command::Flush, range, false, Vec::new(), Operation::Flush).map(drop)
    }

    /// They are in the replay log, and made again before a later flush.
    fn keeps_unsynced(&self) -> bool {
        !self.lost.load(Ordering::Relaxed)
    }

    /// By NBD_CMD_WRITE_ZEROES, which lets the server deallocate, and after which the range reads as
    /// zeros; NBD_CMD_TRIM does not promise that.
    fn punch(&self, range: ByteRange) -> Result<(), Error> {
        self.zero_in_steps(range, false, Operation::Discard)
    }

    fn zero(&self, range: ByteRange) -> Result<(), Error> {
        self.zero_in_steps(range, true, Operation::Zero)
    }

    fn set_len(&self, bytes: u64) -> Result<(), Error> {
        match bytes == self.export.size {
            true => Ok(()),
            false => Err(Error::new(libc::EINVAL, Operation::Write)),
        }
    }

    fn extents(
        &self,
        range: ByteRange,
        limit: usize,
        extents: &mut Vec<ExtentStatus>,
    ) -> Result<(), Error> {
        if self.export.context.is_none() {
            extents.push(ExtentStatus::top(range.len, false));
            return Ok(());
        }
        let mut pos = range.pos;
        for _ in 0..STATUS_CALLS {
            if pos == range.end() || extents.len() >= limit {
                return Ok(());
            }
            let step = ByteRange::new(pos, (range.end() - pos).min(STATUS_BYTES));
            let answer = self.call(Command::Status, step, false, Vec::new(), Operation::Status)?;
            for extent in answer.extents {
                pos += extent.len;
                let has_room = extents.len() < limit;
                match extents.last_mut().filter(|last| last.hole == extent.hole) {
                    Some(last) => last.len += extent.len,
                    None if has_room => extents.push(extent),
                    None => break,
                }
            }
        }
        // The server answers for few bytes at a time: the rest counts as data.
        extents.push(ExtentStatus::top(range.end() - pos, false));
        Ok(())
    }

    fn transfers(&self) -> Option<Arc<dyn AsyncTransfers>> {
        Some(self.inbox.clone())
    }
}

impl Drop for NbdStorage {
    /// The thread disconnects when the last request has completed.
    fn drop(&mut self) {
        self.inbox.close();
    }
}
