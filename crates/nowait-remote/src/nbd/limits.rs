//! The limits of what an NBD storage keeps and asks at a time.
//!
//! Invariant: the log asks for a flush before it is full.

/// Each is a number, and bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// The most jobs that are with the server, and their bytes unless it is one job.
    pub(super) asked: (usize, u64),
    /// The changes from which on the replay log asks for a flush.
    pub(super) trim: (usize, u64),
    /// The changes in the replay log from which on no change is begun.
    pub(super) most: (usize, u64),
}

impl Limits {
    pub(super) const DEFAULT: Self =
        Self { asked: (512, 64 << 20), trim: (4096, 32 << 20), most: (16384, 64 << 20) };
}
