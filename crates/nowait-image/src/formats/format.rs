//! The names of the formats within the program.
//!
//! Invariant: only the table and a format's own code tell one from another; others ask its row.

/// The format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The disk's bytes and nothing else.
    Raw,
    /// QEMU's own format, versions 2 and 3.
    Qcow2,
    /// VMware's format; only read.
    Vmdk,
    /// Hyper-V's format; only read.
    Vhdx,
}

impl Format {
    /// Whether an image is the disk's bytes and nothing else, so that a client chooses all of them.
    #[must_use]
    pub const fn is_raw(self) -> bool {
        matches!(self, Self::Raw)
    }
}
