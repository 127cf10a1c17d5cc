//! In steady state a read or write of a virtual machine allocates nothing.
//!
//! Invariant: one test function in this program; the driver allocates all of its memory before the
//! count begins, so that all counted allocations are the server's.

#[allow(dead_code, reason = "the other tests use all of it")]
#[path = "vhost_user/driver.rs"]
mod driver;
#[allow(dead_code, reason = "the other tests use all of it")]
#[path = "vhost_user/scene.rs"]
mod scene;

use std::time::Instant;

use nowait_testkit::BOUND;
use nowait_testkit::allocations::{Counting, allocations};

use driver::{DATA, Driver, OK, READ, WRITE};
use scene::Scene;

/// Requests of the queue that are in flight simultaneously: reads in two parts, and writes.
const HEADS: [u16; 8] = [0, 4, 8, 12, 16, 20, 24, 28];
/// Rounds before the count begins, and counted ones.
const WARM_UP: u16 = 300;
const ROUNDS: u16 = 1_000;

#[global_allocator]
static COUNTING: Counting = Counting;

/// Does all requests `rounds` times, from the used element `used` on. Returns the next one.
fn run(driver: &mut Driver, rounds: u16, mut used: u16) -> u16 {
    for _ in 0..rounds {
        HEADS.into_iter().for_each(|head| driver.offer(head));
        driver.kick();
        used = used.wrapping_add(HEADS.len() as u16);
        let began = Instant::now();
        while driver.used_index() != used {
            assert!(began.elapsed() < BOUND, "requests do not end");
            std::thread::yield_now();
        }
    }
    used
}

#[test]
fn a_read_or_write_of_a_guest_allocates_nothing() {
    let scene = Scene::new();
    let mut driver = Driver::connect(&scene.sockets[0]);
    for (n, head) in HEADS.into_iter().enumerate() {
        let data = DATA + 8192 * n as u64;
        // Apart, so that they stay two segments.
        let parts = [(data, 4096), (data + 0x20000, 4096)];
        match n % 2 {
            0 => driver.prepare(head, READ, 64 * n as u64, &parts),
            _ => driver.prepare(head, WRITE, 64 * n as u64, &parts[..1]),
        }
    }
    let used = run(&mut driver, WARM_UP, 0);
    let before = allocations();
    run(&mut driver, ROUNDS, used);
    let counted = allocations() - before;
    assert!(HEADS.into_iter().all(|head| driver.status(head) == OK));
    assert_eq!(counted, 0);
}
