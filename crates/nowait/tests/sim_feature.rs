//! The tests that need the feature `sim`. Cargo gives all that it builds at once the same features,
//! and no other program is to have this one: so a second cargo builds and runs them.
#![cfg(not(feature = "sim"))]

use nowait_testkit::cargo;

/// The test programs with simulated devices, and the unit tests.
const PROGRAMS: [&str; 4] = ["sim", "injected_bugs", "replay", "errnos"];

#[test]
fn the_tests_with_simulated_devices_pass() {
    let mut test = cargo("test");
    test.args(["-p", "nowait", "-p", "nowait-sim", "--features", "nowait/sim", "--lib"]);
    for program in PROGRAMS {
        test.args(["--test", program]);
    }
    let status = test.arg("--no-fail-fast").status().expect("cargo");
    assert!(status.success(), "{test:?}: {status}");
}
