//! Name, granularity and state of a bitmap, and the reasons of refusals.
//!
//! Invariant: a name and a granularity that a user or another process gives are checked before they are used.

use std::fmt;
use std::ops::RangeInclusive;

use nowait_image::bitmap_changes::NewBitmap;

/// Bytes of a granule that a bitmap may have, each a power of two.
const GRANULARITIES: RangeInclusive<u64> = 512..=64 << 20;
/// Bytes of a name.
const NAME_BYTES: RangeInclusive<usize> = 1..=1023;
/// The most bitmaps of an export.
/// Beyond it: no further one is added.
pub(crate) const MAX_BITMAPS: usize = 32;
/// The most bytes of memory that the bits of all bitmaps of an export have.
/// Beyond it: no further one is added.
pub(crate) const MAX_BIT_BYTES: u64 = 256 << 20;
/// Bytes of a granule where none are given, as QEMU's.
pub(crate) const DEFAULT_GRANULARITY: u64 = 64 << 10;

/// The properties of a bitmap: all but its bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitmapSpec {
    /// 1 to 1023 bytes without control characters; unique in its export.
    pub name: String,
    /// Bytes of a granule, of which a bitmap has a bit each: a power of two from 512 to 64 MiB.
    pub granularity: u64,
    /// Whether changes are marked.
    pub enabled: bool,
}

impl BitmapSpec {
    /// The most dirty bitmaps of an export.
    /// Beyond it: a new one is refused.
    pub const MAX_OF_EXPORT: usize = MAX_BITMAPS;

    /// An enabled bitmap with granules of 64 KiB.
    #[must_use]
    pub fn new(name: String) -> Self {
        Self { name, granularity: DEFAULT_GRANULARITY, enabled: true }
    }

    /// Checks the name and the granularity.
    ///
    /// # Errors
    /// [`BitmapError::Name`], [`BitmapError::Granularity`].
    pub fn check(&self) -> Result<(), BitmapError> {
        let Self { name, granularity, .. } = self;
        if !NAME_BYTES.contains(&name.len()) || name.chars().any(char::is_control) {
            return Err(BitmapError::Name);
        }
        match granularity.is_power_of_two() && GRANULARITIES.contains(granularity) {
            true => Ok(()),
            false => Err(BitmapError::Granularity),
        }
    }
}

impl From<&BitmapSpec> for NewBitmap {
    /// The bitmap in an image.
    fn from(spec: &BitmapSpec) -> Self {
        let BitmapSpec { name, granularity, enabled } = spec.clone();
        Self { name, granularity, enabled }
    }
}

/// A bitmap at a moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitmapStatus {
    /// Its name, granularity and state.
    pub spec: BitmapSpec,
    /// Bytes of the disk that are dirty.
    pub dirty_bytes: u64,
    /// Whether it is stored in the image.
    pub persistent: bool,
}

/// The refusal of a change of bitmaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitmapError {
    /// There is no such export.
    NoExport,
    /// There is no bitmap of that name.
    NoBitmap,
    /// There is one of that name.
    Exists,
    /// The name has no bytes, too many, or control characters.
    Name,
    /// It is not a power of two in its range.
    Granularity,
    /// It is smaller than the blocks of the export, which have this many bytes.
    SmallGranularity(u64),
    /// The export has as many bitmaps as it may.
    TooMany,
    /// The bits would need this many bytes of memory more than they may have.
    TooLarge(u64),
    /// There is not enough memory.
    NoMemory,
    /// A backup of the export has frozen what was noted in it before.
    InBackup,
}

impl fmt::Display for BitmapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoExport => f.write_str("there is no such export"),
            Self::NoBitmap => f.write_str("there is no such bitmap"),
            Self::Exists => f.write_str("there is a bitmap of that name"),
            Self::Name => {
                f.write_str("the name of a bitmap has 1 to 1023 bytes and no control characters")
            }
            Self::Granularity => f.write_str("a granularity is a power of two from 512 to 64M"),
            Self::SmallGranularity(block) => {
                write!(
                    f,
                    "the granularity is smaller than the blocks of the export ({block} bytes)"
                )
            }
            Self::TooMany => write!(f, "an export has at most {MAX_BITMAPS} bitmaps"),
            Self::TooLarge(bytes) => write!(
                f,
                "the bitmaps of an export have at most {} MiB of bits, {bytes} bytes less than this needs (a larger \
                 granularity needs less)",
                MAX_BIT_BYTES >> 20
            ),
            Self::InBackup => f.write_str("a backup uses it: commit or abort that first"),
            Self::NoMemory => f.write_str("there is not enough memory for the bits"),
        }
    }
}

impl std::error::Error for BitmapError {}

/// A bitmap that is not as it was saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RestoreError {
    /// All of it is dirty, for this reason.
    AllDirty(String),
    /// There is no such bitmap.
    NotAdded(BitmapError),
}

impl fmt::Display for RestoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllDirty(why) => write!(f, "all of it is dirty now: {why}"),
            Self::NotAdded(why) => write!(f, "it is lost: {why}"),
        }
    }
}
