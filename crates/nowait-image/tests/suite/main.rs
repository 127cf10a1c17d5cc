//! Tests with QEMU: images made by one side are read by the other, and damaged ones are refused in
//! one line.
//!
//! Invariant: a test writes only to its own directory. It uses the crate's public API, and QEMU's
//! tools as programs.

#[path = "../../../nowait-cli/tests/suite/common/random.rs"]
#[allow(dead_code)]
mod random;
#[path = "../../../nowait-cli/tests/suite/common/tool.rs"]
#[allow(dead_code)]
mod tool;
mod images;

mod check;
mod commit;
mod contents;
mod create;
mod inconsistent_images;
mod random_damage;
mod refusals;
mod resize;
mod served;
