//! The bytes of a log: headers of segments, groups and records.
//!
//! A segment begins with a block that has its header. Groups follow, each from the start of a block on:
//! a header, and records one after the other. A record is a header, its data, and zeros up to a multiple
//! of 16 bytes. All numbers are little-endian.
//!
//! Invariant: each check includes the number of the log and a position in it, and a position contains the
//! number of its segment, which is never used again: no bytes of an earlier use of a file pass for later ones.

use crc_fast::{CrcAlgorithm, checksum};

use crate::log::log_options::is_segment_size;
use crate::sim_hooks::injected_bug;
use crate::sim_hooks::injected_bug::EngineBug;
use crate::types::alignment::round_up;

/// Bytes of a block: a group begins at a multiple of it, and all transfers are whole blocks.
pub(crate) const BLOCK: u32 = 4096;
pub(crate) const BLOCK_BYTES: u64 = BLOCK as u64;
pub(crate) const GROUP_HEADER: usize = 40;
pub(crate) const RECORD_HEADER: usize = 24;
const SEGMENT_HEADER: usize = 56;
/// Records begin at this distance from a multiple of [`RECORD_UNIT`], so never where a group does.
const RECORD_PHASE: u64 = 8;
const RECORD_UNIT: u64 = 16;
/// The most data of a record of a log in bytes, whatever the size of a segment.
/// Beyond it: `EMSGSIZE`.
const MOST_DATA: u64 = 16 << 20;

const SEGMENT_MAGIC: u64 = u64::from_le_bytes(*b"nowaitLG");
const GROUP_MAGIC: u32 = u32::from_le_bytes(*b"NWGR");
const VERSION: u32 = 1;
/// The flag of the last record of a group.
const LAST: u32 = 1;

/// The check of bytes.
pub(crate) fn check_of(bytes: &[u8]) -> u64 {
    checksum(CrcAlgorithm::Crc64Nvme, bytes)
}

/// The numbers that all segments of a log share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// A random number that tells the log from others.
    pub(crate) id: u64,
    pub(crate) segment_bytes: u64,
}

/// The header of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentHeader {
    pub(crate) layout: Layout,
    pub(crate) number: u64,
    /// The position in the segment before where its last group ends, in whole blocks.
    pub(crate) previous_end: u64,
}

/// The header of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupHeader {
    /// Bytes with this header, without the padding of the last block.
    pub(crate) bytes: u32,
    pub(crate) records: u32,
    /// The check over the checks of all records.
    pub(crate) check: u64,
}

/// The header of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordHeader {
    /// Bytes of its data.
    pub(crate) len: u32,
    pub(crate) is_last: bool,
    /// The check of its data.
    pub(crate) data: u64,
}

/// Bytes of a record with its header and the padding.
pub(crate) fn record_bytes(len: u64) -> u64 {
    round_up(RECORD_HEADER as u64 + len, RECORD_UNIT as u32)
}

/// Whether records can begin at this position.
pub(crate) fn is_record_position(position: u64) -> bool {
    position % RECORD_UNIT == RECORD_PHASE
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let field = bytes.get(at..at + 4).and_then(|field| field.try_into().ok());
    u32::from_le_bytes(field.unwrap_or_default())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let field = bytes.get(at..at + 8).and_then(|field| field.try_into().ok());
    u64::from_le_bytes(field.unwrap_or_default())
}

fn put(bytes: &mut [u8], at: usize, field: &[u8]) {
    if let Some(place) = bytes.get_mut(at..at + field.len()) {
        place.copy_from_slice(field);
    }
}

impl SegmentHeader {
    /// Writes the header at the start of `block`.
    pub(crate) fn write(&self, block: &mut [u8]) {
        let mut header = [0; SEGMENT_HEADER];
        put(&mut header, 0, &SEGMENT_MAGIC.to_le_bytes());
        put(&mut header, 8, &VERSION.to_le_bytes());
        put(&mut header, 16, &self.layout.id.to_le_bytes());
        put(&mut header, 24, &self.number.to_le_bytes());
        put(&mut header, 32, &self.layout.segment_bytes.to_le_bytes());
        put(&mut header, 40, &self.previous_end.to_le_bytes());
        let check = check_of(header.get(..48).unwrap_or_default());
        put(&mut header, 48, &check.to_le_bytes());
        put(block, 0, &header);
    }

    /// The header at the start of `block`; `None` if there is none, or one of another version.
    pub(crate) fn read(block: &[u8]) -> Option<Self> {
        let segment_bytes = u64_at(block, 32);
        let is_good = u64_at(block, 0) == SEGMENT_MAGIC
            && u32_at(block, 8) == VERSION
            && check_of(block.get(..48)?) == u64_at(block, 48)
            && is_segment_size(segment_bytes);
        if !is_good {
            return None;
        }
        let (number, previous_end) = (u64_at(block, 24), u64_at(block, 40));
        let layout = Layout { id: u64_at(block, 16), segment_bytes };
        let is_in_range = number > 0 && number < layout.most_segments();
        is_in_range.then_some(Self { layout, number, previous_end })
    }
}

impl Layout {
    /// All segments have numbers below this.
    pub(crate) const fn most_segments(self) -> u64 {
        i64::MAX as u64 / self.segment_bytes
    }

    /// The position of the first group of a segment.
    pub(crate) const fn first_group(self, segment: u64) -> u64 {
        segment * self.segment_bytes + BLOCK_BYTES
    }

    /// The number of the segment that `position` is in, and the bytes from its start on. The end of a segment
    /// is in it.
    pub(crate) const fn place_of(self, position: u64) -> (u64, u64) {
        let number = position.saturating_sub(1) / self.segment_bytes;
        (number, position - number * self.segment_bytes)
    }

    /// The most bytes of a group, without padding.
    pub(crate) const fn most_group_bytes(self) -> u64 {
        self.segment_bytes - BLOCK_BYTES
    }

    /// The most data of a record in bytes.
    pub(crate) fn most_data(self) -> u64 {
        // The padding of a record takes less than a unit.
        let room = self.most_group_bytes() - (GROUP_HEADER + RECORD_HEADER) as u64 - RECORD_UNIT;
        MOST_DATA.min(room)
    }

    /// The check of `header`, which is at `position`.
    fn check(self, header: &[u8], position: u64) -> u64 {
        let position = match injected_bug::injected(EngineBug::ForgetGeneration) {
            true => position % self.segment_bytes,
            false => position,
        };
        let mut bytes = [0; 48];
        put(&mut bytes, 0, &self.id.to_le_bytes());
        put(&mut bytes, 8, &position.to_le_bytes());
        put(&mut bytes, 16, header);
        check_of(bytes.get(..16 + header.len()).unwrap_or_default())
    }

    pub(crate) fn write_group(self, header: GroupHeader, position: u64, to: &mut [u8]) {
        put(to, 0, &GROUP_MAGIC.to_le_bytes());
        put(to, 4, &header.bytes.to_le_bytes());
        put(to, 8, &header.records.to_le_bytes());
        put(to, 12, &[0; 12]);
        put(to, 24, &header.check.to_le_bytes());
        let check = self.check(to.get(..32).unwrap_or_default(), position);
        put(to, 32, &check.to_le_bytes());
    }

    /// The header of a group that is at `position`; `None` if there is none.
    pub(crate) fn read_group(self, bytes: &[u8], position: u64) -> Option<GroupHeader> {
        let (len, records) = (u32_at(bytes, 4), u32_at(bytes, 8));
        let room = self.segment_bytes - position % self.segment_bytes;
        let is_good = u32_at(bytes, 0) == GROUP_MAGIC
            && self.check(bytes.get(..32)?, position) == u64_at(bytes, 32)
            && u64::from(len) <= room;
        is_good.then_some(GroupHeader { bytes: len, records, check: u64_at(bytes, 24) })
    }

    /// Writes the header of a record at `position`, and returns its check.
    pub(crate) fn write_record(self, header: RecordHeader, position: u64, to: &mut [u8]) -> u64 {
        put(to, 0, &header.len.to_le_bytes());
        put(to, 4, &(if header.is_last { LAST } else { 0 }).to_le_bytes());
        put(to, 8, &header.data.to_le_bytes());
        let check = self.check(to.get(..16).unwrap_or_default(), position);
        put(to, 16, &check.to_le_bytes());
        check
    }

    /// The header of a record that is at `position`, and its check; `None` if there is none.
    pub(crate) fn read_record(self, bytes: &[u8], position: u64) -> Option<(RecordHeader, u64)> {
        let (len, flags, check) = (u32_at(bytes, 0), u32_at(bytes, 4), u64_at(bytes, 16));
        let end = position % self.segment_bytes + record_bytes(len.into());
        let is_good = self.check(bytes.get(..16)?, position) == check
            && end <= self.segment_bytes
            && u64::from(len) <= self.most_data();
        let header = RecordHeader { len, is_last: flags & LAST != 0, data: u64_at(bytes, 8) };
        is_good.then_some((header, check))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout { id: 7, segment_bytes: 64 << 10 };

    #[test]
    fn headers_are_read_back_only_where_they_were_written() {
        let mut bytes = [0; 64];
        let header = SegmentHeader { layout: LAYOUT, number: 3, previous_end: 9 };
        header.write(&mut bytes);
        assert_eq!(SegmentHeader::read(&bytes), Some(header));
        for at in 0..SEGMENT_HEADER {
            let mut wrong = bytes;
            wrong[at] ^= 1;
            assert_eq!(SegmentHeader::read(&wrong), None, "{at}");
        }
        let position = LAYOUT.first_group(3);
        let group = GroupHeader { bytes: 100, records: 2, check: 5 };
        LAYOUT.write_group(group, position, &mut bytes);
        assert_eq!(LAYOUT.read_group(&bytes, position), Some(group));
        let record = RecordHeader { len: 10, is_last: true, data: 5 };
        let mut other = [0; 64];
        let check = LAYOUT.write_record(record, position, &mut other);
        assert_eq!(LAYOUT.read_record(&other, position), Some((record, check)));
        // Another use of the file, and another log.
        for (layout, position) in
            [(LAYOUT, LAYOUT.first_group(4)), (Layout { id: 8, ..LAYOUT }, position)]
        {
            assert_eq!(layout.read_group(&bytes, position), None);
            assert_eq!(layout.read_record(&other, position), None);
        }
    }

    #[test]
    fn a_record_never_begins_where_a_group_does() {
        let first = LAYOUT.first_group(1) + GROUP_HEADER as u64;
        for len in 1..100 {
            let next = first + record_bytes(len);
            assert!(is_record_position(first) && is_record_position(next), "{len}");
        }
        assert!(!is_record_position(LAYOUT.first_group(1)));
    }

    #[test]
    fn the_greatest_record_fits_into_a_segment() {
        for segment_bytes in [64 << 10, 1 << 20, 16 << 20, 64 << 20, 1 << 30] {
            let layout = Layout { id: 0, segment_bytes };
            let group = GROUP_HEADER as u64 + record_bytes(layout.most_data());
            assert!(group <= layout.most_group_bytes(), "{segment_bytes}");
        }
        assert_eq!(Layout { id: 0, segment_bytes: 64 << 20 }.most_data(), 16 << 20);
    }
}
