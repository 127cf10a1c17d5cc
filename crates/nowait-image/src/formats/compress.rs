//! Compression of clusters, as QEMU compresses them.
//!
//! Invariant: compressed data is shorter than its cluster, and decompressed by every program that reads the format.

use flate2::{Compress, FlushCompress, Status};

use crate::formats::decompress::Compression;

/// The levels of QEMU: the defaults of zlib and of zstd.
const DEFLATE_LEVEL: u32 = 6;
const ZSTD_LEVEL: i32 = 3;
/// Deflated data refers to at most 1 << this many bytes before: QEMU inflates with such a window.
const DEFLATE_WINDOW_LOG: u8 = 12;

/// Compresses clusters, one after the other.
pub struct ClusterCompressor {
    state: State,
    /// Room for the data, less than a cluster.
    packed: Vec<u8>,
}

enum State {
    Deflate(Box<Compress>),
    Zstd(zstd::bulk::Compressor<'static>),
}

impl ClusterCompressor {
    /// For clusters of `cluster_bytes`; `None` for a compression that is not known, or without memory.
    #[must_use]
    pub fn new(compression: Compression, cluster_bytes: u64) -> Option<Self> {
        let state = match compression {
            Compression::Deflate => {
                let level = flate2::Compression::new(DEFLATE_LEVEL);
                let state = Compress::new_with_window_bits(level, false, DEFLATE_WINDOW_LOG);
                State::Deflate(Box::new(state))
            }
            Compression::Zstd => State::Zstd(zstd::bulk::Compressor::new(ZSTD_LEVEL).ok()?),
            Compression::Unknown(_) => return None,
        };
        let room = usize::try_from(cluster_bytes.saturating_sub(1)).ok()?;
        Some(Self { state, packed: vec![0; room] })
    }

    /// `cluster`, compressed; `None` where it does not get shorter.
    pub fn compress(&mut self, cluster: &[u8]) -> Option<&[u8]> {
        let len = match &mut self.state {
            State::Deflate(state) => {
                state.reset();
                let done = state.compress(cluster, &mut self.packed, FlushCompress::Finish);
                (done.ok()? == Status::StreamEnd).then_some(state.total_out() as usize)?
            }
            State::Zstd(state) => state.compress_to_buffer(cluster, &mut self.packed[..]).ok()?,
        };
        self.packed.get(..len)
    }
}

#[cfg(test)]
mod tests {
    use nowait_testkit::Random;

    use super::*;
    use crate::formats::decompress::{Form, Packing, decompress_cluster};

    #[test]
    fn clusters_of_each_size_are_compressed_and_decompressed_again() {
        let mut random = Random::from_seed(1);
        for bits in [9, 12, 16, 21] {
            let bytes = 1 << bits;
            let text: Vec<u8> = (0..bytes).map(|n| (n / 7 % 251) as u8).collect();
            let noise: Vec<u8> = (0..bytes).map(|_| random.below(256) as u8).collect();
            for (compression, form) in
                [(Compression::Deflate, Form::Deflate), (Compression::Zstd, Form::Zstd)]
            {
                let mut compressor = ClusterCompressor::new(compression, bytes).unwrap();
                assert_eq!(compressor.compress(&noise), None, "{compression:?}");
                for cluster in [&text, &vec![7; bytes as usize]] {
                    let packed = compressor.compress(cluster).unwrap();
                    assert!(packed.len() < cluster.len());
                    let packing = Packing { bytes, least: bytes, form };
                    assert_eq!(decompress_cluster(packed, packing).as_deref(), Some(&cluster[..]));
                }
            }
        }
        assert!(ClusterCompressor::new(Compression::Unknown(2), 512).is_none());
    }
}
