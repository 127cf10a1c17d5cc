//! Dirty bitmaps of a raw disk on simulated devices, while the disk is written and its processes end in every way.
//!
//! Invariant: a seed and the numbers of the steps determine the run.

pub mod recorded_bits;
pub mod bitmaps_scenario;
pub mod bitmaps_simulation;
