//! Injected bugs: a simulation injects one to prove that it would find it.
//!
//! Invariant: without the feature `sim` no bug is ever injected and no check is made at run time;
//! with it a bug appears only on the thread that has injected it.

use nowait::PooledBuffer;

/// A bug that a server could have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "sim"), expect(unreachable_pub, dead_code, reason = "one list for both"))]
pub enum ServerBug {
    /// A read is answered from the buffer of the previous one (C56).
    ReplyFromOldBuffer,
    /// A flush is answered twice.
    ReplyTwice,
    /// A connection is closed as soon as its client sends nothing more, whatever is in flight.
    LoseAtDisconnect,
    /// A thread sleeps without a final read: an end of file without an event is missed.
    TrustReports,
    /// A queue of a virtual machine does not do again what the server before it has left.
    ForgetInFlight,
    /// It also does again what the server before it had told the driver of when it died.
    RepeatTold,
    /// The driver of a queue is told of the end of a read before the data came.
    TellBeforeData,
    /// A read of a ublk device is answered before the data came.
    CommitBeforeData,
    /// A client that waited under a limit is never looked at again.
    ForgetHeld,
    /// Changes of a read-only export are done.
    IgnoreProtection,
    /// What a connection has received and not parsed is lost when it leaves its thread.
    LoseParkedInput,
    /// A queue of a virtual machine that stops says that it has taken one request more.
    SkipAtStop,
    /// A thread finds a detached export under the index that it had, which another one has now.
    ReuseIndex,
    /// A paused export counts as drained although a request is in flight.
    DrainWithRequest,
    /// A write goes on although a block of it is being copied for a backup.
    WriteBeforeCopy,
}

#[cfg(feature = "sim")]
impl ServerBug {
    /// All of them.
    pub const ALL: [Self; 15] = [
        Self::ReplyFromOldBuffer,
        Self::ReplyTwice,
        Self::LoseAtDisconnect,
        Self::TrustReports,
        Self::ForgetInFlight,
        Self::RepeatTold,
        Self::TellBeforeData,
        Self::CommitBeforeData,
        Self::ForgetHeld,
        Self::IgnoreProtection,
        Self::LoseParkedInput,
        Self::SkipAtStop,
        Self::ReuseIndex,
        Self::DrainWithRequest,
        Self::WriteBeforeCopy,
    ];
}

#[cfg(feature = "sim")]
thread_local! {
    static INJECTED: std::cell::Cell<Option<ServerBug>> = const { std::cell::Cell::new(None) };
    static STALE: std::cell::RefCell<Vec<u8>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Injects one bug, or none, into the server code of this thread from now on.
#[cfg(feature = "sim")]
pub fn inject(bug: Option<ServerBug>) {
    INJECTED.set(bug);
    STALE.take();
}

/// Whether `bug` is injected.
#[cfg(feature = "sim")]
#[inline]
pub(crate) fn injected(bug: ServerBug) -> bool {
    INJECTED.get() == Some(bug)
}

/// Always false.
#[cfg(not(feature = "sim"))]
#[inline(always)]
pub(crate) const fn injected(_: ServerBug) -> bool {
    false
}

/// Runs before a read is answered from `buf`: the injected bug fills it with the previous read's
/// data.
#[cfg(feature = "sim")]
pub(crate) fn corrupt(buf: &mut PooledBuffer) {
    if injected(ServerBug::ReplyFromOldBuffer) {
        let own = buf.to_vec();
        STALE.with_borrow_mut(|old| {
            if old.len() == buf.len() {
                buf.copy_from_slice(old);
            }
            *old = own;
        });
    }
}

/// Does nothing.
#[cfg(not(feature = "sim"))]
#[inline(always)]
pub(crate) const fn corrupt(_: &mut PooledBuffer) {}
