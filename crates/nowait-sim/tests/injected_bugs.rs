//! Tests of the simulation itself: it finds each injected bug.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use nowait::Config;
use nowait::sim::EngineBug;
use nowait_image::ImageBug;
use nowait_remote::RemoteBug;
use nowait_server::ServerBug;
use nowait_sim::remote::remote_scenario::RemoteScenario;
use nowait_sim::run::{InjectedBug, Plan, run};
use nowait_sim::scenario::{Mode, Scenario};
use nowait_sim::trace::name_of;

/// Steps within which a bug is found, in seeds of `SEED_STEPS` each.
const STEPS: u64 = 10_000;
const SEED_STEPS: u64 = 1000;
/// Seeds within which a bug of the qcow2 code is found: some need a power cut between two
/// particular calls.
const IMAGES: usize = 400;
/// Seeds within which a bug of the storage of an export is found, and their steps: most need a loss
/// between two particular steps.
const REMOTE_SEEDS: usize = 1000;
const REMOTE_STEPS: u64 = 3000;

/// Seeds within which a bug of a log, or of the bitmaps of a raw disk, is found.
const FEW_SEEDS: u64 = 100;

/// The first seeds in which a bug can be injected.
fn seeds(bug: InjectedBug) -> impl Iterator<Item = u64> {
    let images = matches!(bug, InjectedBug::Image(_));
    let fits = move |&seed: &u64| {
        let scenario = Scenario::of(Mode::Engine, seed);
        match bug {
            InjectedBug::Image(_) => scenario.qcow2.is_some(),
            InjectedBug::Engine(EngineBug::AnswerUnmovedNeighbours) => fails_merged(&scenario),
            InjectedBug::Server(ServerBug::ForgetHeld | ServerBug::IgnoreProtection) => {
                Scenario::of(Mode::Server, seed).has_operator()
            }
            InjectedBug::Server(ServerBug::LoseParkedInput) => {
                Scenario::of(Mode::Server, seed).has_pauses()
            }
            InjectedBug::Engine(EngineBug::CompleteElsewhere)
            | InjectedBug::Server(ServerBug::ReuseIndex | ServerBug::DrainWithRequest) => {
                Scenario::of(Mode::Server, seed).has_neighbours()
            }
            InjectedBug::Server(ServerBug::SkipAtStop) => {
                Scenario::of(Mode::VhostUser, seed).has_pauses()
            }
            _ => true,
        }
    };
    let count = if images { IMAGES } else { (STEPS / SEED_STEPS) as usize };
    (0..).filter(fits).take(count)
}

/// Whether neighbours are merged, and their transfers fail.
fn fails_merged(scenario: &Scenario) -> bool {
    let Config { simple, merge, nowait_first, .. } = scenario.config;
    simple && merge && nowait_first && scenario.qcow2.is_none() && scenario.faults.refusals > 0
}

/// Whether a seed fails with the bug, in a separate process: some bugs write to freed memory, and
/// the allocator may detect them first.
fn fails(bug: InjectedBug, seed: u64) -> bool {
    let mode = match bug {
        InjectedBug::Engine(EngineBug::CompleteElsewhere) => Mode::Server,
        InjectedBug::Image(
            ImageBug::TrustChangedDisk | ImageBug::ForgetRemoval | ImageBug::CoolInFlight,
        ) => Mode::Bitmaps,
        InjectedBug::Engine(_) | InjectedBug::Image(_) => Mode::Engine,
        InjectedBug::Server(
            ServerBug::ForgetInFlight
            | ServerBug::RepeatTold
            | ServerBug::TellBeforeData
            | ServerBug::SkipAtStop,
        ) => Mode::VhostUser,
        InjectedBug::Server(ServerBug::CommitBeforeData) => Mode::Ublk,
        InjectedBug::Server(ServerBug::WriteBeforeCopy) => Mode::Backup,
        InjectedBug::Server(ServerBug::TakeAfterCopy) => Mode::Move,
        InjectedBug::Server(_) => Mode::Server,
        InjectedBug::Remote(_) => Mode::Remote,
    };
    let (seed, steps) = (seed.to_string(), SEED_STEPS.to_string());
    let run = Command::new(env!("CARGO_BIN_EXE_nowait-sim"))
        .args(["--mode", mode.name(), "--seed", &seed, "--steps", &steps])
        .args(["--break", &name_of(bug), "--whole"])
        .output()
        .unwrap();
    assert!(matches!(run.status.code(), None | Some(0 | 1)), "{run:?}");
    run.status.signal().is_some() || !run.status.success()
}

fn is_found(bug: InjectedBug) {
    let found = seeds(bug).any(|seed| fails(bug, seed));
    assert!(found, "{bug:?} was not found");
}

#[test]
fn without_a_bug_no_failure_is_found() {
    let plans = |mode| (0..STEPS / SEED_STEPS).map(move |seed| Plan::new(mode, seed, SEED_STEPS));
    for plan in Mode::ALL.into_iter().flat_map(plans) {
        assert!(run(&plan).is_ok_and(|counts| counts.requests > 50), "{plan:?}");
    }
}

#[test]
fn a_flush_that_is_not_made_is_found() {
    is_found(InjectedBug::Engine(EngineBug::DropFlush));
}

#[test]
fn a_completion_before_the_data_is_found() {
    is_found(InjectedBug::Engine(EngineBug::CompleteBeforeData));
}

#[test]
fn a_slot_that_is_freed_twice_is_found() {
    is_found(InjectedBug::Engine(EngineBug::FreeSlotTwice));
}

#[test]
fn a_reply_from_a_stale_buffer_is_found() {
    is_found(InjectedBug::Engine(EngineBug::ReplyFromStaleBuffer));
}

#[test]
fn a_range_lock_that_is_forgotten_is_found() {
    is_found(InjectedBug::Engine(EngineBug::ForgetRangeLock));
}

#[test]
fn requests_that_are_answered_although_their_merged_transfer_failed_are_found() {
    is_found(InjectedBug::Engine(EngineBug::AnswerUnmovedNeighbours));
}

#[test]
fn a_read_that_is_answered_from_the_buffer_of_another_is_found() {
    is_found(InjectedBug::Server(ServerBug::ReplyFromOldBuffer));
}

#[test]
fn a_request_that_is_answered_twice_is_found() {
    is_found(InjectedBug::Server(ServerBug::ReplyTwice));
}

#[test]
fn a_request_that_is_lost_when_its_client_disconnects_is_found() {
    is_found(InjectedBug::Server(ServerBug::LoseAtDisconnect));
}

#[test]
fn an_end_of_stream_that_is_missed_because_it_was_not_reported_is_found() {
    is_found(InjectedBug::Server(ServerBug::TrustReports));
}

#[test]
fn requests_in_flight_that_are_not_done_again_after_the_death_of_a_server_are_found() {
    is_found(InjectedBug::Server(ServerBug::ForgetInFlight));
}

#[test]
fn a_request_that_is_done_again_although_its_driver_was_told_of_its_end_is_found() {
    is_found(InjectedBug::Server(ServerBug::RepeatTold));
}

#[test]
fn an_entry_in_the_used_ring_before_the_data_is_found() {
    is_found(InjectedBug::Server(ServerBug::TellBeforeData));
}

#[test]
fn an_answer_of_a_block_device_before_the_data_is_found() {
    is_found(InjectedBug::Server(ServerBug::CommitBeforeData));
}

#[test]
fn a_cluster_that_is_not_filled_to_its_end_is_found() {
    is_found(InjectedBug::Image(ImageBug::ForgetTail));
}

#[test]
fn metadata_that_is_written_out_of_order_is_found() {
    is_found(InjectedBug::Image(ImageBug::ForgetOrder));
}

#[test]
fn clusters_that_are_not_freed_at_closing_are_found() {
    is_found(InjectedBug::Image(ImageBug::ForgetGivenBack));
}

#[test]
fn a_flush_that_does_not_wait_for_writes_in_flight_is_found() {
    is_found(InjectedBug::Image(ImageBug::FlushBesideAnother));
}

#[test]
fn a_cluster_in_use_that_is_allocated_because_its_refcount_is_0_is_found() {
    is_found(InjectedBug::Image(ImageBug::ForgetOverlapCheck));
}

#[test]
fn a_file_that_is_cut_too_short_at_closing_is_found() {
    is_found(InjectedBug::Image(ImageBug::CutTooShort));
}

#[test]
fn a_file_that_is_not_extended_in_time_is_found() {
    is_found(InjectedBug::Image(ImageBug::ForgetToGrow));
}

#[test]
fn a_backing_image_that_is_read_at_another_offset_is_found() {
    is_found(InjectedBug::Image(ImageBug::ReadBelowElsewhere));
}

#[test]
fn a_failed_write_of_metadata_that_is_not_reported_is_found() {
    is_found(InjectedBug::Image(ImageBug::ForgetFailure));
}

#[test]
fn a_bit_of_a_stored_bitmap_that_is_set_after_the_acknowledgement_is_found() {
    is_found(InjectedBug::Image(ImageBug::BitAfterWrite));
}

#[test]
fn a_client_that_is_forgotten_under_a_limit_is_found() {
    is_found(InjectedBug::Server(ServerBug::ForgetHeld));
}

#[test]
fn a_change_of_a_read_only_export_is_found() {
    is_found(InjectedBug::Server(ServerBug::IgnoreProtection));
}

#[test]
fn input_that_is_lost_when_connections_leave_their_threads_is_found() {
    is_found(InjectedBug::Server(ServerBug::LoseParkedInput));
}

#[test]
fn a_client_that_reaches_the_export_that_has_the_index_of_its_own_now_is_found() {
    is_found(InjectedBug::Server(ServerBug::ReuseIndex));
}

#[test]
fn a_completion_that_is_given_to_another_device_is_found() {
    is_found(InjectedBug::Engine(EngineBug::CompleteElsewhere));
}

#[test]
fn an_export_that_is_paused_with_a_request_in_flight_is_found() {
    is_found(InjectedBug::Server(ServerBug::DrainWithRequest));
}

#[test]
fn a_write_that_reaches_the_disk_before_its_copy_for_a_backup_is_done_is_found() {
    is_found(InjectedBug::Server(ServerBug::WriteBeforeCopy));
}

#[test]
fn c96_a_write_beside_the_copy_of_a_move_that_is_not_followed_is_found() {
    is_found_in(Mode::Move, InjectedBug::Server(ServerBug::TakeAfterCopy));
}

/// Whether a bug is found within few seeds of `mode`, in this process.
fn is_found_in(mode: Mode, bug: InjectedBug) {
    let plan = |seed| Plan { bug: Some(bug), ..Plan::new(mode, seed, SEED_STEPS) };
    let found = (0..FEW_SEEDS).any(|seed| run(&plan(seed)).is_err());
    assert!(found, "{bug:?} was not found");
}

fn is_found_in_a_log(bug: EngineBug) {
    is_found_in(Mode::Log, InjectedBug::Engine(bug));
}

#[test]
fn a_bit_of_a_raw_disk_that_is_stored_after_the_write_is_found() {
    is_found_in(Mode::Bitmaps, InjectedBug::Image(ImageBug::BitAfterWrite));
}

#[test]
fn a_bitmap_whose_removal_comes_undone_when_the_power_fails_is_found() {
    is_found_in(Mode::Bitmaps, InjectedBug::Image(ImageBug::ForgetRemoval));
}

#[test]
fn a_region_of_a_bitmap_that_is_closed_while_a_write_in_it_is_in_flight_is_found() {
    is_found_in(Mode::Bitmaps, InjectedBug::Image(ImageBug::CoolInFlight));
}

#[test]
fn bitmaps_of_a_raw_disk_that_another_program_has_written_to_and_that_are_trusted_are_found() {
    is_found_in(Mode::Bitmaps, InjectedBug::Image(ImageBug::TrustChangedDisk));
}

#[test]
fn a_record_of_a_log_that_is_acknowledged_before_the_sync_is_found() {
    is_found_in_a_log(EngineBug::AnswerUnsynced);
}

#[test]
fn a_segment_of_a_log_that_is_reused_without_a_new_generation_is_found() {
    is_found_in_a_log(EngineBug::ForgetGeneration);
}

#[test]
fn a_record_of_a_log_that_is_acknowledged_after_a_failed_sync_is_found() {
    is_found_in_a_log(EngineBug::IgnoreFailedSync);
}

/// Whether a bug of the storage of an export is found, in this process: it touches no memory that is
/// not its own.
fn is_found_behind_a_network(bug: RemoteBug) {
    let seeds = (0..).filter(|&seed| RemoteScenario::of(seed).is_crowded());
    let plan = |seed| Plan {
        bug: Some(InjectedBug::Remote(bug)),
        ..Plan::new(Mode::Remote, seed, REMOTE_STEPS)
    };
    let found = seeds.take(REMOTE_SEEDS).any(|seed| run(&plan(seed)).is_err());
    assert!(found, "{bug:?} was not found");
}

#[test]
fn unflushed_changes_that_are_not_made_again_are_found() {
    is_found_behind_a_network(RemoteBug::ForgetReplay);
}

#[test]
fn a_log_that_is_shortened_before_the_flush_has_ended_is_found() {
    is_found_behind_a_network(RemoteBug::TrimWhenAsked);
}

#[test]
fn a_flush_that_ends_changes_after_it_is_found() {
    is_found_behind_a_network(RemoteBug::TrimTooMuch);
}

#[test]
fn changes_that_are_made_again_in_another_order_are_found() {
    is_found_behind_a_network(RemoteBug::ReplayOutOfOrder);
}

#[test]
fn a_durable_write_that_an_earlier_one_undoes_when_it_is_made_again_is_found() {
    is_found_behind_a_network(RemoteBug::ReplayOverwritten);
}

#[test]
fn a_durable_write_that_is_not_in_the_log_behind_others_is_found() {
    is_found_behind_a_network(RemoteBug::ForgetDurable);
}

#[test]
fn requests_that_are_answered_because_their_connection_is_lost_are_found() {
    is_found_behind_a_network(RemoteBug::AnswerUnanswered);
}

#[test]
fn changes_that_overlap_and_are_with_the_server_together_are_found() {
    is_found_behind_a_network(RemoteBug::ForgetOverlap);
}

#[test]
fn a_read_that_overtakes_a_change_that_is_asked_again_is_found() {
    is_found_behind_a_network(RemoteBug::ReadBesideRepeated);
}

#[test]
fn a_flush_that_succeeds_after_a_failed_one_is_found() {
    is_found_behind_a_network(RemoteBug::ForgetFailedFlush);
}
