//! The bits of stored bitmaps on storage, while the disk is served and written to.
//!
//! Invariant: no clock decides what is asserted: regions cool when they are told to, or a test waits until they have.

use std::io::Read;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

use nowait::Error;
use nowait_image::bitmap_changes::{NewBitmap, add_to_new};
use nowait_image::create::{CreateOptions, create};
use nowait_image::{ChainOptions, Format, Image, Locking};
use nowait_server::{
    AnyExport, BitmapSpec, ExportOptions, Exports, Listener, Options, Server, ShutdownHandle,
    ShutdownReport,
};
use nowait_testkit::nbd::{Client, Command, Mode};
use nowait_testkit::{BOUND, Scratch, wait_until};

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

/// A server of an image with a bitmap, on two threads.
struct Served {
    directory: Scratch,
    format: Format,
    image: Image,
    exports: Exports,
    stopper: ShutdownHandle,
    running: JoinHandle<Result<ShutdownReport, Error>>,
    client: Client,
}

impl Served {
    fn start(format: Format) -> Self {
        let directory = Scratch::new();
        let image = image(&directory.join("disk.img"), format);
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
        let client = Client::connect_to(&directory.join("s"), "", Mode::Structured);
        let client = client.expect("a client");
        Self { directory, format, image, exports, stopper, running, client }
    }

    fn write(&mut self, offset: u64) {
        let write = Command::Write { offset, data: vec![7; 512], fua: false };
        self.client.call(&write).expect("a write");
    }

    /// Granules that are dirty on storage.
    fn stored(&self) -> u32 {
        stored(&self.directory.join("disk.img"), self.format)
    }

    /// Ends in order. Returns the granules that are dirty on storage then.
    fn stop(self) -> u32 {
        self.stopper.stop();
        let report = self.running.join().expect("its end").expect("a report");
        assert_eq!(report.unfinished, 0);
        self.image.close().expect("its end");
        stored(&self.directory.join("disk.img"), self.format)
    }
}

#[test]
fn c90_a_region_without_changes_between_two_calls_is_exact_on_storage_while_it_is_served() {
    for format in [Format::Qcow2, Format::Raw] {
        let mut it = Served::start(format);
        it.write(5);
        it.write(2 * REGION);
        assert_eq!(it.stored(), 2 * GRANULES, "{format:?}");
        it.exports.cool_bitmaps();
        assert_eq!(it.stored(), 2 * GRANULES, "{format:?}: they rest");
        it.write(2 * REGION + (1 << 20));
        it.exports.cool_bitmaps();
        assert_eq!(it.stored(), 1 + GRANULES, "{format:?}: one was written to");
        it.exports.cool_bitmaps();
        assert_eq!(it.stored(), 1 + 2, "{format:?}");
        it.write(REGION - 512);
        assert_eq!(it.stored(), GRANULES + 2, "{format:?}: it is open again");
        assert_eq!(it.stop(), 2 + 2, "{format:?}");
    }
}

/// Threads of this process that look at bitmaps regularly.
fn looking_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("the threads of this process");
    let names = tasks.flatten().map(|task| std::fs::read_to_string(task.path().join("comm")));
    names.flatten().filter(|name| name.trim_end() == "bitmaps").count()
}

#[test]
fn c90_regions_cool_by_themselves_until_the_server_ends() {
    for format in [Format::Qcow2, Format::Raw] {
        let mut it = Served::start(format);
        it.exports.cool_regularly(Duration::from_millis(20)).expect("a thread");
        wait_until("the thread has its name", || looking_threads() == 1);
        // Closed and opened again: not the first look alone.
        for round in 1..=3 {
            it.write(5);
            it.write(2 * REGION + (round << 20));
            let exact = 1 + round as u32;
            wait_until("the exact bits are stored", || it.stored() == exact);
        }
        assert_eq!(it.stop(), 4, "{format:?}");
        wait_until("the thread exits with its server", || looking_threads() == 0);
    }
}
