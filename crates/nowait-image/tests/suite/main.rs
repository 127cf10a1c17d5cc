//! Images made by QEMU read here, and the other way round; damaged ones refused in one line.
//!
//! Invariant: nothing outside a test's own directory is written. Knows: the crate as its users do,
//! and QEMU's tools as programs. Known by: nobody.

#[path = "../../../nowait-cli/tests/suite/common/random.rs"]
#[allow(dead_code)]
mod random;
#[path = "../../../nowait-cli/tests/suite/common/tool.rs"]
#[allow(dead_code)]
mod tool;
mod images;

mod check;
mod contents;
mod damage;
mod refusals;
mod served;
mod create;
mod resize;
mod commit;
