//! What a check counts, beside what `qemu-img check` counts.

use std::os::unix::fs::FileExt;

use nowait_image::check::{Report, check};
use nowait_image::repair::repair;
use nowait_image::{Chain, ChainOptions, Format};

use crate::images::{Images, have_qemu, output, qemu_img};
use crate::random::Random;
use crate::tool::tool;

const FIRST_SEED: u64 = 9_000;
const CHAINS: u64 = 12;
const CLUSTER: u64 = 65536;

fn ours(images: &Images) -> Report {
    let options =
        ChainOptions { format: Some(Format::Qcow2), damaged: true, ..ChainOptions::default() };
    let chain = Chain::open(&images.path(), &options).unwrap();
    check(&chain, &mut |_, _| {}).unwrap()
}

/// The number behind `key` in what `qemu-img check --output=json` said; 0 where it is left out.
fn number(said: &str, key: &str) -> u64 {
    let Some((_, rest)) = said.split_once(&format!("\"{key}\": ")) else { return 0 };
    rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
}

fn theirs(images: &Images) -> (Option<i32>, Report) {
    let mut command = tool("qemu-img");
    command.current_dir(images.directory());
    let (status, said) =
        output(command.args(["check", "-f", "qcow2", "--output=json", images.name()]));
    let report = Report {
        corruptions: number(&said, "corruptions"),
        leaks: number(&said, "leaks"),
        total_clusters: number(&said, "total-clusters"),
        allocated_clusters: number(&said, "allocated-clusters"),
        compressed_clusters: number(&said, "compressed-clusters"),
        fragmented_clusters: number(&said, "fragmented-clusters"),
        image_end: number(&said, "image-end-offset"),
    };
    (status, report)
}

#[test]
fn sound_images_have_the_counts_that_qemu_gives() {
    if !have_qemu() {
        return;
    }
    for seed in FIRST_SEED..FIRST_SEED + CHAINS {
        let images = Images::seeded(seed);
        assert_eq!((Some(0), ours(&images)), theirs(&images), "seed {seed}");
    }
}

#[test]
fn snapshots_and_bitmaps_are_in_use_and_no_leaks() {
    if !have_qemu() {
        return;
    }
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

/// Sets the refcount of `cluster` in an image of 16-bit counts whose only block is at `block`.
fn set_refcount(images: &Images, block: u64, cluster: u64, count: u16) {
    let file = std::fs::File::options().write(true).open(images.path()).unwrap();
    file.write_all_at(&count.to_be_bytes(), block + cluster * 2).unwrap();
}

#[test]
fn leaks_and_corruptions_are_counted_as_qemu_does() {
    if !have_qemu() {
        return;
    }
    let images = Images::qcow2("8M", "", &["write -P 1 0 2M"]);
    let block = 2 * CLUSTER;
    set_refcount(&images, block, 8, 2);
    let end = ours(&images).image_end / CLUSTER;
    assert_eq!(theirs(&images).1, ours(&images));
    // Behind all that is in use, in a file made long enough: leaks and nothing else.
    set_refcount(&images, block, 8, 1);
    let file = std::fs::File::options().write(true).open(images.path()).unwrap();
    file.set_len((end + 5) * CLUSTER).unwrap();
    for cluster in end..end + 3 {
        set_refcount(&images, block, cluster, 1);
    }
    let report = ours(&images);
    assert_eq!((report.corruptions, report.leaks), (0, 3));
    assert_eq!((Some(3), report), theirs(&images));
    // One that is in use but counts as free.
    set_refcount(&images, block, 10, 0);
    let report = ours(&images);
    assert!(report.corruptions > 0);
    assert_eq!((Some(2), report), theirs(&images));
}

#[test]
fn of_damaged_images_we_and_qemu_say_alike_whether_they_are_corrupt() {
    if !have_qemu() {
        return;
    }
    let sound = Images::qcow2("8M", "", &["write -P 1 0 2M", "write -z 3M 64k", "write 5M 1M"]);
    let bytes = std::fs::read(sound.path()).unwrap();
    let mut random = Random::from_seed(FIRST_SEED);
    let tables = [CLUSTER, 2 * CLUSTER, 3 * CLUSTER, 4 * CLUSTER];
    for round in 0..40 {
        let mut damaged = bytes.clone();
        // One bit of an entry near the beginning of one of the tables, where entries are.
        let table = tables[random.below(4) as usize] as usize;
        damaged[table + random.below(48) as usize] ^= 1 << random.below(8);
        std::fs::write(sound.path(), &damaged).unwrap();
        let (ours, (status, theirs)) = (ours(&sound), theirs(&sound));
        // A pointer that is wrong may count as one to where it points, or to nothing.
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
fn a_repair_ends_with_an_image_that_qemu_finds_sound_and_with_the_same_bytes() {
    if !have_qemu() {
        return;
    }
    let images = Images::qcow2("8M", "", &["write -P 1 0 2M"]);
    let reader = |images: &Images| {
        let chain = Chain::open(&images.path(), &ChainOptions::default()).unwrap();
        let mut bytes = vec![0; 8 << 20];
        nowait_image::Reader::new(&chain).unwrap().read_at(0, &mut bytes).unwrap();
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
fn what_has_clusters_of_unknown_use_is_not_even_checked_or_repaired_when_it_is_marked_damaged() {
    if !have_qemu() {
        return;
    }
    let images = Images::qcow2("8M", "", &["write -P 1 0 64k"]);
    let file = std::fs::File::options().write(true).open(images.path()).unwrap();
    // Incompatible bits: one that nobody knows, and "dirty" or "corrupt"; encryption by LUKS, whose
    // header would be taken for a leak.
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
fn a_repair_gives_no_cluster_back_while_a_pointer_makes_no_sense() {
    if !have_qemu() {
        return;
    }
    let images = Images::qcow2("8M", "", &["write -P 1 0 2M"]);
    let file = std::fs::File::options().write(true).open(images.path()).unwrap();
    // A reserved bit in the first entry of the L2 table: what it points to is in use all the same.
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
fn a_repair_writes_to_no_refcount_block_that_is_something_else_too() {
    if !have_qemu() {
        return;
    }
    let images = Images::qcow2("8M", "", &["write -P 1 0 2M"]);
    let file = std::fs::File::options().write(true).open(images.path()).unwrap();
    // The refcount table says that the first block is where the L2 table is.
    file.write_all_at(&(4 * CLUSTER).to_be_bytes(), CLUSTER).unwrap();
    let before = std::fs::read(images.path()).unwrap();
    let done = repaired(&images);
    assert!(done.report.corruptions > 0 && done.corruptions_fixed == 0, "{done:?}");
    assert!(std::fs::read(images.path()).unwrap() == before);
}
