//! An export that is not served for a while, and then by another device.
//!
//! Invariant: a guest sees a pause and nothing else.

use std::convert::Infallible;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nowait::{BlockDevice, ByteRange, OpenOptions};
use nowait_server::{AnyExport, Export, ExportError, copy_changes};
use nowait_testkit::nbd::{Client, Mode};
use nowait_testkit::worker_only_image::{SEVEN, WorkerOnlyImage};
use nowait_testkit::{BOUND, wait_until};

use crate::driver::*;
use crate::scene::{SIZE, Scene};

const SECTOR: u32 = 512;
/// Rounds of requests of a guest under load.
const ROUNDS: u64 = 200;
const SHORT: Duration = Duration::from_millis(30);

/// An export called as the one of [`Scene`], of an image at `path` whose bytes are all `byte`.
fn export_of(path: &Path, byte: u8) -> AnyExport {
    std::fs::write(path, vec![byte; SIZE as usize]).unwrap();
    let disk = Arc::new(BlockDevice::open(path, OpenOptions::default()).unwrap());
    AnyExport::new(Export::new(disk, "golden".into(), String::new()))
}

#[test]
fn guests_and_clients_go_on_where_they_were_on_another_device() {
    let scene = Scene::new();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let id = scene.exports.list()[0].0;
    let mut driver = Driver::connect(&scene.sockets[0]);
    let mut client = Client::connect(&scene.nbd, Mode::Structured).unwrap();
    for byte in [100, 101, 102] {
        let old = if byte == 100 { 1 } else { byte - 1 };
        assert_eq!(driver.request(READ, 0, &[(DATA, SECTOR)]), (OK, SECTOR + 1));
        assert_eq!(driver.read(DATA, 512), [old; 512]);
        let parked = scene.exports.pause_export(id, BOUND).unwrap();
        assert!(scene.exports.pause_export(id, BOUND).is_err(), "it is parked");
        let before = driver.used_index();
        driver.prepare(0, READ, 8, &[(DATA, SECTOR)]);
        driver.offer(0);
        driver.kick();
        let mut late = Driver::connect(&scene.sockets[1]);
        late.prepare(0, READ, 8, &[(DATA, SECTOR)]);
        late.offer(0);
        late.kick();
        std::thread::sleep(SHORT);
        assert_eq!((driver.used_index(), late.used_index()), (before, 0), "it is served");
        let path = directory.path().join(byte.to_string());
        parked.replace(export_of(&path, byte)).unwrap();
        drop(parked);
        for waiting in [&mut driver, &mut late] {
            assert_eq!(waiting.used(), (0, SECTOR + 1));
            assert_eq!(waiting.read(DATA, 512), [byte; 512]);
        }
        assert_eq!(client.read(4096, 512).unwrap(), [byte; 512]);
    }
    let totals = &scene.exports.status()[0].totals;
    let requests: u64 = totals.iter().map(|(_, totals)| totals.requests()).sum();
    assert_eq!(requests, 3 * 3 + 3, "the counts go on");
}

#[test]
fn a_disk_moves_while_a_guest_writes_and_has_all_of_it_in_the_new_place() {
    let scene = Scene::new();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (id, path) = (scene.exports.list()[0].0, directory.path().join("moved"));
    let mut driver = Driver::connect(&scene.sockets[0]);
    let changes = scene.exports.track_changes(id).unwrap();
    let (new, old) = (export_of(&path, 9), File::open(&scene.image).unwrap());
    let to = File::options().write(true).open(&path).unwrap();
    let mut copied = Vec::new();
    let mut copy = |range: ByteRange| {
        let mut bytes = vec![0; range.len as usize];
        old.read_exact_at(&mut bytes, range.pos).unwrap();
        to.write_all_at(&bytes, range.pos).unwrap();
        copied.push(range);
    };
    let mut write = |sector: u64, byte: u8| {
        driver.write(DATA, &[byte; 512]);
        assert_eq!(driver.request(WRITE, sector, &[(DATA, SECTOR)]).0, OK);
        assert_eq!(driver.request(FLUSH, 0, &[]).0, OK);
    };
    copy(ByteRange::new(0, SIZE));
    write(0, 50);
    write(4096, 51);
    let parked = scene.exports.pause_export(id, BOUND).unwrap();
    let rest = copy_changes(&changes, |ranges| {
        ranges.iter().for_each(|range| copy(*range));
        Ok::<_, Infallible>(true)
    });
    assert_eq!(rest, Ok(true));
    parked.replace(new).unwrap();
    drop(parked);
    write(8, 52);
    for (sector, byte) in [(0, 50), (4096, 51), (8, 52), (100, 101)] {
        assert_eq!(driver.request(READ, sector, &[(DATA, SECTOR)]), (OK, SECTOR + 1));
        assert_eq!(driver.read(DATA, 512), [byte; 512], "sector {sector}");
    }
    let granule = |at| ByteRange::new(at, 64 << 10);
    assert_eq!(copied, [ByteRange::new(0, SIZE), granule(0), granule(4096 * 512)]);
    let mut before = [0; 512];
    old.read_exact_at(&mut before, 8 * 512).unwrap();
    assert_eq!(before, [9; 512], "the image before has no more changes");
}

#[test]
fn a_guest_under_load_gets_every_answer_once_through_many_pauses() {
    let scene = Scene::new();
    let id = scene.exports.list()[0].0;
    let done = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut driver = Driver::connect(&scene.sockets[0]);
            for rounds in 0..ROUNDS {
                let heads = [0, 4, 8, 12];
                for (n, head) in (0..).zip(heads) {
                    let data = DATA + u64::from(SECTOR) * n;
                    driver.write(data, &[(rounds + n) as u8; 512]);
                    driver.prepare(head, WRITE, n, &[(data, SECTOR)]);
                    driver.offer(head);
                }
                driver.kick();
                let mut ended: Vec<u16> = heads.iter().map(|_| driver.used().0).collect();
                ended.sort_unstable();
                assert_eq!(ended, heads);
                for n in 0..4 {
                    assert_eq!(driver.request(READ, n, &[(DATA, SECTOR)]), (OK, SECTOR + 1));
                    assert_eq!(driver.read(DATA, 512), [(rounds + n) as u8; 512]);
                }
                done.store(rounds + 1, Ordering::Relaxed);
            }
        });
        let mut pauses = 0;
        while done.load(Ordering::Relaxed) < ROUNDS && !load.is_finished() {
            drop(scene.exports.pause_export(id, BOUND).unwrap());
            pauses += 1;
            // Without a time between two pauses no request would ever be taken.
            std::thread::sleep(Duration::from_millis(1));
        }
        load.join().unwrap();
        assert!(pauses > 0);
    });
}

#[test]
fn a_pause_that_a_request_in_flight_prevents_is_called_off_and_the_guest_goes_on() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let image = WorkerOnlyImage::default();
    let disk = image.device(&directory.path().join("image"), SIZE);
    let scene = Scene::of(Export::new(disk, "golden".into(), String::new()));
    let id = scene.exports.list()[0].0;
    let mut driver = Driver::connect(&scene.sockets[0]);
    let mut client = Client::connect(&scene.nbd, Mode::Structured).unwrap();
    let held = image.hold();
    driver.prepare(0, READ, 0, &[(DATA, SECTOR)]);
    driver.offer(0);
    driver.kick();
    wait_until("the read", || image.reads().len() == 1);
    let refused = scene.exports.pause_export(id, SHORT).err().unwrap();
    assert_eq!(refused, ExportError::DoesNotEnd);
    assert_eq!(driver.used_index(), 0);
    driver.prepare(4, READ, 1, &[(DATA, SECTOR)]);
    driver.offer(4);
    driver.kick();
    drop(held);
    let mut ended = [driver.used().0, driver.used().0];
    ended.sort_unstable();
    assert_eq!((ended, driver.read(DATA, 1)), ([0, 4], vec![SEVEN]));
    assert_eq!(client.read(0, 1).unwrap(), [SEVEN]);
    drop(scene.exports.pause_export(id, BOUND).unwrap());
    assert_eq!(driver.request(READ, 0, &[(DATA, SECTOR)]), (OK, SECTOR + 1));
}
