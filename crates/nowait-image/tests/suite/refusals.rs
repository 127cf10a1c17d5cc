//! Refusals: one line with the reason, and the image stays as it was.

use std::path::Path;

use nowait_image::lock::{self, Access};
use nowait_image::{Chain, ChainOptions, Format, ImageFile, Locking, MAX_LAYERS, NamedStorages};

use nowait_testkit::require_qemu;

use crate::images::{Images, qemu_img};

fn refusal(path: &Path, options: &ChainOptions) -> String {
    let before = std::fs::read(path).unwrap();
    let error = Chain::open(path, options).unwrap_err().to_string();
    assert_eq!(std::fs::read(path).unwrap(), before, "a refused image is left alone");
    assert!(!error.contains('\n') && error.starts_with(&path.display().to_string()), "{error}");
    error
}

fn patched(images: &Images, at: usize, bytes: &[u8]) -> String {
    let whole = std::fs::read(images.path()).unwrap();
    let mut patched = whole.clone();
    patched[at..at + bytes.len()].copy_from_slice(bytes);
    std::fs::write(images.path(), &patched).unwrap();
    let error = refusal(&images.path(), &ChainOptions::default());
    std::fs::write(images.path(), &whole).unwrap();
    error
}

#[test]
fn features_that_are_not_supported_are_refused_by_name() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::qcow2("8M", "", &["write 0 64k"]);
    let writable = ChainOptions { writable: true, ..ChainOptions::default() };
    Chain::open(&images.path(), &writable).unwrap();
    for (at, bytes, words) in [
        (32, &[0, 0, 0, 1][..], "encrypted"),
        (32, &[0, 0, 0, 2], "encrypted"),
        (104, &[1], "compression type and feature bits do not agree"),
        (72, &[0x80], "not known here (incompatible bits 0x8000000000000000)"),
        (4, &[0, 0, 0, 4], "version 4"),
        (20, &[0, 0, 0, 30], "clusters of 2^30 bytes"),
        (24, &[0xff; 8], "a disk of 18446744073709551615 bytes"),
        (36, &[0xff; 4], "L1 table of 4294967295 entries"),
        (40, &[0, 0, 0, 0, 0, 3, 0, 1], "L1 table at byte 196609"),
        (48, &[0xff; 8], "the refcount table at byte"),
        (56, &[0xff; 4], "a refcount table of 4294967295 clusters"),
        (96, &[0, 0, 0, 7], "refcounts of 2^7 bits"),
        (100, &[0, 0, 0, 80], "a header of 80 bytes"),
        (60, &[0, 1, 0, 1], "65537 snapshots"),
    ] {
        let error = patched(&images, at, bytes);
        assert!(error.contains(words), "{error}");
    }
    let valid = std::fs::read(images.path()).unwrap();
    for (mark, words) in [(1, "marked dirty"), (2, "marked corrupt")] {
        let mut marked = valid.clone();
        marked[79] = mark;
        std::fs::write(images.path(), marked).unwrap();
        let error = refusal(&images.path(), &writable);
        assert!(error.contains(words) && error.contains("(read it with --read-only"), "{error}");
        assert!(error.contains("nowait check --repair"), "{error}");
        // It can still be read.
        Chain::open(&images.path(), &ChainOptions::default()).unwrap();
    }
    std::fs::write(images.path(), valid).unwrap();
    let zstd = Images::qcow2("8M", "compression_type=zstd", &[]);
    Chain::open(&zstd.path(), &writable).unwrap();
    assert!(patched(&zstd, 104, &[2]).contains("its compression type 2 is not known here"));
    let extended = Images::qcow2("8M", "extended_l2=on", &[]);
    Chain::open(&extended.path(), &writable).unwrap();
    assert!(patched(&extended, 20, &[0, 0, 0, 13]).contains("subclusters in clusters of 2^13"));
}

#[test]
fn an_image_with_internal_snapshots_is_only_read() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::qcow2("8M", "", &["write 0 64k"]);
    qemu_img(images.directory(), &["snapshot", "-c", "before", images.name()]);
    Chain::open(&images.path(), &ChainOptions::default()).unwrap();
    let writable = ChainOptions { writable: true, ..ChainOptions::default() };
    assert!(refusal(&images.path(), &writable).contains("internal snapshots"));
}

fn overlay(images: &Images, name: &str, backing: &str, format: &str) {
    let backing = format!("backing_file={backing},backing_fmt={format}");
    qemu_img(
        images.directory(),
        &["create", "-q", "-u", "-f", "qcow2", "-o", &backing, name, "1M"],
    );
}

#[test]
fn chains_that_are_circular_missing_or_too_long_are_refused() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::none("a");
    let options = ChainOptions::default();
    overlay(&images, "a", "b", "qcow2");
    assert!(refusal(&images.path(), &options).ends_with("its backing file 'b' is missing"));
    overlay(&images, "b", "a", "qcow2");
    let error = Chain::open(&images.path(), &options).unwrap_err().to_string();
    assert!(error.ends_with("it is its own backing file, directly or through others"), "{error}");
    overlay(&images, "b", "0", "vdi");
    std::fs::write(images.directory().join("0"), [1; 4096]).unwrap();
    let error = Chain::open(&images.path(), &options).unwrap_err().to_string();
    assert!(error.contains("b: its backing file's format 'vdi' is not supported"), "{error}");
    overlay(&images, "b", "nbd:unix:/nowhere", "raw");
    let error = Chain::open(&images.path(), &options).unwrap_err().to_string();
    assert!(error.contains("is neither a file nor a URL that can be opened"), "{error}");
    assert!(!error.contains("--backing"), "no user gives storages to the library: {error}");
    let to_commit = ChainOptions { backing_writable: true, ..ChainOptions::default() };
    let error = Chain::open(&images.directory().join("b"), &to_commit).unwrap_err().to_string();
    assert!(error.contains("is neither a file nor a URL that can be opened"), "{error}");
    let backing_storages = NamedStorages::given_by_user(|name| name.starts_with("nbd+unix:"));
    let to_commit = ChainOptions { backing_storages, ..to_commit };
    let error = Chain::open(&images.directory().join("b"), &to_commit).unwrap_err().to_string();
    let advice = "nothing else is written to (nowait copy --backing nbd+unix:///?socket=/nowhere";
    assert!(error.contains(advice), "{error}");
    for level in 1..=MAX_LAYERS {
        let format = if level == 1 { "raw" } else { "qcow2" };
        overlay(&images, &level.to_string(), &(level - 1).to_string(), format);
    }
    let path = |level: usize| images.directory().join(level.to_string());
    assert_eq!(Chain::open(&path(MAX_LAYERS - 1), &options).unwrap().layers().len(), MAX_LAYERS);
    let error = Chain::open(&path(MAX_LAYERS), &options).unwrap_err().to_string();
    assert!(error.contains("more than 64 images"), "{error}");
}

#[test]
fn a_backing_format_that_is_not_recorded_is_raw_if_no_signature_is_found() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::none("top");
    overlay(&images, "top", "base", "raw");
    let mut bytes = std::fs::read(images.path()).unwrap();
    // The extension becomes an unknown one.
    let at = bytes.windows(4).position(|four| four == 0xe279_2acau32.to_be_bytes()).unwrap();
    bytes[at] = 0;
    std::fs::write(images.path(), bytes).unwrap();
    std::fs::write(images.directory().join("base"), [7; 4096]).unwrap();
    let chain = Chain::open(&images.path(), &ChainOptions::default()).unwrap();
    assert_eq!(chain.layers()[1].format(), Format::Raw);
    std::fs::write(images.directory().join("base"), b"QFI\xfb and more").unwrap();
    let error = refusal(&images.path(), &ChainOptions::default());
    assert!(error.contains("is not recorded, and not guessed"), "{error}");
}

#[test]
fn every_file_of_a_chain_is_locked_and_an_open_without_locks_is_possible() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::none("top");
    std::fs::write(images.directory().join("base"), [7; 4096]).unwrap();
    overlay(&images, "top", "base", "raw");
    let base = ImageFile::open(&images.directory().join("base"), true).unwrap();
    lock::lock(base.fd().unwrap(), Access::Write).unwrap();
    let error = Chain::open(&images.path(), &ChainOptions::default()).unwrap_err().to_string();
    // A process is named too, if one that was being started had the descriptor just then.
    let reason = error.split(" (process ").next().unwrap_or_default();
    assert!(reason.ends_with("base: another process has it open for writing"), "{error}");
    let unlocked = ChainOptions { locking: Locking::Unlocked, ..ChainOptions::default() };
    Chain::open(&images.path(), &unlocked).unwrap();
    drop(base);
    let _chain = Chain::open(&images.path(), &ChainOptions::default()).unwrap();
    let base = ImageFile::open(&images.directory().join("base"), true).unwrap();
    assert!(lock::lock(base.fd().unwrap(), Access::Write).is_err());
}

#[test]
fn a_path_without_links_has_none_in_any_part_and_others_may_have_some() {
    let scratch = tempfile::tempdir().unwrap();
    let directory = scratch.path().canonicalize().unwrap();
    std::fs::create_dir(directory.join("real")).unwrap();
    std::fs::write(directory.join("real/disk"), [7; 4096]).unwrap();
    std::os::unix::fs::symlink("real", directory.join("directory")).unwrap();
    std::os::unix::fs::symlink("real/disk", directory.join("link")).unwrap();
    for writable in [false, true] {
        let options = ChainOptions { writable, ..ChainOptions::default() };
        let no_links = ChainOptions { no_links: true, ..options.clone() };
        Chain::open(&directory.join("real/disk"), &no_links).unwrap();
        for link in ["link", "directory/disk"] {
            drop(Chain::open(&directory.join(link), &options).unwrap());
            let error = refusal(&directory.join(link), &no_links);
            assert!(error.contains("a symbolic link is in its path"), "{error}");
        }
    }
}

#[test]
fn a_format_is_guessed_by_qcow2s_first_bytes_only() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("disk");
    for (bytes, format) in [
        (&b"QFI\xfb"[..], Format::Qcow2),
        (b"QFI", Format::Raw),
        (b"", Format::Raw),
        (b"QFI KDMV", Format::Raw),
    ] {
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(Format::probe(&ImageFile::open(&path, false).unwrap()).unwrap(), format);
    }
}

#[test]
fn an_explicit_raw_format_is_accepted() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::qcow2("8M", "", &[]);
    let options = ChainOptions { format: Some(Format::Raw), ..ChainOptions::default() };
    let chain = Chain::open(&images.path(), &options).unwrap();
    assert_eq!(chain.top().format(), Format::Raw);
    assert!(chain.top().size < 8 << 20);
}
