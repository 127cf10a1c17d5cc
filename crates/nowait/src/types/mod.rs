//! Plain values without I/O: requests, transfers, errors and limits.

pub(crate) mod token;
pub(crate) mod byte_range;
pub(crate) mod error;
pub(crate) mod config;
pub(crate) mod alignment;
pub(crate) mod weight;
pub(crate) mod iovec;
pub(crate) mod io_cursor;
pub(crate) mod io_priority;
pub(crate) mod request;
pub(crate) mod transfer;
#[macro_use]
pub(crate) mod counts;
