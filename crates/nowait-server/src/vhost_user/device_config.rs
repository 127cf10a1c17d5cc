//! Everything that the device tells its driver: features, and the configuration of a virtio block device.
//!
//! Invariant: nothing is promised that the export does not have.

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX,
    VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use crate::block_size::BlockSize;
use crate::export::{Export, SECTOR_BYTES, sectors_of};

/// The most queues of a device.
/// Beyond it: the message is refused.
pub(crate) const MAX_QUEUES: u16 = 64;
/// The most segments of a request that drivers are told: what fits a queue of 128 with its header
/// and its status.
const SEGMENTS: u32 = 126;
/// The most bytes of a segment that drivers are told.
const SEGMENT_BYTES: u32 = 256 << 10;
/// The most bytes of a read or a write: what the segments that drivers are told have together.
/// Beyond it: `VIRTIO_BLK_S_IOERR`.
pub(crate) const MAX_REQUEST_BYTES: u64 = SEGMENTS as u64 * SEGMENT_BYTES as u64;
/// The most bytes of a read or a write of a driver that does not ask for the bound, such as that of firmware, which
/// /// reads a whole kernel at a time.
/// Beyond it: `VIRTIO_BLK_S_IOERR`.
pub(crate) const MAX_UNTOLD_BYTES: u64 = 256 << 20;
/// The most sectors of one discard or one write of zeroes: 2 TiB.
const ZEROED_SECTORS: u32 = u32::MAX;
/// Bytes of the configuration, up to and with the fields of DISCARD and WRITE_ZEROES.
pub(crate) const CONFIG_BYTES: usize = 60;
/// Where `wce`, the only field that drivers may write, is in it.
pub(crate) const WCE_OFFSET: usize = 32;
/// Other features than those of block devices.
const DIRTY_LOG: u64 = 1 << 26;
const PROTOCOL_FEATURES: u64 = 1 << 30;

/// The properties of an export as a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockProperties {
    /// Size in bytes; a last part of a sector is not part of the device.
    pub(crate) size: u64,
    pub(crate) read_only: bool,
    /// Storage can be deallocated.
    pub(crate) discards: bool,
    /// Bytes of the smallest request, 512 at least.
    pub(crate) logical: u32,
    /// Bytes of a block that is read or written without the rest of it being read, a power of two.
    pub(crate) block: u32,
}

impl BlockProperties {
    /// Present properties of `export`.
    pub(crate) fn of(export: &Export) -> Self {
        let disk = export.disk();
        Self {
            // If the refresh fails, the device may be gone: then its requests fail.
            size: export.whole_blocks(disk.refresh().unwrap_or(disk.size())),
            read_only: export.is_read_only(),
            discards: disk.supports_punch_hole(),
            logical: export.block_size().unwrap_or(BlockSize::Sector).bytes(),
            block: disk.alignment().offset.clamp(4096, 1 << 20),
        }
    }
}

/// A set of features, as they are negotiated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Features(pub(crate) u64);

impl Features {
    /// All that a device with `properties` has.
    pub(crate) fn offered(properties: BlockProperties) -> Self {
        let bit = |bit: u32| 1 << bit;
        let mut all = bit(VIRTIO_BLK_F_SIZE_MAX)
            | bit(VIRTIO_BLK_F_SEG_MAX)
            | bit(VIRTIO_BLK_F_BLK_SIZE)
            | bit(VIRTIO_BLK_F_TOPOLOGY)
            | bit(VIRTIO_BLK_F_FLUSH)
            | bit(VIRTIO_BLK_F_CONFIG_WCE)
            | bit(VIRTIO_BLK_F_MQ)
            | bit(VIRTIO_RING_F_INDIRECT_DESC)
            | bit(VIRTIO_RING_F_EVENT_IDX)
            | bit(VIRTIO_F_VERSION_1)
            | DIRTY_LOG
            | PROTOCOL_FEATURES;
        if properties.read_only {
            all |= bit(VIRTIO_BLK_F_RO);
        } else {
            all |= bit(VIRTIO_BLK_F_WRITE_ZEROES);
            if properties.discards {
                all |= bit(VIRTIO_BLK_F_DISCARD);
            }
        }
        Self(all)
    }

    fn has(self, bit: u32) -> bool {
        self.0 & 1 << bit != 0
    }

    /// The driver suppresses notifications by ring indices.
    pub(crate) fn event_idx(self) -> bool {
        self.has(VIRTIO_RING_F_EVENT_IDX)
    }

    /// The most bytes of a read or a write.
    pub(crate) fn max_request_bytes(self) -> u64 {
        let is_told = self.has(VIRTIO_BLK_F_SIZE_MAX) || self.has(VIRTIO_BLK_F_SEG_MAX);
        if is_told { MAX_REQUEST_BYTES } else { MAX_UNTOLD_BYTES }
    }

    /// The memory that the device writes to is logged.
    pub(crate) fn logs(self) -> bool {
        self.0 & DIRTY_LOG != 0
    }

    /// Rings begin disabled, and are enabled by a message.
    pub(crate) fn protocol(self) -> bool {
        self.0 & PROTOCOL_FEATURES != 0
    }

    /// Whether writes are durable when they are completed, as the driver left `wce`: a driver that
    /// does not flush counts on that.
    pub(crate) fn writes_through(self, wce: bool) -> bool {
        match (self.has(VIRTIO_BLK_F_CONFIG_WCE), self.has(VIRTIO_BLK_F_FLUSH)) {
            (true, _) => !wce,
            (false, flushes) => !flushes,
        }
    }
}

/// The bytes of `struct virtio_blk_config`.
pub(crate) fn config(properties: BlockProperties, wce: bool) -> [u8; CONFIG_BYTES] {
    let mut bytes = [0; CONFIG_BYTES];
    let mut put = |at: usize, field: &[u8]| {
        if let Some(place) = bytes.get_mut(at..at + field.len()) {
            place.copy_from_slice(field);
        }
    };
    let logical = properties.logical;
    let physical = properties.block.max(logical);
    put(0, &sectors_of(properties.size).to_le_bytes());
    put(8, &SEGMENT_BYTES.to_le_bytes());
    put(12, &SEGMENTS.to_le_bytes());
    // 16: geometry, which is not offered.
    put(20, &logical.to_le_bytes());
    // Topology: log2 of the logical blocks in a physical one, offset 0, and in logical blocks the
    // smallest good request and the best one.
    put(24, &[(physical / logical).ilog2() as u8, 0]);
    put(26, &((physical / logical) as u16).to_le_bytes());
    put(WCE_OFFSET, &[u8::from(wce)]);
    put(34, &MAX_QUEUES.to_le_bytes());
    // Discard: sectors, segments, alignment in sectors.
    put(36, &ZEROED_SECTORS.to_le_bytes());
    put(40, &1u32.to_le_bytes());
    put(44, &(physical / SECTOR_BYTES as u32).to_le_bytes());
    // Write zeroes: sectors, segments, may unmap.
    put(48, &ZEROED_SECTORS.to_le_bytes());
    put(52, &1u32.to_le_bytes());
    put(56, &[1]);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: BlockProperties = BlockProperties {
        size: 10_000,
        read_only: false,
        discards: true,
        logical: 512,
        block: 4096,
    };

    #[test]
    fn the_configuration_has_the_layout_of_the_specification() {
        let bytes = config(DISK, true);
        let field = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!((field(0), field(4)), (20, 0), "the last one is padded");
        assert_eq!((field(8), field(12), field(20)), (256 << 10, 126, 512));
        assert_eq!((bytes[24], bytes[25], bytes[26], bytes[32]), (3, 0, 8, 1));
        assert_eq!((bytes[34], field(40), field(44), bytes[56]), (64, 1, 8, 1));
        let bytes = config(BlockProperties { size: 1 << 20, logical: 4096, ..DISK }, true);
        let field = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!((field(0), field(20), field(44)), (2048, 4096, 8), "in sectors, but its blocks");
        assert_eq!((bytes[24], bytes[26]), (0, 1));
    }

    #[test]
    fn a_read_only_device_offers_no_change() {
        let offered = Features::offered(BlockProperties { read_only: true, ..DISK });
        assert!(offered.has(VIRTIO_BLK_F_RO));
        assert!(!offered.has(VIRTIO_BLK_F_DISCARD) && !offered.has(VIRTIO_BLK_F_WRITE_ZEROES));
        let offered = Features::offered(BlockProperties { discards: false, ..DISK });
        assert!(offered.has(VIRTIO_BLK_F_WRITE_ZEROES) && !offered.has(VIRTIO_BLK_F_DISCARD));
    }

    #[test]
    fn a_driver_that_does_not_flush_writes_through() {
        let flush = 1 << VIRTIO_BLK_F_FLUSH;
        let wce = 1 << VIRTIO_BLK_F_CONFIG_WCE;
        for (features, cache, through) in [
            (0, true, true),
            (flush, true, false),
            (flush, false, false),
            (flush | wce, true, false),
            (flush | wce, false, true),
        ] {
            assert_eq!(Features(features).writes_through(cache), through, "{features:x} {cache}");
        }
    }
}
