//! A plan determines its run.

use nowait::sim::EngineBug;
use nowait_remote::RemoteBug;
use nowait_sim::run::{InjectedBug, Plan, keep_panics, run, shrink};
use nowait_sim::scenario::Mode;
use nowait_sim::trace;

#[test]
fn the_same_plan_gives_the_same_run() {
    for seed in 0..60 {
        let plan = Plan::new(Mode::ALL[(seed % 2) as usize], seed, 500);
        assert_eq!(run(&plan).unwrap(), run(&plan).unwrap(), "seed {seed}");
    }
}

#[test]
fn the_same_plan_gives_the_same_run_behind_a_network_and_the_same_failure() {
    keep_panics();
    for seed in 0..20 {
        let plan = Plan::new(Mode::Remote, seed, 1000);
        assert_eq!(run(&plan).unwrap(), run(&plan).unwrap(), "seed {seed}");
    }
    let bug = Some(InjectedBug::Remote(RemoteBug::ForgetReplay));
    let plan = (0..).map(|seed| Plan { bug, ..Plan::new(Mode::Remote, seed, 1000) });
    let plan = plan.take(100).find(|plan| run(plan).is_err()).unwrap();
    let replayed = trace::read(&trace::write(&plan)).unwrap();
    assert_eq!(run(&replayed).unwrap_err().what, run(&plan).unwrap_err().what);
}

#[test]
fn a_failure_is_shrunk_and_its_trace_fails_in_the_same_way() {
    keep_panics();
    let bug = Some(InjectedBug::Engine(EngineBug::DropFlush));
    // A seed with a raw disk: the bug shows after fewer steps.
    let plan = Plan { bug, ..Plan::new(Mode::Engine, 2, 2000) };
    let failure = run(&plan).unwrap_err();
    let (small, failure) = shrink(&plan, &failure, std::time::Duration::from_secs(20));
    assert!(small.steps.len() < 20, "{} steps are left", small.steps.len());
    let replayed = trace::read(&trace::write(&small)).unwrap();
    assert_eq!(run(&replayed).unwrap_err().what, failure.what);
}
