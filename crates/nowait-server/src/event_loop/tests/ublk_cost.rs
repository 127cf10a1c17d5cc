//! The server's own cost of a 4 KiB read of a ublk node: instructions from the end of the command that
//! fetches it to the command that answers it, and its allocations, on a queue that does no I/O.
//!
//! Invariant: what is counted is the difference of two runs, so that the start is not; the driver here
//! allocates nothing once it runs.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::rc::Rc;

use nowait::{EventSource, Outcome, QueueFull, Transfer};
use nowait_testkit::require_tool;

use crate::event_loop::tests::request_cost::{VARIABLE, check_cost, wanted};
use crate::event_loop::tests::*;
use crate::ublk::ublk_cmd::{DESCRIPTOR_BYTES, OP_READ};
use crate::ublk::ublk_device::UblkDevice;
use crate::ublk::ublk_frontend::UblkFrontend;

const DEPTH: u16 = 64;
const SECTORS: u32 = 8;
/// Instructions of one read at depth 1, and of one of 64 that arrive together, at most. Without
/// link-time optimisation.
const LIMITS: [(usize, u64); 2] = [(1, 1400), (64, 680)];
/// The numbers of requests of the two runs whose allocations are counted.
const FEW: usize = 640;
const MANY: usize = 3_200;

/// The tokens of the commands that the driver has, and of those that have ended.
struct Driver {
    fetching: Vec<Token>,
    ended: Vec<Token>,
}

/// A queue of transfers that end at once, and of commands.
struct Commands {
    transfers: Null,
    driver: Rc<RefCell<Driver>>,
}

// SAFETY: transfers are those of `Null`; tokens of commands have `FD_TOKEN`.
unsafe impl IoQueue for Commands {
    // SAFETY: as promised by the caller.
    unsafe fn push(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull> {
        // SAFETY: as above.
        unsafe { self.transfers.push(transfer, token) }
    }

    fn submit(&mut self) -> Result<(), Error> {
        self.transfers.submit()
    }

    fn drain_completions(&mut self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        let mut driver = self.driver.borrow_mut();
        let count = driver.ended.len();
        driver.ended.drain(..).for_each(|token| sink(token, 0));
        count + self.transfers.drain_completions(sink)
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        self.transfers.wait(timeout)
    }

    fn has_completions(&mut self) -> bool {
        !self.driver.borrow().ended.is_empty() || self.transfers.has_completions()
    }

    fn events(&self) -> &dyn EventSource {
        self
    }

    fn events_mut(&mut self) -> &mut dyn EventSource {
        self
    }
}

impl EventSource for Commands {
    fn watch(&mut self, fd: BorrowedFd<'_>, token: Token, interest: Interest) -> Result<(), Error> {
        self.transfers.events_mut().watch(fd, token, interest)
    }

    fn unwatch(&mut self, fd: BorrowedFd<'_>, token: Token) {
        self.transfers.events_mut().unwatch(fd, token);
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.transfers.events().fd()
    }

    // SAFETY: the addresses in a command are not used here.
    unsafe fn command(
        &mut self,
        _: BorrowedFd<'_>,
        _: u32,
        _: u64,
        _: [u8; 16],
        token: Token,
    ) -> Result<(), Error> {
        self.driver.borrow_mut().fetching.push(token);
        Ok(())
    }
}

/// Serves `count` reads, `depth` of them at a time.
fn serve(depth: usize, count: usize) {
    let capacity = usize::from(DEPTH);
    let driver =
        Driver { fetching: Vec::with_capacity(capacity), ended: Vec::with_capacity(capacity) };
    let driver = Rc::new(RefCell::new(driver));
    let (context, export, engine) = parts(Config::default(), |_| Commands {
        transfers: Null::new().unwrap(),
        driver: driver.clone(),
    });
    let descriptors = tempfile::tempfile().unwrap();
    let mut read = [0; DESCRIPTOR_BYTES];
    read[..4].copy_from_slice(&u32::from(OP_READ).to_ne_bytes());
    read[4..8].copy_from_slice(&SECTORS.to_ne_bytes());
    let requests = read.repeat(capacity);
    descriptors.set_len(64 << 10).unwrap();
    descriptors.write_all_at(&requests, 0).unwrap();
    let device = UblkDevice::simulated(OwnedFd::from(descriptors), (DEPTH, BLOCK as u32), 0);
    let ublk = UblkFrontend::new(Arc::new(device), 0, Box::new(|| {})).unwrap();
    let mut thread = EventLoop::new(&context, export, engine, ublk).unwrap();
    for _ in 0..count / depth {
        {
            let mut driver = driver.borrow_mut();
            let left = driver.fetching.len() - depth;
            let Driver { fetching, ended } = &mut *driver;
            ended.extend(fetching.drain(left..));
        }
        while driver.borrow().fetching.len() < capacity {
            thread.poll().unwrap();
            thread.run_once().unwrap();
        }
    }
}

#[test]
#[ignore = "needs valgrind and a release build: cargo test --release -p nowait-server --lib"]
fn a_read_of_a_node_costs_no_more_instructions_than_the_limit() {
    match wanted() {
        Some((depth, count)) => serve(depth, count),
        None => check_cost(
            "ublk_cost::a_read_of_a_node_costs_no_more_instructions_than_the_limit",
            LIMITS,
        ),
    }
}

/// The allocations of a run of this test in a process of its own.
fn allocations(count: usize) -> u64 {
    let test = "event_loop::tests::ublk_cost::a_read_of_a_node_allocates_nothing";
    let run = Command::new("valgrind")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--test-threads=1"])
        .env(VARIABLE, format!("{DEPTH} {count}"))
        .output()
        .unwrap();
    let report = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{report}");
    let (_, usage) = report.split_once("total heap usage: ").expect("valgrind counts allocations");
    let (allocations, _) = usage.split_once(" allocs").expect("a number of them");
    allocations.replace(',', "").parse().unwrap()
}

#[test]
fn a_read_of_a_node_allocates_nothing() {
    match wanted() {
        Some((depth, count)) => serve(depth, count),
        None if require_tool("valgrind") => assert_eq!(allocations(FEW), allocations(MANY)),
        None => {}
    }
}
