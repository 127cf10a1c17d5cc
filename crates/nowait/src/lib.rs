//! A direct-I/O engine for Linux: one completion record for each request, no locks and no
//! allocation on the way.
//!
//! Three ways in: [`File`] for callers that wait, [`Engine`] for servers and event loops, which
//! submit, poll and wait on a [`Queue`] of their own thread, and [`AsyncFile`] for tasks of any
//! executor. What a request means is written down
//! in `docs/contract.md`; the C-numbers here are its rules.
//!
//! The modules are listed in the order in which they know each other: a file uses only those
//! before it.
#![deny(unsafe_code)]
#![cfg_attr(not(target_os = "linux"), allow(unused))]

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("nowait needs 64-bit Linux");

mod error;
mod breaks;
mod pause;
mod config;
mod align;
mod iov;
mod io;
mod buffer;
mod image;
mod ranges;
mod crew;
mod sync;
mod flushes;
mod remote;
mod rendezvous;
mod queue;
#[cfg(feature = "sim")]
pub mod sim;
mod descriptor;
mod storage;
mod map;
mod disk;
mod blocking;
mod simple;
mod generic;
mod request;
mod complete;
mod pool;
mod completion;
mod qualify;
mod worker;
mod core;
mod engine;
mod file;
mod memory;
mod inbox;
mod driver;
mod future;
#[cfg(feature = "fuzz")]
pub mod fuzz;

pub use align::Alignment;
pub use buffer::{BUFFER_ALIGN, Buf};
pub use completion::{Completion, Rejected, Stats};
pub use config::Config;
pub use disk::Disk;
pub use engine::Engine;
pub use error::{Doing, Error, Range};
pub use file::File;
pub use future::AsyncFile;
pub use image::Image;
pub use io::{Flags, Io, Op, Outcome, Span, Transfer, UNREGISTERED};
pub use iov::{MAX_SEGMENTS, MAX_TRANSFER_BYTES, Segment};
pub use map::{Extent, Extents, Identity, Intent, Map, WouldBlock};
pub use memory::Buffer;
pub use pool::PoolStats;
pub use queue::{Interest, Null, Queue, QueueFull, Threads, Token, Uring, WATCHED};
pub use storage::{Direct, OpenOptions, Storage};
#[cfg(feature = "sim")]
pub use worker::SimJob;
pub use worker::Workers;
