//! Tests that need access to private parts: power cuts, waiting for allocations, bounded work.
//!
//! Invariant: a test that needs `qemu-img` asks for it first.

#[path = "../../../../nowait-cli/tests/suite/common/random.rs"]
#[allow(dead_code)]
mod random;
#[path = "../../../../nowait-cli/tests/suite/common/tool.rs"]
#[allow(dead_code)]
mod tool;
pub(crate) mod gate;
pub(crate) mod journal;
pub(crate) mod observed_storage;
mod bounded_lookups;
mod power_cut;
mod block_status;
mod held_up_allocation;
