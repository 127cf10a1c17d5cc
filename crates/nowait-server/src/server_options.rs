//! The options of a server and of an export.
//!
//! Invariant: plain values; nothing here opens or starts anything.

use std::time::Duration;

use nowait::{Config, QueueKind, WorkerPool};

use crate::block_size::BlockSize;
use crate::nbd::tls_config::Tls;

/// The options of a server.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads with an engine each for all exports, at least 1.
    pub threads: u16,
    /// The kind of the queues.
    pub kind: QueueKind,
    /// The engines' switches and sizes; all engines share [`Config::buffer_bytes`].
    pub config: Config,
    /// Threads that may block, for all engines together, 1 to 1024; they start when first needed.
    pub workers: u32,
    /// Whether connections are encrypted.
    pub tls: Tls,
    /// The most connections, at least 1. A further one is closed right after it is
    /// accepted.
    pub max_connections: u32,
    /// Time after which a thread makes the writes of an export durable that has no connection any more,
    /// and detaches it; see [`Options::IDLE`].
    pub idle: Duration,
    /// Bytes of a fragment of a long write beside other connections, a power of two; see
    /// [`Options::SPLIT_BYTES`].
    pub split_bytes: u64,
    /// Requests that take longer are logged; `None`: none is.
    pub slow_requests: Option<Duration>,
}

impl Options {
    /// How long the threads of an export without connections go on: a client that comes back soon finds it attached.
    /// Beyond it: the threads of an export without connections stop.
    pub const IDLE: Duration = Duration::from_secs(15);
    /// A good value for [`Options::split_bytes`]: some devices work for a quarter of a millisecond on
    /// so many bytes.
    pub const SPLIT_BYTES: u64 = 256 << 10;
}

impl Default for Options {
    /// One thread, without TLS, for at most 1024 connections.
    fn default() -> Self {
        Self {
            threads: 1,
            kind: QueueKind::Auto,
            config: Config::default(),
            workers: WorkerPool::DEFAULT_LIMIT,
            tls: Tls::Off,
            max_connections: 1024,
            idle: Self::IDLE,
            split_bytes: Self::SPLIT_BYTES,
            slow_requests: None,
        }
    }
}

/// How an image is exported.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// The name by which clients choose it; empty for the default export.
    pub name: String,
    /// A text for people.
    pub description: String,
    /// Called once, when a flush has failed after which every later one fails, too. It runs on a
    /// serving thread and must not block.
    pub when_a_flush_fails: Option<fn()>,
    /// The smallest request of its clients; without it NBD has none, and other frontends have sectors of
    /// 512 bytes, or those of a block device. The size of the image is a multiple of it.
    pub block_size: Option<BlockSize>,
}

impl Default for ExportOptions {
    /// The default export, without a description.
    fn default() -> Self {
        let (name, description) = (String::new(), String::new());
        Self { name, description, when_a_flush_fails: None, block_size: None }
    }
}
