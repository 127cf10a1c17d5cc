//! The engine's own cost: instructions for submission and completion of one 4 KiB read, on a queue
//! that does no I/O. Instructions are counted, not timed, so that the bounds hold on a busy machine
//! too.

use nowait_testkit::instructions::Example;
use nowait_testkit::require_tool;

/// Instructions of one request on the simple path, at most.
const SIMPLE_INSTRUCTIONS: u64 = 120;
/// Instructions of one request on the general path, at most.
const GENERAL_INSTRUCTIONS: u64 = 400;

#[test]
fn a_request_costs_no_more_instructions_than_the_limit_of_its_path() {
    if !require_tool("valgrind") {
        return;
    }
    let example = Example::build(env!("CARGO_MANIFEST_DIR"), "null_cost");
    let [simple, general] =
        ["simple", "general"].map(|path| example.instructions_of_one(&["{}", path]));
    println!("simple {simple}, general {general} instructions");
    assert!(simple <= SIMPLE_INSTRUCTIONS, "simple: {simple}");
    assert!(general <= GENERAL_INSTRUCTIONS, "general: {general}");
}
