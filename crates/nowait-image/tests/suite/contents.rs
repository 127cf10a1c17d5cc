//! The bytes and the map of an image, compared with QEMU's; the bytes also with imago's, another reader of
//! qcow2 images in Rust.

use imago::file::File;
use imago::qcow2::Qcow2;
use imago::{FormatAccess, FormatDriverBuilder, PermissiveImplicitOpenGate};

use nowait_image::{Chain, ChainOptions, ChainReader, map};

use nowait_testkit::require_qemu;

use crate::images::{Images, qemu_img};

/// Number of chains; each takes QEMU's tools about a quarter of a second.
const CHAINS: u64 = 50;
const FIRST_SEED: u64 = 7_000;

fn our_map(images: &Images) -> String {
    let options = ChainOptions { data_files: images.data_files(), ..ChainOptions::default() };
    let chain = Chain::open(&images.path(), &options).unwrap();
    let mut out = Vec::new();
    map::write_json(&chain, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

/// The disk as imago reads it. `None` where it has a feature that imago does not know.
fn bytes_by_imago(images: &Images) -> Option<Vec<u8>> {
    let builder = Qcow2::<File>::builder_path(images.path()).write(false);
    let disk = FormatAccess::new(builder.open(PermissiveImplicitOpenGate::default()).ok()?);
    let mut bytes = vec![0xee; disk.size() as usize];
    disk.read(&mut bytes, 0).unwrap();
    Some(bytes)
}

#[test]
fn fifty_chains_have_the_same_map_and_bytes_as_in_qemu() {
    nowait_testkit::needs!(require_qemu());
    let mut read_by_imago = 0;
    for seed in FIRST_SEED..FIRST_SEED + CHAINS {
        let images = Images::seeded(seed);
        let theirs =
            qemu_img(images.directory(), &["map", "--output=json", "-f", "qcow2", images.name()]);
        assert_eq!(our_map(&images), theirs, "seed {seed}");
        qemu_img(images.directory(), &["convert", "-O", "raw", images.name(), "all.raw"]);
        let expected = std::fs::read(images.directory().join("all.raw")).unwrap();
        let options = ChainOptions { data_files: images.data_files(), ..ChainOptions::default() };
        let chain = Chain::open(&images.path(), &options).unwrap();
        let reader = ChainReader::new(chain.layers()).unwrap();
        let mut found = vec![0xee; reader.size() as usize];
        // In pieces that begin and end inside clusters.
        for (index, piece) in found.chunks_mut(1_000_001).enumerate() {
            reader.read_at(index as u64 * 1_000_001, piece).unwrap();
        }
        assert!(found == expected, "seed {seed}");
        if let Some(bytes) = bytes_by_imago(&images) {
            assert!(found == bytes, "seed {seed}: imago");
            read_by_imago += 1;
        }
    }
    // A chain in two has nothing but features that imago knows.
    assert!(read_by_imago >= CHAINS / 4, "imago read {read_by_imago} chains");
}
