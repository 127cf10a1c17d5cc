//! Deliberate mistakes: a simulation makes one to prove that it would find it.
//!
//! Invariant: without the feature `sim` nothing is ever broken and nothing is asked at run time;
//! with it a mistake is made only on the thread that has asked for it.
//! Knows: nothing. Known by: served.

/// A mistake that could be made with an image in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "sim"), expect(unreachable_pub, reason = "one list for both"))]
pub enum Flaw {
    /// What a new cluster holds behind a request's bytes is not what the disk held there (C24).
    ForgetTail,
    /// What is in an image below is looked for at another place.
    ReadBelowElsewhere,
    /// What is to be written before the rest is not made durable first.
    ForgetOrder,
    /// Clusters are given back at closing, and that is not written.
    ForgetGivenBack,
    /// At closing the file loses a cluster that is in use.
    CutTooShort,
    /// The file is not made longer before something is written behind its end.
    ForgetToGrow,
    /// That metadata could not be written when nobody had asked for it is forgotten (C51).
    ForgetFailure,
    /// Who flushes while metadata is being written is told at once that all is written (C49).
    FlushBesideAnother,
}

#[cfg(feature = "sim")]
impl Flaw {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::ForgetTail,
        Self::ReadBelowElsewhere,
        Self::ForgetOrder,
        Self::ForgetGivenBack,
        Self::CutTooShort,
        Self::ForgetToGrow,
        Self::ForgetFailure,
        Self::FlushBesideAnother,
    ];
}

#[cfg(feature = "sim")]
thread_local! {
    static MADE: std::cell::Cell<Option<Flaw>> = const { std::cell::Cell::new(None) };
}

/// Makes one mistake, or none, in everything that runs on this thread from now on.
#[cfg(feature = "sim")]
pub fn make(flaw: Option<Flaw>) {
    MADE.set(flaw);
}

/// Whether the mistake is to be made.
#[cfg(feature = "sim")]
#[inline]
pub(crate) fn has(flaw: Flaw) -> bool {
    MADE.get() == Some(flaw)
}

/// Never.
#[cfg(not(feature = "sim"))]
#[inline(always)]
pub(crate) const fn has(_: Flaw) -> bool {
    false
}
