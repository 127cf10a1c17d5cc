//! One move of bytes between memory and storage, as submitted to a queue.
//!
//! Invariant: the memory of a transfer stays in place until the queue has returned its completion.

/// The result of a transfer: bytes moved, or a negative errno.
pub type Outcome = i32;

/// `Transfer::buffer` of memory that is not registered with the queue.
pub const UNREGISTERED: u16 = u16::MAX;

/// One move of bytes between memory and storage, as submitted to a queue.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// The memory itself, or an array of [`crate::IoSegment`] when `segments` is not 0.
    pub base: *mut u8,
    /// First byte in the file.
    pub pos: u64,
    /// Bytes to move.
    pub len: u32,
    /// `RWF_*` of preadv2(2).
    pub rw_flags: i32,
    /// Entries of the array at `base`; 0 when `base` is the memory itself.
    pub segments: u16,
    /// The number of the registered buffer that `base` lies in, or [`UNREGISTERED`].
    pub buffer: u16,
    /// The number of the file, among those that are attached to the queue.
    pub file: u32,
    /// The number of its priority (ioprio_set(2)); 0: that of the thread which submits it.
    pub priority: u16,
    /// Whether the direction is memory to device.
    pub write: bool,
    /// The request itself has [`crate::Flags::NOWAIT`] (C32), so a queue keeps `RWF_NOWAIT` even on
    /// a thread that may wait.
    pub must_not_wait: bool,
}

impl Transfer {
    pub(crate) const NONE: Self = Self {
        base: std::ptr::null_mut(),
        pos: 0,
        len: 0,
        rw_flags: 0,
        segments: 0,
        buffer: UNREGISTERED,
        file: 0,
        priority: 0,
        write: false,
        must_not_wait: false,
    };
}
