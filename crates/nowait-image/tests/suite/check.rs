//! The counts of a check, compared with those of `qemu-img check`.

use std::os::unix::fs::FileExt;

use nowait_image::check::{Report, check};
use nowait_image::repair::repair;
use nowait_image::{Chain, ChainOptions, Format};

use crate::images::{Images, output, qemu_img};
use nowait_testkit::{Random, require_qemu, tool};

const FIRST_SEED: u64 = 9_000;
const CHAINS: u64 = 12;
const CLUSTER: u64 = 65536;

fn ours(images: &Images) -> Report {
    let options = ChainOptions {
        format: Some(Format::Qcow2),
        damaged: true,
        data_files: images.data_files(),
        ..ChainOptions::default()
    };
    let chain = Chain::open(&images.path(), &options).unwrap();
    check(&chain, &mut |_, _| {}).unwrap()
}

/// The number behind `key` in the output of `qemu-img check --output=json`; 0 where it is missing.
fn number(text: &str, key: &str) -> u64 {
    let Some((_, rest)) = text.split_once(&format!("\"{key}\": ")) else { return 0 };
    rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
}

fn theirs(images: &Images) -> (Option<i32>, Report) {
    let mut command = tool("qemu-img");
    command.current_dir(images.directory());
    let (status, output_text) =
        output(command.args(["check", "-f", "qcow2", "--output=json", images.name()]));
    let report = Report {
        corruptions: number(&output_text, "corruptions"),
        leaks: number(&output_text, "leaks"),
        total_clusters: number(&output_text, "total-clusters"),
        allocated_clusters: number(&output_text, "allocated-clusters"),
        compressed_clusters: number(&output_text, "compressed-clusters"),
        fragmented_clusters: number(&output_text, "fragmented-clusters"),
        image_end: number(&output_text, "image-end-offset"),
    };
    (status, report)
}

#[test]
fn consistent_images_have_the_same_counts_as_in_qemu() {
    nowait_testkit::needs!(require_qemu());
    for seed in FIRST_SEED..FIRST_SEED + CHAINS {
        let images = Images::seeded(seed);
        assert_eq!((Some(0), ours(&images)), theirs(&images), "seed {seed}");
    }
}

#[test]
fn snapshots_and_bitmaps_are_in_use_and_no_leaks() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::qcow2("8M", "", &["write -P 1 0 3M"]);
    for arguments in [
        &["snapshot", "-c", "before", "disk.qcow2"][..],
        &["bitmap", "--add", "disk.qcow2", "changes"],
    ] {
        qemu_img(images.directory(), arguments);
    }
    crate::images::qemu_io(
        images.directory(),
        "qcow2",
        "disk.qcow2",
        &["write -P 2 1M 64k".into()],
    );
    let report = ours(&images);
    assert_eq!((report.corruptions, report.leaks), (0, 0), "{report:?}");
}

/// Sets the refcount of `cluster` in an image with 16-bit refcounts whose only refcount block is at
/// `block`.
fn set_refcount(images: &Images, block: u64, cluster: u64, count: u16) {
    let file = std::fs::File::options().write(true).open(images.path()).unwrap();
    file.write_all_at(&count.to_be_bytes(), block + cluster * 2).unwrap();
}

#[test]
fn leaks_and_corruptions_are_counted_as_qemu_does() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::qcow2("8M", "", &["write -P 1 0 2M"]);
    let block = 2 * CLUSTER;
    set_refcount(&images, block, 8, 2);
    let end = ours(&images).image_end / CLUSTER;
    assert_eq!(theirs(&images).1, ours(&images));
    // Behind all clusters in use, in a file made long enough: leaks and nothing else.
    set_refcount(&images, block, 8, 1);
    let file = std::fs::File::options().write(true).open(images.path()).unwrap();
    file.set_len((end + 5) * CLUSTER).unwrap();
    for cluster in end..end + 3 {
        set_refcount(&images, block, cluster, 1);
    }
    let report = ours(&images);
    assert_eq!((report.corruptions, report.leaks), (0, 3));
    assert_eq!((Some(3), report), theirs(&images));
    // A cluster in use with a refcount of 0.
    set_refcount(&images, block, 10, 0);
    let report = ours(&images);
    assert!(report.corruptions > 0);
    assert_eq!((Some(2), report), theirs(&images));
}

#[test]
fn we_and_qemu_agree_on_which_damaged_images_are_corrupt() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::qcow2("8M", "", &["write -P 1 0 2M", "write -z 3M 64k", "write 5M 1M"]);
    let bytes = std::fs::read(images.path()).unwrap();
    let mut random = Random::from_seed(FIRST_SEED);
    let tables = [CLUSTER, 2 * CLUSTER, 3 * CLUSTER, 4 * CLUSTER];
    for round in 0..40 {
        let mut damaged = bytes.clone();
        // One bit near the beginning of one of the tables, where the entries are.
        let table = tables[random.below(4) as usize] as usize;
        damaged[table + random.below(48) as usize] ^= 1 << random.below(8);
        std::fs::write(images.path(), &damaged).unwrap();
        let (ours, (status, theirs)) = (ours(&images), theirs(&images));
        // A wrong pointer may count as a reference to its target or not at all, so only these
        // states are compared.
        let state =
            |report: &Report| (report.corruptions > 0, report.corruptions + report.leaks > 0);
        assert_eq!(state(&ours), state(&theirs), "round {round}: {ours:?}, {status:?} {theirs:?}");
    }
}

fn repaired(images: &Images) -> nowait_image::repair::Repaired {
    let format = Some(Format::Qcow2);
    let options = ChainOptions { format, damaged: true, writable: true, ..Default::default() };
    let chain = Chain::open(&images.path(), &options).unwrap();
    repair(&chain, &mut |_, _| {}).unwrap()
}

#[test]
fn a_repaired_image_passes_qemus_check_and_has_the_same_bytes() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::qcow2("8M", "", &["write -P 1 0 2M"]);
    let reader = |images: &Images| {
        let chain = Chain::open(&images.path(), &ChainOptions::default()).unwrap();
        let mut bytes = vec![0; 8 << 20];
        nowait_image::ChainReader::new(chain.layers()).unwrap().read_at(0, &mut bytes).unwrap();
        bytes
    };
    let before = reader(&images);
    let block = 2 * CLUSTER;
    for (cluster, count) in [(6, 0), (9, 5), (11, 0), (40, 1), (41, 1)] {
        set_refcount(&images, block, cluster, count);
    }
    let file = std::fs::File::options().write(true).open(images.path()).unwrap();
    file.set_len(50 * CLUSTER).unwrap();
    // The mark "dirty".
    file.write_all_at(&[1], 79).unwrap();
    let found = ours(&images);
    assert_eq!((found.corruptions, found.leaks), (2 + 3, 3), "two counts, three flags");
    let done = repaired(&images);
    assert_eq!((done.corruptions_fixed, done.leaks_fixed), (5, 3));
    assert_eq!((Some(0), done.report), theirs(&images));
    assert!(reader(&images) == before);
}

#[test]
fn an_image_with_clusters_of_unknown_use_is_neither_checked_nor_repaired() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::qcow2("8M", "", &["write -P 1 0 64k"]);
    let file = std::fs::File::options().write(true).open(images.path()).unwrap();
    // Incompatible bits: an unknown one, and "dirty" or "corrupt"; encryption by LUKS, whose header
    // would be taken for a leak.
    let encrypted = [(35, 2), (79, 1)];
    for changes in [[(72, 1), (79, 1)], [(72, 1), (79, 2)], encrypted] {
        let before = std::fs::read(images.path()).unwrap();
        for (at, byte) in changes {
            file.write_all_at(&[byte], at).unwrap();
        }
        for writable in [false, true] {
            let format = Some(Format::Qcow2);
            let options = ChainOptions { format, damaged: true, writable, ..Default::default() };
            let refused = Chain::open(&images.path(), &options).unwrap_err().to_string();
            let why = ["features that are not known", "it is encrypted"];
            assert!(why.iter().any(|why| refused.contains(why)), "{refused}");
        }
        file.write_all_at(&before, 0).unwrap();
    }
}

#[test]
fn a_repair_frees_no_cluster_while_a_pointer_is_invalid() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::qcow2("8M", "", &["write -P 1 0 2M"]);
    let file = std::fs::File::options().write(true).open(images.path()).unwrap();
    // A reserved bit in the first entry of the L2 table: its target is in use nevertheless.
    let at = 4 * CLUSTER + 7;
    file.write_all_at(&[2], at).unwrap();
    let before = std::fs::read(images.path()).unwrap();
    let done = repaired(&images);
    assert!(done.report.corruptions > 0 && done.leaks_fixed == 0, "{done:?}");
    assert!(std::fs::read(images.path()).unwrap() == before);
    file.write_all_at(&[0], at).unwrap();
    assert_eq!(theirs(&images).0, Some(0));
}

#[test]
fn a_repair_writes_to_no_refcount_block_with_another_use() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::qcow2("8M", "", &["write -P 1 0 2M"]);
    let file = std::fs::File::options().write(true).open(images.path()).unwrap();
    // The refcount table puts the first block at the position of the L2 table.
    file.write_all_at(&(4 * CLUSTER).to_be_bytes(), CLUSTER).unwrap();
    let before = std::fs::read(images.path()).unwrap();
    let done = repaired(&images);
    assert!(done.report.corruptions > 0 && done.corruptions_fixed == 0, "{done:?}");
    assert!(std::fs::read(images.path()).unwrap() == before);
}
