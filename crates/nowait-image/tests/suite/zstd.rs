//! Images with clusters that are compressed by zstd: made, read, and damaged.

use std::fs;
use std::sync::Arc;

use nowait::{BlockingFile, Direct};
use nowait_image::create::{CreateOptions, Features, create};
use nowait_image::qcow2_disk::{self, ServeOptions};
use nowait_image::{Chain, ChainOptions, ChainReader, Compression, Format};
use nowait_testkit::require_qemu;

use crate::images::{Images, qemu_img, qemu_io};

const CLUSTER: usize = 64 << 10;
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// Reads the first cluster as the offline commands do, and as a server does.
fn read_both_ways(images: &Images) -> [Result<Vec<u8>, String>; 2] {
    let open = || Chain::open(&images.path(), &ChainOptions::default()).unwrap();
    let mut bytes = vec![0; CLUSTER];
    let chain = open();
    let reader = ChainReader::new(chain.layers()).unwrap();
    let offline = reader.read_at(0, &mut bytes).map(|()| bytes.clone());
    let options = ServeOptions { writable: false, direct: Direct::Off, cache_holes: true };
    let (disk, _open) = qcow2_disk::open(open(), options).unwrap();
    let file = BlockingFile::new(Arc::new(disk));
    let served = file.read_at(&mut bytes, 0).map(|_| bytes.clone());
    [offline.map_err(|error| error.to_string()), served.map_err(|error| error.to_string())]
}

#[test]
fn a_new_image_with_zstd_takes_compressed_clusters_from_qemu_and_has_their_bytes() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::none("disk.qcow2");
    let features = Features { compression: Some(Compression::Zstd), ..Features::default() };
    let options = CreateOptions { features, ..CreateOptions::new(Format::Qcow2, Some(8 << 20)) };
    create(&images.path(), &options).unwrap();
    let info = qemu_img(images.directory(), &["info", images.name()]);
    assert!(info.contains("compression type: zstd"), "{info}");
    qemu_io(images.directory(), "qcow2", images.name(), &["write -c -P 7 0 64k".into()]);
    assert!(fs::read(images.path()).unwrap().windows(4).any(|bytes| bytes == ZSTD_MAGIC));
    for read in read_both_ways(&images) {
        assert!(read.unwrap() == [7; CLUSTER]);
    }
    let raw = CreateOptions { format: Format::Raw, ..options };
    let error = create(&images.directory().join("raw"), &raw).unwrap_err().to_string();
    assert!(error.contains("leave out --compression"), "{error}");
}

#[test]
fn a_damaged_frame_is_an_error_of_its_cluster_and_the_image_stays_as_it_is() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::qcow2("8M", "compression_type=zstd", &["write -c -P 7 0 64k"]);
    let mut bytes = fs::read(images.path()).unwrap();
    let at = bytes.windows(4).position(|bytes| bytes == ZSTD_MAGIC).unwrap();
    for damaged_at in [at, at + 4] {
        bytes[damaged_at] ^= 0xff;
        fs::write(images.path(), &bytes).unwrap();
        for read in read_both_ways(&images) {
            let error = read.unwrap_err();
            assert!(error.contains("Input/output error"), "{error}");
        }
        assert!(fs::read(images.path()).unwrap() == bytes);
        bytes[damaged_at] ^= 0xff;
    }
}
