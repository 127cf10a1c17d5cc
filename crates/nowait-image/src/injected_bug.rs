//! Injected bugs: a simulation enables one to prove that it would find it.
//!
//! Invariant: without the feature `sim` no bug is ever active and there is no check at run time;
//! with it a bug is active only on the thread that injected it.

/// A bug that a served image could have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "sim"), expect(unreachable_pub, reason = "one list for both"))]
pub enum ImageBug {
    /// A new cluster's bytes behind those of the request are not what the disk held there (C24).
    ForgetTail,
    /// Bytes of an image below the top one are read from another position.
    ReadBelowElsewhere,
    /// An earlier stage of the metadata is not made durable before the next one is written.
    ForgetOrder,
    /// Clusters are freed on close, and the refcounts are not written.
    ForgetGivenBack,
    /// On close the file loses a cluster that is in use.
    CutTooShort,
    /// The file is not extended before a write behind its end.
    ForgetToGrow,
    /// A failed write of metadata in the background is forgotten (C51).
    ForgetFailure,
    /// A flush during a writeback succeeds immediately, before its data is durable (C49).
    FlushBesideAnother,
    /// A cluster with a refcount of 0 is allocated although it is in use.
    ForgetOverlapCheck,
    /// The bits of a write are stored after its acknowledgement: when the image is closed (C74).
    BitAfterWrite,
}

#[cfg(feature = "sim")]
impl ImageBug {
    /// All bugs.
    pub const ALL: [Self; 10] = [
        Self::ForgetTail,
        Self::ReadBelowElsewhere,
        Self::ForgetOrder,
        Self::ForgetGivenBack,
        Self::CutTooShort,
        Self::ForgetToGrow,
        Self::ForgetFailure,
        Self::FlushBesideAnother,
        Self::ForgetOverlapCheck,
        Self::BitAfterWrite,
    ];
}

#[cfg(feature = "sim")]
thread_local! {
    static INJECTED: std::cell::Cell<Option<ImageBug>> = const { std::cell::Cell::new(None) };
}

/// Activates one bug, or none, on this thread.
#[cfg(feature = "sim")]
pub fn inject(bug: Option<ImageBug>) {
    INJECTED.set(bug);
}

/// Whether `bug` is active on this thread.
#[cfg(feature = "sim")]
#[inline]
pub(crate) fn injected(bug: ImageBug) -> bool {
    INJECTED.get() == Some(bug)
}

/// Always false.
#[cfg(not(feature = "sim"))]
#[inline(always)]
pub(crate) const fn injected(_: ImageBug) -> bool {
    false
}
