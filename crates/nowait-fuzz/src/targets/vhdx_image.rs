//! A VHDX image: the input is its header, region table, metadata and block table, which are put in their
//! places with right checksums.
//!
//! Checked: as in [`crate::targets::read_only_image`].

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crc_fast::{CrcAlgorithm, checksum};
use nowait_image::Format;

use crate::target::{Check, Target};
use crate::targets::image::scratch;
use crate::targets::read_only_image;

/// Where each part is, its bytes in the input, and the bytes that its checksum is of; 0 without one.
const PARTS: [(u64, usize, usize); 6] = [
    (64 << 10, 80, 4096),
    (128 << 10, 80, 4096),
    (192 << 10, 96, 64 << 10),
    (2 << 20, 160, 0),
    ((2 << 20) + (64 << 10), 32, 0),
    (3 << 20, usize::MAX, 0),
];
const FILE_BYTES: u64 = 8 << 20;

pub(crate) const TARGET: Target = Target {
    name: "vhdx",
    about: "VHDX headers, regions, metadata and block tables: open, map, read, serve",
    prepare,
    seeds: || vec![seed(1 << 20, 512), seed(32 << 20, 4096)],
    words: &[
        b"head",
        b"regi",
        b"metadata",
        &[6, 0, 0x40, 0, 0, 0, 0, 0],
        &[6, 0, 0x70, 0, 0, 0, 0, 0],
        &[0, 0, 0x10, 0],
        &[0, 0, 0, 0x10],
        &[0, 16, 0, 0],
        &[0xff; 8],
    ],
    longest: 4096,
    memory: 64 << 20,
};

fn prepare() -> Result<Check, String> {
    let directory = scratch()?;
    let path = directory.path().join("image.vhdx");
    Ok(Box::new(move |input| {
        // The closure keeps the directory alive.
        debug_assert!(path.starts_with(directory.path()));
        write(&path, input).map_err(|error| format!("{}: {error}", path.display()))?;
        read_only_image::check(&path, Format::Vhdx)
    }))
}

fn write(path: &Path, mut input: &[u8]) -> io::Result<()> {
    let file = File::create(path)?;
    file.set_len(FILE_BYTES)?;
    file.write_all_at(b"vhdxfile", 0)?;
    for (at, most, checked) in PARTS {
        let (part, rest) = input.split_at(most.min(input.len()));
        input = rest;
        let mut part = part.to_vec();
        if checked > 0 {
            part.resize(checked, 0);
            part[4..8].fill(0);
            let sum = checksum(CrcAlgorithm::Crc32Iscsi, &part) as u32;
            part[4..8].copy_from_slice(&sum.to_le_bytes());
        }
        file.write_all_at(&part, at)?;
    }
    // Bytes for blocks.
    file.write_all_at(&[7; 8192], 4 << 20)?;
    file.write_all_at(&[9; 8192], FILE_BYTES - 8192)
}

/// An image of a disk of 6 blocks of `block` bytes in sectors of `sector` bytes, of which two are there.
fn seed(block: u32, sector: u32) -> Vec<u8> {
    let mut header = b"head\0\0\0\0\x01".to_vec();
    header.resize(66, 0);
    header.push(1);
    header.resize(80, 0);
    let mut other = header.clone();
    other[8] = 2;
    let entry = |guid: [u8; 16], numbers: &[u32]| {
        let numbers = numbers.iter().flat_map(|number| number.to_le_bytes());
        let mut entry: Vec<u8> = guid.into_iter().chain(numbers).collect();
        entry.resize(32, 0);
        entry
    };
    let guid = |start: &[u8; 8], end: u64| {
        let mut guid = [0; 16];
        guid[..8].copy_from_slice(start);
        guid[8..].copy_from_slice(&end.to_be_bytes());
        guid
    };
    let table = guid(b"\x66\x77\xc2\x2d\x23\xf6\x00\x42", 0x9d64_115e_9bfd_4a08);
    let metadata = guid(b"\x06\xa2\x7c\x8b\x90\x47\x9a\x4b", 0xb8fe_575f_050f_886e);
    let mut regions = b"regi\0\0\0\0\x02\0\0\0\0\0\0\0".to_vec();
    regions.extend(entry(table, &[3 << 20, 0, 1 << 20, 1]));
    regions.extend(entry(metadata, &[2 << 20, 0, 1 << 20, 1]));
    regions.resize(96, 0);
    let parameters = guid(b"\x37\x67\xa1\xca\x36\xfa\x43\x4d", 0xb3b6_33f0_aa44_e76b);
    let size = guid(b"\x24\x42\xa5\x2f\x1b\xcd\x76\x48", 0xb211_5dbe_d83b_f4b8);
    let logical = guid(b"\x1d\xbf\x41\x81\x6f\xa9\x09\x47", 0xba47_f233_a8fa_ab5f);
    let mut items = b"metadata\0\0\x03".to_vec();
    items.resize(32, 0);
    for (guid, at, len) in [(parameters, 0, 8), (size, 8, 8), (logical, 16, 4)] {
        items.extend(entry(guid, &[(64 << 10) + at, len, 4]));
    }
    items.resize(160, 0);
    let mut values = block.to_le_bytes().to_vec();
    values.extend([0; 4]);
    values.extend((u64::from(block) * 6).to_le_bytes());
    values.extend(sector.to_le_bytes());
    values.resize(32, 0);
    let blocks = [0u64, (4 << 20) + 6, 2, (7 << 20) + 6, 3, 1];
    let blocks = blocks.iter().flat_map(|entry| entry.to_le_bytes()).collect();
    [header, other, regions, items, values, blocks].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_seed_is_opened() {
        let mut check = prepare().unwrap();
        let directory = scratch().unwrap();
        let path = directory.path().join("image.vhdx");
        for seed in (TARGET.seeds)() {
            check(&seed).unwrap();
            write(&path, &seed).unwrap();
            assert!(read_only_image::opens(&path, Format::Vhdx));
        }
    }
}
