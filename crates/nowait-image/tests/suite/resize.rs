//! Images made by QEMU, grown and shrunk here.

use nowait_image::resize::resize;
use nowait_image::{Chain, ChainOptions};

use crate::images::{Images, qemu_img};
use nowait_testkit::{Random, no_child_starts, require_qemu};

const CHAINS: u64 = 24;
const FIRST_SEED: u64 = 8_000;
const STEPS: usize = 4;

fn open(images: &Images) -> Chain {
    let data_files = images.data_files();
    let options = ChainOptions { writable: true, data_files, ..ChainOptions::default() };
    let _alone = no_child_starts();
    Chain::open(&images.path(), &options).unwrap()
}

fn bytes(images: &Images) -> Vec<u8> {
    qemu_img(images.directory(), &["convert", "-O", "raw", images.name(), "all.raw"]);
    std::fs::read(images.directory().join("all.raw")).unwrap()
}

#[test]
fn a_disk_keeps_its_bytes_and_grows_by_zeros_whatever_is_below_it() {
    nowait_testkit::needs!(require_qemu());
    let mut resized = 0;
    for seed in FIRST_SEED..FIRST_SEED + CHAINS {
        let images = Images::seeded(seed);
        let mut random = Random::from_seed(seed);
        let mut expected = bytes(&images);
        for _ in 0..STEPS {
            let size = 512 * (1 + random.below(48 << 10));
            let chain = open(&images);
            if chain.top().header().is_some_and(|header| header.has_data_file()) {
                let error = resize(&chain, size, true).unwrap_err().to_string();
                assert!(error.contains("in a file of its own"), "{error}");
                break;
            }
            assert_eq!(resize(&chain, size - 511, true).unwrap(), size, "seed {seed}");
            drop(chain);
            expected.resize(size as usize, 0);
            assert!(bytes(&images) == expected, "seed {seed}: {size}");
            qemu_img(images.directory(), &["check", "-q", images.name()]);
            resized += 1;
        }
    }
    assert!(resized as u64 > CHAINS, "most images have no data file");
}

#[test]
fn a_table_that_becomes_too_small_is_replaced_by_a_larger_one() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::qcow2("1M", "cluster_size=512", &["write -P 5 0 1M"]);
    let mut expected = bytes(&images);
    // 2 GiB in clusters of 512 bytes: an L1 table of 128 clusters per GiB.
    assert_eq!(resize(&open(&images), 2 << 30, false).unwrap(), 2 << 30);
    qemu_img(images.directory(), &["check", "-q", images.name()]);
    let chain = open(&images);
    assert_eq!(resize(&chain, 8 << 20, true).unwrap(), 8 << 20);
    drop(chain);
    expected.resize(8 << 20, 0);
    assert!(bytes(&images) == expected);
    qemu_img(images.directory(), &["check", "-q", images.name()]);
}

#[test]
fn bytes_that_were_cut_off_take_no_space_and_do_not_come_back() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::qcow2("8M", "", &["write -P 5 0 8M"]);
    resize(&open(&images), 100_000, true).unwrap();
    assert!(std::fs::metadata(images.path()).unwrap().len() < 1 << 20);
    qemu_img(images.directory(), &["resize", "-q", images.name(), "8M"]);
    let found = bytes(&images);
    assert!(found[..100_352].iter().all(|&byte| byte == 5));
    assert!(found[100_352..].iter().all(|&byte| byte == 0));
}

#[test]
fn a_raw_image_gets_exactly_the_requested_size_and_shrinks_only_on_request() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("disk");
    std::fs::write(&path, [5; 5000]).unwrap();
    let open = || {
        let options = ChainOptions { writable: true, ..ChainOptions::default() };
        let _alone = no_child_starts();
        Chain::open(&path, &options).unwrap()
    };
    let error = resize(&open(), 4999, false).unwrap_err().to_string();
    assert!(error.contains("smaller") && error.contains("--shrink"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), [5; 5000]);
    assert_eq!(resize(&open(), 4999, true).unwrap(), 4999);
    assert_eq!(resize(&open(), 5001, false).unwrap(), 5001);
    assert_eq!(std::fs::read(&path).unwrap(), [&[5; 4999][..], &[0; 2]].concat());
}

#[test]
fn an_image_with_snapshots_or_damage_is_left_alone() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::qcow2("8M", "", &["write 0 64k"]);
    qemu_img(images.directory(), &["snapshot", "-c", "before", images.name()]);
    let options = ChainOptions { writable: true, ..ChainOptions::default() };
    let error = Chain::open(&images.path(), &options).unwrap_err().to_string();
    assert!(error.contains("internal snapshots"), "{error}");
    let images = Images::qcow2("8M", "", &["write 0 64k"]);
    let mut damaged = std::fs::read(images.path()).unwrap();
    // The refcount of the first data cluster, in the only block.
    damaged[(2 << 16) + 5 * 2 + 1] = 0;
    std::fs::write(images.path(), &damaged).unwrap();
    let error = resize(&open(&images), 16 << 20, false).unwrap_err().to_string();
    assert!(error.contains("nowait check"), "{error}");
    assert_eq!(std::fs::read(images.path()).unwrap(), damaged);
}
