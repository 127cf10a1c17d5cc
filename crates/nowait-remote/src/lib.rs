//! Storages behind a network, for images anywhere: exports of NBD servers.
//!
//! A remote storage makes its transfers on a thread of its own, which has its connection; the threads
//! of an engine hand requests to it and learn of their ends by a descriptor. No request has a thread.
#![forbid(unsafe_code)]

mod policy;
mod location;
mod nbd;
mod open;

pub use location::Location;
pub use nbd::{NbdOptions, NbdStorage};
pub use open::{RemoteOptions, open};
pub use policy::{BackOff, Pace, PrefetchCursor, PrefetchOrder, block_runs};
