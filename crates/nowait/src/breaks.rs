//! Deliberate mistakes: a simulation makes one to prove that it would find it.
//!
//! Invariant: without the feature `sim` nothing is ever broken and nothing is asked at run time;
//! with it a mistake is made only on the thread that has asked for it.
//! Knows: nothing. Known by: ranges, pool, disk, core, sim.

/// A mistake that an engine or a queue could have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "sim"), expect(unreachable_pub, dead_code, reason = "one list for both"))]
pub enum Break {
    /// A flush is answered without having been made.
    DropFlush,
    /// A transfer is reported before its bytes have moved.
    CompleteBeforeData,
    /// A request slot is put into the free list twice.
    FreeSlotTwice,
    /// A read that went through a bounce buffer is answered without what came into that buffer.
    ReplyFromStaleBuffer,
    /// A range is written without having been locked.
    ForgetRangeLock,
}

#[cfg(feature = "sim")]
impl Break {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::DropFlush,
        Self::CompleteBeforeData,
        Self::FreeSlotTwice,
        Self::ReplyFromStaleBuffer,
        Self::ForgetRangeLock,
    ];
}

#[cfg(feature = "sim")]
thread_local! {
    static BROKEN: std::cell::Cell<Option<Break>> = const { std::cell::Cell::new(None) };
}

/// Makes one mistake, or none, in everything that runs on this thread from now on.
#[cfg(feature = "sim")]
pub fn set(broken: Option<Break>) {
    BROKEN.set(broken);
}

/// Whether the mistake is to be made.
#[cfg(feature = "sim")]
#[inline]
pub(crate) fn is(broken: Break) -> bool {
    BROKEN.get() == Some(broken)
}

/// Never.
#[cfg(not(feature = "sim"))]
#[inline(always)]
pub(crate) const fn is(_: Break) -> bool {
    false
}
