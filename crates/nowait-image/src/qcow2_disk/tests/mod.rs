//! Tests that need access to private parts: power cuts, waiting for allocations, bounded work.
//!
//! Invariant: a test that needs `qemu-img` asks for it first.

pub(crate) mod gate;
pub(crate) mod journal;
pub(crate) mod failed_batches;
pub(crate) mod file_observer;
mod bounded_lookups;
mod power_cut;
mod block_status;
mod held_up_allocation;
