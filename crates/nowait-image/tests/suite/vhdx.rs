//! VHDX images of every kind that qemu-img makes, and damaged ones.
//!
//! Invariant: as in [`crate::read_only_formats`].

use std::fs;

use nowait_image::ChainOptions;
use nowait_testkit::require_qemu;

use crate::read_only_formats::{Disk, assert_reads, refusal, try_damaged};

/// The headers, the region tables, and as qemu-img places them the metadata and its items.
const PARTS: [usize; 6] =
    [64 << 10, 128 << 10, 192 << 10, 256 << 10, 2 << 20, (2 << 20) + (64 << 10)];

#[test]
fn every_kind_and_block_size_is_read_byte_for_byte() {
    nowait_testkit::needs!(require_qemu());
    for (seed, (blocks, more)) in [(3000, 0), (517, 512)].into_iter().enumerate() {
        let disk = Disk::new(40 + seed as u64, blocks, more);
        for (index, options) in [
            "subformat=dynamic",
            "subformat=dynamic,block_size=1M",
            "subformat=dynamic,block_size=1M,block_state_zero=off",
            "subformat=dynamic,block_size=256M",
            "subformat=fixed",
            "subformat=fixed,block_size=2M",
        ]
        .into_iter()
        .enumerate()
        {
            let name = format!("{index}.vhdx");
            disk.convert("vhdx", options, &name);
            assert_reads(&disk, &name, "vhdx");
            fs::remove_file(disk.path(&name)).unwrap();
        }
    }
}

/// The entries of sector bitmaps are passed over: with blocks of 256 MiB there is one behind each 16.
#[test]
fn a_block_behind_the_entry_of_a_sector_bitmap_is_found() {
    nowait_testkit::needs!(require_qemu());
    use nowait::BlockingFile;
    let disk = Disk::new(1, 1, 0);
    let create = ["create", "-q", "-f", "vhdx", "-o", "block_size=256M", "disk.vhdx", "9G"];
    crate::images::qemu_img(disk.directory(), &create);
    let at = [15u64, 16, 17, 31, 32, 35].map(|block| (block << 28) + 4096);
    let writes: Vec<_> =
        at.iter().map(|at| format!("write -P {} {at} 4096", (at >> 28) + 1)).collect();
    crate::images::qemu_io(disk.directory(), "vhdx", "disk.vhdx", &writes);
    let image = nowait_image::open(&disk.path("disk.vhdx"), &ChainOptions::default()).unwrap();
    let file = BlockingFile::new(image.device());
    for at in at {
        let mut bytes = [0; 12_288];
        file.read_at(&mut bytes, at - 4096).unwrap();
        let expected = [[0; 4096], [(at >> 28) as u8 + 1; 4096], [0; 4096]].concat();
        assert!(bytes[..] == expected, "{at}");
    }
}

#[test]
fn an_image_that_is_to_be_written_or_has_a_log_is_refused() {
    nowait_testkit::needs!(require_qemu());
    let disk = Disk::new(1, 40, 0);
    disk.convert("vhdx", "", "disk.vhdx");
    let writable = ChainOptions { writable: true, ..ChainOptions::default() };
    let line = refusal(&disk, "disk.vhdx", &writable);
    assert!(line.contains("a vhdx image is only read (say --read-only"), "{line}");
    let whole = fs::read(disk.path("disk.vhdx")).unwrap();
    let mut logged = whole.clone();
    for at in &PARTS[..2] {
        let header = &mut logged[*at..at + 4096];
        header[48..64].fill(7);
        set_checksum(header);
    }
    fs::write(disk.path("disk.vhdx"), &logged).unwrap();
    let line = refusal(&disk, "disk.vhdx", &ChainOptions::default());
    assert!(
        line.contains("its log has changes") && line.contains("qemu-img check -r all"),
        "{line}"
    );
    // The older header does not count, nor does one with a wrong checksum.
    let newer = usize::from(sequence(&whole, 1) > sequence(&whole, 0));
    for (part, is_refused) in [(newer, true), (1 - newer, false)] {
        let mut bytes = whole.clone();
        let header = &mut bytes[PARTS[part]..PARTS[part] + 4096];
        header[48..64].fill(7);
        set_checksum(header);
        fs::write(disk.path("disk.vhdx"), &bytes).unwrap();
        let opened = nowait_image::open(&disk.path("disk.vhdx"), &ChainOptions::default());
        assert_eq!(opened.is_err(), is_refused, "header {part}");
        bytes[PARTS[part] + 4000] ^= 1;
        fs::write(disk.path("disk.vhdx"), &bytes).unwrap();
        assert!(try_damaged(&disk, "disk.vhdx", "vhdx"), "header {part}");
    }
}

fn sequence(image: &[u8], header: usize) -> u64 {
    let at = PARTS[header] + 8;
    u64::from_le_bytes(image[at..at + 8].try_into().unwrap())
}

/// CRC-32C, bit by bit.
fn set_checksum(part: &mut [u8]) {
    part[4..8].fill(0);
    let mut crc = u32::MAX;
    for &byte in part.iter() {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ ((crc & 1) * 0x82f6_3b78);
        }
    }
    part[4..8].copy_from_slice(&(!crc).to_le_bytes());
}

/// Position of the item whose GUID begins with `guid`, in an image of qemu-img's.
fn item(image: &[u8], guid: [u8; 8]) -> usize {
    let entry = image.windows(8).position(|it| it == guid).unwrap();
    let offset = u32::from_le_bytes(image[entry + 16..entry + 20].try_into().unwrap());
    entry / (1 << 20) * (1 << 20) + offset as usize
}

#[test]
fn a_parent_is_refused_and_sectors_of_4096_bytes_are_not() {
    nowait_testkit::needs!(require_qemu());
    let disk = Disk::new(1, 40, 0);
    disk.convert("vhdx", "", "disk.vhdx");
    let mut bytes = fs::read(disk.path("disk.vhdx")).unwrap();
    let sector = item(&bytes, [0x1d, 0xbf, 0x41, 0x81, 0x6f, 0xa9, 0x09, 0x47]);
    for (size, is_right) in [(4096u32, true), (1024, false), (512, true)] {
        bytes[sector..sector + 4].copy_from_slice(&size.to_le_bytes());
        fs::write(disk.path("disk.vhdx"), &bytes).unwrap();
        assert_eq!(try_damaged(&disk, "disk.vhdx", "vhdx"), is_right, "{size}");
        if is_right {
            assert_reads(&disk, "disk.vhdx", "vhdx");
        }
    }
    let parameters = item(&bytes, [0x37, 0x67, 0xa1, 0xca, 0x36, 0xfa, 0x43, 0x4d]);
    bytes[parameters + 4] |= 2;
    fs::write(disk.path("disk.vhdx"), &bytes).unwrap();
    let line = refusal(&disk, "disk.vhdx", &ChainOptions::default());
    assert!(line.contains("stands on a parent"), "{line}");
}

#[test]
fn each_damaged_field_is_refused_or_read_and_nothing_is_changed() {
    nowait_testkit::needs!(require_qemu());
    let disk = Disk::new(5, 300, 0);
    disk.convert("vhdx", "block_size=1M", "disk.vhdx");
    let whole = fs::read(disk.path("disk.vhdx")).unwrap();
    let mut refused = 0;
    let mut attempt = |bytes: &[u8]| {
        fs::write(disk.path("disk.vhdx"), bytes).unwrap();
        refused += u32::from(!try_damaged(&disk, "disk.vhdx", "vhdx"));
    };
    for (number, part) in PARTS.into_iter().enumerate() {
        for at in (part..part + 84).step_by(2) {
            let mut bytes = whole.clone();
            bytes[at..at + 2].fill(0xff);
            let len = if number < 2 { 4096 } else { 64 << 10 };
            if number < 4 {
                // Both copies, with right checksums.
                let other = PARTS[number ^ 1];
                set_checksum(&mut bytes[part..part + len]);
                bytes.copy_within(part..part + len, other);
            }
            attempt(&bytes);
        }
    }
    for at in (3 << 20..(3 << 20) + 16).chain(1 << 20..(1 << 20) + 8) {
        for value in [0, 5, 7, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] = value;
            attempt(&bytes);
        }
    }
    assert!(refused > 60, "{refused}");
    for len in [0, 7, 8, 65_536, 200_000, 1 << 20, (2 << 20) + 5, whole.len() - (1 << 20)] {
        fs::write(disk.path("disk.vhdx"), &whole[..len]).unwrap();
        assert!(!try_damaged(&disk, "disk.vhdx", "vhdx"), "{len}");
    }
}
