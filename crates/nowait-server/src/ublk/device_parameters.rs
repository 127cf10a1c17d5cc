//! The properties of a block device that the driver is told, and an image's as such.
//!
//! Invariant: sectors are 512 bytes, as in the kernel, and so are the blocks of a node, unless others are asked for or the
//! image is a block device with larger ones: a partition table is found only with the blocks that it was made for. The last sector of a node may
//! reach past the image's end.

use nowait::{BlockDevice, BlockMap};
use nowait_image::Image;

use rustix::fs::{FileType, fstat};

use crate::block_size::BlockSize;
use crate::export::sectors_of;
use crate::ublk::ublk_cmd::field;

const SECTOR_SHIFT: u32 = 9;
/// The kernel's largest block: a page.
/// Beyond it: the block is a page.
const MAX_BLOCK_BYTES: u32 = 4096;
const TYPES_BASIC_AND_DISCARD: u32 = 3;
const READ_ONLY: u32 = 1;
const VOLATILE_CACHE: u32 = 1 << 2;
const FUA: u32 = 1 << 3;
/// The longest discard, in bytes. A worker does it as a whole.
/// Beyond it: the kernel makes several requests.
const MAX_DISCARD_BYTES: u32 = 1 << 30;
/// The longest zeroing, in bytes. A worker does it as a whole.
/// Beyond it: the kernel makes several requests.
const MAX_ZERO_BYTES: u32 = 64 << 20;

/// The properties of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parameters {
    /// Size in bytes, a number of whole blocks: see [`Parameters::whole_blocks`].
    pub(crate) size: u64,
    /// Bytes of a block: the smallest request.
    pub(crate) block: u32,
    pub(crate) read_only: bool,
    /// Storage can be deallocated.
    pub(crate) discards: bool,
    /// The longest request, in bytes.
    pub(crate) max_io_bytes: u32,
}

fn is_block_device(device: &BlockDevice<dyn BlockMap>) -> bool {
    let found = device.fd().ok().and_then(|fd| fstat(fd).ok());
    found.is_some_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::BlockDevice)
}

/// Whether requests can move data between storage and the memory of their users, which is aligned to
/// sectors only.
pub(crate) fn can_register(image: &Image) -> bool {
    let (device, sector) = (image.device(), 1 << SECTOR_SHIFT);
    device.supports_nowait() && device.alignment().memory <= sector
}

impl Parameters {
    /// Bytes of `struct ublk_params` up to the end of its discard parameters.
    pub(crate) const BYTES: usize = 64;

    /// Parameters of `image`, for requests of at most `max_io_bytes`; with blocks of `block_size` if that is given.
    pub(crate) fn of(image: &Image, block_size: Option<BlockSize>, max_io_bytes: u32) -> Self {
        let (device, sector) = (image.device(), 1 << SECTOR_SHIFT);
        let own = match image.format().is_raw() && is_block_device(&device) {
            true => device.alignment().offset.clamp(sector, MAX_BLOCK_BYTES),
            // Direct I/O may need more of a file, as of one that shares its blocks with another.
            false => sector,
        };
        let block = block_size.map_or(own, BlockSize::bytes);
        Self {
            size: Self::whole_blocks(device.size(), block),
            block,
            read_only: device.is_read_only(),
            discards: device.supports_punch_hole(),
            max_io_bytes,
        }
    }

    /// The bytes of a node for an image of `size` bytes: with blocks of 512 bytes all, padded to a sector, else those in whole
    /// blocks.
    pub(crate) fn whole_blocks(size: u64, block: u32) -> u64 {
        match block {
            0..=512 => sectors_of(size) << SECTOR_SHIFT,
            _ => size - size % u64::from(block),
        }
    }

    /// `struct ublk_params`, as far as it is used here.
    pub(crate) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        // All of its writes may be in a volatile cache until a flush (C50).
        let attributes = if self.read_only { READ_ONLY } else { VOLATILE_CACHE | FUA };
        let page = MAX_BLOCK_BYTES.trailing_zeros() as u8;
        put(0, &(Self::BYTES as u32).to_ne_bytes());
        put(4, &TYPES_BASIC_AND_DISCARD.to_ne_bytes());
        put(8, &attributes.to_ne_bytes());
        // The logical and the physical block, the optimal and the smallest request.
        put(12, &[self.block.trailing_zeros() as u8, page, page, page]);
        put(16, &(self.max_io_bytes >> SECTOR_SHIFT).to_ne_bytes());
        put(24, &(self.size >> SECTOR_SHIFT).to_ne_bytes());
        let discard = if self.discards { MAX_DISCARD_BYTES } else { 0 };
        let zero = if self.read_only { 0 } else { MAX_ZERO_BYTES };
        // The alignment of discards is 0; their granularity is that of most file systems.
        put(44, &MAX_BLOCK_BYTES.to_ne_bytes());
        put(48, &(discard >> SECTOR_SHIFT).to_ne_bytes());
        put(52, &(zero >> SECTOR_SHIFT).to_ne_bytes());
        put(56, &1u16.to_ne_bytes());
        bytes
    }

    /// Whether a node with the parameters `bytes` looks the same to its users, or only smaller if it
    /// `can_grow`. It keeps the blocks with which it was made, of which an earlier version made larger ones that left out
    /// what is in no whole block.
    pub(crate) fn fits(self, bytes: &[u8; Self::BYTES], can_grow: bool) -> bool {
        let read_only = u32::from_ne_bytes(field(bytes, 8)) & READ_ONLY != 0;
        let (before, block) = (sectors_in(bytes), block_in(bytes));
        let now = Self::whole_blocks(self.size, block) >> SECTOR_SHIFT;
        read_only == self.read_only
            && (before == now || can_grow && before < now)
            && (1 << SECTOR_SHIFT..=MAX_BLOCK_BYTES).contains(&block)
    }
}

/// Bytes of a block by the parameters `bytes`.
pub(crate) fn block_in(bytes: &[u8; Parameters::BYTES]) -> u32 {
    1_u32.checked_shl(bytes[12].into()).unwrap_or_default()
}

/// The size that the parameters `bytes` tell, in sectors.
pub(crate) fn sectors_in(bytes: &[u8; Parameters::BYTES]) -> u64 {
    u64::from_ne_bytes(field(bytes, 24))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_tells_the_image_and_is_recognised_by_it() {
        let parameters = Parameters {
            size: 5 << 20,
            block: 512,
            read_only: false,
            discards: true,
            max_io_bytes: 1 << 19,
        };
        let bytes = parameters.to_bytes();
        assert_eq!(bytes[12..16], [9, 12, 12, 12]);
        assert_eq!(sectors_in(&bytes), 10240);
        assert_eq!(u32::from_ne_bytes(field(&bytes, 16)), 1024);
        assert_eq!(u32::from_ne_bytes(field(&bytes, 48)), MAX_DISCARD_BYTES / 512);
        assert!(parameters.fits(&bytes, false) && parameters.fits(&bytes, true));
        let larger = Parameters { size: 6 << 20, ..parameters };
        assert!(larger.fits(&bytes, true) && !larger.fits(&bytes, false));
        for other in [
            Parameters { size: 4 << 20, ..parameters },
            Parameters { read_only: true, ..parameters },
        ] {
            assert!(!other.fits(&bytes, true), "{other:?}");
        }
        let of_earlier_version = Parameters { size: 5 << 20, block: 4096, ..parameters };
        let padded = Parameters { size: (5 << 20) + 512, ..parameters };
        assert!(padded.fits(&of_earlier_version.to_bytes(), false));
        let with_pages = Parameters { block: 4096, ..parameters };
        assert!(with_pages.fits(&bytes, false), "it keeps its blocks");
        for shift in [8, 13] {
            let mut other = bytes;
            other[12] = shift;
            assert!(!parameters.fits(&other, true), "{shift}");
        }
    }

    #[test]
    fn the_last_sector_is_padded_and_larger_blocks_are_whole() {
        assert_eq!(Parameters::whole_blocks(123_456_789, 512), 241_127 * 512);
        assert_eq!(Parameters::whole_blocks(1024, 512), 1024);
        assert_eq!(Parameters::whole_blocks(8191, 4096), 4096);
    }
}
