//! The records of a group in the memory from which they are written.
//!
//! Invariant: the bytes behind the last record are zeros, up to the end of its block.

use crate::log::log_format::{
    BLOCK, GROUP_HEADER, GroupHeader, Layout, RECORD_HEADER, RecordHeader, check_of, record_bytes,
};
use crate::memory::io_buffer::IoBuffer;
use crate::types::alignment::round_up;
use crate::types::error::Error;

/// The most bytes of a group of several records.
const GROUP_BYTES: u64 = 1 << 20;

/// A record of a group.
struct Placed {
    /// The place of its header, in bytes from the start of the group.
    at: u32,
    len: u32,
    data: u64,
}

/// A group that is not written yet.
#[derive(Default)]
pub(crate) struct GroupBuffer {
    memory: IoBuffer,
    used: usize,
    /// From here on the memory is zeros.
    written: usize,
    records: Vec<Placed>,
    /// The checks of the records, one after the other.
    checks: Vec<u8>,
}

impl GroupBuffer {
    /// Whether a record of `len` bytes can be added.
    pub(crate) fn has_room(&self, len: usize, layout: Layout) -> bool {
        let most = GROUP_BYTES.min(layout.most_group_bytes());
        self.records.is_empty() || self.used as u64 + record_bytes(len as u64) <= most
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    pub(crate) fn records(&self) -> usize {
        self.records.len()
    }

    /// Adds a record, whose data has the check `check`. Returns where its header is, in bytes from the
    /// start of the group.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn push(&mut self, data: &[u8], check: u64) -> Result<u32, Error> {
        let at = self.used.max(GROUP_HEADER);
        let end = at + record_bytes(data.len() as u64) as usize;
        if end > self.memory.len() {
            let bytes =
                round_up(end as u64, BLOCK).max((self.memory.len() as u64 * 2).min(GROUP_BYTES));
            let mut larger = IoBuffer::zeroed(bytes as usize)?;
            let used = self.memory.get(..self.used).unwrap_or_default();
            larger.get_mut(..self.used).unwrap_or_default().copy_from_slice(used);
            (self.memory, self.written) = (larger, self.used);
        }
        let from = at + RECORD_HEADER;
        let place = self.memory.get_mut(from..from + data.len()).unwrap_or_default();
        place.copy_from_slice(data);
        // The memory is used again: what is between the data and the next record is of an earlier group.
        self.memory.get_mut(from + data.len()..end).unwrap_or_default().fill(0);
        (self.used, self.written) = (end, self.written.max(end));
        self.records.push(Placed { at: at as u32, len: data.len() as u32, data: check });
        Ok(at as u32)
    }

    /// Bytes in whole blocks.
    pub(crate) fn padded(&self) -> u64 {
        round_up(self.used as u64, BLOCK)
    }

    /// The blocks of the group, with all headers, to be written at `position`.
    pub(crate) fn blocks(&mut self, layout: Layout, position: u64) -> &[u8] {
        self.checks.clear();
        for (n, &Placed { at, len, data }) in self.records.iter().enumerate() {
            let header = RecordHeader { len, is_last: n + 1 == self.records.len(), data };
            let to = self.memory.get_mut(at as usize..).unwrap_or_default();
            let check = layout.write_record(header, position + u64::from(at), to);
            self.checks.extend(check.to_le_bytes());
        }
        let header = GroupHeader {
            bytes: self.used as u32,
            records: self.records.len() as u32,
            check: check_of(&self.checks),
        };
        layout.write_group(header, position, &mut self.memory);
        let padded = self.padded() as usize;
        // An earlier group may have been longer.
        let end = padded.min(self.written);
        self.memory.get_mut(self.used..end).unwrap_or_default().fill(0);
        if self.written <= padded {
            self.written = self.used;
        }
        self.memory.get(..padded).unwrap_or_default()
    }

    /// Forgets the records; memory of more than a usual group is given back.
    pub(crate) fn clear(&mut self) {
        self.records.clear();
        self.used = 0;
        if self.memory.len() as u64 > GROUP_BYTES {
            (self.memory, self.written) = (IoBuffer::default(), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::log_format::check_of;
    use nowait_testkit::{Random, seed};

    #[test]
    fn behind_the_last_record_are_zeros_whatever_the_groups_before_had() {
        let mut random = Random::from_seed(seed());
        let layout = Layout { id: 7, segment_bytes: 4 << 20 };
        let mut buffer = GroupBuffer::default();
        for round in 0..400 {
            for _ in 0..1 + random.below(5) {
                let data = vec![0xff; 1 + random.below(6000) as usize];
                buffer.push(&data, check_of(&data)).unwrap();
            }
            let (used, padded) = (buffer.used, buffer.padded() as usize);
            // A group that is refused was not laid out.
            if random.below(8) > 0 {
                let blocks = buffer.blocks(layout, layout.first_group(1));
                assert_eq!(blocks.len(), padded, "{round}");
                assert!(blocks[used..].iter().all(|byte| *byte == 0), "{round}: {used}");
            }
            let behind = &buffer.memory[buffer.written..];
            assert!(behind.iter().all(|byte| *byte == 0), "{round}");
            buffer.clear();
        }
    }
}
