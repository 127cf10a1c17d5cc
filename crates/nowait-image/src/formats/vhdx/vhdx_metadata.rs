//! The metadata of a VHDX image: sizes of the disk, its blocks and its sectors.
//!
//! Invariant: whatever the bytes are, parsed sizes are within the format's limits.

use crate::formats::vhdx::region_table::{Guid, MIB, le};

/// Bytes of the table of items; items follow it.
pub(super) const TABLE_BYTES: usize = 64 << 10;
/// The most bytes of metadata of a VHDX image: the table, and as much for items.
/// Beyond it: the image is refused.
pub(super) const MAX_BYTES: u64 = 1 << 20;
/// The most items of metadata of a VHDX image.
/// Beyond it: the image is refused.
const MAX_ITEMS: u16 = 2047;
const ENTRY_BYTES: usize = 32;
const REQUIRED: u32 = 1 << 2;
const HAS_PARENT: u32 = 1 << 1;
/// The largest disk of a VHDX image, in bytes.
/// Beyond it: the image is refused.
const MAX_DISK_BYTES: u64 = 64 << 40;

const PARAMETERS: Guid = Guid::new(0xcaa1_6737, 0xfa36, 0x4d43, 0xb3b6_33f0_aa44_e76b);
const DISK_SIZE: Guid = Guid::new(0x2fa5_4224, 0xcd1b, 0x4876, 0xb211_5dbe_d83b_f4b8);
const LOGICAL_SECTOR: Guid = Guid::new(0x8141_bf1d, 0xa96f, 0x4709, 0xba47_f233_a8fa_ab5f);
const PHYSICAL_SECTOR: Guid = Guid::new(0xcda3_48c7, 0x445d, 0x4471, 0x9cc9_e988_5251_c556);
const PAGE_83: Guid = Guid::new(0xbeca_12ab, 0xb2e6, 0x4523, 0x93ef_c309_e000_c746);
const PARENT_LOCATOR: Guid = Guid::new(0xa8d3_5f2d, 0xb30b, 0x454d, 0xabf7_d3d8_4834_ab0c);

/// The sizes of an image, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) disk: u64,
    /// A power of two, 1 to 256 MiB.
    pub(super) block: u64,
    /// 512 or 4096.
    pub(super) sector: u64,
}

impl Sizes {
    /// Parses the metadata region, as far as it was read.
    ///
    /// # Errors
    /// The reason, in words to follow the image's name.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let damaged = |what: &str| Err(format!("its metadata is damaged: {what}"));
        let count = u16::from_le_bytes(le(bytes, 10));
        if !bytes.starts_with(b"metadata") || count > MAX_ITEMS {
            return damaged("the table of its items");
        }
        let (mut parameters, mut disk, mut sector) = (None, None, None);
        for index in 1..=usize::from(count) {
            let entry = index * ENTRY_BYTES;
            let n32 = |at: usize| u32::from_le_bytes(le(bytes, entry + at));
            let (at, len, flags) = (n32(16) as usize, n32(20) as usize, n32(24));
            let item = match bytes.get(at..at.saturating_add(len)) {
                Some(item) if at >= TABLE_BYTES => item,
                _ if flags & REQUIRED == 0 => continue,
                _ => return damaged("the place of an item"),
            };
            match Guid::at(bytes, entry) {
                PARAMETERS if len >= 8 => {
                    let flags = u32::from_le_bytes(le(item, 4));
                    parameters = Some((u64::from(u32::from_le_bytes(le(item, 0))), flags));
                }
                DISK_SIZE if len >= 8 => disk = Some(u64::from_le_bytes(le(item, 0))),
                LOGICAL_SECTOR if len >= 4 => {
                    sector = Some(u64::from(u32::from_le_bytes(le(item, 0))));
                }
                PARENT_LOCATOR => return refused_parent(),
                PHYSICAL_SECTOR | PAGE_83 => {}
                _ if flags & REQUIRED == 0 => {}
                _ => return Err("it has metadata that is not known, and needed to read it".into()),
            }
        }
        let (Some((block, flags)), Some(disk), Some(sector)) = (parameters, disk, sector) else {
            return damaged("an item is missing");
        };
        if flags & HAS_PARENT != 0 {
            return refused_parent();
        }
        if !block.is_power_of_two() || !(MIB..=256 * MIB).contains(&block) {
            return damaged("the size of a block");
        }
        if sector != 512 && sector != 4096 {
            return damaged("the size of a sector");
        }
        if disk == 0 || disk > MAX_DISK_BYTES || !disk.is_multiple_of(sector) {
            return damaged("the size of the disk");
        }
        Ok(Self { disk, block, sector })
    }
}

fn refused_parent<T>() -> Result<T, String> {
    Err("it stands on a parent, and a vhdx image is only read by itself (make one image of both where they \
         are from, with Merge-VHD)"
        .into())
}
