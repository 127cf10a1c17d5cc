//! Blocks of a disk as they are stored: compressed by zstd where that is shorter, with a checksum of their content.
//!
//! Invariant: a block that is unpacked has the checksum that was made of it; the memory for that is one block,
//! whatever the stored bytes claim.

use nowait_image::{ClusterCompressor, Compression};
use ring::digest;

/// The smallest block in bytes.
pub(crate) const MIN_BLOCK_BYTES: u64 = 64 << 10;
/// The largest block in bytes.
/// Beyond it: a point with such blocks is damaged.
pub(crate) const MAX_BLOCK_BYTES: u64 = 16 << 20;
/// The most blocks of a disk: their table takes less than 500 MiB of memory.
/// Beyond it: the blocks are larger; a disk of more than 128 TiB is refused.
pub(crate) const MAX_BLOCKS: u64 = 1 << 23;

/// The SHA-256 of the content of a block.
pub(crate) type Sum = [u8; 32];

/// Bytes of the blocks of a disk of `size` bytes; `None` where it is too large.
pub(crate) fn block_bytes_of(size: u64) -> Option<u64> {
    let mut bytes = MIN_BLOCK_BYTES;
    while size.div_ceil(bytes) > MAX_BLOCKS {
        bytes *= 2;
        if bytes > MAX_BLOCK_BYTES {
            return None;
        }
    }
    Some(bytes)
}

/// The checksum of `bytes`.
pub(crate) fn sum_of(bytes: &[u8]) -> Sum {
    let mut sum = Sum::default();
    sum.copy_from_slice(digest::digest(&digest::SHA256, bytes).as_ref());
    sum
}

/// A compressor of blocks; `None` without memory.
pub(crate) fn compressor(block_bytes: u64) -> Option<ClusterCompressor> {
    ClusterCompressor::new(Compression::Zstd, block_bytes)
}

/// Unpacks `stored` into all of `block`, and compares the checksum.
///
/// # Errors
/// The fault of the block.
pub(crate) fn unpack(stored: &[u8], sum: &Sum, block: &mut [u8]) -> Result<(), &'static str> {
    if stored.len() == block.len() {
        block.copy_from_slice(stored);
    } else if zstd::bulk::decompress_to_buffer(stored, block).ok() != Some(block.len()) {
        return Err("it cannot be decompressed");
    }
    match sum_of(block) == *sum {
        true => Ok(()),
        false => Err("its checksum is wrong"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_become_larger_with_the_disk_and_the_largest_disk_is_128_tib() {
        let most = MAX_BLOCKS * MIN_BLOCK_BYTES;
        for (size, bytes) in [
            (0, Some(64 << 10)),
            (most, Some(64 << 10)),
            (most + 1, Some(128 << 10)),
            (128 << 40, Some(MAX_BLOCK_BYTES)),
            ((128 << 40) + 1, None),
            (u64::MAX, None),
        ] {
            assert_eq!(block_bytes_of(size), bytes, "{size}");
        }
    }

    #[test]
    fn a_block_is_unpacked_only_if_every_bit_is_right() {
        let block: Vec<u8> = (0..65536u32).map(|n| (n / 100) as u8).collect();
        let packed = compressor(65536).unwrap().compress(&block).unwrap().to_vec();
        let sum = sum_of(&block);
        let mut out = vec![0; block.len()];
        assert_eq!(unpack(&packed, &sum, &mut out), Ok(()));
        assert_eq!(out, block);
        assert_eq!(unpack(&block, &sum, &mut out), Ok(()));
        assert!(unpack(&[], &sum, &mut out).is_err());
        assert!(unpack(&packed[1..], &sum, &mut out).is_err());
        assert!(unpack(&packed, &[0; 32], &mut out).is_err());
        for at in 0..packed.len() {
            let mut wrong = packed.clone();
            wrong[at] ^= 1;
            // A bit of the frame that means nothing leaves the content as it was.
            if unpack(&wrong, &sum, &mut out).is_ok() {
                assert_eq!(out, block);
            }
        }
    }

    #[test]
    fn a_frame_that_is_longer_than_a_block_takes_no_more_memory_than_one() {
        let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 3).unwrap();
        let mut out = vec![0; 65536];
        assert_eq!(unpack(&bomb, &[0; 32], &mut out), Err("it cannot be decompressed"));
        let short = zstd::bulk::compress(&[1; 100], 3).unwrap();
        assert!(unpack(&short, &sum_of(&[1; 100]), &mut out).is_err());
    }
}
