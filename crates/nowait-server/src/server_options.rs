//! The options of a server and of an export.
//!
//! Invariant: plain values; nothing here opens or starts anything.

use std::sync::Arc;
use std::time::Duration;

use nowait::{Config, QueueKind};

use crate::nbd::tls_config::Tls;
use crate::ublk::ublk_device::UblkDevice;

/// The options of a server.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads with a queue each, at least 1.
    pub queues: u16,
    /// The kind of the queues.
    pub kind: QueueKind,
    /// The engines' switches and sizes; all engines share [`Config::buffer_bytes`].
    pub config: Config,
    /// Whether connections are encrypted.
    pub tls: Tls,
    /// The most connections at once, at least 1. A further one is closed right after it is
    /// accepted.
    pub max_connections: u32,
    /// Idle timeout of a thread without connections; see [`Options::IDLE`]. The next connection
    /// starts a thread again. The acceptor thread never retires.
    pub idle: Duration,
    /// Bytes of a fragment of a long write beside other connections, a power of two; see
    /// [`Options::SPLIT_BYTES`].
    pub split_bytes: u64,
    /// Requests that take longer are logged; `None`: none is.
    pub slow_requests: Option<Duration>,
    /// The block device of this machine that the default export is, too. Its threads are at least
    /// as many as the device has queues.
    pub ublk: Option<Arc<UblkDevice>>,
}

impl Options {
    /// A good value for [`Options::idle`]: a client that comes back soon finds the threads running.
    pub const IDLE: Duration = Duration::from_secs(15);
    /// A good value for [`Options::split_bytes`]: some devices work for a quarter of a millisecond on
    /// so many bytes.
    pub const SPLIT_BYTES: u64 = 256 << 10;
}

impl Default for Options {
    /// One queue, without TLS, for at most 1024 connections.
    fn default() -> Self {
        Self {
            queues: 1,
            kind: QueueKind::Auto,
            config: Config::default(),
            tls: Tls::Off,
            max_connections: 1024,
            idle: Self::IDLE,
            split_bytes: Self::SPLIT_BYTES,
            slow_requests: None,
            ublk: None,
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
}

impl Default for ExportOptions {
    /// The default export, without a description.
    fn default() -> Self {
        let (name, description) = (String::new(), String::new());
        Self { name, description, when_a_flush_fails: None }
    }
}
