//! Properties of every simulation of many hosts.

use std::time::Duration;

use nowait_remote::{BLOCK_BYTES, BackOff};

use super::boot_trace::BootTrace;
use super::outcome::Outcome;
use super::parameters::{BootReads, GiveUp, Parameters, Plan, StoreParameters};
use super::{simulate, transfers};

/// A few hosts with a small boot, a store that has room for them, no faults, and no reading ahead.
fn small(plan: Plan) -> Parameters {
    let mut parameters = Parameters { hosts: 12, window: 1.0, plan, ..Parameters::default() };
    parameters.boot.reads = BootReads::Synthetic { image_bytes: 256 << 20, read_bytes: 24 << 20 };
    parameters.boot.think_seconds = 4.0;
    parameters.store.request_rate = 1e5;
    parameters.store.faults = 0;
    parameters.rack_hosts = 5;
    parameters.read_ahead = false;
    parameters
}

/// More hosts than the store has requests for.
fn overloaded(plan: Plan) -> Parameters {
    let mut parameters = Parameters { hosts: 150, ..small(plan) };
    parameters.store.request_rate = 300.0;
    parameters
}

/// The bytes of the different blocks that the boots of `machines` read.
fn unique_bytes(parameters: &Parameters, machines: impl Iterator<Item = u64>) -> u64 {
    let trace = BootTrace::new(&parameters.boot, parameters.seed);
    let mut set = super::block_set::BlockSet::new(trace.blocks());
    machines.flat_map(|machine| trace.blocks_read(machine)).for_each(|block| set.add(block));
    set.len() * BLOCK_BYTES
}

fn is_whole(outcome: &Outcome) -> bool {
    outcome.failed == 0 && outcome.boot_p50.is_some()
}

#[test]
fn the_same_seed_gives_the_same_outcome_and_another_seed_another_one() {
    for plan in Plan::ALL {
        let mut parameters = overloaded(plan);
        parameters.store.faults = 3000;
        assert_eq!(simulate(&parameters), simulate(&parameters));
        let other = Parameters { seed: 2, ..parameters };
        assert_ne!(simulate(&parameters), simulate(&other), "{plan:?}");
    }
}

#[test]
fn a_cache_fetches_each_block_that_its_boot_reads_exactly_once() {
    let parameters = small(Plan::Cache);
    let hosts = 0..u64::from(parameters.hosts);
    let bytes: u64 = hosts.map(|host| unique_bytes(&parameters, host..host + 1)).sum();
    let outcome = simulate(&parameters);
    assert!(is_whole(&outcome));
    assert_eq!(outcome.store_bytes, bytes);
}

#[test]
fn a_prefetch_fetches_each_block_of_record_and_boot_once_in_fewer_requests_and_boots_sooner() {
    let [cache, prefetch] = [Plan::Cache, Plan::Prefetch].map(|plan| simulate(&small(plan)));
    let parameters = small(Plan::Prefetch);
    let hosts = 0..u64::from(parameters.hosts);
    let with_record = |host| unique_bytes(&parameters, [host, BootTrace::RECORDED].into_iter());
    assert_eq!(prefetch.store_bytes, hosts.map(with_record).sum::<u64>());
    assert!(prefetch.store_requests < cache.store_requests, "{prefetch:?} {cache:?}");
    assert!(prefetch.boot_p50 < cache.boot_p50, "{prefetch:?} {cache:?}");
}

#[test]
fn reading_ahead_costs_bytes_but_never_more_than_the_image_and_boots_are_not_later() {
    for plan in [Plan::NoCache, Plan::Cache, Plan::RackCache] {
        let alone = simulate(&small(plan));
        let ahead = simulate(&Parameters { read_ahead: true, ..small(plan) });
        assert!(is_whole(&ahead));
        assert!(ahead.store_bytes > alone.store_bytes, "{ahead:?} {alone:?}");
        assert!(ahead.boot_p50 <= alone.boot_p50, "{ahead:?} {alone:?}");
        assert!(plan == Plan::NoCache || ahead.store_bytes <= 12 * (256 << 20), "{ahead:?}");
    }
}

#[test]
fn behind_what_a_record_has_brought_next_to_nothing_is_read_ahead() {
    let alone = simulate(&small(Plan::Prefetch));
    let ahead = simulate(&Parameters { read_ahead: true, ..small(Plan::Prefetch) });
    assert!(is_whole(&ahead));
    assert!(ahead.store_bytes * 50 < alone.store_bytes * 51, "{ahead:?} {alone:?}");
    assert!(ahead.store_requests <= alone.store_requests, "{ahead:?} {alone:?}");
    let [alone, ahead] = [alone, ahead].map(|outcome| outcome.boot_p50.unwrap_or(0.0));
    assert!(ahead < alone * 1.01, "{ahead} {alone}");
}

#[test]
fn while_a_record_is_followed_nothing_else_is_read_ahead() {
    // The store is so slow that the record is followed for most of the boot.
    let parameters = overloaded(Plan::Prefetch);
    let alone = simulate(&parameters);
    let ahead = simulate(&Parameters { read_ahead: true, ..parameters });
    assert!(ahead.store_bytes < alone.store_bytes * 3 / 2, "{ahead:?} {alone:?}");
}

#[test]
fn faults_cost_bytes_and_retries_but_no_boot() {
    let mut parameters = small(Plan::Cache);
    let well = simulate(&parameters);
    parameters.store.faults = 2000;
    let outcome = simulate(&parameters);
    assert!(is_whole(&outcome), "{outcome:?}");
    assert!(outcome.store_faults > 100 && outcome.retries > 0);
    assert!(outcome.store_bytes > well.store_bytes && outcome.boot_p99 > well.boot_p99);
}

#[test]
fn a_warm_cache_asks_only_whether_the_image_is_the_same() {
    let mut parameters = small(Plan::WarmCache);
    parameters.machines = 3;
    let outcome = simulate(&parameters);
    assert!(is_whole(&outcome));
    assert_eq!((outcome.store_requests, outcome.store_bytes), (12, 0));
}

#[test]
fn machines_of_a_host_share_its_cache() {
    let parameters = Parameters { hosts: 3, machines: 4, ..small(Plan::Cache) };
    let hosts = 0..u64::from(parameters.hosts);
    let bytes: u64 = hosts.map(|host| unique_bytes(&parameters, host * 4..host * 4 + 4)).sum();
    assert_eq!(simulate(&parameters).store_bytes, bytes);
}

#[test]
fn a_rack_fetches_each_block_that_its_hosts_read_once() {
    let parameters = small(Plan::RackCache);
    let racks = [0..5, 5..10, 10..12];
    let bytes: u64 = racks.map(|hosts| unique_bytes(&parameters, hosts)).iter().sum();
    let outcome = simulate(&parameters);
    assert!(is_whole(&outcome));
    assert_eq!(outcome.store_bytes, bytes);
}

#[test]
fn a_download_is_the_whole_image_for_each_host() {
    let outcome = simulate(&small(Plan::Download));
    assert!(is_whole(&outcome));
    assert_eq!(outcome.store_bytes, 12 * (256 << 20));
}

#[test]
fn every_machine_comes_up_or_fails_and_no_read_waits_much_longer_than_the_reconnect_time() {
    for plan in Plan::ALL {
        let mut parameters = Parameters { reconnect: 2.0, ..overloaded(plan) };
        parameters.give_up = GiveUp::Request;
        parameters.paced = false;
        parameters.store.faults = 10_000;
        let outcome = simulate(&parameters);
        let ended = outcome.failed + outcome.boots;
        assert_eq!(ended, outcome.machines, "{outcome:?}");
        // After the last failure within the time: the pause before one more attempt, and its time.
        let attempt = transfers::IDLE as f64 / 1e9;
        let limit = 2.0 + 2.0 * attempt + BackOff::STORE.longest.as_secs_f64();
        assert!(outcome.longest_read <= limit, "{outcome:?}");
        assert!(plan == Plan::Download || plan == Plan::WarmCache || outcome.failed > 0);
    }
}

#[test]
fn without_a_store_every_machine_fails() {
    let mut parameters = small(Plan::NoCache);
    parameters.store.faults = u16::MAX;
    parameters.store.request_rate = 0.001;
    let outcome = simulate(&parameters);
    assert_eq!((outcome.failed, outcome.boot_p50), (12, None));
}

/// The part of the store's limit that is answered while it is overloaded.
fn goodput(back_off: BackOff) -> f64 {
    let reconnect = 600.0;
    let parameters = Parameters { back_off, reconnect, paced: false, ..overloaded(Plan::Cache) };
    let StoreParameters { request_rate, .. } = parameters.store;
    simulate(&parameters).answered_rate() / request_rate
}

#[test]
fn an_overloaded_store_goes_on_answering_because_clients_pause() {
    let store = goodput(BackOff::STORE);
    assert!(store > 0.7, "{store}");
}

#[test]
fn an_overloaded_store_whose_clients_ask_again_at_once_has_little_time_to_answer() {
    let millisecond = Duration::from_millis(1);
    let at_once = goodput(BackOff { first: millisecond, longest: millisecond });
    assert!(at_once < 0.4, "{at_once}");
}

#[test]
fn hosts_that_ask_less_often_when_refused_come_up_where_others_fail() {
    let plans = [Plan::NoCache, Plan::Cache, Plan::Prefetch];
    for parameters in plans.map(overloaded) {
        let paced = simulate(&parameters);
        let alone = Parameters { paced: false, give_up: GiveUp::Request, ..parameters };
        let alone = simulate(&alone);
        assert!(alone.failed > 20 && paced.failed * 20 <= alone.failed, "{paced:?} {alone:?}");
        assert!(alone.store_refused > 2 * paced.store_refused, "{paced:?} {alone:?}");
    }
}
