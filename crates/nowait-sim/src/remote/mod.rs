//! An export of a server behind as a storage: its client is the code that is shipped, the server and
//! the network are simulated, and time is virtual.
//!
//! Invariant: a seed and the numbers of the steps determine the run.

mod volatile_disk;
pub mod remote_scenario;
mod far_server;
mod remote_oracle;
pub mod remote_simulation;
