//! Kinds of damage in the metadata of a served image, in words.
//!
//! Invariant: a message names a position in the file wherever one is known, for inspection.

use std::fmt;

/// The use of a cluster of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClusterUse {
    /// The header, and the rest of the first cluster.
    Header,
    /// Part of the L1 table.
    L1Table,
    /// Part of the refcount table.
    RefcountTable,
    /// A refcount block.
    RefcountBlock,
    /// An L2 table.
    L2Table,
    /// Part of the dirty bitmaps.
    Bitmaps,
    /// The disk's bytes.
    Data,
}

impl ClusterUse {
    const fn words(self) -> &'static str {
        match self {
            Self::Header => "the header",
            Self::L1Table => "the L1 table",
            Self::RefcountTable => "the refcount table",
            Self::RefcountBlock => "a refcount block",
            Self::L2Table => "an L2 table",
            Self::Bitmaps => "the dirty bitmaps",
            Self::Data => "data",
        }
    }
}

/// A contradiction in an image's metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Damage {
    /// The cluster at this byte of the file is in use and has a refcount of 0.
    CountsAsFree(ClusterUse, u64),
    /// The cluster at this byte holds metadata and is named a second time.
    Shared(u64),
    /// A data entry points to this byte, which is metadata or outside the file.
    DataAt(u64),
    /// An L1 entry points to this byte, where no L2 table can be.
    TableAt(u64),
    /// The refcount table points to this byte, where no refcount block can be.
    BlockAt(u64),
    /// A table entry is invalid, for this reason.
    Entry(&'static str),
    /// The L2 table at this byte lacks the mark that only one L1 entry points to it.
    NotSole(u64),
    /// Damage was found before.
    Known,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::CountsAsFree(holds, pos) => {
                write!(f, "{} at byte {pos} counts as free", holds.words())
            }
            Self::Shared(pos) => write!(f, "two things are said to be at byte {pos}"),
            Self::DataAt(pos) => write!(f, "data is said to be at byte {pos}, where none can be"),
            Self::TableAt(pos) => {
                write!(f, "an L2 table is said to be at byte {pos}, where none can be")
            }
            Self::BlockAt(pos) => {
                write!(f, "a refcount block is said to be at byte {pos}, where none can be")
            }
            Self::Entry(what) => write!(f, "an entry of a table {what}"),
            Self::NotSole(pos) => write!(f, "the L2 table at byte {pos} is marked as shared"),
            Self::Known => f.write_str("damage that was told of before"),
        }
    }
}
