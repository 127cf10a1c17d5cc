//! The scenarios of many seeds.
//!
//! Invariant: as for the module above.

use super::*;

#[test]
fn the_same_seed_and_number_give_the_same_step() {
    let (one, other) = (Scenario::of(Mode::Engine, 9), Scenario::of(Mode::Engine, 9));
    assert!((0..1000).all(|n| one.step(n).action == other.step(n).action));
    assert!((0..1000).any(|n| one.step(n).action != Scenario::of(Mode::Engine, 10).step(n).action));
}

#[test]
fn each_kind_of_fault_occurs_in_some_seeds_of_each_mode_and_in_others_none() {
    for mode in Mode::ON_DEVICES {
        let all = (0..200).map(|seed| Scenario::of(mode, seed).faults);
        let kinds = all.map(|it| {
            let Faults { errors, flush_errors, shorts, refusals, interrupts, .. } = it;
            let rest = [it.full, it.submit_errors, it.rot];
            [errors, flush_errors, shorts, refusals, interrupts].into_iter().chain(rest)
        });
        let kinds: Vec<Vec<u16>> = kinds.map(Iterator::collect).collect();
        assert!((0..8).all(|kind| kinds.iter().any(|it| it[kind] > 0)), "{mode:?}");
        assert!(kinds.iter().any(|it| it.iter().all(|&often| often == 0)), "{mode:?}");
    }
}

#[test]
fn some_disks_of_each_mode_are_qcow2_images_of_whole_sectors() {
    for mode in Mode::ON_DEVICES {
        let all = (0..200).map(|seed| Scenario::of(mode, seed));
        let images: Vec<_> = all.filter(|scenario| scenario.qcow2.is_some()).collect();
        assert!((10..50).contains(&images.len()), "{mode:?}: {}", images.len());
        assert!(images.iter().all(|image| image.device.bytes.is_multiple_of(512)));
        let files = images.iter().filter(|image| image.device.grows).count();
        assert!((5..25).contains(&files), "{mode:?}: {files} in files");
        let damaged = images.iter().filter(|image| image.damages > 0).count();
        assert!((2..25).contains(&damaged), "{mode:?}: {damaged} damaged");
    }
}

#[test]
fn requests_are_whole_cells_but_for_the_last() {
    for seed in 0..50 {
        let scenario = Scenario::of(Mode::of(seed), seed);
        for n in 0..2000 {
            let Action::Ask(request) = scenario.step(n).action else { continue };
            let ByteRange { pos, len } = request.range;
            assert!(pos.is_multiple_of(scenario.grain) && len > 0);
            let to_end = pos + len == scenario.device.bytes;
            assert!(len.is_multiple_of(scenario.grain) || to_end, "{request:?}");
            assert!(len <= MAX_REQUEST_BYTES.max(scenario.grain));
        }
    }
}

#[test]
fn some_servers_have_one_or_two_neighbours_which_never_fail_and_the_kept_seeds_have_none() {
    let all = (0..300).map(|seed| Scenario::of(Mode::Server, seed));
    let crowded: Vec<_> = all.filter(Scenario::has_neighbours).collect();
    assert!((60..140).contains(&crowded.len()), "{}", crowded.len());
    assert!([1, 2].iter().all(|count| crowded.iter().any(|it| it.neighbours == *count)));
    for scenario in crowded {
        for n in 1..=scenario.neighbours {
            let own = scenario.neighbour(n);
            let faults = Faults { rot: 0, submit_errors: 0, ..own.faults };
            assert_eq!((faults, own.qcow2, own.parts), (Faults::default(), None, scenario.parts));
            let again = scenario.neighbour(n).device.seed;
            assert!(own.device.seed == again && again != scenario.device.seed);
        }
    }
    for line in include_str!("../../seeds").lines().filter(|line| !line.starts_with('#')) {
        // A seed with a mode before it is of that mode.
        let Ok(seed) = line.split('#').next().unwrap().trim().parse() else { continue };
        let is_server = Mode::of(seed) == Mode::Server;
        assert!(!is_server || !Scenario::of(Mode::Server, seed).has_neighbours(), "{seed}");
    }
}
