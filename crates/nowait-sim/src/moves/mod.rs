//! Moves of a disk from one simulated device to another while clients change it.
//!
//! Invariant: a seed and the numbers of the steps determine the run.

pub mod move_scenario;
pub mod mover;
pub mod move_simulation;
