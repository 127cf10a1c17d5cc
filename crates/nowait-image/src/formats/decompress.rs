//! Decompression of clusters and grains.
//!
//! Invariant: the bytes are a stranger's. Damaged or hostile data is `None`: it takes no more memory than a
//! cluster and the window that [`MAX_WINDOW_LOG`] allows, and no more time than its bytes and the cluster's.

use std::sync::Arc;

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::{
    TINFL_FLAG_PARSE_ZLIB_HEADER, TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF,
};
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};

/// The largest window of a zstd frame is 1 << this many bytes: 8 MiB, which RFC 8878 asks each decoder to
/// support. Clusters have at most 2 MiB, and so have the windows of QEMU's frames.
/// Beyond it: the cluster cannot be read (`EIO`).
const MAX_WINDOW_LOG: u32 = 23;

/// The compression of an image's clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Deflate, without a zlib header (QEMU calls it zlib).
    Deflate,
    /// Zstandard.
    Zstd,
    /// An unknown number.
    Unknown(u8),
}

/// How a cluster is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packing {
    /// Bytes of the cluster.
    pub(crate) bytes: u64,
    /// Bytes of it that the compressed data has at least.
    pub(crate) least: u64,
    pub(crate) form: Form,
}

/// The form of compressed data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Deflate, without a header.
    Deflate,
    /// Deflate with the header of zlib, behind as many other bytes.
    Zlib { behind: usize },
    /// Zstandard: one frame or several.
    Zstd,
}

/// Decompresses a cluster from `compressed`, which may have other bytes behind it. `None` if the data is
/// invalid or too short.
pub(crate) fn decompress_cluster(compressed: &[u8], packing: Packing) -> Option<Arc<[u8]>> {
    let mut cluster = vec![0; packing.bytes as usize];
    let got = match packing.form {
        Form::Deflate => inflate(compressed, 0, &mut cluster)?,
        Form::Zlib { behind } => {
            inflate(compressed.get(behind..)?, TINFL_FLAG_PARSE_ZLIB_HEADER, &mut cluster)?
        }
        Form::Zstd => unpack_zstd(compressed, &mut cluster)?,
    };
    (got as u64 >= packing.least).then(|| cluster.into())
}

/// Fills `cluster` from deflated data. Returns how many bytes there were.
fn inflate(data: &[u8], flags: u32, cluster: &mut [u8]) -> Option<usize> {
    let flags = flags | TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let (status, _, got) = decompress(&mut DecompressorOxide::new(), data, cluster, 0, flags);
    matches!(status, TINFLStatus::Done | TINFLStatus::HasMoreOutput).then_some(got)
}

/// Like [`inflate`], from frames of zstd, the last of which ends where the cluster does.
fn unpack_zstd(data: &[u8], cluster: &mut [u8]) -> Option<usize> {
    let mut decoder = Decoder::new().ok()?;
    decoder.set_parameter(DParameter::WindowLogMax(MAX_WINDOW_LOG)).ok()?;
    let mut input = InBuffer::around(data);
    let mut output = OutBuffer::around(cluster);
    loop {
        let before = (input.pos(), output.pos());
        let is_frame_left = decoder.run(&mut input, &mut output).ok()? > 0;
        let is_full = output.pos() == output.capacity();
        match (is_full, is_frame_left) {
            (true, false) => return Some(output.pos()),
            // Data without progress is cut off, or is more than a cluster.
            _ if (input.pos(), output.pos()) == before => return None,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zstd::stream::raw::{CParameter, Encoder};

    const CLUSTER: usize = 64 << 10;

    fn packing(bytes: usize) -> Packing {
        Packing { bytes: bytes as u64, least: bytes as u64, form: Form::Zstd }
    }

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|n| (n / 100 * 7) as u8).collect()
    }

    fn frame(bytes: &[u8]) -> Vec<u8> {
        zstd::bulk::compress(bytes, 3).unwrap()
    }

    /// A frame with a window of `1 << window` bytes, which does not tell its size.
    fn frame_with_window(bytes: &[u8], window: u32) -> Vec<u8> {
        let mut encoder = Encoder::new(3).unwrap();
        encoder.set_parameter(CParameter::WindowLog(window)).unwrap();
        encoder.set_parameter(CParameter::ContentSizeFlag(false)).unwrap();
        let mut out = vec![0; 2 * bytes.len() + 1024];
        let mut output = OutBuffer::around(&mut out[..]);
        let (head, tail) = bytes.split_at(bytes.len() / 2);
        for half in [head, tail] {
            encoder.run(&mut InBuffer::around(half), &mut output).unwrap();
        }
        assert_eq!(encoder.finish(&mut output, true).unwrap(), 0);
        let len = output.pos();
        out.truncate(len);
        out
    }

    #[test]
    fn frames_of_zstd_fill_exactly_one_cluster_and_what_is_behind_them_is_ignored() {
        let cluster = bytes(CLUSTER);
        let whole = frame(&cluster);
        let padded = [&whole[..], &[0x5a; 500]].concat();
        assert_eq!(decompress_cluster(&padded, packing(CLUSTER)).as_deref(), Some(&cluster[..]));
        let two = [frame(&cluster[..1000]), frame(&cluster[1000..])].concat();
        assert_eq!(decompress_cluster(&two, packing(CLUSTER)).as_deref(), Some(&cluster[..]));
        for len in [CLUSTER - 1, CLUSTER + 1] {
            assert_eq!(decompress_cluster(&frame(&bytes(len)), packing(CLUSTER)), None, "{len}");
        }
    }

    #[test]
    fn a_frame_of_zstd_that_is_cut_off_or_damaged_is_refused() {
        let whole = frame(&bytes(CLUSTER));
        for len in 0..whole.len() {
            assert_eq!(decompress_cluster(&whole[..len], packing(CLUSTER)), None, "{len} bytes");
        }
        for at in 0..4 {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            assert_eq!(decompress_cluster(&damaged, packing(CLUSTER)), None, "byte {at}");
        }
        // Frames without content bring the end no nearer, but the data ends.
        let empty = frame(&[]).repeat(1000);
        assert_eq!(decompress_cluster(&empty, packing(CLUSTER)), None);
    }

    #[test]
    fn a_frame_of_zstd_that_claims_more_than_8_mib_of_memory_is_refused() {
        let cluster = bytes(CLUSTER);
        let largest = frame_with_window(&cluster, MAX_WINDOW_LOG);
        assert_eq!(decompress_cluster(&largest, packing(CLUSTER)).as_deref(), Some(&cluster[..]));
        let more = frame_with_window(&cluster, MAX_WINDOW_LOG + 1);
        assert_eq!(decompress_cluster(&more, packing(CLUSTER)), None);
    }
}
