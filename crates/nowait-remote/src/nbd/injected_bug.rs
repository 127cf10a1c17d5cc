//! Injected bugs: a simulation enables one to prove that it would find it.
//!
//! Invariant: without the feature `sim` no bug is ever active and there is no check at run time;
//! with it a bug is active only on the thread that injected it.

/// A bug that the storage of an export could have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "sim"), expect(unreachable_pub, reason = "one list for both"))]
pub enum RemoteBug {
    /// A new connection does not begin with the replay log.
    ForgetReplay,
    /// A flush shortens the log when it is asked.
    TrimWhenAsked,
    /// A flush that has succeeded ends changes that ended after it was asked.
    TrimTooMuch,
    /// Of two changes of the same bytes the earlier one is made again last.
    ReplayOutOfOrder,
    /// A change is made again although a later one has overwritten it.
    ReplayOverwritten,
    /// A durable write is not in the log, although earlier changes are.
    ForgetDurable,
    /// What the server has not answered is answered when its connection is lost.
    AnswerUnanswered,
    /// Changes that overlap are with the server together.
    ForgetOverlap,
    /// A read is asked beside a change of its bytes that is asked again.
    ReadBesideRepeated,
    /// A flush may succeed after one has failed.
    ForgetFailedFlush,
}

#[cfg(feature = "sim")]
impl RemoteBug {
    /// All bugs.
    pub const ALL: [Self; 10] = [
        Self::ForgetReplay,
        Self::TrimWhenAsked,
        Self::TrimTooMuch,
        Self::ReplayOutOfOrder,
        Self::ReplayOverwritten,
        Self::ForgetDurable,
        Self::AnswerUnanswered,
        Self::ForgetOverlap,
        Self::ReadBesideRepeated,
        Self::ForgetFailedFlush,
    ];
}

#[cfg(feature = "sim")]
thread_local! {
    static INJECTED: std::cell::Cell<Option<RemoteBug>> = const { std::cell::Cell::new(None) };
}

/// Activates one bug, or none, on this thread.
#[cfg(feature = "sim")]
pub fn inject(bug: Option<RemoteBug>) {
    INJECTED.set(bug);
}

/// Whether `bug` is active on this thread.
#[cfg(feature = "sim")]
#[inline]
pub(crate) fn injected(bug: RemoteBug) -> bool {
    INJECTED.get() == Some(bug)
}

/// Always false.
#[cfg(not(feature = "sim"))]
#[inline(always)]
pub(crate) const fn injected(_: RemoteBug) -> bool {
    false
}
