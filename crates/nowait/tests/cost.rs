//! The engine's own cost: instructions for submission and completion of one 4 KiB read, on a queue
//! that does no I/O. Instructions are counted, not timed, so that the bounds hold on a busy machine
//! too.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Instructions of one request on the simple path, at most.
const SIMPLE_INSTRUCTIONS: u64 = 120;
/// Instructions of one request on the general path, at most.
const GENERAL_INSTRUCTIONS: u64 = 400;
/// The numbers of requests of the two runs.
const FEW: u64 = 10_000;
const MANY: u64 = 110_000;

/// Whether valgrind can be run. Fails without it where `NOWAIT_REQUIRE_TOOLS` is 1.
fn has_valgrind() -> bool {
    let found = Command::new("valgrind").arg("--version").output().is_ok();
    let required = std::env::var_os("NOWAIT_REQUIRE_TOOLS").is_some_and(|value| value == "1");
    assert!(found || !required, "valgrind is required and cannot be run");
    found
}

/// The example in a release build, whatever the profile of this test. Cargo builds it, so that it
/// is never an old one.
fn example() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    // TARGET/PROFILE/deps/TEST
    let target = test.ancestors().nth(3).unwrap();
    let built = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--offline", "--quiet", "--release", "--example", "null_cost"])
        .args(["--manifest-path", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")])
        .arg("--target-dir")
        .arg(target)
        .status()
        .unwrap();
    assert!(built.success());
    target.join("release/examples/null_cost")
}

/// The instructions of a whole run.
fn collected(example: &Path, requests: u64, path: &str) -> u64 {
    let run = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(example)
        .args([&requests.to_string(), path])
        .output()
        .unwrap();
    let report = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{report}");
    let (_, count) = report.split_once("Collected : ").expect("callgrind prints its count");
    count.split_whitespace().next().unwrap().parse().unwrap()
}

fn cost(example: &Path, path: &str) -> u64 {
    let (few, many) = (collected(example, FEW, path), collected(example, MANY, path));
    (many - few).div_ceil(MANY - FEW)
}

#[test]
fn a_request_costs_no_more_instructions_than_the_limit_of_its_path() {
    if !has_valgrind() {
        println!("skipped: no valgrind");
        return;
    }
    let example = example();
    let (simple, general) = (cost(&example, "simple"), cost(&example, "general"));
    println!("simple {simple}, general {general} instructions");
    assert!(simple <= SIMPLE_INSTRUCTIONS, "simple: {simple}");
    assert!(general <= GENERAL_INSTRUCTIONS, "general: {general}");
}
