//! Deliberate mistakes: a simulation makes one to prove that it would find it.
//!
//! Invariant: without the feature `sim` nothing is ever broken and nothing is asked at run time;
//! with it a mistake is made only on the thread that has asked for it.
//! Knows: nothing. Known by: respond, conn, receive.

use nowait::Buf;

/// A mistake that a server could make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "sim"), expect(unreachable_pub, dead_code, reason = "one list for both"))]
pub enum Mistake {
    /// A read is answered from the buffer of the one before (C56).
    ReplyFromOldBuffer,
    /// A flush is answered twice.
    ReplyTwice,
    /// A connection is closed as soon as its client sends nothing more, whatever is in flight.
    LoseAtDisconnect,
    /// A thread sleeps without having read once more: an end of which nothing was reported is missed.
    TrustReports,
}

#[cfg(feature = "sim")]
impl Mistake {
    /// All of them.
    pub const ALL: [Self; 4] =
        [Self::ReplyFromOldBuffer, Self::ReplyTwice, Self::LoseAtDisconnect, Self::TrustReports];
}

#[cfg(feature = "sim")]
thread_local! {
    static MADE: std::cell::Cell<Option<Mistake>> = const { std::cell::Cell::new(None) };
    static OLD: std::cell::RefCell<Vec<u8>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Makes one mistake, or none, in everything that runs on this thread from now on.
#[cfg(feature = "sim")]
pub fn make(mistake: Option<Mistake>) {
    MADE.set(mistake);
    OLD.take();
}

/// Whether the mistake is to be made.
#[cfg(feature = "sim")]
#[inline]
pub(crate) fn makes(mistake: Mistake) -> bool {
    MADE.get() == Some(mistake)
}

/// Never.
#[cfg(not(feature = "sim"))]
#[inline(always)]
pub(crate) const fn makes(_: Mistake) -> bool {
    false
}

/// Before a read is answered from `buf`: by mistake it holds what the one before has brought.
#[cfg(feature = "sim")]
pub(crate) fn spoil(buf: &mut Buf) {
    if makes(Mistake::ReplyFromOldBuffer) {
        let own = buf.to_vec();
        OLD.with_borrow_mut(|old| {
            if old.len() == buf.len() {
                buf.copy_from_slice(old);
            }
            *old = own;
        });
    }
}

/// Nothing.
#[cfg(not(feature = "sim"))]
#[inline(always)]
pub(crate) const fn spoil(_: &mut Buf) {}
