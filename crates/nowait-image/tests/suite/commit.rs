//! Overlays made by QEMU, committed here and by QEMU.

use std::path::{Path, PathBuf};

use nowait_image::commit::{Overlay, commit};
use nowait_image::{Chain, ChainOptions, Format};

use crate::images::{Images, output, qemu_img};
use nowait_testkit::{no_child_starts, require_qemu, tool};

const CHAINS: u64 = 40;
const FIRST_SEED: u64 = 9_000;

fn open(path: &Path) -> Chain {
    open_with(path, Vec::new())
}

fn open_with(path: &Path, data_files: Vec<PathBuf>) -> Chain {
    let options = ChainOptions {
        writable: true,
        backing_writable: true,
        data_files,
        ..ChainOptions::default()
    };
    let _alone = no_child_starts();
    Chain::open(path, &options).unwrap()
}

/// The bytes of the disk in `image`, which has this `format`.
fn bytes(directory: &Path, image: &str, format: &str) -> Vec<u8> {
    qemu_img(directory, &["convert", "-f", format, "-O", "raw", image, "all.raw"]);
    std::fs::read(directory.join("all.raw")).unwrap()
}

/// The files of `directory` and their contents, except for those in `without`.
fn files(directory: &Path, without: &[&str]) -> Vec<(String, Vec<u8>)> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if !without.contains(&name.as_str()) {
            files.push((name, std::fs::read(path).unwrap()));
        }
    }
    files.sort();
    files
}

#[test]
fn a_commit_gives_the_backing_file_the_same_bytes_as_qemus_commit() {
    nowait_testkit::needs!(require_qemu());
    let (mut committed, mut alike) = ([0, 0], 0);
    for seed in FIRST_SEED..FIRST_SEED + CHAINS {
        let images = Images::seeded(seed);
        let (directory, top) = (images.directory(), images.name());
        let chain = open_with(&images.path(), images.data_files());
        let Some(below) = chain.layers().get(1) else { continue };
        let name = below.file.path().file_name().unwrap().to_str().unwrap().to_owned();
        let format = below.format();
        let has_data_file = below.header().is_some_and(|header| header.has_data_file());
        drop(chain);
        let before = bytes(directory, top, "qcow2");
        let chain = open_with(&images.path(), images.data_files());
        if has_data_file {
            let error =
                commit(&chain, Overlay::Emptied, false, &mut |_, _| {}).unwrap_err().to_string();
            assert!(error.contains("in a file of its own"), "{error}");
            continue;
        }
        let theirs = tempfile::tempdir().unwrap();
        for (name, content) in files(directory, &[]) {
            std::fs::write(theirs.path().join(name), content).unwrap();
        }
        // QEMU cannot grow an image of version 2 whose backing file is longer.
        let mut qemus = tool("qemu-img");
        let qemu_can =
            output(qemus.current_dir(theirs.path()).args(["commit", "-q", top])).0 == Some(0);
        let others = files(directory, &[top, &name, "all.raw"]);
        let mut last = (0, 0);
        let done = commit(&chain, Overlay::Emptied, false, &mut |done, total| last = (done, total));
        let total = done.map(|done| done.data_bytes + done.zero_bytes).unwrap();
        assert_eq!(last, (total, total), "seed {seed}");
        drop(chain);
        for image in [top, &name].into_iter().filter(|image| image.ends_with("qcow2")) {
            qemu_img(directory, &["check", "-q", image]);
        }
        assert!(bytes(directory, top, "qcow2") == before, "seed {seed}: the overlay's disk");
        let ours = bytes(directory, &name, format.name());
        assert!(ours[..before.len()] == before, "seed {seed}: the backing file's disk");
        if qemu_can {
            let theirs = bytes(theirs.path(), &name, format.name());
            assert!(ours == theirs, "seed {seed}: beside QEMU's");
            alike += 1;
        }
        assert!(others == files(directory, &[top, &name, "all.raw"]), "seed {seed}: what is below");
        let again = commit(&open(&images.path()), Overlay::Kept, false, &mut |_, _| {}).unwrap();
        assert_eq!((again.data_bytes, again.zero_bytes), (0, 0), "seed {seed}: it was emptied");
        committed[usize::from(format == Format::Raw)] += 1;
    }
    assert!(committed.iter().all(|&count| count >= 5), "{committed:?}");
    assert!(alike * 4 >= committed.iter().sum::<i32>() * 3, "{alike} of {committed:?}");
}

#[test]
fn a_kept_overlay_is_unchanged_to_the_byte_and_an_emptied_one_takes_no_space() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::qcow2("4M", "", &[]);
    let directory = images.directory();
    let create = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", images.name(), "top", "6M"];
    qemu_img(directory, &create);
    crate::images::qemu_io(directory, "qcow2", "top", &["write -P 9 1M 5M".to_owned()]);
    let top = directory.join("top");
    let before = std::fs::read(&top).unwrap();
    let done = commit(&open(&top), Overlay::Kept, false, &mut |_, _| {}).unwrap();
    assert_eq!((done.data_bytes, done.old_size, done.size), (5 << 20, 4 << 20, 6 << 20));
    assert!(std::fs::read(&top).unwrap() == before);
    commit(&open(&top), Overlay::Emptied, false, &mut |_, _| {}).unwrap();
    assert_eq!(std::fs::metadata(&top).unwrap().len(), 4 << 16);
    qemu_img(directory, &["check", "-q", "top"]);
    qemu_img(directory, &["compare", "-q", "top", images.name()]);
}

#[test]
fn a_commit_that_outgrows_the_refcount_table_makes_a_larger_one() {
    nowait_testkit::needs!(require_qemu());
    // With clusters of 512 bytes a table of one cluster counts 8 MiB of file.
    let images = Images::qcow2("24M", "cluster_size=512", &["write -P 1 0 7M"]);
    let directory = images.directory();
    let create = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", images.name(), "top"];
    qemu_img(directory, &create);
    crate::images::qemu_io(directory, "qcow2", "top", &["write -P 9 6M 18M".to_owned()]);
    commit(&open(&directory.join("top")), Overlay::Emptied, false, &mut |_, _| {}).unwrap();
    qemu_img(directory, &["check", "-q", images.name()]);
    let found = bytes(directory, images.name(), "qcow2");
    assert!(found[..6 << 20].iter().all(|&byte| byte == 1));
    assert!(found[6 << 20..].iter().all(|&byte| byte == 9));
}

#[test]
fn an_image_without_a_backing_file_is_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("disk");
    std::fs::write(&path, [5; 5000]).unwrap();
    let error =
        commit(&open(&path), Overlay::Emptied, false, &mut |_, _| {}).unwrap_err().to_string();
    assert!(error.contains("no backing file"), "{error}");
}
