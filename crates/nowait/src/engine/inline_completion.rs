//! Inline completion: the thread that reaps the last transfer of a request also finishes the
//! request (C42). This saves the hand-over to a worker and the wake-up back. The switch
//! [`crate::Config::inline_completion`] turns it off; every completion then makes a detour over a
//! worker (`WorkerTask::CompleteOnly`).
//!
//! Invariant: `next_step` is the only place that lists the work left after the data; a request for
//! which it lists none is finished by the thread that reaps.

use crate::engine::slot::{RequestSlot, Role};
use crate::types::request::Flags;

/// The work left for a request after its data.
///
/// Other work that a kernel defers is part of a queue's transfer: before the transfer ends, the
/// file system commits the allocation and the size of the file, and the kernel drops cached pages
/// around a direct write. An image that allocates by itself adds its commit to this list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextStep {
    /// No work: the request has succeeded.
    Nothing,
    /// A sync: the fragments were written without `DSYNC` (C29).
    Sync,
    /// A transfer was refused without waiting, interrupted, or short: a worker does the whole
    /// request again, and may allocate, resume, or find the end of the file (C19, C34, C35).
    Again,
    /// No work: the request has failed.
    Error,
}

/// The work left for `request`, all of whose transfers have ended.
pub(crate) fn next_step(request: &RequestSlot) -> NextStep {
    if request.result < 0 {
        NextStep::Error
    } else if request.again {
        NextStep::Again
    } else if request.role == Role::Split
        && request.io.op.changes()
        && request.io.flags.contains(Flags::DSYNC)
    {
        NextStep::Sync
    } else {
        NextStep::Nothing
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::slot::State;
    use crate::types::byte_range::ByteRange;
    use crate::types::request::{Op, Request};
    use crate::types::token::Target;

    fn slot(op: Op, flags: Flags, role: Role) -> RequestSlot {
        let mut slot = RequestSlot::new();
        let io = Request { op, flags, range: ByteRange::new(0, 4096) };
        slot.begin(role, State::Submitting, Target::new(0, 0), io, None, 0);
        slot
    }

    #[test]
    fn c29_only_a_durable_change_without_a_durable_transfer_of_its_own_has_a_sync_left() {
        for op in [Op::Read, Op::Write, Op::Discard, Op::Zero] {
            for (flags, is_durable) in [(Flags::NONE, false), (Flags::DSYNC, true)] {
                let wanted = is_durable && op != Op::Read;
                let wanted = if wanted { NextStep::Sync } else { NextStep::Nothing };
                assert_eq!(next_step(&slot(op, flags, Role::Split)), wanted, "{op:?}, {flags:?}");
            }
        }
        let own_transfer = slot(Op::Write, Flags::DSYNC, Role::Write);
        assert_eq!(next_step(&own_transfer), NextStep::Nothing);
    }

    #[test]
    fn c22_an_error_comes_before_another_try_and_that_before_a_sync() {
        let mut request = slot(Op::Write, Flags::DSYNC, Role::Split);
        request.again = true;
        assert_eq!(next_step(&request), NextStep::Again);
        request.fail(-5);
        assert_eq!(next_step(&request), NextStep::Error);
    }
}
