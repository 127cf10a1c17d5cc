//! Hostile guests and VMMs: each stops its own device, and nothing else.

use rustix::fs::ftruncate;
use std::os::fd::AsRawFd;
use vhost::VhostBackend;
use vhost::vhost_user::message::VhostUserInflight;
use vhost::vhost_user::{Frontend, VhostUserFrontend};

use crate::driver::*;
use crate::scene::Scene;

/// Outside of the guest's memory.
const NOWHERE: u64 = MEMORY_BYTES + 0x1000;

/// Lets `break_rule` prepare a chain at descriptor 0, and make it available: the device stops, is
/// served again when it was reset, and another device of the same thread is served meanwhile.
fn stops_its_device(break_rule: impl FnOnce(&mut Driver)) {
    let scene = Scene::new();
    let mut beside = Driver::connect(&scene.sockets[1]);
    let mut hostile = Driver::connect(&scene.sockets[0]);
    assert_eq!(hostile.request(READ, 0, &[(DATA, 512)]), (OK, 513));
    break_rule(&mut hostile);
    hostile.kick();
    hostile.await_breakdown();
    assert_eq!(hostile.used_index(), 1, "it was answered");
    assert_eq!(beside.request(READ, 7, &[(DATA, 512)]), (OK, 513));
    hostile.reset();
    assert_eq!(hostile.request(READ, 0, &[(DATA, 512)]), (OK, 513));
}

/// [`stops_its_device`] for a chain of `descriptors`, behind a header that asks for a read.
fn chain_stops_its_device(descriptors: &[((u64, u32), u16, u16)]) {
    stops_its_device(|driver| {
        driver.describe(0, driver.header(0, READ, 0), NEXT, 1);
        for (n, (memory, flags, next)) in (1..).zip(descriptors) {
            driver.describe(n, *memory, *flags, *next);
        }
        driver.offer(0);
    });
}

#[test]
fn a_chain_without_an_end() {
    chain_stops_its_device(&[((DATA, 512), NEXT | WRITABLE, 1)]);
}

#[test]
fn a_chain_that_leads_back_to_its_head() {
    chain_stops_its_device(&[((DATA, 512), NEXT, 0)]);
}

#[test]
fn a_descriptor_outside_of_the_table() {
    chain_stops_its_device(&[((DATA, 512), NEXT | WRITABLE, QUEUE_SIZE)]);
}

#[test]
fn a_head_outside_of_the_table() {
    stops_its_device(|driver| driver.offer(QUEUE_SIZE));
}

#[test]
fn readable_memory_after_writable_memory() {
    let status = Driver::status_place(0);
    chain_stops_its_device(&[
        ((DATA, 512), NEXT | WRITABLE, 2),
        ((DATA, 512), NEXT, 3),
        (status, WRITABLE, 0),
    ]);
}

#[test]
fn no_status() {
    chain_stops_its_device(&[((DATA, 512), 0, 0)]);
}

#[test]
fn a_status_of_no_bytes() {
    chain_stops_its_device(&[((DATA, 0), WRITABLE, 0)]);
}

#[test]
fn a_status_outside_of_the_memory() {
    chain_stops_its_device(&[((NOWHERE, 1), WRITABLE, 0)]);
}

#[test]
fn a_header_that_is_too_short() {
    stops_its_device(|driver| {
        driver.describe(0, (HEADERS, 15), NEXT, 1);
        driver.describe(1, Driver::status_place(0), WRITABLE, 0);
        driver.offer(0);
    });
}

#[test]
fn a_header_outside_of_the_memory() {
    stops_its_device(|driver| {
        driver.describe(0, (NOWHERE, 16), NEXT, 1);
        driver.describe(1, Driver::status_place(0), WRITABLE, 0);
        driver.offer(0);
    });
}

#[test]
fn a_buffer_outside_of_the_memory() {
    let status = Driver::status_place(0);
    chain_stops_its_device(&[((NOWHERE, 512), NEXT | WRITABLE, 2), (status, WRITABLE, 0)]);
}

#[test]
fn a_buffer_across_the_end_of_the_memory() {
    let status = Driver::status_place(0);
    let across = (MEMORY_BYTES - 256, 512);
    chain_stops_its_device(&[(across, NEXT | WRITABLE, 2), (status, WRITABLE, 0)]);
}

#[test]
fn a_buffer_whose_address_overflows() {
    let status = Driver::status_place(0);
    chain_stops_its_device(&[((u64::MAX - 100, 512), NEXT | WRITABLE, 2), (status, WRITABLE, 0)]);
}

#[test]
fn a_table_in_a_table() {
    stops_its_device(|driver| {
        driver.describe_at(DATA, 0, (DATA, 16), INDIRECT, 0);
        driver.describe(0, (DATA, 16), INDIRECT, 0);
        driver.offer(0);
    });
}

#[test]
fn a_table_of_a_wrong_length() {
    for len in [0, 1, 17, u32::MAX] {
        stops_its_device(|driver| {
            driver.describe(0, (DATA, len), INDIRECT, 0);
            driver.offer(0);
        });
    }
}

#[test]
fn a_table_outside_of_the_memory() {
    stops_its_device(|driver| {
        driver.describe(0, (NOWHERE, 160), INDIRECT, 0);
        driver.offer(0);
    });
}

#[test]
fn a_table_with_a_chain_without_an_end() {
    stops_its_device(|driver| {
        driver.describe_at(DATA, 0, driver.header(0, READ, 0), NEXT, 1);
        driver.describe_at(DATA, 1, (DATA + 512, 4), NEXT | WRITABLE, 1);
        driver.describe(0, (DATA, 32), INDIRECT, 0);
        driver.offer(0);
    });
}

#[test]
fn more_requests_than_the_queue_has_room_for() {
    stops_its_device(|driver| driver.set_available(QUEUE_SIZE + 2));
}

#[test]
fn memory_whose_file_was_shrunk() {
    let scene = Scene::new();
    let mut beside = Driver::connect(&scene.sockets[1]);
    let hostile = Driver::connect(&scene.sockets[0]);
    // The rings are in the first file. The driver does not touch them any more.
    ftruncate(&hostile.files[0], 0).unwrap();
    hostile.kick();
    hostile.await_breakdown();
    assert_eq!(beside.request(READ, 7, &[(DATA, 512)]), (OK, 513));
    drop(hostile);
    let mut next = Driver::connect(&scene.sockets[0]);
    assert_eq!(next.request(READ, 7, &[(DATA, 512)]), (OK, 513));
}

#[test]
fn what_a_vmm_may_not_set_up_is_refused() {
    let scene = Scene::new();
    let refused = |ask: &dyn Fn(&mut Driver) -> bool| {
        let mut driver = Driver::connect(&scene.sockets[0]);
        assert!(ask(&mut driver));
        drop(driver);
    };
    refused(&|driver| driver.vmm.set_vring_num(0, 3).is_err());
    refused(&|driver| driver.vmm.set_vring_num(0, 0).is_err());
    refused(&|driver| {
        let asked = VhostUserInflight { num_queues: 1000, queue_size: 4, ..Default::default() };
        driver.vmm.get_inflight_fd(&asked).is_err()
    });
    refused(&|driver| {
        let short = VhostUserInflight::new(1 << 20, 0, 64, 1024);
        driver.vmm.set_inflight_fd(&short, driver.files[0].as_raw_fd()).is_err()
    });
    refused(&|driver| {
        // Rings at addresses that the VMM has not shared.
        driver.stop();
        let nowhere = vhost::VringConfigData {
            queue_max_size: QUEUE_SIZE,
            queue_size: QUEUE_SIZE,
            flags: 0,
            desc_table_addr: 0x10,
            used_ring_addr: 0x20,
            avail_ring_addr: 0x30,
            log_addr: None,
        };
        let kick = vmm_sys_util::eventfd::EventFd::new(0).unwrap();
        driver.vmm.set_vring_addr(0, &nowhere).is_err()
            || driver.vmm.set_vring_kick(0, &kick).is_err()
    });
    let mut next = Driver::connect(&scene.sockets[0]);
    assert_eq!(next.request(READ, 7, &[(DATA, 512)]), (OK, 513));
}

#[test]
fn a_second_vmm_waits_until_the_first_has_left() {
    let scene = Scene::new();
    let first = Driver::connect(&scene.sockets[0]);
    let second = Frontend::connect(&scene.sockets[0], 1).unwrap();
    let waiting = std::thread::spawn(move || {
        second.set_owner().unwrap();
        second.get_features().unwrap()
    });
    let mut beside = Driver::connect(&scene.sockets[1]);
    assert_eq!(beside.request(READ, 7, &[(DATA, 512)]), (OK, 513));
    assert!(!waiting.is_finished());
    drop(first);
    assert_ne!(waiting.join().unwrap(), 0);
    let _: u64 = beside.vmm.get_queue_num().unwrap();
}
