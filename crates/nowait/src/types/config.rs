//! The switches and the sizes of an engine.
//!
//! Invariant: a switch changes how a request is served, never what it means; the whole test suite
//! passes with each of them off.

/// How an engine serves requests. Every switch but `strict` is on by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The simple path: an aligned request of one extent and one segment takes one slot and one
    /// transfer. Off: every request takes the general path.
    pub simple: bool,
    /// The thread that drains a completion from the queue finishes the request (C42). Off: each
    /// completion makes a detour through a worker.
    pub inline_completion: bool,
    /// All transfers of a request are in flight together. Off: each starts when the one before it
    /// has ended.
    pub vectored: bool,
    /// Request slots come from the engine's slab. Off: each is allocated and freed.
    pub pool: bool,
    /// Simple requests of one burst that touch on storage are served by one transfer, and so are
    /// small writes that touch and wait for a worker. Off: each makes its own.
    pub merge: bool,
    /// Requests are first tried without waiting (C37). Off: every request goes to a worker.
    pub nowait_first: bool,
    /// After many refusals in a row, requests go to the workers for a while without being tried
    /// (C39). Off: every request is tried, however many are refused.
    pub back_off: bool,
    /// Where the kernel syncs a file for each `DSYNC` write (btrfs, NFS, FUSE), those in flight at
    /// the same time are written without and share a sync (C29). Off: each transfer carries
    /// `RWF_DSYNC`.
    pub group_syncs: bool,
    /// An unaligned request is `EINVAL`, as in the kernel, instead of going through a bounce
    /// buffer (C12). Off by default.
    pub strict: bool,
    /// Request slots of an engine: the greatest number of requests and fragments of requests in
    /// flight, 1 to 32768.
    pub slots: u32,
    /// Bytes of pooled buffer memory of an engine; requests that fit no pooled buffer may take as
    /// much again.
    pub buffer_bytes: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            simple: true,
            inline_completion: true,
            vectored: true,
            pool: true,
            merge: true,
            nowait_first: true,
            back_off: true,
            group_syncs: true,
            strict: false,
            slots: 4096,
            buffer_bytes: 256 << 20,
        }
    }
}
