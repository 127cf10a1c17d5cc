//! Images with wrong refcounts or tables, served and written to: their good data stays.

use std::fs;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use nowait::{BlockingFile, ByteRange, Direct, Error, Flags};
use nowait_image::check::{Report, check};
use nowait_image::qcow2_disk::{self, OpenImage, Qcow2Map, ServeOptions};
use nowait_image::repair::repair;
use nowait_image::resize::resize;
use nowait_image::{Chain, ChainOptions, Format};

use nowait_testkit::require_qemu;

use crate::images::{Images, qemu_img};

const CLUSTER: u64 = 65536;
/// The layout of qemu-img: the header, and one cluster each of the others.
const REFCOUNT_TABLE: u64 = 1;
const REFCOUNT_BLOCK: u64 = 2;
const L1_TABLE: u64 = 3;
const L2_TABLE: u64 = 4;
const DATA: u64 = 5;
const INCOMPATIBLE_BYTE: usize = 79;
const CORRUPT: u8 = 2;
const COPIED: u64 = 1 << 63;

/// An image with the first three clusters of the disk written.
fn image() -> Images {
    let commands = ["write -P 1 0 64k", "write -P 2 64k 64k", "write -P 3 128k 64k"];
    Images::qcow2("64M", "", &commands)
}

fn patch(images: &Images, at: u64, bytes: &[u8]) {
    let file = fs::File::options().write(true).open(images.path()).unwrap();
    file.write_all_at(bytes, at).unwrap();
}

fn entry(images: &Images, at: u64, value: u64) {
    patch(images, at, &value.to_be_bytes());
}

fn set_count(images: &Images, cluster: u64, count: u16) {
    patch(images, REFCOUNT_BLOCK * CLUSTER + cluster * 2, &count.to_be_bytes());
}

fn open(images: &Images) -> (BlockingFile<Qcow2Map>, OpenImage) {
    let options =
        ChainOptions { writable: true, format: Some(Format::Qcow2), ..ChainOptions::default() };
    let chain = Chain::open(&images.path(), &options).unwrap();
    let options = ServeOptions { writable: true, direct: Direct::Auto, cache_holes: true };
    let (disk, open_image) = qcow2_disk::open(chain, options).unwrap();
    (BlockingFile::new(Arc::new(disk)), open_image)
}

fn write(file: &BlockingFile<Qcow2Map>, cluster: u64, byte: u8) -> Result<usize, Error> {
    file.write_at(&[byte; CLUSTER as usize], cluster * CLUSTER, Flags::NONE)
}

fn reads(file: &BlockingFile<Qcow2Map>, cluster: u64, byte: u8) -> bool {
    let mut found = vec![!byte; CLUSTER as usize];
    file.read_at(&mut found, cluster * CLUSTER).unwrap();
    found.iter().all(|&b| b == byte)
}

fn damaged() -> ChainOptions {
    ChainOptions { format: Some(Format::Qcow2), damaged: true, ..ChainOptions::default() }
}

fn report(images: &Images) -> Report {
    let chain = Chain::open(&images.path(), &damaged()).unwrap();
    check(&chain, &mut |_, _| {}).unwrap()
}

fn is_marked(images: &Images) -> bool {
    fs::read(images.path()).unwrap()[INCOMPATIBLE_BYTE] & CORRUPT != 0
}

/// A write that allocates fails, and existing clusters can still be read and written; the image is
/// marked as corrupt. After a repair all operations succeed.
fn assert_allocation_refused(images: &Images, what: &str) {
    let (file, open_image) = open(images);
    for cluster in [16, 32] {
        assert_eq!(write(&file, cluster, 9).unwrap_err().errno(), libc::EIO, "{what}");
    }
    assert!(is_marked(images), "{what}");
    write(&file, 1, 7).unwrap();
    file.flush().unwrap();
    for (cluster, byte) in [(0, 1), (1, 7), (2, 3), (16, 0), (32, 0)] {
        assert!(reads(&file, cluster, byte), "{what}: cluster {cluster}");
    }
    drop(file);
    open_image.close().unwrap();
    let before = report(images);
    assert!(before.corruptions > 0, "{what}");
    let chain = Chain::open(&images.path(), &ChainOptions { writable: true, ..damaged() }).unwrap();
    let repaired = repair(&chain, &mut |_, _| {}).unwrap();
    assert_eq!((repaired.report.corruptions, repaired.report.leaks), (0, 0), "{what}");
    drop(chain);
    qemu_img(images.directory(), &["check", "-q", "-f", "qcow2", images.name()]);
    let (file, open_image) = open(images);
    write(&file, 16, 9).unwrap();
    for (cluster, byte) in [(0, 1), (1, 7), (2, 3), (16, 9)] {
        assert!(reads(&file, cluster, byte), "{what}: cluster {cluster}");
    }
    drop(file);
    open_image.close().unwrap();
    qemu_img(images.directory(), &["check", "-q", "-f", "qcow2", images.name()]);
}

#[test]
fn metadata_with_a_refcount_of_0_is_not_overwritten_and_the_image_is_marked_corrupt() {
    nowait_testkit::needs!(require_qemu());
    let all = [(0, "header"), (REFCOUNT_TABLE, "table"), (REFCOUNT_BLOCK, "block")];
    for (cluster, what) in all.into_iter().chain([(L1_TABLE, "L1"), (L2_TABLE, "L2")]) {
        let images = image();
        set_count(&images, cluster, 0);
        assert_allocation_refused(&images, what);
    }
    let images = image();
    patch(&images, REFCOUNT_BLOCK * CLUSTER, &[0; CLUSTER as usize]);
    assert_allocation_refused(&images, "all");
}

#[test]
fn a_data_entry_that_points_to_metadata_is_neither_read_nor_written() {
    nowait_testkit::needs!(require_qemu());
    for metadata in [REFCOUNT_TABLE, REFCOUNT_BLOCK, L1_TABLE, L2_TABLE] {
        let images = image();
        entry(&images, L2_TABLE * CLUSTER + 8, (metadata * CLUSTER) | COPIED);
        let before = fs::read(images.path()).unwrap();
        let (file, open_image) = open(&images);
        let mut byte = [0];
        assert_eq!(file.read_at(&mut byte, CLUSTER).unwrap_err().errno(), libc::EIO);
        assert!(!is_marked(&images), "a read marks nothing");
        assert_eq!(write(&file, 1, 9).unwrap_err().errno(), libc::EIO);
        let zeroed = file.zero(ByteRange::new(CLUSTER, CLUSTER), Flags::NONE);
        assert_eq!(zeroed.unwrap_err().errno(), libc::EIO);
        assert!(is_marked(&images));
        assert!(reads(&file, 0, 1) && reads(&file, 2, 3));
        drop(file);
        open_image.close().unwrap();
        let mut after = fs::read(images.path()).unwrap();
        after[INCOMPATIBLE_BYTE] &= !CORRUPT;
        assert!(after == before, "nothing but the mark was written: {metadata}");
    }
}

#[test]
fn a_write_to_data_that_two_entries_claim_gets_a_cluster_of_its_own() {
    nowait_testkit::needs!(require_qemu());
    // Two entries for one cluster, whose refcount is 2; the flag "copied" is wrong.
    let images = image();
    entry(&images, L2_TABLE * CLUSTER + 8, (DATA * CLUSTER) | COPIED);
    set_count(&images, DATA, 2);
    let (file, open_image) = open(&images);
    assert!(reads(&file, 0, 1) && reads(&file, 1, 1));
    write(&file, 0, 8).unwrap();
    assert!(reads(&file, 0, 8) && reads(&file, 1, 1), "the other one has its bytes still");
    drop(file);
    open_image.close().unwrap();
    let (file, _open_image) = open(&images);
    assert!(reads(&file, 0, 8) && reads(&file, 1, 1) && reads(&file, 2, 3));
}

#[test]
fn a_cluster_that_one_of_two_entries_left_keeps_its_refcount_and_the_other_its_flag() {
    nowait_testkit::needs!(require_qemu());
    // A repair leaves a cluster that two entries name like this: a refcount of 2, and no flag "copied".
    let images = image();
    for n in [0, 1] {
        entry(&images, L2_TABLE * CLUSTER + n * 8, DATA * CLUSTER);
    }
    set_count(&images, DATA, 2);
    set_count(&images, DATA + 1, 0);
    assert_eq!(report(&images).corruptions, 0);
    for (first, leaks) in [(0, 1), (1, 1)] {
        let (file, open_image) = open(&images);
        write(&file, first, 8).unwrap();
        drop(file);
        open_image.close().unwrap();
        let Report { corruptions, leaks: found, .. } = report(&images);
        assert_eq!((corruptions, found), (0, leaks), "cluster {first}");
    }
}

#[test]
fn an_l2_table_that_two_l1_entries_share_is_read_and_not_written() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::qcow2("2G", "", &["write -P 1 0 64k"]);
    entry(&images, L1_TABLE * CLUSTER + 8, (L2_TABLE * CLUSTER) | COPIED);
    let (file, open_image) = open(&images);
    let other = (512 << 20) / CLUSTER;
    assert!(reads(&file, 0, 1) && reads(&file, other, 1));
    for cluster in [0, other, 5] {
        assert_eq!(write(&file, cluster, 9).unwrap_err().errno(), libc::EIO, "{cluster}");
    }
    assert!(reads(&file, 0, 1) && reads(&file, other, 1));
    assert!(is_marked(&images));
    drop(file);
    open_image.close().unwrap();
}

#[test]
fn a_disk_of_which_two_parts_share_a_table_gets_no_other_size() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::qcow2("2G", "", &["write -P 1 0 64k"]);
    for index in 0..2 {
        entry(&images, L1_TABLE * CLUSTER + 8 * index, L2_TABLE * CLUSTER);
    }
    set_count(&images, L2_TABLE, 2);
    assert_eq!(report(&images).corruptions, 0);
    let before = fs::read(images.path()).unwrap();
    let chain = Chain::open(&images.path(), &ChainOptions { writable: true, ..damaged() }).unwrap();
    for size in [1 << 20, 4 << 30] {
        let error = resize(&chain, size, true).unwrap_err().to_string();
        assert!(error.contains("two parts of its disk share a table"), "{error}");
    }
    drop(chain);
    assert!(fs::read(images.path()).unwrap() == before);
}

#[test]
fn a_shared_cluster_is_freed_when_no_entry_is_left_that_names_it() {
    nowait_testkit::needs!(require_qemu());
    // Clusters 1 and 2 of the disk are the same one; the new end cuts off one of them, or both.
    for (clusters, leaks) in [(2, 1), (1, 0)] {
        let images = image();
        for index in [1, 2] {
            entry(&images, L2_TABLE * CLUSTER + 8 * index, (DATA + 1) * CLUSTER);
        }
        set_count(&images, DATA + 1, 2);
        set_count(&images, DATA + 2, 0);
        let Report { corruptions, leaks: found, .. } = report(&images);
        assert_eq!((corruptions, found), (0, 0));
        for size in [clusters * CLUSTER, 64 << 20] {
            let options = ChainOptions { writable: true, ..damaged() };
            let chain = Chain::open(&images.path(), &options).unwrap();
            resize(&chain, size, true).unwrap();
        }
        let Report { corruptions, leaks: found, .. } = report(&images);
        assert_eq!((corruptions, found), (0, leaks), "{clusters} clusters");
        let (file, open_image) = open(&images);
        assert!(reads(&file, 0, 1) && reads(&file, 1, if clusters == 2 { 2 } else { 0 }));
        assert!(reads(&file, 2, 0));
        drop(file);
        open_image.close().unwrap();
    }
}

#[test]
fn a_refcount_block_with_another_use_is_not_written() {
    nowait_testkit::needs!(require_qemu());
    for other in [REFCOUNT_TABLE, L1_TABLE, L2_TABLE, 1 << 20] {
        let images = image();
        entry(&images, REFCOUNT_TABLE * CLUSTER, other * CLUSTER);
        let before = fs::read(images.path()).unwrap();
        let (file, open_image) = open(&images);
        assert_eq!(write(&file, 16, 9).unwrap_err().errno(), libc::EIO);
        assert!(reads(&file, 0, 1) && reads(&file, 2, 3));
        drop(file);
        open_image.close().unwrap();
        let mut after = fs::read(images.path()).unwrap();
        after[INCOMPATIBLE_BYTE] &= !CORRUPT;
        assert!(after == before, "nothing but the mark was written: {other}");
    }
}

#[test]
fn data_with_a_refcount_of_0_is_not_allocated_again() {
    nowait_testkit::needs!(require_qemu());
    let images = image();
    set_count(&images, DATA + 1, 0);
    assert_allocation_refused(&images, "data");
}

#[test]
fn free_clusters_inside_a_consistent_image_are_allocated_again() {
    nowait_testkit::needs!(require_qemu());
    let images = image();
    let discard = ["discard 0 64k".to_owned(), "discard 128k 64k".to_owned()];
    crate::images::qemu_io(images.directory(), "qcow2", images.name(), &discard);
    let before = fs::metadata(images.path()).unwrap().len();
    let (file, open_image) = open(&images);
    write(&file, 16, 8).unwrap();
    assert!(reads(&file, 1, 2) && reads(&file, 16, 8) && reads(&file, 0, 0));
    drop(file);
    open_image.close().unwrap();
    assert_eq!(fs::metadata(images.path()).unwrap().len(), before);
    qemu_img(images.directory(), &["check", "-q", "-f", "qcow2", images.name()]);
}

#[test]
fn compressed_clusters_with_a_low_refcount_are_not_freed_with_their_neighbour() {
    nowait_testkit::needs!(require_qemu());
    // Two compressed clusters of the disk in one of the file, whose refcount is 1 instead of 2.
    let images = Images::qcow2("64M", "", &["write -c -P 1 0 64k", "write -c -P 2 64k 64k"]);
    set_count(&images, DATA, 1);
    let (file, open_image) = open(&images);
    write(&file, 0, 8).unwrap();
    drop(file);
    open_image.close().unwrap();
    let (file, open_image) = open(&images);
    for cluster in 16..24 {
        write(&file, cluster, 9).unwrap();
    }
    assert!(reads(&file, 0, 8) && reads(&file, 1, 2));
    drop(file);
    open_image.close().unwrap();
    qemu_img(images.directory(), &["check", "-q", "-f", "qcow2", images.name()]);
}

#[test]
fn tables_that_the_header_puts_at_one_position_are_refused() {
    nowait_testkit::needs!(require_qemu());
    let images = image();
    for (at, position) in [(40, REFCOUNT_TABLE), (48, L1_TABLE)] {
        let before = fs::read(images.path()).unwrap();
        entry(&images, at, position * CLUSTER);
        let error = Chain::open(&images.path(), &damaged()).unwrap_err().to_string();
        assert!(error.contains("two tables at byte") && !error.contains('\n'), "{error}");
        fs::write(images.path(), before).unwrap();
    }
}

/// Whether the offline commands can map the image, and read the first byte of `cluster`.
fn offline(images: &Images, cluster: u64) -> (bool, bool) {
    let chain = Chain::open(&images.path(), &ChainOptions::default()).unwrap();
    let mapped = nowait_image::map::map(&chain, |_| Ok(()));
    if let Err(error) = &mapped {
        assert!(error.to_string().contains("behind the end of the file"), "{error}");
    }
    let reader = nowait_image::ChainReader::new(chain.layers()).unwrap();
    (mapped.is_ok(), reader.read_at(cluster * CLUSTER, &mut [0]).is_ok())
}

fn open_to_read(path: &std::path::Path) -> (BlockingFile<Qcow2Map>, OpenImage) {
    let options = ChainOptions { format: Some(Format::Qcow2), ..ChainOptions::default() };
    let chain = Chain::open(path, &options).unwrap();
    let options = ServeOptions { writable: false, direct: Direct::Auto, cache_holes: true };
    let (disk, open_image) = qcow2_disk::open(chain, options).unwrap();
    (BlockingFile::new(Arc::new(disk)), open_image)
}

#[test]
fn an_image_whose_tables_are_cut_off_is_refused_and_not_an_empty_disk() {
    nowait_testkit::needs!(require_qemu());
    let images = image();
    let file = fs::File::options().write(true).open(images.path()).unwrap();
    for bytes in [L1_TABLE * CLUSTER + 4, L1_TABLE * CLUSTER, CLUSTER, 4096, 511] {
        file.set_len(bytes).unwrap();
        for writable in [false, true] {
            let options = ChainOptions { writable, ..ChainOptions::default() };
            let error = Chain::open(&images.path(), &options).unwrap_err().to_string();
            assert!(error.contains("it was cut off") && !error.contains('\n'), "{error}");
        }
        assert!(report(&images).corruptions > 0, "{bytes}");
    }
}

#[test]
fn data_that_was_cut_off_with_the_files_end_is_an_error_in_every_read() {
    nowait_testkit::needs!(require_qemu());
    let images = image();
    let name = images.name();
    let create = ["create", "-q", "-f", "qcow2", "-b", name, "-F", "qcow2", "above"];
    qemu_img(images.directory(), &create);
    let top = fs::File::options().write(true).open(images.path()).unwrap();
    top.set_len((DATA + 2) * CLUSTER).unwrap();
    for path in [images.path(), images.directory().join("above")] {
        let (file, _open_image) = open_to_read(&path);
        assert!(reads(&file, 0, 1) && reads(&file, 1, 2) && reads(&file, 3, 0));
        assert_eq!(file.read_at(&mut [0], 2 * CLUSTER).unwrap_err().errno(), libc::EIO);
        // Also in the middle of a longer read.
        let mut all = vec![0; 4 * CLUSTER as usize];
        assert!(!matches!(file.read_at(&mut all, 0), Ok(done) if done as u64 > 2 * CLUSTER));
    }
    assert!(report(&images).corruptions > 0);
    assert_eq!(offline(&images, 2), (false, false));
    // No new cluster is allocated at a position that the tables still name.
    let (file, open_image) = open(&images);
    write(&file, 16, 9).unwrap();
    assert_eq!(file.read_at(&mut [0], 2 * CLUSTER).unwrap_err().errno(), libc::EIO);
    assert!(reads(&file, 16, 9));
    drop(file);
    open_image.close().unwrap();
}

#[test]
fn the_last_cluster_may_be_there_in_part_and_ends_with_zeros() {
    nowait_testkit::needs!(require_qemu());
    let images = image();
    let top = fs::File::options().write(true).open(images.path()).unwrap();
    top.set_len((DATA + 2) * CLUSTER + 4096).unwrap();
    let (file, _open_image) = open_to_read(&images.path());
    let mut found = vec![9; CLUSTER as usize];
    file.read_at(&mut found, 2 * CLUSTER).unwrap();
    assert!(found[..4096].iter().all(|&byte| byte == 3) && found[4096..].iter().all(|&b| b == 0));
    assert_eq!(report(&images).corruptions, 0);
    assert_eq!(offline(&images, 2), (true, true));
}

#[test]
fn a_table_of_snapshots_that_is_cut_off_is_counted() {
    nowait_testkit::needs!(require_qemu());
    let images = image();
    qemu_img(images.directory(), &["snapshot", "-c", "one", images.name()]);
    let bytes = fs::read(images.path()).unwrap();
    assert_eq!(report(&images).corruptions, 0);
    let at = u64::from_be_bytes(bytes[64..72].try_into().unwrap());
    fs::File::options().write(true).open(images.path()).unwrap().set_len(at + 8).unwrap();
    assert!(report(&images).corruptions > 0);
}
