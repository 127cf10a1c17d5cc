//! An export of an NBD server as a storage.
//!
//! Invariant: whatever the server sends, a request completes with its bytes or with an error, in bounded
//! memory; a write that has completed is in the server's storage or in the replay log until a flush has
//! made it durable.

mod injected_bug;
mod job;
mod inbox;
mod limits;
mod replay_log;
mod requests;
mod session;
#[cfg(feature = "sim")]
mod simulated_nbd;
mod link_counters;
mod connector;
mod link;
mod nbd_storage;

pub use connector::NbdOptions;
#[cfg(feature = "sim")]
pub use injected_bug::{RemoteBug, inject};
pub use link_counters::{LinkCounts, open_links};
pub use nbd_storage::NbdStorage;
#[cfg(feature = "sim")]
pub use simulated_nbd::{SimLimits, SimNbdEnd, SimNbdRequest, SimNext, SimulatedNbd};
