//! Backups on a simulated device: a disk is read as it was at an instant while it is written.
//!
//! Invariant: a seed and the numbers of the steps determine the run.

pub mod backup_scenario;
pub mod backup_simulation;
