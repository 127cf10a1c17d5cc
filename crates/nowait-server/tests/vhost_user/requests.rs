//! Requests of a driver, and their answers.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;

use nowait_testkit::{BOUND, wait_for};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserInflight};

use crate::driver::*;
use crate::scene::{SIZE, Scene};

/// The byte of a sector.
fn byte_of(sector: u64) -> u8 {
    (sector % 251) as u8 + 1
}

#[test]
fn data_go_to_and_from_the_memory_of_the_guest_also_across_its_regions() {
    let scene = Scene::new();
    let mut driver = Driver::connect(&scene.sockets[0]);
    let across = REGION_BYTES - 512;
    assert_eq!(driver.request(READ, 5, &[(DATA, 512), (across, 1024)]), (OK, 1537));
    assert_eq!(driver.read(DATA, 512), [byte_of(5); 512]);
    assert_eq!(driver.read(across, 1024), [[byte_of(6); 512], [byte_of(7); 512]].concat());
    for sector in [0, 100] {
        driver.write(across, &[0x77; 1024]);
        assert_eq!(driver.request(WRITE, sector, &[(across, 1024)]), (OK, 1));
        assert_eq!(driver.request(FLUSH, 0, &[]), (OK, 1));
        let mut bytes = [0; 1536];
        let file = File::open(&scene.image).unwrap();
        file.read_exact_at(&mut bytes, sector * 512).unwrap();
        assert_eq!(bytes[..1024], [0x77; 1024]);
        assert_eq!(bytes[1024..], [byte_of(sector + 2); 512]);
    }
}

#[test]
fn a_request_of_any_layout_is_understood() {
    let scene = Scene::new();
    let mut driver = Driver::connect(&scene.sockets[0]);
    // The header in two parts, and the status behind the data; the chain in a table of its own.
    let (header, _) = driver.header(0, READ, 9);
    let table = DATA + 0x8000;
    driver.describe_at(table, 0, (header, 7), NEXT, 3);
    driver.describe_at(table, 3, (header + 7, 9), NEXT, 1);
    driver.describe_at(table, 1, (DATA, 513), WRITABLE, 0);
    driver.describe(0, (table, 64), INDIRECT, 0);
    driver.offer(0);
    driver.kick();
    assert_eq!(driver.used(), (0, 513));
    assert_eq!(driver.read(DATA, 513), [[byte_of(9); 512].as_slice(), &[OK]].concat());
}

#[test]
fn ranges_are_discarded_and_zeroed_and_the_name_is_told() {
    let scene = Scene::new();
    let mut driver = Driver::connect(&scene.sockets[0]);
    let range = |sector: u64, sectors: u32, flags: u32| {
        [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
    };
    driver.write(DATA, &range(16, 8, 0));
    assert_eq!(driver.request(DISCARD, 0, &[(DATA, 16)]), (OK, 1));
    driver.write(DATA, &range(32, 8, 1));
    assert_eq!(driver.request(WRITE_ZEROES, 0, &[(DATA, 16)]), (OK, 1));
    for sector in [16, 39] {
        assert_eq!(driver.request(READ, sector, &[(DATA, 512)]), (OK, 513));
        assert_eq!(driver.read(DATA, 512), [0; 512]);
    }
    driver.write(DATA, &range(0, 8, 1));
    assert_eq!(driver.request(DISCARD, 0, &[(DATA, 16)]), (UNSUPP, 1), "unmap of a discard");
    assert_eq!(driver.request(GET_ID, 0, &[(DATA, 20)]), (OK, 21));
    assert_eq!(&driver.read(DATA, 20), b"golden\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
}

#[test]
fn a_wrong_request_is_refused_and_the_queue_goes_on() {
    let scene = Scene::new();
    let mut driver = Driver::connect(&scene.sockets[0]);
    let end = SIZE / 512;
    driver.write(DATA, &[0; 16]);
    for (kind, sector, data, status) in [
        (READ, end, &[(DATA, 512)][..], IOERR),
        (WRITE, end - 1, &[(DATA, 1024)], IOERR),
        (READ, u64::MAX, &[(DATA, 512)], IOERR),
        (READ, 1 << 55, &[(DATA, 512)], IOERR),
        (READ, 0, &[(DATA, 511)], IOERR),
        (WRITE, 0, &[(DATA, 100)], IOERR),
        (DISCARD, 0, &[(DATA, 32)], IOERR),
        (WRITE_ZEROES, 0, &[(DATA, 15)], IOERR),
        (99, 0, &[], UNSUPP),
    ] {
        assert_eq!(driver.request(kind, sector, data).0, status, "{kind} at {sector}");
    }
    // A read with nothing but readable memory.
    driver.describe(0, driver.header(0, READ, 0), NEXT, 1);
    driver.describe(1, (DATA, 512), NEXT, 2);
    driver.describe(2, Driver::status_place(0), WRITABLE, 0);
    driver.offer(0);
    driver.kick();
    driver.used();
    assert_eq!(driver.status(0), IOERR);
    assert_eq!(driver.request(READ, end - 1, &[(DATA, 512)]), (OK, 513));
}

#[test]
fn many_requests_at_once_are_all_answered_once() {
    let scene = Scene::new();
    let mut driver = Driver::connect(&scene.sockets[0]);
    let heads: Vec<u16> = (0..QUEUE_SIZE / 3).map(|n| n * 3).collect();
    for round in 0..50u64 {
        for head in &heads {
            let data = DATA + 512 * u64::from(*head);
            driver.prepare(*head, READ, round * 64 + u64::from(*head), &[(data, 512)]);
            driver.offer(*head);
        }
        driver.kick();
        let mut ended: Vec<u16> = heads.iter().map(|_| driver.used().0).collect();
        ended.sort_unstable();
        assert_eq!(ended, heads);
        for head in &heads {
            assert_eq!(driver.status(*head), OK);
            let byte = byte_of(round * 64 + u64::from(*head));
            assert_eq!(driver.read(DATA + 512 * u64::from(*head), 512), [byte; 512]);
        }
    }
    assert!(driver.call.read().unwrap() > 0, "the driver was never called");
}

#[test]
fn a_queue_stops_at_the_entry_that_it_takes_next_and_goes_on_there() {
    let scene = Scene::new();
    let mut driver = Driver::connect(&scene.sockets[0]);
    for _ in 0..3 {
        driver.request(READ, 0, &[(DATA, 512)]);
    }
    assert_eq!(driver.stop(), 3);
    driver.prepare(0, READ, 8, &[(DATA, 512)]);
    driver.offer(0);
    driver.kick();
    driver.start_from(3);
    assert_eq!(driver.used(), (0, 513));
    assert_eq!(driver.read(DATA, 512), [byte_of(8); 512]);
}

#[test]
fn a_driver_is_called_when_its_queue_starts_for_what_an_earlier_server_may_have_told_it() {
    let scene = Scene::new();
    let mut driver = Driver::connect(&scene.sockets[0]);
    assert_eq!(driver.request(READ, 0, &[(DATA, 512)]).0, OK);
    let base = driver.stop();
    while driver.call.read().is_ok() {}
    driver.start_from(base as u16);
    wait_for("a call", || driver.call.read());
}

#[test]
fn the_next_server_does_again_what_was_in_flight_and_nothing_else() {
    let scene = Scene::new();
    let mut driver = Driver::connect(&scene.sockets[0]);
    let asked = VhostUserInflight { num_queues: 1, queue_size: QUEUE_SIZE, ..Default::default() };
    let (layout, file) = driver.vmm.get_inflight_fd(&asked).unwrap();
    drop(driver);
    // State of a server that has died with requests 3 and 6 in flight, 6 taken first.
    let state = |head: u64| 16 + 16 * head;
    file.write_all_at(&1u16.to_le_bytes(), 8).unwrap();
    for (head, counter) in [(3, 8u64), (6, 7)] {
        file.write_all_at(&[1], state(head)).unwrap();
        file.write_all_at(&counter.to_le_bytes(), state(head) + 8).unwrap();
    }
    let mut driver = Driver::connect_with(&scene.sockets[0], None);
    driver.stop();
    driver.prepare(3, READ, 3, &[(DATA, 512)]);
    driver.prepare(6, READ, 6, &[(DATA + 512, 512)]);
    driver.offer(6);
    driver.offer(3);
    driver.vmm.set_inflight_fd(&layout, std::os::fd::AsRawFd::as_raw_fd(&file)).unwrap();
    driver.start_from(0);
    let mut ended = [driver.used(), driver.used()];
    ended.sort_unstable();
    assert_eq!(ended, [(3, 513), (6, 513)]);
    assert_eq!((driver.read(DATA, 1), driver.read(DATA + 512, 1)), (vec![4], vec![7]));
    assert_eq!(driver.request(READ, 9, &[(DATA, 512)]), (OK, 513));
    assert_eq!((driver.used_index(), driver.stop()), (3, 3));
}

#[test]
fn the_configuration_is_told_and_the_cache_can_be_turned_off() {
    let scene = Scene::new();
    let mut driver = Driver::connect(&scene.sockets[0]);
    let flags = VhostUserConfigFlags::WRITABLE;
    let config = |driver: &mut Driver| driver.vmm.get_config(0, 60, flags, &[0; 60]).unwrap().1;
    let before = config(&mut driver);
    assert_eq!(before[..8], (SIZE / 512).to_le_bytes());
    assert_eq!(before[32], 1);
    driver.vmm.set_config(32, flags, &[0]).unwrap();
    assert_eq!(config(&mut driver)[32], 0);
    driver.write(DATA, &[0x55; 512]);
    assert_eq!(driver.request(WRITE, 50, &[(DATA, 512)]), (OK, 1));
    assert!(driver.vmm.set_features(u64::MAX).is_err());
}

#[test]
fn the_next_server_writes_through_as_the_driver_left_it() {
    let scene = Scene::new();
    let mut driver = Driver::connect(&scene.sockets[0]);
    let asked = VhostUserInflight { num_queues: 1, queue_size: QUEUE_SIZE, ..Default::default() };
    let (layout, file) = driver.vmm.get_inflight_fd(&asked).unwrap();
    driver.vmm.set_inflight_fd(&layout, std::os::fd::AsRawFd::as_raw_fd(&file)).unwrap();
    driver.vmm.set_config(32, VhostUserConfigFlags::WRITABLE, &[0]).unwrap();
    drop(driver);
    let mut driver = Driver::connect_with(&scene.sockets[0], Some((layout, file)));
    let flags = VhostUserConfigFlags::WRITABLE;
    assert_eq!(driver.vmm.get_config(32, 1, flags, &[0]).unwrap().1, [0]);
    assert_eq!(driver.request(READ, 9, &[(DATA, 512)]), (OK, 513));
}

#[test]
fn a_vmm_is_told_when_its_disk_becomes_larger_and_the_new_part_can_be_used() {
    let scene = Scene::new();
    let mut driver = Driver::connect(&scene.sockets[0]);
    let (mut channel, far) = UnixStream::pair().unwrap();
    channel.set_read_timeout(Some(BOUND)).unwrap();
    driver.vmm.set_backend_request_fd(&far).unwrap();
    let end = SIZE / 512;
    assert_eq!(driver.request(READ, end, &[(DATA, 512)]), (IOERR, 1));
    let image = File::options().write(true).open(&scene.image).unwrap();
    image.set_len(2 * SIZE).unwrap();
    scene.exports.refresh_sizes();
    let mut message = [0; 12];
    channel.read_exact(&mut message).unwrap();
    assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    let config = driver.vmm.get_config(0, 8, VhostUserConfigFlags::WRITABLE, &[0; 8]).unwrap().1;
    assert_eq!(config, (2 * end).to_le_bytes());
    driver.write(DATA, &[0x77; 512]);
    assert_eq!(driver.request(WRITE, 2 * end - 1, &[(DATA, 512)]), (OK, 1));
    assert_eq!(driver.request(READ, 2 * end - 1, &[(DATA + 512, 512)]), (OK, 513));
    assert_eq!(driver.read(DATA + 512, 512), [0x77; 512]);
    // Nothing has changed since.
    scene.exports.refresh_sizes();
    channel.set_nonblocking(true).unwrap();
    assert_eq!(channel.read(&mut message).unwrap_err().kind(), ErrorKind::WouldBlock);
}

#[test]
fn a_vmm_is_told_from_the_moment_that_its_channel_is_acknowledged() {
    let scene = Scene::new();
    let mut driver = Driver::connect(&scene.sockets[0]);
    let image = File::options().write(true).open(&scene.image).unwrap();
    for n in 1..=200 {
        let (mut channel, far) = UnixStream::pair().unwrap();
        channel.set_read_timeout(Some(BOUND)).unwrap();
        driver.vmm.set_backend_request_fd(&far).unwrap();
        image.set_len(SIZE + n * 512).unwrap();
        scene.exports.refresh_sizes();
        channel.read_exact(&mut [0; 12]).unwrap();
    }
}

/// VIRTIO_F_EVENT_IDX.
const EVENT_IDX: u64 = 1 << 29;

#[test]
fn a_driver_without_event_indices_is_called_unless_it_asks_not_to_be() {
    let scene = Scene::new();
    let mut driver = Driver::connect_without(&scene.sockets[0], EVENT_IDX);
    assert_eq!(driver.request(READ, 0, &[(DATA, 512)]), (OK, 513));
    wait_for("a call", || driver.call.read());
    // VRING_AVAIL_F_NO_INTERRUPT.
    driver.set_flags(1);
    for _ in 0..3 {
        assert_eq!(driver.request(READ, 0, &[(DATA, 512)]), (OK, 513));
    }
    // A call for the first ones would have come before the end of the last one.
    assert_eq!(driver.call.read().unwrap_err().kind(), ErrorKind::WouldBlock);
    driver.set_flags(0);
    assert_eq!(driver.request(READ, 0, &[(DATA, 512)]), (OK, 513));
    wait_for("a call", || driver.call.read());
}

#[test]
fn a_request_of_an_unknown_type_is_unsupported_whatever_memory_it_has() {
    let scene = Scene::new();
    let mut driver = Driver::connect(&scene.sockets[0]);
    let header = driver.header(0, 99, 0);
    driver.describe(0, header, NEXT, 1);
    driver.describe(1, (DATA, 512), NEXT | WRITABLE, 2);
    driver.describe(2, Driver::status_place(0), WRITABLE, 0);
    driver.offer(0);
    driver.kick();
    assert_eq!((driver.used(), driver.status(0)), ((0, 1), UNSUPP));
}
