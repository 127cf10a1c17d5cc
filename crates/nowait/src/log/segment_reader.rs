//! Reads the groups and records of one segment.
//!
//! Invariant: what is returned has the check of its place; memory is bounded by the window and the
//! record.

use std::sync::Arc;

use crc_fast::{CrcAlgorithm, Digest};

use crate::log::log_format::{
    BLOCK, BLOCK_BYTES, GROUP_HEADER, GroupHeader, Layout, RECORD_HEADER, RecordHeader,
    SegmentHeader, record_bytes,
};
use crate::log::whole_blocks;
use crate::memory::io_buffer::IoBuffer;
use crate::storage::Storage;
use crate::types::alignment::{round_down, round_up};
use crate::types::byte_range::ByteRange;
use crate::types::error::{Error, Operation};

/// Bytes that are read at a time when one record is read, and when one after the other is.
pub(crate) const ONE_RECORD: u64 = BLOCK_BYTES;
pub(crate) const MANY_RECORDS: u64 = 256 << 10;

/// A segment, and the blocks of it that were read last. Positions are those of the log.
pub(crate) struct SegmentReader {
    storage: Arc<dyn Storage>,
    layout: Layout,
    number: u64,
    window: IoBuffer,
    /// Bytes from the start of the segment to the window, and bytes in it.
    start: u64,
    filled: u64,
}

/// The reason why something could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadFailure {
    /// The check of its place is missing.
    Mismatch,
    /// The storage failed.
    Storage(Error),
}

impl From<Error> for ReadFailure {
    fn from(error: Error) -> Self {
        Self::Storage(error)
    }
}

/// The error for what does not have the check of its place, at `position` in the log.
pub(crate) const fn damaged(position: u64) -> Error {
    Error::new(libc::EBADMSG, Operation::Read).at(ByteRange::new(position, RECORD_HEADER as u64))
}

/// The header in the first block of a segment.
///
/// # Errors
/// The errno of a read; `EBADMSG` if there is none.
pub(crate) fn read_header(storage: &dyn Storage) -> Result<SegmentHeader, Error> {
    let mut block = IoBuffer::zeroed(BLOCK_BYTES as usize)?;
    whole_blocks::read(storage, &mut block, 0)?;
    SegmentHeader::read(&block).ok_or(Error::new(libc::EBADMSG, Operation::Read))
}

impl SegmentReader {
    /// A reader of segment `number` in `storage`, with a window of `window` bytes, whole blocks.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn new(
        storage: Arc<dyn Storage>,
        layout: Layout,
        number: u64,
        window: u64,
    ) -> Result<Self, Error> {
        let window = IoBuffer::zeroed(window as usize)?;
        Ok(Self { storage, layout, number, window, start: 0, filled: 0 })
    }

    /// The number of the segment.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// At most `most` bytes from `position` on, before `limit`, which is a position, too, at the end of a
    /// block. Empty at the limit.
    fn bytes(&mut self, position: u64, most: u64, limit: u64) -> Result<&[u8], Error> {
        let base = self.number * self.layout.segment_bytes;
        let (at, limit) = (position - base, limit.min(base + self.layout.segment_bytes) - base);
        if at >= limit {
            return Ok(&[]);
        }
        if at < self.start || at >= self.start + self.filled {
            self.start = round_down(at, BLOCK);
            let len = (limit - self.start).min(self.window.len() as u64);
            self.filled = 0;
            let window = self.window.get_mut(..len as usize).unwrap_or_default();
            let range = ByteRange::new(base + self.start, len);
            let read = whole_blocks::read(&*self.storage, window, self.start);
            self.filled = read.map_err(|error| error.at(range))? as u64;
        }
        let end = (self.start + self.filled).min(at + most);
        let range = (at - self.start) as usize..(end.max(at) - self.start) as usize;
        Ok(self.window.get(range).unwrap_or_default())
    }

    /// `N` bytes from `position` on; zeros behind the limit.
    fn array<const N: usize>(&mut self, position: u64, limit: u64) -> Result<[u8; N], Error> {
        let (mut array, mut done) = ([0; N], 0);
        while done < N {
            let bytes = self.bytes(position + done as u64, (N - done) as u64, limit)?;
            if bytes.is_empty() {
                break;
            }
            let len = bytes.len();
            array.get_mut(done..done + len).unwrap_or_default().copy_from_slice(bytes);
            done += len;
        }
        Ok(array)
    }

    /// The header of the group at `position`; `None` if there is none.
    pub(crate) fn group(
        &mut self,
        position: u64,
        limit: u64,
    ) -> Result<Option<GroupHeader>, Error> {
        let header: [u8; GROUP_HEADER] = self.array(position, limit)?;
        Ok(self
            .layout
            .read_group(&header, position)
            .filter(|header| position + u64::from(header.bytes) <= limit && header.records > 0))
    }

    fn header(&mut self, position: u64, limit: u64) -> Result<(RecordHeader, u64), ReadFailure> {
        let header: [u8; RECORD_HEADER] = self.array(position, limit)?;
        self.layout.read_record(&header, position).ok_or(ReadFailure::Mismatch)
    }

    /// Passes the data of the record at `position` to `take`, in parts, and returns its header and check.
    fn record_to(
        &mut self,
        position: u64,
        limit: u64,
        mut take: impl FnMut(&[u8]),
    ) -> Result<(RecordHeader, u64), ReadFailure> {
        let (header, check) = self.header(position, limit)?;
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        let (mut at, end) = (position + RECORD_HEADER as u64, u64::from(header.len));
        let end = at + end;
        while at < end {
            let bytes = self.bytes(at, end - at, limit)?;
            if bytes.is_empty() {
                return Err(ReadFailure::Mismatch);
            }
            digest.update(bytes);
            take(bytes);
            at += bytes.len() as u64;
        }
        match digest.finalize() == header.data {
            true => Ok((header, check)),
            false => Err(ReadFailure::Mismatch),
        }
    }

    /// The data of the record at `position`, and the position after it: that of a record, or of a group
    /// if the record is the last of its own.
    pub(crate) fn record(
        &mut self,
        position: u64,
        limit: u64,
    ) -> Result<(Vec<u8>, u64), ReadFailure> {
        let mut data = Vec::new();
        let (header, _) = self.record_to(position, limit, |part| data.extend_from_slice(part))?;
        let next = position + record_bytes(header.len.into());
        Ok((data, if header.is_last { round_up(next, BLOCK) } else { next }))
    }

    /// The position after the group at `position`, if all of it is there.
    pub(crate) fn whole_group(&mut self, position: u64, limit: u64) -> Result<Option<u64>, Error> {
        let Some(group) = self.group(position, limit)? else { return Ok(None) };
        let end = position + u64::from(group.bytes);
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        let mut at = position + GROUP_HEADER as u64;
        for n in 1..=group.records {
            let (header, check) = match self.record_to(at, limit, |_| {}) {
                Ok(found) => found,
                Err(ReadFailure::Mismatch) => return Ok(None),
                Err(ReadFailure::Storage(error)) => return Err(error),
            };
            digest.update(&check.to_le_bytes());
            at += record_bytes(header.len.into());
            if at > end || header.is_last != (n == group.records) {
                return Ok(None);
            }
        }
        let is_whole = at == end && digest.finalize() == group.check;
        Ok(is_whole.then_some(round_up(end, BLOCK)))
    }
}
