//! The five switches and the sizes of an engine.
//!
//! Invariant: every switch only changes how a request is served, never what it means; the whole
//! test suite passes with each of them off.
//! Knows: nothing. Known by: pool, engine, disk.

/// How an engine serves requests. All switches default to on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// One extent, one segment, aligned: one slot and one transfer. Off: every request goes
    /// through the generic path.
    pub simple: bool,
    /// The thread that reaps a completion finishes the request (C42). Off: each completion makes
    /// a detour over a worker.
    pub inline_completion: bool,
    /// All transfers of a request are in flight together. Off: one after the other, each waited
    /// for.
    pub vectored: bool,
    /// Request slots come from the engine's slab. Off: each is allocated and freed.
    pub pool: bool,
    /// Requests are tried without waiting first (C37). Off: every request goes to a worker.
    pub nowait_first: bool,
    /// The map remembers which ranges are mapped and which are holes (C38). Off: nothing is
    /// remembered and the file system is asked by trying.
    pub hint: bool,
    /// An unaligned request is `EINVAL`, as in the kernel, instead of going through a bounce
    /// buffer (C12). Off by default.
    pub strict: bool,
    /// Request slots of an engine: the greatest number of requests and pieces of requests in
    /// flight, 1 to 32768.
    pub slots: u32,
    /// Threads that may block, for each device, 1 to 1024. They start when first needed.
    pub workers: u32,
    /// Bytes of pooled buffer memory of an engine; requests that fit no pooled buffer may have as
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
            nowait_first: true,
            hint: true,
            strict: false,
            slots: 4096,
            workers: 16,
            buffer_bytes: 256 << 20,
        }
    }
}
