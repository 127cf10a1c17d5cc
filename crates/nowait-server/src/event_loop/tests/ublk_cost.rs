//! The server's own cost of a 4 KiB read of a ublk node: instructions from the end of the command that
//! fetches it to the command that answers it, and its allocations, on a queue that does no I/O.
//!
//! Invariant: what is counted is the difference of two runs, so that the start is not.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::sync::mpsc::channel;

use nowait_testkit::{require_tool, say_skipped};

use crate::event_loop::tests::request_cost::{check_cost, counted, wanted};
use crate::event_loop::tests::ublk_requests::{CommandQueue, Driver};
use crate::event_loop::tests::*;
use crate::ublk::ublk_channel::UblkStart;
use crate::ublk::ublk_cmd::{DESCRIPTOR_BYTES, OP_READ};
use crate::ublk::ublk_device::UblkDevice;

const DEPTH: u16 = 64;
const SECTORS: u32 = 8;
/// Instructions of one read at depth 1, and of one of 64 that arrive together, at most. With
/// the profile `dist`.
const LIMITS: [(usize, u64); 2] = [(1, 1480), (64, 860)];
/// The numbers of requests of the two runs whose allocations are counted.
const FEW: usize = 640;
const MANY: usize = 3_200;

/// Serves `count` reads, `depth` of them at a time.
fn serve(depth: usize, count: usize) {
    let capacity = usize::from(DEPTH);
    let driver: Rc<RefCell<Driver>> = Rc::default();
    let queue = || CommandQueue::new(Null::new().unwrap(), &driver);
    let (context, engine) = parts(Config::default(), queue);
    let descriptors = tempfile::tempfile().unwrap();
    let mut read = [0; DESCRIPTOR_BYTES];
    read[..4].copy_from_slice(&u32::from(OP_READ).to_ne_bytes());
    read[4..8].copy_from_slice(&SECTORS.to_ne_bytes());
    let requests = read.repeat(capacity);
    descriptors.set_len(64 << 10).unwrap();
    descriptors.write_all_at(&requests, 0).unwrap();
    let device = UblkDevice::simulated(OwnedFd::from(descriptors), (DEPTH, BLOCK as u32), 0);
    let mut thread = EventLoop::new(&context, engine, context.frontends().ublk).unwrap();
    let (started, begun) = channel();
    let used = registered(&thread).shared().begin_use().unwrap();
    let (device, on_removed) = (Arc::new(device), Box::new(|| {}));
    let start = UblkStart { device, number: 0, used, on_removed, started };
    thread.frontend.add(&mut thread.context, start);
    begun.recv().unwrap().unwrap();
    for _ in 0..count / depth {
        {
            let mut driver = driver.borrow_mut();
            let left = capacity - depth;
            let Driver { commands, ended, .. } = &mut *driver;
            ended.extend(commands.drain(left..).map(|(token, _)| (token, 0)));
        }
        while driver.borrow().commands.len() < capacity {
            thread.poll().unwrap();
            thread.run_once().unwrap();
        }
    }
}

#[test]
#[ignore = "needs valgrind and optimisation: cargo test --profile dist -p nowait-server --lib"]
fn a_read_of_a_node_costs_no_more_instructions_than_the_limit() {
    match wanted() {
        Some((depth, count)) => serve(depth, count),
        None => check_cost(
            "ublk_cost::a_read_of_a_node_costs_no_more_instructions_than_the_limit",
            LIMITS,
        ),
    }
}

/// The allocations of a run of the test below.
fn allocations(count: usize) -> u64 {
    let test = "ublk_cost::a_read_of_a_node_allocates_nothing";
    counted(&["--tool=memcheck"], "total heap usage: ", test, usize::from(DEPTH), count)
}

#[test]
fn a_read_of_a_node_allocates_nothing() {
    match wanted() {
        Some((depth, count)) => serve(depth, count),
        // Where CI has the address sanitizer in this program.
        None if std::env::var_os("ASAN_OPTIONS").is_some() => {
            say_skipped("valgrind runs no program with the address sanitizer");
        }
        None if require_tool("valgrind") => assert_eq!(allocations(FEW), allocations(MANY)),
        None => {}
    }
}
