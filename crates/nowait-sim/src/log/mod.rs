//! A log on simulated files: the code that is shipped appends, is killed, loses its power, and is opened again.
//!
//! Invariant: a seed and the numbers of the steps determine the run.

pub mod log_scenario;
mod sim_directory;
mod log_oracle;
pub mod log_simulation;
