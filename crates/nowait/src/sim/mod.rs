//! A device that exists in memory only, and whose every moment follows from a seed.
//!
//! What runs on it is the real engine: its queue is [`Sim`], its workers are
//! [`crate::Workers::simulated`], its storage [`crate::Storage::simulated`]. Time is virtual: it
//! passes when somebody waits. A device completes late and out of order, has a volatile cache, and
//! loses what was not flushed when [`SimDevice::cut_power`] is called.
//!
//! Invariant: on one thread, the same seed and the same calls give the same results.
//! Knows: error, align, io, iov, queue, breaks, pause. Known by: descriptor, storage.

mod random;
mod fault;
mod media;
mod state;
mod device;
mod net;
mod queue;

pub use crate::breaks::{Break, set as set_break};
pub use crate::pause::{here as pause, is_possible as can_pause, set as set_pause};
pub use device::SimDevice;
pub use fault::{ERRNOS, Fault, Faults, KICK_ERRNO};
pub use net::{Far, Near, connection};
pub use queue::Sim;
pub use random::Random;
pub use state::SimOptions;
