//! Direct I/O for databases and storage software on Linux: reads and writes of any position and length on files, images
//! and block devices, past the page cache, by io_uring where the system allows it. No call of an executor or an event
//! loop blocks, and a request that must wait holds up no other.
//!
//! For those who write a database, a log, an index, a cache or a server of disks, and want the disk's speed
//! without a runtime of its own: from plain threads, from tokio, smol or any other executor, or from your own event
//! loop.
//!
//! # First lines
//!
//! ```no_run
//! use std::path::Path;
//!
//! use nowait::{BlockingFile, Error, Flags, OpenOptions};
//!
//! fn write_and_read(path: &Path) -> Result<(), Error> {
//!     let file = BlockingFile::open(path, OpenOptions::new().create(true))?;
//!     file.write_at(b"any length, anywhere", 1000, Flags::DSYNC)?; // durable when it returns
//!     let mut back = [0; 20];
//!     file.read_at(&mut back, 1000)?;
//!     Ok(())
//! }
//! ```
//!
//! Nothing is published yet; in Cargo.toml: `nowait = { git = "URL of the repository" }`.
//!
//! # Four APIs
//!
//! * [`BlockingFile`]: each call waits for its request.
//! * [`AsyncFile`]: futures for any executor, also of several threads. Threads of the library own the queues: a request
//!   that is alone costs one hop between threads or none, and several in flight share two.
//! * [`LocalAsyncFile`]: futures for the executor of one thread, on an engine of that thread. A request costs what it
//!   costs the engine, about. A [`LocalDriver`] drives the files, or a task on the executor's reactor:
//!   [`LocalAsyncFile::driver`], and for tokio `tokio_driver`.
//! * [`Engine`]: for servers and event loops. One thread submits many requests, polls for
//!   completions and waits on an [`IoQueue`] of its own: [`Uring`], or [`AioThreadQueue`] where
//!   there is no io_uring. Each request gets one [`Completion`].
//!
//! `FileStream` makes a stream of an async file, with the traits of futures-io or tokio. `examples/` has a small program for
//! each API and for each executor; `docs/files.md` tells which to take and what a request costs.
//!
//! The async files of a thread share its engine, and those of a process at most four threads with an
//! engine each; all share the threads that may block ([`WorkerPool`]). So thousands of files cost
//! little more than their descriptors, and one that is busy is as fast as it is alone. A file with many
//! requests, or whose disk hangs, leaves slots and threads to the others.
//!
//! All four work on a [`BlockDevice`], which may be shared between threads. A [`BlockMap`] tells
//! which file holds a range of the device; an [`ImageFormat`] adds images that allocate by
//! themselves.
//!
//! # Files and disks
//!
//! `open` of [`BlockingFile`], [`AsyncFile`] and [`LocalAsyncFile`] opens a *file*, and [`OpenOptions`] may make it. It
//! grows: a write at its end or across it extends it, and its size is exact to the byte. Other handles, threads and
//! programs may read and write it at the same time, through the page cache as well. `append`, `set_len`, `allocate`,
//! `sync_all`, locks and names ([`durable_rename`], [`sync_directory`]) are calls of all three APIs.
//!
//! [`BlockDevice::open`] opens a *disk* of a fixed size, whose writes end at its end (C25). One without other writers may
//! have its holes cached ([`OpenOptions::cache_holes`]).
//!
//! A scan by small reads is read ahead where [`OpenOptions::read_ahead`] asks for it. [`IoArena`] is memory of the caller
//! that engines register once; [`Engine::cancel`], [`Engine::set_deadline`] and [`AsyncFile::with_timeout`] end requests
//! early. After fork(2) a child process has [`BlockingFile`], and no engine beside those of its parent.
//!
//! # Logs
//!
//! [`Log`] is an append log for databases: an append from any thread or task returns when its record is durable, and
//! records that wait share a write. Its example is `append_log`.
//!
//! # Rules and limits
//!
//! `docs/contract.md` defines the meaning of every request; the C-numbers in this documentation are
//! its rules. Errors carry the Linux errno ([`Error::errno`]). The library locks nothing by itself. It needs 64-bit Linux.
//!
//! # Features
//!
//! All are off by default: `tokio` adds `LocalAsyncFile::tokio_driver`, and tokio's traits of streams to `FileStream`;
//! `futures-io` adds those of that crate. For tests only: `sim` adds a simulated device, `fuzz` entry points for fuzz targets.
// The modules are listed in the order of their dependencies: a file uses only those before it.
#![deny(unsafe_code)]
#![cfg_attr(not(target_os = "linux"), allow(unused))]

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("nowait needs 64-bit Linux");

#[macro_use]
mod types;
mod sim_hooks;
mod memory;
#[doc(hidden)]
pub mod injected_panic;
mod loom_shim;
mod threads;
mod queue;
#[cfg(feature = "sim")]
pub mod sim;
mod read_ahead;
mod storage;
mod block;
mod blocking;
mod engine;
mod api;
mod log;
#[cfg(feature = "fuzz")]
pub mod fuzz;

pub use api::async_file::AsyncFile;
pub use api::blocking_file::BlockingFile;
#[cfg(any(feature = "futures-io", all(feature = "tokio", not(loom))))]
pub use api::file_stream::{FileStream, StreamFile};
pub use api::local_file::LocalAsyncFile;
pub use api::local_file::local_driver::LocalDriver;
pub use block::allocation_cache::AllocationCache;
pub use block::block_map::{BlockMap, Extent, Intent, LinearMap, WouldBlock};
pub use block::device::BlockDevice;
pub use block::image_format::ImageFormat;
#[cfg(feature = "sim")]
pub use blocking::worker_pool::SimJob;
pub use blocking::worker_pool::WorkerPool;
pub use engine::Engine;
pub use engine::attached_device::DeviceHandle;
pub use engine::completion::{Completion, Rejected, Stats};
pub use engine::single_disk::SingleDisk;
pub use log::Log;
#[cfg(feature = "sim")]
pub use log::log_directory::LogDirectory;
pub use log::log_options::LogOptions;
pub use log::log_position::LogPosition;
pub use log::log_records::{LogRecord, LogRecords};
pub use memory::buffer_pool::PooledBuffer;
pub use memory::io_arena::IoArena;
pub use memory::io_buffer::IoBuffer;
pub use queue::auto::{AnyQueue, QueueKind};
pub use queue::pending_transfer::{AsyncTransfers, PendingTransfer};
pub use queue::{
    AioThreadQueue, EventSource, Interest, IoQueue, Null, QueueFile, QueueFull, Uring,
};
pub use storage::durable_names::{durable_rename, sync_directory};
pub use storage::file::FileStorage;
pub use storage::file_calls::{Allocate, FileLock};
pub use storage::open_options::{Direct, OpenOptions};
#[cfg(feature = "sim")]
pub use storage::sim::SimStorage;
pub use storage::untorn_limits::UntornLimits;
pub use storage::write_life::WriteLife;
pub use storage::{Storage, StorageProperties};
pub use types::alignment::Alignment;
pub use types::byte_range::ByteRange;
pub use types::config::Config;
pub use types::error::{Error, Operation};
pub use types::io_cursor::{IoCursor, ReadCursor, WriteCursor};
pub use types::io_priority::{IoPriority, PriorityClass};
pub use types::iovec::{IoSegment, MAX_SEGMENTS};
pub use types::request::{ExtentStatus, Flags, Op, Request};
pub use types::token::{FD_TOKEN, Token};
pub use types::transfer::{Outcome, Transfer, UNREGISTERED};
pub use types::weight::{DEFAULT_WEIGHT, WEIGHTS};

/// For the other crates of this project only: it changes without notice.
#[doc(hidden)]
pub mod internal {
    pub use crate::block::ahead_map::AheadMap;
    pub use crate::block::flush_coalescer::FlushCoalescer;
    pub use crate::block::guarded_map::GuardedMap;
    pub use crate::block::write_guard::{ReadDevice, WriteGuard};
    pub use crate::engine::pool::SlotPoolStats;
    pub use crate::memory::buffer_pool::{BUFFER_ALIGN, Budget};
    pub use crate::queue::RegisteredMemory;
    pub use crate::sim_hooks::yield_point::{is_simulated, yield_now};
    pub use crate::storage::StorageSpace;
    pub use crate::storage::device_claim::retry_while_claimed;
    pub use crate::threads::adaptive_poll::AdaptivePoll;
    pub use crate::types::counts::{Count, CountKind, CountValue, Countable, Counted};
    pub use crate::types::iovec::MAX_TRANSFER_BYTES;
}

/// Compiles the examples of both READMEs.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
#[doc = include_str!("../README.md")]
struct Readme;
