//! An export of an NBD server as a storage.
//!
//! Invariant: whatever the server sends, a request ends with its bytes or with an error, in bounded
//! memory; a write that has ended is in the server's storage or in the replay log until a flush has
//! made it durable.

mod job;
mod inbox;
mod replay_log;
mod requests;
mod connector;
mod link;
mod nbd_storage;

pub use connector::NbdOptions;
pub use nbd_storage::NbdStorage;
