//! The engine's own cost: instructions for submission and completion of one 4 KiB request, on a
//! queue that does no I/O. Instructions are counted, not timed, so that the bounds hold on a busy machine
//! too.

use nowait_testkit::instructions::Example;
use nowait_testkit::require_tool;

/// An example, its arguments, and the limits of its paths: as a package is built, and as a release.
type Case = (&'static str, &'static [&'static str], [u64; 2], [u64; 2]);

/// Instructions of one request on the simple and on the general path, at most: of a caller that only
/// reads mapped bytes, with many requests for each poll or with one, and for each map and direction of
/// one that reads and writes. First as a package is built, then as `cargo build --release` builds, which optimises
/// one crate at a time.
const LIMITS: [Case; 6] = [
    ("null_cost", &[], [123, 203], [123, 293]),
    ("null_cost_one", &[], [162, 248], [163, 335]),
    ("null_cost_cases", &["mapped", "read"], [117, 241], [121, 290]),
    ("null_cost_cases", &["mapped", "write"], [251, 394], [286, 474]),
    ("null_cost_cases", &["cache", "read"], [176, 332], [199, 364]),
    ("null_cost_cases", &["cache", "write"], [393, 549], [458, 637]),
];

fn check(profile: &str, limits: impl Fn([[u64; 2]; 2]) -> [u64; 2]) {
    nowait_testkit::needs!(require_tool("valgrind"));
    let mut exceeded = Vec::new();
    for (name, case, dist, release) in LIMITS {
        let example = Example::of(profile, "nowait", env!("CARGO_MANIFEST_DIR"), name);
        let Some(example) = example else { return };
        for (path, limit) in ["simple", "general"].into_iter().zip(limits([dist, release])) {
            let arguments = [&["{}", path], case].concat();
            let cost = example.instructions_of_one(&arguments);
            println!("{path} {case:?}: {cost} instructions");
            exceeded.extend((cost > limit).then_some((path, case, cost, limit)));
        }
    }
    assert_eq!(exceeded, [], "path, case, instructions, limit");
}

#[test]
fn a_request_costs_no_more_instructions_than_the_limit_of_its_path() {
    check("dist", |[dist, _]| dist);
}

#[test]
fn a_request_of_a_release_build_costs_no_more_instructions_than_the_limit_of_its_path() {
    check("release", |[_, release]| release);
}
