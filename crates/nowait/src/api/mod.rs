//! The APIs for blocking calls and for futures. An event loop uses the engine itself.

pub(crate) mod blocking_file;
mod blocking_file_calls;
mod process_workers;
mod oneshot;
mod handle_disk;
mod timed_request;
pub(crate) mod file_call;
mod file_turns;
#[macro_use]
mod async_file_methods;
pub(crate) mod async_file;
pub(crate) mod local_file;
#[cfg(any(feature = "futures-io", all(feature = "tokio", not(loom))))]
pub(crate) mod file_stream;
