//! An image that one process hands over to another, which here are two opens of it.

use nowait_image::{ChainOptions, HandedOver, Image, ImageError, open};
use nowait_testkit::{no_child_starts, require_qemu};

use crate::images::Images;

fn try_open(images: &Images, handed_over: HandedOver) -> Result<Image, ImageError> {
    let data_files = images.data_files();
    let options =
        ChainOptions { writable: true, data_files, handed_over, ..ChainOptions::default() };
    open(&images.path(), &options)
}

/// The state that the process that has `image` open hands over.
fn handed_over(image: &Image) -> HandedOver {
    let files = image.held_files().into_iter().map(|fd| fd.try_clone_to_owned().unwrap());
    HandedOver::new(files.collect())
}

fn why(opened: Result<Image, ImageError>) -> String {
    opened.err().map_or_else(|| "it was opened".into(), |error| error.to_string())
}

#[test]
fn an_image_that_is_handed_over_is_locked_at_every_moment() {
    nowait_testkit::needs!(require_qemu());
    let all: Vec<Images> = (0..3).map(Images::seeded).collect();
    let _alone = no_child_starts();
    let in_use =
        |images: &Images| why(try_open(images, HandedOver::default())).contains("open for writing");
    for (seed, images) in all.iter().enumerate() {
        let mut holder = try_open(images, HandedOver::default()).unwrap();
        for _ in 0..2 {
            assert!(in_use(images), "seed {seed}");
            let next = try_open(images, handed_over(&holder)).unwrap();
            assert!(in_use(images), "seed {seed}");
            drop(holder);
            holder = next;
        }
        // A program that takes over and fails leaves the image to the one that has it.
        drop(try_open(images, handed_over(&holder)).unwrap());
        assert!(in_use(images), "seed {seed}");
        drop(holder);
        drop(try_open(images, HandedOver::default()).unwrap());
    }
}

#[test]
fn another_file_in_the_place_of_one_that_was_handed_over_is_refused() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::qcow2("1M", "cluster_size=4k", &["write -P 5 0 1M"]);
    let other = Images::qcow2("1M", "cluster_size=4k", &[]);
    let _alone = no_child_starts();
    let holder = try_open(&images, HandedOver::default()).unwrap();
    let (path, moved) = (images.path(), images.directory().join("moved"));
    std::fs::rename(&path, &moved).unwrap();
    std::fs::copy(other.path(), &path).unwrap();
    let refused = why(try_open(&images, handed_over(&holder)));
    assert!(refused.contains("another file has taken its place"), "{refused}");
    std::fs::rename(&moved, &path).unwrap();
    let refused = why(try_open(&images, HandedOver::default()));
    assert!(refused.contains("open for writing"), "{refused}");
}
