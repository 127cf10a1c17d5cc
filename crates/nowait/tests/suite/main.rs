//! The engine and its files from outside: tests that share a process. In a program of its own is what counts allocations or
//! descriptors, changes limits of its process, forks, or runs under a sanitizer.

mod allocate_ahead;
mod append_log_example;
mod async_storage;
mod descriptor;
mod detached_devices;
mod durable_renames;
mod files;
mod grow;
mod log_damage;
mod log_file_systems;
mod log_threads;
mod model;
mod neighbours;
mod no_stale_bytes;
mod priorities;
mod read_ahead;
mod redb_storage;
mod requests_on_workers;
mod several_devices;
mod stopped_requests;
mod storage;
mod with_flags;
mod write_options;
