//! Requests that block: synchronous I/O, and the worker pool that runs it.

pub(crate) mod sync_io;
pub(crate) mod joined_writes;
pub(crate) mod worker_pool;
