//! The cost of a hit in the extent cache of a qcow2 image. Instructions are counted, not timed, so
//! that the limit holds on a busy machine, too.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Most instructions of one lookup, with the loop around it. A lookup may take 20 ns. Measured are
/// 59 of them without and 64 with whole-program optimisation, which take a third of that.
const LOOKUP_INSTRUCTIONS: u64 = 75;
const FEW: u64 = 10_000;
const MANY: u64 = 110_000;

/// Whether both tools can be run; a missing tool is a failure where the tools are required.
fn has_tools() -> bool {
    let found = ["valgrind", "qemu-img"]
        .into_iter()
        .find(|tool| Command::new(tool).arg("--version").output().is_err());
    let required = std::env::var_os("NOWAIT_REQUIRE_TOOLS").is_some_and(|value| value == "1");
    assert!(found.is_none() || !required, "{found:?} is required and cannot be run");
    if let Some(tool) = found {
        println!("skipped: no {tool}");
    }
    found.is_none()
}

/// The example, built now, so that no outdated one is measured.
fn example() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    // TARGET/PROFILE/deps/TEST
    let target = test.ancestors().nth(3).unwrap();
    let built = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--offline", "--quiet", "--release", "--example", "lookup_cost"])
        .args(["--manifest-path", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")])
        .arg("--target-dir")
        .arg(target)
        .status()
        .unwrap();
    assert!(built.success());
    target.join("release/examples/lookup_cost")
}

/// The instructions of a whole run.
fn collected(example: &Path, image: &Path, lookups: u64) -> u64 {
    let run = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .args([example, image])
        .arg(lookups.to_string())
        .output()
        .unwrap();
    let report = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{report}");
    let (_, count) = report.split_once("Collected : ").expect("callgrind tells its count");
    count.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn a_hit_in_the_extent_cache_costs_no_more_instructions_than_20_ns_allow() {
    if !has_tools() {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let image = scratch.path().join("disk.qcow2");
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata"])
        .arg(&image)
        .arg("256M")
        .status();
    assert!(made.unwrap().success());
    let example = example();
    let (few, many) = (collected(&example, &image, FEW), collected(&example, &image, MANY));
    let cost = (many - few).div_ceil(MANY - FEW);
    println!("{cost} instructions");
    assert!(cost <= LOOKUP_INSTRUCTIONS, "{cost}");
}
