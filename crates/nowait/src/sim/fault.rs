//! What goes wrong on a simulated device, and how often.
//!
//! Invariant: nothing goes wrong that is not asked for here.
//! Knows: random. Known by: device.

use super::random::Random;

/// One thing that goes wrong with one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It fails with this errno, positive; some of its bytes may have moved. `EAGAIN` befalls only
    /// what may not wait.
    Errno(i32),
    /// It ends before all of its bytes have moved, at a block.
    Short,
    /// From it on, the first queue that asks has no room before the next hand-over.
    Full,
    /// From it on, the first hand-over fails with [`KICK_ERRNO`].
    Kick,
}

/// What goes wrong: each field but the last says how often in 65536 operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// A read, a write, an allocation or a seek fails with one of [`ERRNOS`].
    pub errors: u16,
    /// A flush fails, and what it was to make durable may be lost.
    pub flush_errors: u16,
    /// A transfer ends short.
    pub shorts: u16,
    /// A transfer that may not wait is refused with `EAGAIN`, at once or later.
    pub refusals: u16,
    /// Anything fails with `EINTR`.
    pub interrupts: u16,
    /// A queue has no room before the next hand-over.
    pub full: u16,
    /// A hand-over fails with [`KICK_ERRNO`], and nothing of it was started.
    pub kicks: u16,
    /// A sector that was not durable when the power failed holds garbage.
    pub rot: u16,
    /// One fault at the operation with this number; the first one is 1.
    pub once: Option<(u64, Fault)>,
}

/// What storage says when it fails.
pub const ERRNOS: [i32; 3] = [libc::EIO, libc::ENOSPC, libc::ENOMEM];

/// What a hand-over fails with.
pub const KICK_ERRNO: i32 = libc::ENOMEM;

/// What a fault may befall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// A transfer that must not wait.
    Try,
    /// A transfer that may wait.
    Transfer,
    /// A flush.
    Flush,
    /// Allocating, seeking.
    Other,
}

impl Fault {
    fn befalls(self, call: Call) -> bool {
        match self {
            Self::Errno(libc::EAGAIN) => call == Call::Try,
            Self::Errno(_) => true,
            Self::Short => matches!(call, Call::Try | Call::Transfer),
            Self::Full | Self::Kick => false,
        }
    }
}

impl Faults {
    /// What befalls operation number `op`.
    #[inline]
    pub(crate) fn draw(&self, op: u64, call: Call, random: &mut Random) -> Option<Fault> {
        if let Some((at, fault)) = self.once
            && at == op
            && fault.befalls(call)
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
