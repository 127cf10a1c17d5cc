//! Injected bugs: a simulation activates one to prove that it would find it.
//!
//! Invariant: without the feature `sim` no bug is ever active and no check is left at run time;
//! with it a bug is active only on the thread that has injected it.

/// Declares the bugs that a crate could have: the enum, `inject`, and `injected`, which asks for one. The crate needs
/// a feature `sim`.
#[doc(hidden)]
#[macro_export]
macro_rules! injected_bugs {
    ($(#[$meta:meta])* pub enum $name:ident { $($(#[$bug_meta:meta])* $bug:ident,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[cfg_attr(not(feature = "sim"), allow(unreachable_pub, dead_code, reason = "one list for both"))]
        pub enum $name {
            $($(#[$bug_meta])* $bug,)*
        }

        #[cfg(feature = "sim")]
        impl $name {
            /// Every bug.
            pub const ALL: &'static [Self] = &[$(Self::$bug),*];
        }

        #[cfg(feature = "sim")]
        thread_local! {
            static INJECTED: std::cell::Cell<Option<$name>> = const { std::cell::Cell::new(None) };
        }

        /// Activates one bug, or none, in all code that runs on this thread from now on.
        #[cfg(feature = "sim")]
        pub fn inject(bug: Option<$name>) {
            INJECTED.set(bug);
        }

        /// Whether the bug is active on this thread.
        #[cfg(feature = "sim")]
        #[inline]
        pub(crate) fn injected(bug: $name) -> bool {
            INJECTED.get() == Some(bug)
        }

        /// Always false.
        #[cfg(not(feature = "sim"))]
        #[inline(always)]
        pub(crate) const fn injected(_: $name) -> bool {
            false
        }
    };
}

injected_bugs! {
    /// A bug that an engine or a queue could have.
    pub enum EngineBug {
        /// A flush completes without a sync.
        DropFlush,
        /// A transfer completes before its bytes have moved.
        CompleteBeforeData,
        /// A request slot is put into the free list twice.
        FreeSlotTwice,
        /// A read through a bounce buffer completes without the bytes of that buffer being copied.
        ReplyFromStaleBuffer,
        /// A range is written without its range lock.
        ForgetRangeLock,
        /// The requests of a merged transfer that failed or was short are answered as done.
        AnswerUnmovedNeighbours,
        /// A completion names another device than that of its request.
        CompleteElsewhere,
        /// A record of a log is acknowledged without a sync.
        AnswerUnsynced,
        /// The checks of a log do not include the number of the segment.
        ForgetGeneration,
        /// A record of a log is acknowledged although the sync failed.
        IgnoreFailedSync,
    }
}
