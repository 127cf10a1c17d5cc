//! An export that a virtual machine and an NBD client use simultaneously: one device, whose data and
//! flushes are the same for both.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use nowait_server::Export;
use nowait_testkit::nbd::{Client, Command, Mode};
use nowait_testkit::worker_only_image::WorkerOnlyImage;

use crate::driver::*;
use crate::scene::{SIZE, Scene};

const BLOCK: usize = 4096;
/// Reads of the guest that are in flight simultaneously, of 64 KiB each.
const HEADS: [u16; 8] = [0, 4, 8, 12, 16, 20, 24, 28];
const LARGE: u32 = 64 << 10;

fn connect(scene: &Scene) -> Client {
    Client::connect(&scene.nbd, Mode::Structured).unwrap()
}

#[test]
fn what_is_written_by_one_protocol_is_read_by_the_other() {
    let scene = Scene::new();
    let mut client = connect(&scene);
    let mut driver = Driver::connect(&scene.sockets[0]);
    for n in 0..20u8 {
        let (at, sector) = (u64::from(n) * 8192, u64::from(n) * 16);
        driver.write(DATA, &[n; BLOCK]);
        assert_eq!(driver.request(WRITE, sector, &[(DATA, BLOCK as u32)]), (OK, 1));
        assert_eq!(client.read(at, BLOCK as u32).unwrap(), [n; BLOCK]);
        client.write(at + BLOCK as u64, &[!n; BLOCK]).unwrap();
        let read = driver.request(READ, sector + 8, &[(DATA, BLOCK as u32)]);
        assert_eq!(read, (OK, BLOCK as u32 + 1));
        assert_eq!(driver.read(DATA, BLOCK), [!n; BLOCK]);
    }
}

/// A flush of the device covers all writes that have ended, by either protocol.
#[test]
fn a_flush_by_either_protocol_is_one_of_the_device() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let image = WorkerOnlyImage::default();
    let disk = image.device(&directory.path().join("image"), SIZE);
    let scene = Scene::of(Export::new(disk, "golden".into(), String::new()));
    let mut client = connect(&scene);
    let mut driver = Driver::connect(&scene.sockets[0]);
    let before = image.flushes();
    driver.write(DATA, &[1; BLOCK]);
    assert_eq!(driver.request(WRITE, 64, &[(DATA, BLOCK as u32)]), (OK, 1));
    client.call(&Command::Flush).unwrap();
    assert_eq!(image.flushes(), before + 1, "of a write of the guest");
    client.write(0, &[1; BLOCK]).unwrap();
    assert_eq!(driver.request(FLUSH, 0, &[]), (OK, 1));
    assert_eq!(image.flushes(), before + 2, "of a write of the client");
}

#[test]
fn a_client_is_answered_beside_a_guest_whose_queue_is_never_empty() {
    let scene = Scene::new();
    let mut driver = Driver::connect(&scene.sockets[0]);
    for (n, head) in (0..).zip(HEADS) {
        driver.prepare(head, READ, 128 * n, &[(DATA + u64::from(LARGE) * n, LARGE)]);
    }
    let (is_done, ended) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            HEADS.into_iter().for_each(|head| driver.offer(head));
            driver.kick();
            // Each request is made again as soon as it has ended.
            while !is_done.load(Ordering::Relaxed) {
                let (head, _) = driver.used();
                ended.store(true, Ordering::Relaxed);
                driver.offer(head);
                driver.kick();
            }
            for _ in HEADS {
                driver.used();
            }
        });
        let mut client = connect(&scene);
        for n in 0..200 {
            let byte = (n * 8 % 251) as u8 + 1;
            let read = client.read(n * BLOCK as u64, BLOCK as u32).unwrap();
            assert_eq!(read[..512], [byte; 512]);
        }
        is_done.store(true, Ordering::Relaxed);
    });
    assert!(ended.into_inner());
    assert!(HEADS.into_iter().all(|head| driver.status(head) == OK));
}
