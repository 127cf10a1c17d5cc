//! Small qcow2 images, byte for byte, whose headers name other files.
//!
//! Invariant: the images are valid: QEMU opens them if the files that they name exist.

/// Bytes of a cluster of these images.
pub const CLUSTER: usize = 64 << 10;
/// Bytes of their disk.
pub const DISK: u64 = 1 << 20;
/// The offset of the L1 table.
const L1: usize = 3 * CLUSTER;

/// The file names in a header.
#[derive(Clone, Copy, Debug, Default)]
pub struct Names<'a> {
    /// The backing file, and its format.
    pub backing: Option<(&'a str, &'a str)>,
    /// The external raw data file.
    pub data: Option<&'a str>,
}

/// An empty image with these names.
pub fn image(names: Names<'_>) -> Vec<u8> {
    let mut bytes = vec![0; 4 * CLUSTER];
    let mut put = |at: usize, what: &[u8]| bytes[at..at + what.len()].copy_from_slice(what);
    put(0, b"QFI\xfb");
    put(4, &3u32.to_be_bytes());
    put(20, &16u32.to_be_bytes());
    put(24, &DISK.to_be_bytes());
    put(36, &1u32.to_be_bytes());
    put(40, &(L1 as u64).to_be_bytes());
    put(48, &(CLUSTER as u64).to_be_bytes());
    put(56, &1u32.to_be_bytes());
    put(96, &4u32.to_be_bytes());
    put(100, &104u32.to_be_bytes());
    put(CLUSTER, &(2 * CLUSTER as u64).to_be_bytes());
    for cluster in 0..4 {
        put(2 * CLUSTER + 2 * cluster, &1u16.to_be_bytes());
    }
    let mut at = 104;
    let mut extension = |kind: u32, text: &str| {
        put(at, &kind.to_be_bytes());
        put(at + 4, &(text.len() as u32).to_be_bytes());
        put(at + 8, text.as_bytes());
        at += 8 + text.len().next_multiple_of(8);
    };
    if let Some((_, format)) = names.backing {
        extension(0xe279_2aca, format);
    }
    if let Some(data) = names.data {
        extension(0x4441_5441, data);
        put(72, &4u64.to_be_bytes());
        put(88, &2u64.to_be_bytes());
    }
    if let Some((name, _)) = names.backing {
        put(4096, name.as_bytes());
        put(8, &4096u64.to_be_bytes());
        put(16, &(name.len() as u32).to_be_bytes());
    }
    bytes
}
