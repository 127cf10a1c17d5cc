//! The bits of stored bitmaps on storage, while the disk is served and written to.
//!
//! Invariant: no clock decides: regions cool when they are told to.

use std::io::Read;
use std::path::Path;

use nowait_image::bitmap_changes::{NewBitmap, add_to_new};
use nowait_image::create::{CreateOptions, create};
use nowait_image::{ChainOptions, Format, Image, Locking};
use nowait_server::{AnyExport, BitmapSpec, ExportOptions, Listener, Options, Server};
use nowait_testkit::nbd::{Client, Command, Mode};
use nowait_testkit::{BOUND, Scratch};

const SIZE: u64 = 64 << 20;
/// Bytes of a region.
const REGION: u64 = 16 << 20;
/// Granules of a region.
const GRANULES: u32 = 256;

fn open(path: &Path, format: Format, writable: bool) -> Image {
    let locking = if writable { Locking::Locked } else { Locking::Unlocked };
    let format = Some(format);
    let options = ChainOptions { writable, locking, format, ..ChainOptions::default() };
    nowait_image::open(path, &options).expect("the image")
}

/// An image in `path` with an empty bitmap, open.
fn image(path: &Path, format: Format) -> Image {
    create(path, &CreateOptions::new(format, Some(SIZE))).expect("an image");
    let new = NewBitmap { name: "b".into(), granularity: 64 << 10, enabled: true };
    if format == Format::Qcow2 {
        add_to_new(path, &[new]).expect("a bitmap");
    } else {
        let image = open(path, format, true);
        let place = image.bitmaps_place().expect("a place").clone();
        image.close().expect("its end");
        place.add(&new).expect("a bitmap");
    }
    open(path, format, true)
}

/// Granules that are dirty on storage.
fn stored(path: &Path, format: Format) -> u32 {
    let image = open(path, format, false);
    let (_, bits) = image.stored_bitmaps().expect("bitmaps").pop().expect("a bitmap");
    let mut all = Vec::new();
    bits.expect("a usable one").read_to_end(&mut all).expect("its bits");
    all.iter().map(|byte| byte.count_ones()).sum()
}

#[test]
fn c90_a_region_without_changes_between_two_calls_is_exact_on_storage_while_it_is_served() {
    for format in [Format::Qcow2, Format::Raw] {
        let directory = Scratch::new();
        let path = directory.join("disk.img");
        let image = image(&path, format);
        let export = AnyExport::of_image(&image, ExportOptions::default());
        let store = image.bitmap_store().expect("a store").clone();
        let mut bits = store.stored_bits("b").expect("its bits");
        let spec = BitmapSpec { granularity: 64 << 10, ..BitmapSpec::new("b".into()) };
        export.add_stored_bitmap(&spec, &mut bits).expect("the bitmap");
        let listener = Listener::unix(&directory.join("s")).expect("a socket");
        let options = Options { threads: 2, ..Options::default() };
        let server = Server::start(vec![export], vec![listener], options).expect("a server");
        let (stopper, exports) = (server.shutdown_handle(), server.exports());
        let running = std::thread::spawn(move || server.run(BOUND));
        let mut client =
            Client::connect_to(&directory.join("s"), "", Mode::Structured).expect("a client");
        let mut write = |offset: u64| {
            let write = Command::Write { offset, data: vec![7; 512], fua: false };
            client.call(&write).expect("a write");
        };
        write(5);
        write(2 * REGION);
        assert_eq!(stored(&path, format), 2 * GRANULES, "{format:?}");
        exports.cool_bitmaps();
        assert_eq!(stored(&path, format), 2 * GRANULES, "{format:?}: they rest");
        write(2 * REGION + (1 << 20));
        exports.cool_bitmaps();
        assert_eq!(stored(&path, format), 1 + GRANULES, "{format:?}: one was written to");
        exports.cool_bitmaps();
        assert_eq!(stored(&path, format), 1 + 2, "{format:?}");
        write(REGION - 512);
        assert_eq!(stored(&path, format), GRANULES + 2, "{format:?}: it is open again");
        stopper.stop();
        running.join().expect("its end").expect("a report");
        image.close().expect("its end");
        assert_eq!(stored(&path, format), 2 + 2, "{format:?}");
    }
}
