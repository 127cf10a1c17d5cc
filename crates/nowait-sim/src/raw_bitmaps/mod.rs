//! Dirty bitmaps of a disk, raw or in a qcow2 image, on simulated devices, while the disk is written and its processes end in every way.
//!
//! Invariant: a seed and the numbers of the steps determine the run.

pub mod recorded_bits;
pub mod bitmaps_scenario;
pub mod bitmaps_disk;
pub mod bitmaps_simulation;
