//! VMDK images of every arrangement that qemu-img makes, and damaged ones.
//!
//! Invariant: as in [`crate::read_only_formats`].

use std::fs;

use nowait_image::{Chain, ChainOptions, formats, map};
use nowait_testkit::require_qemu;

use crate::images::qemu_img;
use crate::read_only_formats::{Disk, assert_reads, refusal, try_damaged};

const ARRANGEMENTS: [&str; 5] = [
    "monolithicSparse",
    "monolithicFlat",
    "twoGbMaxExtentSparse",
    "twoGbMaxExtentFlat",
    "streamOptimized",
];

fn our_map(disk: &Disk, name: &str) -> String {
    let chain = Chain::open(&disk.path(name), &ChainOptions::default()).unwrap();
    let mut out = Vec::new();
    map::write_json(&chain, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

#[test]
fn every_arrangement_is_read_byte_for_byte_and_has_the_map_of_qemu() {
    nowait_testkit::needs!(require_qemu());
    for (seed, (blocks, more)) in [(3000, 0), (517, 512), (1, 0)].into_iter().enumerate() {
        let disk = Disk::new(seed as u64, blocks, more);
        for arrangement in ARRANGEMENTS {
            let name = format!("{arrangement}.vmdk");
            disk.convert("vmdk", &format!("subformat={arrangement}"), &name);
            assert_reads(&disk, &name, "vmdk");
            let theirs = qemu_img(disk.directory(), &["map", "--output=json", &name]);
            assert_eq!(our_map(&disk, &name), theirs, "{name}");
        }
    }
}

#[test]
fn an_image_of_several_extents_is_read_across_their_borders() {
    nowait_testkit::needs!(require_qemu());
    let mut disk = Disk::new(9, 1500, 0);
    // Three parts of the disk: sparse, zeros in no file, flat from a position inside a file on.
    let bytes = &disk.bytes;
    let (first, last) = (700 * 4096 + 512, 900 * 4096);
    fs::write(disk.path("a.raw"), &bytes[..first]).unwrap();
    let convert = ["convert", "-q", "-f", "raw", "-O", "vmdk", "a.raw", "a.vmdk"];
    qemu_img(disk.directory(), &convert);
    fs::write(disk.path("c.bin"), [&[0xee; 1024], &bytes[last..]].concat()).unwrap();
    let text = format!(
        "# Disk DescriptorFile\nCID=1\nparentCID=ffffffff\ncreateType=\"twoGbMaxExtentSparse\"\n\
         RW {} SPARSE \"a.vmdk\"\nRW {} ZERO\nRW {} FLAT \"c.bin\" 2\n",
        first / 512,
        (last - first) / 512,
        (bytes.len() - last) / 512,
    );
    fs::write(disk.path("all.vmdk"), text).unwrap();
    disk.bytes[first..last].fill(0);
    assert_reads(&disk, "all.vmdk", "vmdk");
}

/// A stream's image as VMware writes it: the first header does not know where the tables are, and a second
/// one at the end does.
#[test]
fn the_tables_of_a_stream_are_found_by_its_footer() {
    nowait_testkit::needs!(require_qemu());
    let disk = Disk::new(4, 700, 0);
    disk.convert("vmdk", "subformat=streamOptimized", "disk.vmdk");
    let whole = fs::read(disk.path("disk.vmdk")).unwrap();
    let mut bytes = whole.clone();
    bytes.resize(whole.len().next_multiple_of(512), 0);
    bytes[56..64].fill(0xff);
    let mut marker = [0; 512];
    (marker[0], marker[12]) = (1, 3);
    let end = [0; 512];
    let all = [&bytes[..], &marker, &whole[..512], &end].concat();
    fs::write(disk.path("disk.vmdk"), &all).unwrap();
    assert_reads(&disk, "disk.vmdk", "vmdk");
    for (cut, whole) in [(all.len() - 512, false), (all.len() - 1, false), (all.len(), true)] {
        fs::write(disk.path("disk.vmdk"), &all[..cut]).unwrap();
        assert_eq!(try_damaged(&disk, "disk.vmdk", "vmdk"), whole, "{cut} of {}", all.len());
    }
}

#[test]
fn an_image_is_only_read_and_only_with_its_name_guessed() {
    nowait_testkit::needs!(require_qemu());
    let disk = Disk::new(1, 40, 0);
    disk.convert("vmdk", "", "disk.vmdk");
    let writable = ChainOptions { writable: true, ..ChainOptions::default() };
    let line = refusal(&disk, "disk.vmdk", &writable);
    assert!(line.contains("a vmdk image is only read (say --read-only"), "{line}");
    fs::rename(disk.path("disk.vmdk"), disk.path("disk.img")).unwrap();
    let line = refusal(&disk, "disk.img", &ChainOptions::default());
    assert!(line.contains("does not end in .vmdk (say which it is: -f vmdk or -f raw)"), "{line}");
    let named = ChainOptions { format: formats::by_name("vmdk"), ..ChainOptions::default() };
    assert!(nowait_image::open(&disk.path("disk.img"), &named).is_ok());
}

#[test]
fn a_descriptor_names_only_files_beside_it() {
    let disk = Disk::new(1, 8, 0);
    fs::create_dir(disk.path("below")).unwrap();
    for name in ["below/a.bin", ".hidden", "a.bin"] {
        fs::write(disk.path(name), [1; 4096]).unwrap();
    }
    std::os::unix::fs::symlink("/etc/passwd", disk.path("link")).unwrap();
    let absolute = disk.path("a.bin");
    for (name, why) in [
        ("below/a.bin", "named by a path"),
        ("../a.bin", "named by a path"),
        ("..", "named by a path"),
        (absolute.to_str().unwrap(), "named by a path"),
        ("/etc/passwd", "named by a path"),
        ("", "named by a path"),
        (".hidden", "is hidden"),
        ("link", "not in the image's own directory"),
        ("missing", "is missing"),
    ] {
        let text = format!("# Disk DescriptorFile\nparentCID=ffffffff\nRW 8 FLAT \"{name}\" 0\n");
        fs::write(disk.path("d.vmdk"), text).unwrap();
        let line = refusal(&disk, "d.vmdk", &ChainOptions::default());
        assert!(line.contains(why), "{name}: {line}");
    }
    for (sectors, is_whole) in [(8, true), (9, false)] {
        let text =
            format!("# Disk DescriptorFile\nparentCID=ffffffff\nRW {sectors} FLAT \"a.bin\" 0\n");
        fs::write(disk.path("d.vmdk"), text).unwrap();
        let opened = nowait_image::open(&disk.path("d.vmdk"), &ChainOptions::default());
        assert_eq!(opened.is_ok(), is_whole, "{sectors} sectors of 8");
    }
}

#[test]
fn an_image_with_a_parent_is_refused() {
    nowait_testkit::needs!(require_qemu());
    let disk = Disk::new(1, 40, 0);
    disk.convert("vmdk", "", "base.vmdk");
    let create = ["create", "-q", "-f", "vmdk", "-F", "vmdk", "-b", "base.vmdk", "top.vmdk"];
    qemu_img(disk.directory(), &create);
    let line = refusal(&disk, "top.vmdk", &ChainOptions::default());
    assert!(line.contains("stands on a parent") && line.contains("qemu-img convert"), "{line}");
}

#[test]
fn each_damaged_field_is_refused_or_read_and_nothing_is_changed() {
    nowait_testkit::needs!(require_qemu());
    let disk = Disk::new(5, 300, 0);
    for arrangement in ["monolithicSparse", "streamOptimized"] {
        disk.convert("vmdk", &format!("subformat={arrangement}"), "disk.vmdk");
        let whole = fs::read(disk.path("disk.vmdk")).unwrap();
        let tail = whole.len() - 1024;
        let mut refused = 0;
        // The fields of the header, of the footer, and the beginning of the tables behind the descriptor.
        for base in [0, tail, 21 * 512, 26 * 512] {
            for at in (base..base + 80).step_by(2) {
                for value in [0, 0xff, whole[at] ^ 1] {
                    let mut bytes = whole.clone();
                    bytes[at..at + 2].fill(value);
                    fs::write(disk.path("disk.vmdk"), &bytes).unwrap();
                    refused += u32::from(!try_damaged(&disk, "disk.vmdk", "vmdk"));
                }
            }
        }
        assert!(refused > 60, "{refused}");
        for len in [0, 3, 4, 100, 511, 512, 1024, 12_000, whole.len() / 2, whole.len() - 70_000] {
            fs::write(disk.path("disk.vmdk"), &whole[..len]).unwrap();
            assert!(!try_damaged(&disk, "disk.vmdk", "vmdk"), "{arrangement}, {len}");
        }
    }
}
