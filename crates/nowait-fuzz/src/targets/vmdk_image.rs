//! A VMDK image, byte for byte: a descriptor or a sparse extent, beside files that it may name.
//!
//! Checked: as in [`crate::targets::read_only_image`].

use std::fs;

use nowait_image::Format;

use crate::target::{Check, Target};
use crate::targets::image::{BACKING, backing_bytes, scratch};
use crate::targets::read_only_image;

const SECTOR: usize = 512;

pub(crate) const TARGET: Target = Target {
    name: "vmdk",
    about: "VMDK descriptors, headers and grain tables: open, map, read, serve",
    prepare,
    seeds,
    words: &[
        b"KDMV",
        b"# Disk DescriptorFile",
        b"RW 8 FLAT \"below.raw\" 0\n",
        b"RW 8 ZERO\n",
        b"RW 64 SPARSE \"image.vmdk\"\n",
        b"RW 64 SPARSE \"part.vmdk\"\n",
        b"parentCID=ffffffff\n",
        b"parentFileNameHint=",
        &[0xff; 8],
        &[3, 0, 0, 0],
        &[0, 0, 1, 0],
        &[5, 0, 1, 0],
        &[0, 0, 3, 0],
        &[0, 2, 0, 0],
        &[0x78, 0x9c],
    ],
    longest: 32 << 10,
    memory: 128 << 20,
};

fn prepare() -> Result<Check, String> {
    let directory = scratch()?;
    let write = |name: &str, bytes: &[u8]| {
        fs::write(directory.path().join(name), bytes).map_err(|error| error.to_string())
    };
    write(BACKING, &backing_bytes())?;
    write("part.vmdk", &sparse(5))?;
    let path = directory.path().join("image.vmdk");
    Ok(Box::new(move |input| {
        // The closure keeps the directory alive.
        debug_assert!(path.starts_with(directory.path()));
        fs::write(&path, input).map_err(|error| format!("{}: {error}", path.display()))?;
        read_only_image::check(&path, Format::Vmdk)
    }))
}

/// A sparse extent of 64 sectors in grains of 8, of which two have bytes. With bit 16 in `flags` they are
/// compressed.
fn sparse(flags: u32) -> Vec<u8> {
    let text = "# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\n\
                createType=\"monolithicSparse\"\nRW 64 SPARSE \"image.vmdk\"\n";
    let mut image = vec![0; 24 * SECTOR];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"KDMV\x01\0\0\0");
    put(8, &(flags & !1).to_le_bytes());
    // Sectors of the disk, of a grain, of the descriptor and before it; the place of the directory.
    for (at, number) in [(12, 64u64), (20, 8), (28, 1), (36, 1), (56, 2)] {
        put(at, &number.to_le_bytes());
    }
    put(44, &16u32.to_le_bytes());
    put(77, &1u16.to_le_bytes());
    put(SECTOR, text.as_bytes());
    put(2 * SECTOR, &3u32.to_le_bytes());
    for (grain, sector) in [(0, 8u32), (1, 16), (3, 1)] {
        put(3 * SECTOR + grain * 4, &sector.to_le_bytes());
    }
    for sector in [8, 16] {
        put(sector * SECTOR, &[sector as u8; 8 * SECTOR]);
    }
    if flags & 1 << 16 != 0 {
        for sector in [8, 16] {
            put(sector * SECTOR, &[sector as u8, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0]);
            // A stored block of 4096 bytes, and its checksum by zlib: of zeros.
            put(sector * SECTOR + 12, &[0x78, 0x01, 1, 0, 16, 0xff, 0xef]);
            put(sector * SECTOR + 19, &[0; 4096 - 19]);
        }
    }
    image
}

fn seeds() -> Vec<Vec<u8>> {
    let flat = "# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType=\"custom\"\n\
                RW 16 FLAT \"below.raw\" 1\nRW 8 ZERO\nRW 60 SPARSE \"part.vmdk\"\n";
    vec![flat.into(), sparse(0), sparse(4), sparse(3 << 16)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_seed_is_opened() {
        let mut check = prepare().unwrap();
        for seed in seeds() {
            check(&seed).unwrap();
        }
        let directory = scratch().unwrap();
        fs::write(directory.path().join(BACKING), backing_bytes()).unwrap();
        fs::write(directory.path().join("part.vmdk"), sparse(5)).unwrap();
        let path = directory.path().join("image.vmdk");
        for seed in seeds() {
            fs::write(&path, seed).unwrap();
            assert!(read_only_image::opens(&path, Format::Vmdk));
        }
    }
}
