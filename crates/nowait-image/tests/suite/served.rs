//! Served images: random requests through the engine, compared with an array of bytes, and many
//! simultaneous writers.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use nowait::{BlockingFile, Config, Direct, Flags, IoBuffer};
use nowait_image::qcow2_disk::{self, OpenImage, Qcow2Map, ServeOptions};
use nowait_image::{Chain, ChainOptions, Format};

use crate::images::{Images, output, qemu_img};
use nowait_testkit::model::Model;
use nowait_testkit::{
    Random, TestQueueKind, no_child_starts, require_qemu, say_skipped, switches, tool,
};

const FIRST_SEED: u64 = 40_000;
/// Each takes QEMU's tools about half a second.
const CHAINS: u64 = 28;
const STEPS: u32 = 700;

type Disk = nowait::BlockDevice<Qcow2Map>;

fn open(images: &Images, direct: Direct, hint: bool) -> (Arc<Disk>, OpenImage) {
    let options = ChainOptions {
        writable: true,
        format: Some(Format::Qcow2),
        data_files: images.data_files(),
        ..ChainOptions::default()
    };
    let _alone = no_child_starts();
    let chain = Chain::open(&images.path(), &options).unwrap();
    let options = ServeOptions { writable: true, direct, cache_holes: hint };
    let (disk, open_image) = qcow2_disk::open(chain, options).unwrap();
    (Arc::new(disk), open_image)
}

/// The disk's bytes according to QEMU.
fn contents(images: &Images) -> Vec<u8> {
    let convert = ["convert", "-f", "qcow2", "-O", "raw", images.name(), "all.raw"];
    qemu_img(images.directory(), &convert);
    fs::read(images.directory().join("all.raw")).unwrap()
}

/// The files below the top one, and their contents.
fn backing_files(images: &Images) -> Vec<(std::path::PathBuf, Vec<u8>)> {
    let entries = fs::read_dir(images.directory()).unwrap().map(|entry| entry.unwrap().path());
    let top = images.path();
    let data = top.with_extension("qcow2.data");
    let below = entries.filter(|path| {
        *path != top && *path != data && path.file_name().is_some_and(|name| name != "all.raw")
    });
    below.map(|path| (path.clone(), fs::read(&path).unwrap())).collect()
}

fn is_consistent(images: &Images) -> bool {
    let mut command = tool("qemu-img");
    command.current_dir(images.directory()).args(["check", "-q", "-f", "qcow2", images.name()]);
    output(&mut command).0 == Some(0)
}

/// Checks with QEMU's tools that the image is consistent and has the model's bytes, and that no
/// file below it was changed.
fn verify(images: &Images, model: &[u8], below: &[(std::path::PathBuf, Vec<u8>)], label: &str) {
    qemu_img(images.directory(), &["check", "-q", "-f", "qcow2", images.name()]);
    assert!(contents(images) == model, "{label}");
    for (path, bytes) in below {
        assert!(fs::read(path).unwrap() == *bytes, "{label}: {} was changed", path.display());
    }
}

#[test]
fn chains_of_all_kinds_agree_with_the_model_with_each_switch_off() {
    nowait_testkit::needs!(require_qemu());
    let mut played = 0;
    for seed in FIRST_SEED..FIRST_SEED + CHAINS {
        let images = Images::seeded(seed);
        let all = switches(Config { slots: 32, ..Config::default() });
        let (name, config, options) = all[seed as usize % all.len()];
        let direct = if seed % 3 == 0 { Direct::Off } else { Direct::Auto };
        let label = format!("seed {seed}, {name}, {direct:?}");
        println!("{label}");
        if !is_consistent(&images) {
            // QEMU 7.2 lets compressed clusters overlap others, and its check then reports that.
            continue;
        }
        let model = contents(&images);
        let below = backing_files(&images);
        let (disk, open_image) = open(&images, direct, options.cache_holes);
        let kind = TestQueueKind::REAL[seed as usize % 2];
        let [_, threads] = TestQueueKind::REAL;
        let engine = kind.engine(&disk, 4, config).or_else(|| threads.engine(&disk, 4, config));
        let mut model = Model::new(Random::from_seed(seed), model, label.clone());
        model.play(&mut engine.unwrap(), STEPS);
        drop(disk);
        open_image.close().unwrap();
        verify(&images, &model.bytes, &below, &label);
        played += 1;
    }
    assert!(played > CHAINS / 2, "{played} were sound");
}

/// Each thread writes one sector of every cluster.
const SECTOR: usize = 512;
const WRITERS: usize = 8;

#[test]
fn a_cluster_that_many_threads_write_to_at_once_is_allocated_once() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::none("top.qcow2");
    let base = Random::from_seed(5).bytes(4 << 20);
    fs::write(images.directory().join("base"), &base).unwrap();
    let create = ["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", images.name()];
    qemu_img(images.directory(), &create);
    let (disk, open_image) = open(&images, Direct::Auto, true);
    let file = nowait::BlockingFile::new(disk.clone());
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let file = &file;
            scope.spawn(move || {
                // All threads begin at the same cluster.
                for cluster in (0..4 << 20).step_by(65536) {
                    let pos = cluster + writer * SECTOR;
                    file.write_at(&[writer as u8 + 1; SECTOR], pos as u64, Flags::NONE).unwrap();
                }
            });
        }
    });
    let mut model = base;
    for cluster in model.chunks_mut(65536) {
        for (writer, sector) in (1..).zip(cluster.chunks_mut(SECTOR).take(WRITERS)) {
            sector.fill(writer);
        }
    }
    drop((file, disk));
    open_image.close().unwrap();
    verify(&images, &model, &[], "many writers");
    // Header, refcount table and block, L1 table, L2 table, and 64 clusters of data.
    let bytes = fs::metadata(images.path()).unwrap().len();
    assert_eq!(bytes, (5 + 64) * 65536, "as many clusters as are needed");
}

#[test]
fn an_image_that_outgrows_its_refcount_table_gets_a_longer_one() {
    nowait_testkit::needs!(require_qemu());
    // With clusters of 512 bytes the first table counts up to 8 MiB of the file.
    let images = Images::qcow2("20M", "cluster_size=512", &[]);
    let (disk, open_image) = open(&images, Direct::Off, true);
    let file = nowait::BlockingFile::new(disk.clone());
    let model = Random::from_seed(6).bytes(20 << 20);
    for (piece, pos) in model.chunks(1 << 20).zip((0..).step_by(1 << 20)) {
        file.write_at(piece, pos, Flags::NONE).unwrap();
        if pos == 10 << 20 {
            file.flush().unwrap();
        }
    }
    drop((file, disk));
    open_image.close().unwrap();
    verify(&images, &model, &[], "a long file");
}

#[test]
fn an_image_that_cannot_be_served_is_refused_in_one_line_and_left_alone() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::qcow2("8M", "", &["write 0 64k"]);
    qemu_img(images.directory(), &["snapshot", "-c", "before", images.name()]);
    let before = fs::read(images.path()).unwrap();
    let options =
        ChainOptions { writable: true, format: Some(Format::Qcow2), ..ChainOptions::default() };
    let error = Chain::open(&images.path(), &options).unwrap_err().to_string();
    assert!(error.contains("internal snapshots") && !error.contains('\n'), "{error}");
    let chain = Chain::open(&images.path(), &ChainOptions::default()).unwrap();
    let options = ServeOptions { writable: false, direct: Direct::Auto, cache_holes: true };
    let (disk, open_image) = qcow2_disk::open(chain, options).unwrap();
    let file = nowait::BlockingFile::new(Arc::new(disk));
    let mut byte = [0];
    assert_eq!(file.read_at(&mut byte, 0).unwrap(), 1);
    let refused = file.write_at(&byte, 0, Flags::NONE).unwrap_err();
    assert_eq!(refused.errno(), libc::EROFS);
    drop(file);
    open_image.close().unwrap();
    assert!(fs::read(images.path()).unwrap() == before);
}

/// A server that ends by exit(2) has threads that still use the device.
#[test]
fn a_raw_image_that_is_closed_takes_no_space_that_was_allocated_ahead() {
    const WRITTEN: u64 = 8 << 20;
    // A file system takes a few blocks for its own tables.
    const TABLES: u64 = 64 << 10;
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("disk.img");
    fs::File::create(&path).unwrap().set_len(8 * WRITTEN).unwrap();
    let allocated = || fs::metadata(&path).unwrap().blocks() * 512;
    let format = Some(Format::Raw);
    let options = ChainOptions { writable: true, format, ..ChainOptions::default() };
    let image = nowait_image::open(&path, &options).unwrap();
    let is_direct = image.is_direct();
    let device = image.device();
    let mut block = IoBuffer::zeroed(4096).unwrap();
    block.fill(7);
    let file = BlockingFile::new(device.clone());
    for pos in (0..WRITTEN).step_by(4096) {
        file.write_at(&block, pos, Flags::NONE).unwrap();
    }
    drop(file);
    if !is_direct || allocated() <= WRITTEN + TABLES {
        say_skipped("the file system has no direct I/O, or lists no extents");
        return;
    }
    image.close().unwrap();
    assert!(allocated() <= WRITTEN + TABLES, "{} bytes", allocated());
    drop(device);
}
