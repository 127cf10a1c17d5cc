//! Changes that an operator makes while a virtual machine uses the device: limits, read-only, its connection.
//!
//! Invariant: a change reaches the guest without an error within what it may do.

use std::time::Duration;

use nowait_server::{BackupEnd, BackupSpec, Limits, TokenBucket, scratch_file};
use nowait_testkit::nbd::{Client, Mode};
use nowait_testkit::wait_until;

use crate::driver::*;
use crate::scene::{SIZE, Scene};

const SECTOR: u32 = 512;

/// A limit that lets one request through and the next one days later.
fn one_byte_a_day() -> Limits {
    let day = TokenBucket::MAX_REFILL_TIME;
    let bucket = TokenBucket { size: 1, one_time_burst: 0, refill_time: day };
    Limits { requests: None, bytes: Some(bucket) }
}

#[test]
fn a_guest_over_its_limit_waits_and_other_clients_of_the_export_do_not() {
    let scene = Scene::new();
    let id = scene.exports.list()[0].0;
    scene.exports.set_client_limits(id, one_byte_a_day()).unwrap();
    let mut waits = Driver::connect(&scene.sockets[0]);
    assert_eq!(waits.request(READ, 0, &[(DATA, SECTOR)]), (OK, SECTOR + 1));
    waits.prepare(4, READ, 1, &[(DATA, SECTOR)]);
    waits.offer(4);
    waits.kick();
    let mut other = Driver::connect(&scene.sockets[1]);
    assert_eq!(other.request(READ, 0, &[(DATA, SECTOR)]), (OK, SECTOR + 1));
    let mut client = Client::connect(&scene.nbd, Mode::Structured).unwrap();
    client.read(0, 512).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(waits.used_index(), 1, "the limit does not hold");
    scene.exports.set_client_limits(id, Limits::default()).unwrap();
    assert_eq!(waits.used().0, 4);
    assert_eq!((waits.status(4), &waits.read(DATA, 1)[..]), (OK, &[2][..]));
    client.read(0, 512).unwrap();
}

#[test]
fn a_write_of_a_guest_fails_at_once_while_the_export_is_read_only() {
    let scene = Scene::new();
    let id = scene.exports.list()[0].0;
    let mut driver = Driver::connect(&scene.sockets[0]);
    driver.write(DATA, &[9; 512]);
    for (read_only, status) in [(true, IOERR), (false, OK), (true, IOERR), (false, OK)] {
        scene.exports.set_read_only(id, read_only).unwrap();
        for kind in [WRITE, DISCARD, WRITE_ZEROES] {
            // Sector 8 and one sector from there on.
            let range = [8u64.to_le_bytes(), 1u64.to_le_bytes()].concat();
            let data: &[u8] = if kind == WRITE { &[9; 512] } else { &range };
            driver.write(DATA, data);
            let (got, _) = driver.request(kind, 8, &[(DATA, data.len() as u32)]);
            assert_eq!(got, status, "kind {kind}, read-only: {read_only}");
        }
        assert_eq!(driver.request(READ, 0, &[(DATA, SECTOR)]), (OK, SECTOR + 1));
        assert_eq!(driver.request(FLUSH, 0, &[]), (OK, 1));
        // A VMM that connects now sees what the device is.
        let features = Driver::connect(&scene.sockets[1]).vmm_features();
        assert_eq!(features & 1 << 5 != 0, read_only);
    }
    let totals = &scene.exports.status()[0].totals;
    let errnos: Vec<_> = totals.iter().flat_map(|(_, totals)| totals.errnos.clone()).collect();
    assert_eq!(errnos, [(libc::EPERM, 6)], "two times three refused changes");
}

#[test]
fn the_connection_of_a_guest_is_closed_on_request_and_it_can_connect_again() {
    let scene = Scene::new();
    let mut driver = Driver::connect(&scene.sockets[0]);
    assert_eq!(driver.request(READ, 0, &[(DATA, SECTOR)]), (OK, SECTOR + 1));
    let mut other = Driver::connect(&scene.sockets[1]);
    let id = scene.exports.connections()[0].id;
    assert!(scene.exports.disconnect(id));
    let left = || scene.exports.connections().iter().all(|connection| connection.id != id);
    wait_until("the disconnect", left);
    assert!(!scene.exports.disconnect(id), "it is there still");
    let mut again = Driver::connect(&scene.sockets[0]);
    assert_eq!(again.request(READ, 3, &[(DATA, SECTOR)]), (OK, SECTOR + 1));
    assert_eq!(other.request(READ, 0, &[(DATA, SECTOR)]), (OK, SECTOR + 1));
}

#[test]
fn c78_a_guest_writes_its_disk_while_a_backup_of_it_is_read() {
    let scene = Scene::new();
    let id = scene.exports.list()[0].0;
    let mut driver = Driver::connect(&scene.sockets[0]);
    assert_eq!(driver.request(READ, 0, &[(DATA, SECTOR)]), (OK, SECTOR + 1));
    let spec = BackupSpec {
        export: id,
        name: "backup".into(),
        bitmap: None,
        only_dirty: false,
        discards: false,
        scratch: scratch_file(scene.nbd.parent().unwrap(), None, SIZE).unwrap(),
        scratch_bytes: SIZE,
    };
    let timeout = Duration::from_secs(30);
    scene.exports.begin_backups(vec![spec], timeout).unwrap();
    let mut backup = Client::connect_to(&scene.nbd, "backup", Mode::Structured).unwrap();
    let range = [8u64.to_le_bytes(), 300u64.to_le_bytes()].concat();
    for (kind, data) in [(WRITE, vec![255; 512]), (DISCARD, range.clone()), (WRITE_ZEROES, range)] {
        driver.write(DATA, &data);
        assert_eq!(driver.request(kind, 200, &[(DATA, data.len() as u32)]).0, OK, "kind {kind}");
        let sectors = backup.read(0, SIZE as u32).unwrap();
        let was = (0..SIZE).map(|at| (at / 512 % 251) as u8 + 1);
        assert!(sectors.into_iter().eq(was), "kind {kind}");
    }
    scene.exports.end_backups(&[id], BackupEnd::Commit, timeout).unwrap();
    assert_eq!(driver.request(READ, 8, &[(DATA, SECTOR)]), (OK, SECTOR + 1));
    assert_eq!(driver.read(DATA, 1), [0], "the zeros of the guest");
    assert_eq!(driver.request(FLUSH, 0, &[]), (OK, 1));
}
