//! Disks as of internal snapshots: IMAGE@NAME, compared with what QEMU reads.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use nowait::{BlockingFile, Direct};
use nowait_image::check::check;
use nowait_image::create::{CreateOptions, create};
use nowait_image::qcow2_disk::{self, ServeOptions};
use nowait_image::{Chain, ChainOptions, ChainReader, Format, ImageFile, Purpose, map};
use nowait_testkit::{Random, no_child_starts, require_qemu};

use crate::images::{Images, qemu_img, qemu_io};

const MIB: u64 = 1 << 20;

/// The path of `snapshot` of the image.
fn at(images: &Images, snapshot: &str) -> PathBuf {
    format!("{}@{snapshot}", images.path().display()).into()
}

/// The first 4 MiB of the snapshot by QEMU, which gives it the size that the disk has now.
fn theirs(images: &Images, snapshot: &str) -> Vec<u8> {
    let of = format!("snapshot.name={snapshot}");
    let convert = ["convert", "-l", &of, "-f", "qcow2", "-O", "raw", images.name(), "all.raw"];
    qemu_img(images.directory(), &convert);
    let mut bytes = fs::read(images.directory().join("all.raw")).unwrap();
    bytes.truncate(4 << 20);
    bytes
}

/// All bytes as the offline commands read them, and as a server does.
fn ours(images: &Images, snapshot: &str) -> [Vec<u8>; 2] {
    let open = || Chain::open(&at(images, snapshot), &ChainOptions::default()).unwrap();
    let chain = open();
    let reader = ChainReader::new(chain.layers()).unwrap();
    let mut offline = vec![0; reader.size() as usize];
    reader.read_at(0, &mut offline).unwrap();
    let mut mapped = 0;
    map::map(&chain, |entry| {
        let bytes = &offline[entry.start as usize..(entry.start + entry.length) as usize];
        assert!(entry.data || bytes.iter().all(|&byte| byte == 0), "{entry:?}");
        mapped += entry.length;
        Ok(())
    })
    .unwrap();
    assert_eq!(mapped, reader.size());
    let options = ServeOptions { writable: false, direct: Direct::Off, cache_holes: true };
    let (disk, _open) = qcow2_disk::open(open(), options).unwrap();
    let file = BlockingFile::new(Arc::new(disk));
    let mut served = vec![0; file.size() as usize];
    file.read_at(&mut served, 0).unwrap();
    [offline, served]
}

fn error(images: &Images, snapshot: &str, options: &ChainOptions) -> String {
    let before = fs::read(images.path()).unwrap();
    let error = Chain::open(&at(images, snapshot), options).unwrap_err().to_string();
    assert!(fs::read(images.path()).unwrap() == before, "a refused image is left alone");
    assert!(!error.contains('\n'), "{error}");
    error
}

#[test]
fn the_disk_as_of_each_snapshot_has_the_bytes_that_qemu_reads() {
    nowait_testkit::needs!(require_qemu());
    for (seed, options) in ["", "cluster_size=512", "compression_type=zstd"].iter().enumerate() {
        let images = Images::qcow2("4M", options, &[]);
        let mut random = Random::from_seed(seed as u64);
        let names = ["before", "2", "with@sign", "last"];
        for (round, name) in names.iter().enumerate() {
            let writes = (0..6).map(|n| {
                let pos = random.below(8000) * 512;
                let len = (1 + random.below((4 * MIB - pos) / 512).min(900)) * 512;
                match n {
                    0 => format!("write -z {pos} {len}"),
                    1 => format!("write -c -P {} {} 64k", 100 + round, pos / 65536 * 65536),
                    _ => format!("write -P {} {pos} {len}", 10 * round + n),
                }
            });
            qemu_io(images.directory(), "qcow2", images.name(), &writes.collect::<Vec<_>>());
            qemu_img(images.directory(), &["snapshot", "-c", name, images.name()]);
        }
        qemu_img(images.directory(), &["resize", "-q", images.name(), "6M"]);
        for name in names {
            let expected = theirs(&images, name);
            for found in ours(&images, name) {
                assert!(found == expected, "{options}: {name}");
            }
        }
        // The name "2" comes before the ID 2, and an ID is found where there is no such name.
        assert!(ours(&images, "1") == ours(&images, "before"));
        assert!(ours(&images, "2")[0] == theirs(&images, "2"));
        let before = fs::read(images.path()).unwrap();
        let over = images.directory().join("over.qcow2");
        let of = CreateOptions {
            backing: Some("disk.qcow2@before".into()),
            backing_format: Some(Format::Qcow2),
            ..CreateOptions::new(Format::Qcow2, None)
        };
        let chain = {
            let _alone = no_child_starts();
            assert_eq!(create(&over, &of).unwrap(), 4 * MIB);
            Chain::open(&over, &ChainOptions::default()).unwrap()
        };
        let mut found = vec![0; 4 << 20];
        ChainReader::new(chain.layers()).unwrap().read_at(0, &mut found).unwrap();
        assert!(found == theirs(&images, "before"));
        assert!(fs::read(images.path()).unwrap() == before);
    }
}

#[test]
fn a_snapshot_is_only_read_and_what_is_none_is_refused() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::qcow2("8M", "", &["write 0 64k"]);
    qemu_img(images.directory(), &["snapshot", "-c", "before", images.name()]);
    let read = ChainOptions::default();
    let write = ChainOptions { writable: true, ..read.clone() };
    assert!(error(&images, "after", &read).contains("it has no internal snapshot 'after'"));
    assert!(error(&images, "before", &write).contains("'before' is only read (say --read-only)"));
    for purpose in [Purpose::Resize, Purpose::Repair] {
        let options = ChainOptions { purpose, ..write.clone() };
        assert!(error(&images, "before", &options).contains("only read (leave out the @"));
    }
    let raw = ChainOptions { format: Some(Format::Raw), ..read.clone() };
    assert!(error(&images, "before", &raw).contains("a raw image has no internal snapshots"));
    let chain = Chain::open(&at(&images, "before"), &read).unwrap();
    assert!(check(&chain, &mut |_, _| {}).unwrap_err().to_string().contains("leave out the @"));
    // A file that has this name is opened instead.
    fs::write(at(&images, "before"), [1; 4096]).unwrap();
    assert_eq!(Chain::open(&at(&images, "before"), &read).unwrap().top().size, 4096);
}

#[test]
fn snapshots_are_listed_as_in_qemu_and_their_damage_is_refused() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::qcow2("8M", "", &["write 0 64k"]);
    qemu_img(images.directory(), &["snapshot", "-c", "before", images.name()]);
    let file = ImageFile::open(&images.path(), false).unwrap();
    let info = Format::Qcow2.info(&file, &images.path(), None).unwrap().unwrap();
    let ours = info.json["snapshots"][0].clone();
    let json = qemu_img(images.directory(), &["info", "--output=json", images.name()]);
    let theirs: serde_json::Value = serde_json::from_str(&json).unwrap();
    for (key, value) in theirs["snapshots"][0].as_object().unwrap() {
        assert_eq!(ours[key], *value, "{key}");
    }
    assert_eq!(ours["disk-size"], 8 * MIB);
    let lines = format!("{:?}", info.lines);
    assert!(lines.contains("before (ID 1), 20"), "{lines}");
    let table = {
        let bytes = fs::read(images.path()).unwrap();
        u64::from_be_bytes(bytes[64..72].try_into().unwrap()) as usize
    };
    for (at, bytes, words) in [
        (0, &[0xff; 8][..], "its snapshot 'before' is damaged"),
        (0, &[0, 0, 0, 0, 0, 0, 2, 0], "is damaged: "),
        (8, &[0xff; 4], "an L1 table of 4294967295 entries"),
        (36, &[0xff; 4], "cut off"),
        (48, &[0x7f; 8], "a disk of "),
        (16, &[0xff; 16], ""),
    ] {
        let mut damaged = fs::read(images.path()).unwrap();
        let whole = damaged.clone();
        damaged[table + at..table + at + bytes.len()].copy_from_slice(bytes);
        fs::write(images.path(), &damaged).unwrap();
        if words.is_empty() {
            Chain::open(&self::at(&images, "before"), &ChainOptions::default()).unwrap();
        } else {
            let error = error(&images, "before", &ChainOptions::default());
            assert!(error.contains(words), "{error}");
        }
        Format::Qcow2.info(&file, &images.path(), None).unwrap();
        fs::write(images.path(), whole).unwrap();
    }
}
