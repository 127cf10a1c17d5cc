//! Entries of qcow2 tables: what eight bytes of an L1, L2 or refcount table mean.
//!
//! Invariant: a position that comes out is a multiple of the cluster size and below 2^56, or the
//! entry is an error; no entry makes anyone read or allocate more than two clusters.
//! Knows: header. Known by: tables, check. Source: QEMU docs/interop/qcow2.txt, "L1 table
//! entry", "L2 table entry", "Compressed Clusters Descriptor".

use crate::header::Header;

pub(crate) const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
pub(crate) const ZERO: u64 = 1;
const POSITION: u64 = 0x00ff_ffff_ffff_fe00;
const L1_RESERVED: u64 = !(COPIED | POSITION);
const L2_RESERVED: u64 = !(COPIED | COMPRESSED | POSITION | ZERO);
const SECTOR_BYTES: u64 = 512;

/// Why an entry means nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BadEntry {
    /// The position is no multiple of the cluster size.
    Unaligned,
    /// Bits are set that nobody has given a meaning.
    Reserved,
    /// A zero cluster in an image of version 2, which has none.
    ZeroInVersion2,
}

impl BadEntry {
    pub(crate) const fn words(self) -> &'static str {
        match self {
            Self::Unaligned => "points to where no cluster begins",
            Self::Reserved => "has reserved bits set",
            Self::ZeroInVersion2 => "is a zero cluster, which version 2 does not have",
        }
    }
}

/// The L1 or L2 entry for what is at `pos` and nothing else points to.
pub(crate) const fn sole(pos: u64) -> u64 {
    pos | COPIED
}

/// What an L1 entry says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum L1Entry {
    /// Nothing is allocated below it.
    Empty,
    /// There is an L2 table at `pos`.
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

/// What an L2 entry says of one cluster of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cluster {
    /// As in the backing file; zeros where there is none.
    Unallocated,
    /// Zeros. `host` is the cluster that is kept for it, if one is.
    Zero { host: Option<u64>, copied: bool },
    /// The cluster at `host` in the data file.
    Data { host: u64, copied: bool },
    /// At most `len` bytes at `pos` of deflated data.
    Compressed { pos: u64, len: u64 },
}

impl Cluster {
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
        // In a data file the first cluster is at 0, and told from none by the flag.
        let host = (pos != 0 || header.has_data_file() && copied).then_some(pos);
        match host {
            _ if value & ZERO != 0 && header.version < 3 => Err(BadEntry::ZeroInVersion2),
            host if value & ZERO != 0 => Ok(Self::Zero { host, copied }),
            Some(host) => Ok(Self::Data { host, copied }),
            None => Ok(Self::Unallocated),
        }
    }

    fn compressed(value: u64, header: &Header) -> Result<Self, BadEntry> {
        if value & COPIED != 0 || header.has_data_file() {
            return Err(BadEntry::Reserved);
        }
        let pos_bits = 62 - (header.cluster_bits - 8);
        let descriptor = value & (COMPRESSED - 1);
        let pos = descriptor & ((1 << pos_bits) - 1);
        if pos >= crate::header::MAX_POS {
            return Err(BadEntry::Reserved);
        }
        let sectors = (descriptor >> pos_bits) + 1;
        Ok(Self::Compressed { pos, len: sectors * SECTOR_BYTES - pos % SECTOR_BYTES })
    }
}

/// What an entry of the refcount table says: where its block is, if it has one.
pub(crate) fn refcount_block(value: u64, header: &Header) -> Result<Option<u64>, BadEntry> {
    if value & (SECTOR_BYTES - 1) != 0 || value >= crate::header::MAX_POS {
        return Err(BadEntry::Reserved);
    }
    if value & (header.cluster_bytes() - 1) != 0 {
        return Err(BadEntry::Unaligned);
    }
    Ok((value != 0).then_some(value))
}
