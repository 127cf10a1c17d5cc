//! A simulated device in memory, whose behaviour is determined by a seed.
//!
//! The real engine runs on it: with the queue [`SimQueue`], the workers
//! [`crate::WorkerPool::simulated`] and the storage [`crate::SimStorage`]. Time is
//! virtual: it advances when a caller waits. A device completes late and out of order, has a
//! volatile cache, and may lose data that was not flushed when [`SimDevice::cut_power`] is called.
//!
//! Invariant: on one thread, the same seed and the same calls give the same results.

mod random;
mod fault;
mod sim_disk;
mod sim_state;
mod sim_device;
mod net;
mod sim_commands;
mod sim_queue;

pub use crate::sim_hooks::injected_bug::{EngineBug, inject as inject_bug};
pub use crate::sim_hooks::yield_point::{is_simulated, set as set_yield, yield_now};
pub use fault::{ERRNOS, Fault, Faults, SUBMIT_ERRNO};
pub use net::{ClientEnd, ServerEnd, connection};
pub use random::Random;
pub use sim_commands::{SimCommand, SimCommands};
pub use sim_device::SimDevice;
pub use sim_queue::SimQueue;
pub use sim_state::SimOptions;
