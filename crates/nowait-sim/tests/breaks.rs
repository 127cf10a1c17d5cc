//! A simulation that finds nothing has proved nothing: each mistake made on purpose is found.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use nowait::sim::Break;
use nowait_sim::run::{Plan, run};
use nowait_sim::trace::name_of;

/// Steps within which a mistake is found, in seeds of so many each.
const STEPS: u64 = 10_000;
const SEED_STEPS: u64 = 1000;

/// Whether the seed of the mistake ends with a finding, in a process of its own: some mistakes write to
/// memory that was given back, and the allocator may be the first to notice.
fn fails(broken: Break, seed: u64) -> bool {
    let steps = SEED_STEPS.to_string();
    let run = Command::new(env!("CARGO_BIN_EXE_nowait-sim"))
        .args([
            "--seed",
            &seed.to_string(),
            "--steps",
            &steps,
            "--break",
            name_of(broken),
            "--whole",
        ])
        .output()
        .unwrap();
    assert!(matches!(run.status.code(), None | Some(0 | 1)), "{run:?}");
    run.status.signal().is_some() || !run.status.success()
}

fn is_found(broken: Break) {
    let found = (0..STEPS / SEED_STEPS).any(|seed| fails(broken, seed));
    assert!(found, "{broken:?} was not found within {STEPS} steps");
}

#[test]
fn without_a_mistake_nothing_is_found() {
    for plan in (0..STEPS / SEED_STEPS).map(|seed| Plan::new(seed, SEED_STEPS)) {
        assert!(run(&plan).is_ok_and(|counts| counts.requests > 50), "{plan:?}");
    }
}

#[test]
fn a_flush_that_is_not_made_is_found() {
    is_found(Break::DropFlush);
}

#[test]
fn a_completion_before_the_data_is_found() {
    is_found(Break::CompleteBeforeData);
}

#[test]
fn a_slot_that_is_freed_twice_is_found() {
    is_found(Break::FreeSlotTwice);
}

#[test]
fn a_reply_from_a_stale_buffer_is_found() {
    is_found(Break::ReplyFromStaleBuffer);
}

#[test]
fn a_range_lock_that_is_forgotten_is_found() {
    is_found(Break::ForgetRangeLock);
}
