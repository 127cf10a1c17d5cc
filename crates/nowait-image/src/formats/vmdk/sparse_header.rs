//! The header of a sparse extent: where its tables are, and how its grains are compressed.
//!
//! Invariant: whatever the bytes are, each field of a parsed header is within the limits named here, and its
//! grain directory is inside the file.

use crate::error::ImageError;
use crate::formats::vmdk::descriptor::{MAX_SECTORS, SECTOR_BYTES};
use crate::image_file::ImageFile;

/// The first bytes of a sparse extent.
pub(super) const MAGIC: [u8; 4] = *b"KDMV";
const HEADER_BYTES: usize = 512;
/// The newest version of a sparse VMDK image.
/// Beyond it: the image is refused.
const MAX_VERSION: u32 = 3;
/// Sectors of a grain: a power of two, from 4 KiB to 4 MiB.
const GRAIN_SECTORS: std::ops::RangeInclusive<u64> = 8..=8192;
/// Entries of a grain table; nearly always 512.
const TABLE_ENTRIES: std::ops::RangeInclusive<u64> = 1..=4096;
const FLAG_NEWLINES: u32 = 1;
const FLAG_ZERO_GRAINS: u32 = 1 << 2;
const FLAG_COMPRESSED: u32 = 1 << 16;
const FLAG_MARKERS: u32 = 1 << 17;
const NEWLINES: [u8; 4] = *b"\n \r\n";
const DEFLATE: u16 = 1;
/// The position of a grain directory that is at the end, behind a second header.
const AT_END: u64 = u64::MAX;
/// The second header, between two markers, is this far from the end.
const FOOTER_BYTES: u64 = 3 * SECTOR_BYTES;
const FOOTER_MARKER: u32 = 3;

/// A parsed header. All sizes and positions are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SparseHeader {
    /// Of the extent's part of the disk.
    pub(super) capacity: u64,
    pub(super) grain: u64,
    /// Entries of a grain table.
    pub(super) table_entries: u64,
    pub(super) directory: u64,
    /// The descriptor in the file; of no bytes if there is none.
    pub(super) descriptor: (u64, u64),
    /// Whether an entry of 1 is a grain of zeros.
    pub(super) has_zero_grains: bool,
    pub(super) is_compressed: bool,
    /// Whether a compressed grain follows a marker with its position and length.
    pub(super) has_markers: bool,
}

fn le<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..at + N).and_then(|it| it.try_into().ok()).unwrap_or([0; N])
}

impl SparseHeader {
    /// Reads and checks the header of `file`.
    ///
    /// # Errors
    /// One line: damage, what is not supported, or the failed system call.
    pub(super) fn read(file: &ImageFile) -> Result<Self, ImageError> {
        let failed = |error: std::io::Error| ImageError::os(file.path(), "read its header", &error);
        let refused = |why: String| ImageError::refused(file.path(), why);
        let end = file.size().map_err(failed)?;
        let mut bytes = [0; HEADER_BYTES];
        file.read_at(0, &mut bytes).map_err(failed)?;
        let first = Self::parse(&bytes).map_err(refused)?;
        if first.directory != AT_END {
            return first.fits(end).map_err(refused);
        }
        let mut footer = [0; FOOTER_BYTES as usize];
        let at = end.checked_sub(FOOTER_BYTES).map(|at| at / SECTOR_BYTES * SECTOR_BYTES);
        let cut = || refused("it was cut off: it has no footer, where its tables are named".into());
        file.read_at(at.ok_or_else(cut)?, &mut footer).map_err(failed)?;
        let [marker, second] = [0, HEADER_BYTES].map(|at| footer.get(at..).unwrap_or_default());
        if u32::from_le_bytes(le(marker, 12)) != FOOTER_MARKER || !second.starts_with(&MAGIC) {
            return Err(cut());
        }
        let second = Self::parse(second).map_err(refused)?;
        if second.directory == AT_END {
            return Err(cut());
        }
        // The descriptor is where the first header says.
        Self { descriptor: first.descriptor, ..second }.fits(end).map_err(refused)
    }

    /// Parses a header. The position of its directory is [`AT_END`] or in range.
    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let n32 = |at: usize| u32::from_le_bytes(le(bytes, at));
        let n64 = |at: usize| u64::from_le_bytes(le(bytes, at));
        let damaged = |what: &str| Err(format!("its header is damaged: {what}"));
        if !bytes.starts_with(&MAGIC) {
            return damaged("its first bytes");
        }
        let (version, flags) = (n32(4), n32(8));
        if version == 0 || version > MAX_VERSION {
            return Err(format!("vmdk version {version} is not known"));
        }
        if flags & FLAG_NEWLINES != 0 && le(bytes, 73) != NEWLINES {
            return damaged("line ends were changed, as by a transfer as text");
        }
        let compression = u16::from_le_bytes(le(bytes, 77));
        let is_compressed = flags & FLAG_COMPRESSED != 0;
        if is_compressed && compression != DEFLATE {
            return Err(format!("its compression {compression} is not known"));
        }
        let (capacity, grain, tables) = (n64(12), n64(20), u64::from(n32(44)));
        if capacity == 0 || capacity > MAX_SECTORS {
            return damaged("the size of the disk");
        }
        if !grain.is_power_of_two() || !GRAIN_SECTORS.contains(&grain) {
            return damaged("the size of a grain");
        }
        if !TABLE_ENTRIES.contains(&tables) {
            return damaged("the size of a grain table");
        }
        let directory = match n64(56) {
            AT_END => AT_END,
            at if at == 0 || at > MAX_SECTORS => {
                return damaged("the place of its grain directory");
            }
            at => at * SECTOR_BYTES,
        };
        let (at, len) = (n64(28), n64(36));
        if at > MAX_SECTORS || len > MAX_SECTORS {
            return damaged("the place of its descriptor");
        }
        Ok(Self {
            capacity: capacity * SECTOR_BYTES,
            grain: grain * SECTOR_BYTES,
            table_entries: tables,
            directory,
            descriptor: (at * SECTOR_BYTES, if at == 0 { 0 } else { len * SECTOR_BYTES }),
            has_zero_grains: flags & FLAG_ZERO_GRAINS != 0,
            is_compressed,
            has_markers: flags & FLAG_MARKERS != 0,
        })
    }

    /// Checks that the grain directory is inside a file of `end` bytes.
    fn fits(self, end: u64) -> Result<Self, String> {
        let entries = self.capacity.div_ceil(self.grain * self.table_entries);
        let needed = self.directory.saturating_add(entries.saturating_mul(4));
        match needed <= end {
            true => Ok(self),
            false => Err(format!(
                "it was cut off: it has {end} bytes, and its grain directory ends at byte {needed}"
            )),
        }
    }
}
