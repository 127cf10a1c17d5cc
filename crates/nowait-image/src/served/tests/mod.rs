//! What can only be tested from within: what a power cut leaves, and who waits for
//! whom.
//!
//! Invariant: as in the tests from outside. Knows: everything here. Known by: nobody.

#[path = "../../../../nowait-cli/tests/suite/common/random.rs"]
#[allow(dead_code)]
mod random;
#[path = "../../../../nowait-cli/tests/suite/common/tool.rs"]
#[allow(dead_code)]
mod tool;
pub(super) mod gate;
pub(super) mod journal;

mod power_cut;
mod waiting;
