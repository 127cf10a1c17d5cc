//! New images, compared by QEMU's tools with those that they make.

use std::path::Path;

use nowait_image::create::{CreateOptions, Preallocation, create};
use nowait_image::{Chain, ChainOptions, Format};

use nowait_testkit::require_qemu;

use crate::images::{Images, qemu_img, qemu_io};

const ODD_SIZE: u64 = 10_000_001;

fn options(format: Format, size: u64) -> CreateOptions {
    CreateOptions::new(format, Some(size))
}

/// The output of `qemu-img info`, without the image's name and the space it takes.
fn info(directory: &Path, image: &str) -> String {
    let said = qemu_img(directory, &["info", "--output=json", image]);
    let own = ["\"filename\"", "\"full-backing-filename\"", "\"actual-size\""];
    said.lines().filter(|line| !own.iter().any(|name| line.contains(name))).collect()
}

#[test]
fn every_kind_of_new_qcow2_image_equals_qemus_own_and_can_be_written_to() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::none("");
    let directory = images.directory();
    for cluster in [512, 4096, 65536, 2 << 20] {
        for (preallocation, name) in [
            (Preallocation::Off, "off"),
            (Preallocation::Metadata, "metadata"),
            (Preallocation::Falloc, "falloc"),
        ] {
            let (ours, theirs) = (format!("ours-{cluster}-{name}"), format!("{cluster}-{name}"));
            let wanted = CreateOptions {
                cluster_bytes: Some(cluster),
                preallocation,
                ..options(Format::Qcow2, ODD_SIZE)
            };
            let size = create(&directory.join(&ours), &wanted).unwrap();
            assert_eq!(size, ODD_SIZE.next_multiple_of(512));
            let same = format!("cluster_size={cluster},preallocation={name}");
            let size = ODD_SIZE.to_string();
            qemu_img(directory, &["create", "-q", "-f", "qcow2", "-o", &same, &theirs, &size]);
            assert_eq!(info(directory, &ours), info(directory, &theirs));
            qemu_img(directory, &["check", "-q", &ours]);
            qemu_img(directory, &["compare", "-q", &ours, &theirs]);
            let chain = Chain::open(&directory.join(&ours), &ChainOptions::default()).unwrap();
            drop(chain);
            let write = ["write -P 7 77k 3M".to_owned()];
            for image in [&ours, &theirs] {
                qemu_io(directory, "qcow2", image, &write);
            }
            qemu_img(directory, &["check", "-q", &ours]);
            qemu_img(directory, &["compare", "-q", &ours, &theirs]);
        }
    }
}

#[test]
fn an_overlay_has_its_backing_files_bytes_and_size() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::qcow2("8M", "", &["write -P 3 1M 64k"]);
    let wanted = CreateOptions {
        backing: Some(images.name().into()),
        backing_format: Some(Format::Qcow2),
        ..CreateOptions::new(Format::Qcow2, None)
    };
    let top = images.directory().join("top");
    assert_eq!(create(&top, &wanted).unwrap(), 8 << 20);
    qemu_img(images.directory(), &["check", "-q", "top"]);
    qemu_img(images.directory(), &["compare", "-q", "top", images.name()]);
    let chain = Chain::open(&top, &ChainOptions::default()).unwrap();
    assert_eq!(chain.layers().len(), 2);
    let full = images.directory().join("full");
    let error = create(&full, &CreateOptions { backing_format: None, ..wanted }).unwrap_err();
    assert!(error.to_string().contains("give --backing-format"), "{error}");
    assert!(!full.exists());
}

#[test]
fn impossible_options_are_refused_and_leave_no_file() {
    let scratch = tempfile::tempdir().unwrap();
    let base = scratch.path().join("base");
    std::fs::write(&base, [7; 4096]).unwrap();
    let raw = options(Format::Raw, 4096);
    let qcow2 = options(Format::Qcow2, 4096);
    let on_base = CreateOptions { backing: Some("base".into()), ..qcow2.clone() };
    for (wanted, words) in [
        (CreateOptions { backing: Some("base".into()), ..raw.clone() }, "no backing file"),
        (CreateOptions { cluster_bytes: Some(512), ..raw.clone() }, "has no clusters"),
        (CreateOptions { preallocation: Preallocation::Metadata, ..raw }, "no metadata"),
        (CreateOptions { preallocation: Preallocation::Falloc, ..on_base.clone() }, "would hide"),
        (CreateOptions { backing: Some("none".into()), ..qcow2.clone() }, "'none' is missing"),
        (CreateOptions { backing: Some("/".into()), ..qcow2.clone() }, "is not a file"),
        (CreateOptions { cluster_bytes: Some(3000), ..qcow2.clone() }, "a power of two"),
        (options(Format::Qcow2, 1 << 62), "needs larger clusters"),
    ] {
        let error = create(&scratch.path().join("disk"), &wanted).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 1, "{words}");
    }
    let holder = nowait_image::ImageFile::open(&base, true).unwrap();
    nowait_image::lock::lock(holder.fd().unwrap(), nowait_image::lock::Access::Write).unwrap();
    let error = create(&scratch.path().join("disk"), &on_base).unwrap_err().to_string();
    assert!(error.contains("open for writing"), "{error}");
}
