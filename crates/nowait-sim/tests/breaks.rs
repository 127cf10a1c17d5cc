//! A simulation that finds nothing has proved nothing: each mistake made on purpose is found.

use nowait::sim::Break;
use nowait_sim::run::{Plan, keep_panics, run};

/// Steps within which a mistake is found, in seeds of so many each.
const STEPS: u64 = 10_000;
const SEED_STEPS: u64 = 1000;

fn plans(broken: Option<Break>) -> impl Iterator<Item = Plan> {
    (0..STEPS / SEED_STEPS).map(move |seed| Plan { broken, ..Plan::new(seed, SEED_STEPS) })
}

fn is_found(broken: Break) {
    keep_panics();
    let found = plans(Some(broken)).find_map(|plan| run(&plan).err());
    assert!(found.is_some(), "{broken:?} was not found within {STEPS} steps");
}

#[test]
fn without_a_mistake_nothing_is_found() {
    for plan in plans(None) {
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
