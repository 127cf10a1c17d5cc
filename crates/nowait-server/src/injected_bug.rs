//! Bugs of a server that a simulation injects to prove that it would find them.
//!
//! Invariant: without the feature `sim` nothing here has an effect.

use nowait::PooledBuffer;

mod server_bug {
    nowait::injected_bugs! {
        /// A bug that a server could have.
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
            /// Bytes that a connection has received and not parsed are lost when it leaves its thread.
            LoseParkedInput,
            /// A queue of a virtual machine that stops says that it has taken one request more.
            SkipAtStop,
            /// A thread finds a detached export under the index that it had, which another one has now.
            ReuseIndex,
            /// A paused export counts as drained although a request is in flight.
            DrainWithRequest,
            /// A write goes on although a block of it is being copied for a backup.
            WriteBeforeCopy,
            /// Changes of a disk that moves are taken after they are copied, so a change beside the copy is not followed.
            TakeAfterCopy,
        }
    }
}

#[cfg_attr(not(feature = "sim"), expect(unreachable_pub, reason = "one list for both"))]
pub use server_bug::ServerBug;
pub(crate) use server_bug::injected;

#[cfg(feature = "sim")]
thread_local! {
    static STALE: std::cell::RefCell<Vec<u8>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Injects one bug, or none, into the server code of this thread from now on.
#[cfg(feature = "sim")]
pub fn inject(bug: Option<ServerBug>) {
    server_bug::inject(bug);
    STALE.take();
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
