//! Sizes of the tables of a new qcow2 image, and writing tables of numbers.
//!
//! Invariant: all sizes are within the limits that [`Header::parse`] accepts.

use std::io;

use crate::formats::qcow2::header::{Header, MAX_L1_BYTES, MAX_REFCOUNT_TABLE_BYTES};
use crate::image_file::ImageFile;

/// Default bytes of a cluster, as in QEMU.
pub const DEFAULT_CLUSTER_BYTES: u64 = 64 << 10;
/// The smallest and the largest cluster in bytes; all are powers of two.
pub const CLUSTER_BYTES: std::ops::RangeInclusive<u64> = 512..=2 << 20;
/// QEMU counts the size of a disk in sectors, rounded up: that of a qcow2 disk when it is made or
/// resized, that of a raw one in the output of `qemu-img map`.
pub(crate) const SECTOR_BYTES: u64 = 512;
/// Most bytes that are written together.
const PIECE_BYTES: u64 = 1 << 20;

/// The header's cluster bits for clusters of `bytes`, or of [`DEFAULT_CLUSTER_BYTES`].
pub(crate) fn cluster_bits(bytes: Option<u64>) -> Result<u32, String> {
    let bytes = bytes.unwrap_or(DEFAULT_CLUSTER_BYTES);
    if !bytes.is_power_of_two() || !CLUSTER_BYTES.contains(&bytes) {
        return Err(format!("clusters of {bytes} bytes (512 to 2M, a power of two)"));
    }
    Ok(bytes.ilog2())
}

/// Refuses a disk that is too large for any L1 table.
pub(crate) fn check_l1(header: &Header) -> Result<(), String> {
    let entries = header.size.div_ceil(header.l2_reach());
    if entries * 8 > MAX_L1_BYTES { Err(too_large(header)) } else { Ok(()) }
}

/// The error of an image that would need more clusters than its tables can name.
pub(crate) fn tables_full() -> io::Error {
    let why = "its tables name no more clusters (nowait copy --cluster-size makes larger ones)";
    io::Error::new(io::ErrorKind::FileTooLarge, why)
}

fn too_large(header: &Header) -> String {
    let more = "give a larger --cluster-size, up to 2M";
    format!("a disk of {} bytes needs larger clusters ({more})", header.size)
}

/// The clusters that an image's refcounts take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RefcountLayout {
    /// The refcount table.
    pub(crate) table: u64,
    /// The refcount blocks.
    pub(crate) blocks: u64,
    /// All clusters that are counted: these and the rest of the image.
    pub(crate) clusters: u64,
}

impl RefcountLayout {
    /// For an image with `rest` clusters beside these.
    pub(crate) fn of(header: &Header, rest: u64) -> Result<Self, String> {
        let cluster = header.cluster_bytes();
        let (mut table, mut blocks, mut clusters) = (1, 1, 0);
        // Refcount clusters have refcounts, too: the blocks for a number of clusters add to that
        // number.
        while clusters != rest + table + blocks {
            clusters = rest + table + blocks;
            blocks = clusters.div_ceil(header.block_entries());
            table = (blocks * 8).div_ceil(cluster);
        }
        if table * cluster > MAX_REFCOUNT_TABLE_BYTES.max(cluster) {
            return Err(too_large(header));
        }
        Ok(Self { table, blocks, clusters })
    }
}

/// Writes `count` numbers of `N` bytes, one after the other from `pos` on.
pub(crate) fn write_numbers<const N: usize>(
    file: &ImageFile,
    pos: u64,
    count: u64,
    number: impl Fn(u64) -> [u8; N],
) -> io::Result<()> {
    let at_once = PIECE_BYTES / N as u64;
    let mut piece = Vec::new();
    let mut first = 0;
    while first < count {
        let end = count.min(first + at_once);
        piece.clear();
        piece.extend((first..end).flat_map(&number));
        file.write_at(pos + first * N as u64, &piece)?;
        first = end;
    }
    Ok(())
}
