//! Entries of qcow2 tables: the eight bytes of an L1, L2 or refcount table entry.
//!
//! Invariant: a parsed position is a multiple of the cluster size and below 2^56, or the entry is
//! an error; no entry makes a caller read or allocate more than two clusters.

use crate::formats::qcow2::header::Header;

pub(crate) const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
pub(crate) const ZERO: u64 = 1;
const POSITION: u64 = 0x00ff_ffff_ffff_fe00;
const L1_RESERVED: u64 = !(COPIED | POSITION);
const L2_RESERVED: u64 = !(COPIED | COMPRESSED | POSITION | ZERO);
const SECTOR_BYTES: u64 = 512;

/// The reason why an entry is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BadEntry {
    /// The position is not a multiple of the cluster size.
    Unaligned,
    /// Reserved bits are set.
    Reserved,
    /// A zero cluster in an image of version 2, which has none.
    ZeroInVersion2,
    /// The position is behind the end of the file.
    Outside,
    /// The bitmap of subclusters contradicts the entry or itself.
    Bitmap,
}

impl BadEntry {
    pub(crate) const fn words(self) -> &'static str {
        match self {
            Self::Unaligned => "points to where no cluster begins",
            Self::Reserved => "has reserved bits set",
            Self::Outside => "points behind the end of the file",
            Self::Bitmap => "has states of subclusters that contradict each other",
            Self::ZeroInVersion2 => "is a zero cluster, which version 2 does not have",
        }
    }
}

/// The L1 or L2 entry for the cluster at `pos`, which no other pointer refers to.
pub(crate) const fn with_copied(pos: u64) -> u64 {
    pos | COPIED
}

/// A parsed L1 entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum L1Entry {
    /// No L2 table.
    Empty,
    /// An L2 table at `pos`.
    Table { pos: u64, copied: bool },
}

impl L1Entry {
    pub(crate) fn parse(value: u64, header: &Header) -> Result<Self, BadEntry> {
        let pos = value & POSITION;
        if pos & (header.cluster_bytes() - 1) != 0 {
            return Err(BadEntry::Unaligned);
        }
        if value & L1_RESERVED != 0 {
            return Err(BadEntry::Reserved);
        }
        Ok(if pos == 0 { Self::Empty } else { Self::Table { pos, copied: value & COPIED != 0 } })
    }
}

/// A parsed L2 entry: the mapping of one cluster of the disk, or of one subcluster
/// ([`crate::formats::qcow2::subclusters`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cluster {
    /// Contents of the backing file; zeros where there is none.
    Unallocated,
    /// Zeros. `host` is the cluster that is reserved for it, if any.
    Zero { host: Option<u64>, copied: bool },
    /// The cluster at `host` in the data file.
    Data { host: u64, copied: bool },
    /// A subcluster that is as in the backing file, and has a place at `host`.
    Reserved { host: u64, copied: bool },
    /// A whole cluster whose subclusters differ. `host` is its cluster in the data file, if it has one.
    Mixed { host: Option<u64>, copied: bool },
    /// At most `len` bytes at `pos` of compressed data.
    Compressed { pos: u64, len: u64 },
}

impl Cluster {
    pub(crate) fn is_compressed(self) -> bool {
        matches!(self, Self::Compressed { .. })
    }

    pub(crate) fn parse(value: u64, header: &Header) -> Result<Self, BadEntry> {
        if value & COMPRESSED != 0 {
            return Self::compressed(value, header);
        }
        let copied = value & COPIED != 0;
        let pos = value & POSITION;
        if pos & (header.cluster_bytes() - 1) != 0 {
            return Err(BadEntry::Unaligned);
        }
        if value & L2_RESERVED != 0 {
            return Err(BadEntry::Reserved);
        }
        // In a data file the first cluster is at 0; the flag distinguishes it from an unallocated
        // one.
        let host = (pos != 0 || header.has_data_file() && copied).then_some(pos);
        match host {
            _ if value & ZERO != 0 && header.has_extended_l2() => Err(BadEntry::Reserved),
            _ if value & ZERO != 0 && header.version < 3 => Err(BadEntry::ZeroInVersion2),
            host if value & ZERO != 0 => Ok(Self::Zero { host, copied }),
            Some(host) => Ok(Self::Data { host, copied }),
            None => Ok(Self::Unallocated),
        }
    }

    /// The entry of a cluster that is compressed into `len` bytes at `pos`, which is not 0; `None` where an entry
    /// cannot tell the position.
    pub(crate) fn compressed_entry(pos: u64, len: u64, header: &Header) -> Option<u64> {
        let pos_bits = 62 - (header.cluster_bits - 8);
        let end = pos.checked_add(len)?;
        let sectors = (end - 1) / SECTOR_BYTES - pos / SECTOR_BYTES;
        let is_told = end < 1 << pos_bits && end < crate::formats::qcow2::header::MAX_POS;
        is_told.then_some(COMPRESSED | sectors << pos_bits | pos)
    }

    fn compressed(value: u64, header: &Header) -> Result<Self, BadEntry> {
        if value & COPIED != 0 || header.has_data_file() {
            return Err(BadEntry::Reserved);
        }
        let pos_bits = 62 - (header.cluster_bits - 8);
        let descriptor = value & (COMPRESSED - 1);
        let pos = descriptor & ((1 << pos_bits) - 1);
        if pos >= crate::formats::qcow2::header::MAX_POS {
            return Err(BadEntry::Reserved);
        }
        let sectors = (descriptor >> pos_bits) + 1;
        Ok(Self::Compressed { pos, len: sectors * SECTOR_BYTES - pos % SECTOR_BYTES })
    }
}

/// The position of the refcount block in an entry of the refcount table, if it has one.
pub(crate) fn refcount_block(value: u64, header: &Header) -> Result<Option<u64>, BadEntry> {
    if value & (SECTOR_BYTES - 1) != 0 || value >= crate::formats::qcow2::header::MAX_POS {
        return Err(BadEntry::Reserved);
    }
    if value & (header.cluster_bytes() - 1) != 0 {
        return Err(BadEntry::Unaligned);
    }
    Ok((value != 0).then_some(value))
}
