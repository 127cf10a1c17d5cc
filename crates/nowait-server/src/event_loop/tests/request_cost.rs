//! The server's own cost of a 4 KiB read over NBD: instructions from the event of the socket to the
//! reply, on a queue that does no I/O. Instructions are counted, not timed, so that the bounds hold
//! on a busy machine too.
//!
//! Invariant: one thread is client and server in turn, so that every run does the same.

use std::process::Command;

use crate::event_loop::tests::*;

/// Instructions of one request at depth 1, and of one of 64 that arrive together, at most. With
/// the profile `dist`.
const LIMITS: [(usize, u64); 2] = [(1, 3110), (64, 1355)];
/// The numbers of requests of the two runs.
const FEW: usize = 6_400;
const MANY: usize = 70_400;
/// Depth and number of requests, for the process that is measured.
const VARIABLE: &str = "NOWAIT_REQUEST_COST";

/// Serves `count` reads, `depth` of them at a time.
fn serve(depth: usize, count: usize) {
    let mut bench = Bench::new(1);
    bench.settle();
    let requests = read(BLOCK).repeat(depth);
    let mut replies = vec![0; depth * (REPLY + BLOCK)];
    for _ in 0..count / depth {
        bench.clients[0].write_all(&requests).unwrap();
        let mut got = 0;
        while got < replies.len() {
            bench.iterate();
            while let Ok(some) = bench.clients[0].read(&mut replies[got..])
                && some > 0
            {
                got += some;
            }
        }
    }
}

/// Depth and number of requests that this process is to serve, if it is the one that is measured.
pub(super) fn wanted() -> Option<(usize, usize)> {
    let wanted = std::env::var(VARIABLE).ok()?;
    let (depth, count) = wanted.split_once(' ').unwrap();
    Some((depth.parse().unwrap(), count.parse().unwrap()))
}

/// The number that valgrind with the options `tool` prints behind `label` for a whole run of `test` in
/// a process of its own.
pub(super) fn counted(tool: &[&str], label: &str, test: &str, depth: usize, count: usize) -> u64 {
    let test = format!("event_loop::tests::{test}");
    let run = Command::new("valgrind")
        .args(tool)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &test, "--include-ignored", "--test-threads=1"])
        .env(VARIABLE, format!("{depth} {count}"))
        .output()
        .unwrap();
    let report = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{report}");
    let (_, number) = report.split_once(label).expect("valgrind prints its count");
    number.split_whitespace().next().unwrap().replace(',', "").parse().unwrap()
}

/// The instructions of a whole run of `test`.
fn collected(test: &str, depth: usize, count: usize) -> u64 {
    let tool = ["--tool=callgrind", "--callgrind-out-file=/dev/null"];
    counted(&tool, "Collected : ", test, depth, count)
}

/// The instructions of one request in the `test` of this name.
pub(super) fn cost(test: &str, depth: usize) -> u64 {
    let few = collected(test, depth, FEW);
    (collected(test, depth, MANY) - few).div_ceil((MANY - FEW) as u64)
}

/// Checks the instructions of one request in the `test` of this name, for each depth with its limit.
pub(super) fn check_cost(test: &str, limits: [(usize, u64); 2]) {
    for (depth, limit) in limits {
        let cost = cost(test, depth);
        println!("depth {depth}: {cost} instructions");
        assert!(cfg!(debug_assertions) || cost <= limit, "depth {depth}: {cost}");
    }
}

#[test]
#[ignore = "needs valgrind and optimisation: cargo test --profile dist -p nowait-server --lib"]
fn a_read_costs_no_more_instructions_than_the_limit() {
    match wanted() {
        Some((depth, count)) => serve(depth, count),
        None => {
            check_cost("request_cost::a_read_costs_no_more_instructions_than_the_limit", LIMITS)
        }
    }
}
