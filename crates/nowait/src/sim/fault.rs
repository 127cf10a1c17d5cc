//! The faults of a simulated device, and their frequencies.
//!
//! Invariant: a device has no faults but those configured here.

use super::random::Random;

/// A fault of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The operation fails with this errno, positive; some of its bytes may have moved. `EAGAIN`
    /// applies only to operations that must not wait.
    Errno(i32),
    /// The transfer ends at a block boundary before all of its bytes have moved.
    Short,
    /// The first push to a queue from this operation on finds no room before the next submission.
    Full,
    /// The first submission from this operation on fails with [`SUBMIT_ERRNO`].
    SubmitError,
}

/// The frequencies of faults: each field but the last is a number of cases in 65536 operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// A read, a write, an allocation or a seek fails with one of [`ERRNOS`].
    pub errors: u16,
    /// A flush fails, and the data that it covers may be lost.
    pub flush_errors: u16,
    /// A transfer ends short.
    pub shorts: u16,
    /// A transfer that must not wait fails with `EAGAIN`, immediately or later.
    pub refusals: u16,
    /// Any operation fails with `EINTR`.
    pub interrupts: u16,
    /// A queue has no room before the next submission.
    pub full: u16,
    /// A submission fails with [`SUBMIT_ERRNO`], and none of its transfers starts.
    pub submit_errors: u16,
    /// A sector that was not durable when the power failed holds garbage.
    pub rot: u16,
    /// One fault at the operation with this number; the first operation is 1.
    pub once: Option<(u64, Fault)>,
}

/// The errnos of failing storage.
pub const ERRNOS: [i32; 3] = [libc::EIO, libc::ENOSPC, libc::ENOMEM];

/// The errno of a failing submission.
pub const SUBMIT_ERRNO: i32 = libc::ENOMEM;

/// The kinds of operations that faults distinguish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// A transfer that must not wait.
    Try,
    /// A transfer that may wait.
    Transfer,
    /// A flush.
    Flush,
    /// An allocation, a seek or a change of the size.
    Other,
}

impl Fault {
    fn applies_to(self, call: Call) -> bool {
        match self {
            Self::Errno(libc::EAGAIN) => call == Call::Try,
            Self::Errno(_) => true,
            Self::Short => matches!(call, Call::Try | Call::Transfer),
            Self::Full | Self::SubmitError => false,
        }
    }
}

impl Faults {
    /// The fault of operation number `op`, if it has one.
    #[inline]
    pub(crate) fn draw(&self, op: u64, call: Call, random: &mut Random) -> Option<Fault> {
        if let Some((at, fault)) = self.once
            && at == op
            && fault.applies_to(call)
        {
            return Some(fault);
        }
        let transfer = matches!(call, Call::Try | Call::Transfer);
        let errors = if call == Call::Flush { self.flush_errors } else { self.errors };
        if random.chance(errors) {
            return random.pick(&ERRNOS).map(Fault::Errno);
        }
        if call == Call::Try && random.chance(self.refusals) {
            return Some(Fault::Errno(libc::EAGAIN));
        }
        if transfer && random.chance(self.shorts) {
            return Some(Fault::Short);
        }
        random.chance(self.interrupts).then_some(Fault::Errno(libc::EINTR))
    }
}
