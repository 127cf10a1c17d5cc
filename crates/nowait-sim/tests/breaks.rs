//! A simulation that finds nothing has proved nothing: each mistake made on purpose is found.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use nowait::sim::Break;
use nowait_image::Flaw;
use nowait_server::Mistake;
use nowait_sim::run::{Broken, Plan, run};
use nowait_sim::scenario::{Mode, Scenario};
use nowait_sim::trace::name_of;

/// Steps within which a mistake is found, in seeds of so many each.
const STEPS: u64 = 10_000;
const SEED_STEPS: u64 = 1000;
/// Seeds within which one with a qcow2 image is found: for some the power has to fail between two
/// calls of few.
const IMAGES: usize = 400;

/// The first seeds in which a mistake can be made.
fn seeds(broken: Broken) -> impl Iterator<Item = u64> {
    let images = matches!(broken, Broken::Image(_));
    let fits = move |&seed: &u64| !images || Scenario::of(Mode::Engine, seed).qcow2.is_some();
    let count = if images { IMAGES } else { (STEPS / SEED_STEPS) as usize };
    (0..).filter(fits).take(count)
}

/// Whether the seed of the mistake ends with a finding, in a process of its own: some mistakes write to
/// memory that was given back, and the allocator may be the first to notice.
fn fails(broken: Broken, seed: u64) -> bool {
    let mode = match broken {
        Broken::Engine(_) | Broken::Image(_) => Mode::Engine,
        Broken::Server(_) => Mode::Server,
    };
    let (seed, steps) = (seed.to_string(), SEED_STEPS.to_string());
    let run = Command::new(env!("CARGO_BIN_EXE_nowait-sim"))
        .args(["--mode", mode.name(), "--seed", &seed, "--steps", &steps])
        .args(["--break", name_of(broken), "--whole"])
        .output()
        .unwrap();
    assert!(matches!(run.status.code(), None | Some(0 | 1)), "{run:?}");
    run.status.signal().is_some() || !run.status.success()
}

fn is_found(broken: Broken) {
    let found = seeds(broken).any(|seed| fails(broken, seed));
    assert!(found, "{broken:?} was not found");
}

#[test]
fn without_a_mistake_nothing_is_found() {
    let plans = |mode| (0..STEPS / SEED_STEPS).map(move |seed| Plan::new(mode, seed, SEED_STEPS));
    for plan in Mode::ALL.into_iter().flat_map(plans) {
        assert!(run(&plan).is_ok_and(|counts| counts.requests > 50), "{plan:?}");
    }
}

#[test]
fn a_flush_that_is_not_made_is_found() {
    is_found(Broken::Engine(Break::DropFlush));
}

#[test]
fn a_completion_before_the_data_is_found() {
    is_found(Broken::Engine(Break::CompleteBeforeData));
}

#[test]
fn a_slot_that_is_freed_twice_is_found() {
    is_found(Broken::Engine(Break::FreeSlotTwice));
}

#[test]
fn a_reply_from_a_stale_buffer_is_found() {
    is_found(Broken::Engine(Break::ReplyFromStaleBuffer));
}

#[test]
fn a_range_lock_that_is_forgotten_is_found() {
    is_found(Broken::Engine(Break::ForgetRangeLock));
}

#[test]
fn a_read_that_is_answered_from_the_buffer_of_another_is_found() {
    is_found(Broken::Server(Mistake::ReplyFromOldBuffer));
}

#[test]
fn a_request_that_is_answered_twice_is_found() {
    is_found(Broken::Server(Mistake::ReplyTwice));
}

#[test]
fn a_request_that_is_lost_when_its_client_hangs_up_is_found() {
    is_found(Broken::Server(Mistake::LoseAtDisconnect));
}

#[test]
fn an_end_that_is_missed_because_it_was_not_reported_is_found() {
    is_found(Broken::Server(Mistake::TrustReports));
}

#[test]
fn a_cluster_that_is_not_filled_to_its_end_is_found() {
    is_found(Broken::Image(Flaw::ForgetTail));
}

#[test]
fn metadata_that_is_written_out_of_order_is_found() {
    is_found(Broken::Image(Flaw::ForgetOrder));
}

#[test]
fn clusters_that_are_not_given_back_at_closing_are_found() {
    is_found(Broken::Image(Flaw::ForgetGivenBack));
}

#[test]
fn a_flush_that_does_not_wait_for_what_is_being_written_is_found() {
    is_found(Broken::Image(Flaw::FlushBesideAnother));
}

#[test]
fn a_file_that_is_cut_too_short_at_closing_is_found() {
    is_found(Broken::Image(Flaw::CutTooShort));
}

#[test]
fn a_file_that_is_not_made_longer_in_time_is_found() {
    is_found(Broken::Image(Flaw::ForgetToGrow));
}

#[test]
fn an_image_below_that_is_read_at_another_place_is_found() {
    is_found(Broken::Image(Flaw::ReadBelowElsewhere));
}

#[test]
fn metadata_that_could_not_be_written_and_that_nobody_hears_of_is_found() {
    is_found(Broken::Image(Flaw::ForgetFailure));
}
