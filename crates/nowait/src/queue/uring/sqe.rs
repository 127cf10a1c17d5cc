//! The submission queue entry of a transfer.
//!
//! Invariant: an entry names the memory, range and flags of its transfer, and nothing else.

use io_uring::{opcode, squeue, types};

use crate::types::transfer::{Transfer, UNREGISTERED};

/// The entry for a transfer to or from `fd`.
#[inline]
pub(crate) fn of(fd: types::Fd, transfer: &Transfer) -> squeue::Entry {
    let Transfer { base, pos, len, rw_flags, segments, buffer, write, .. } = *transfer;
    let (iov, count) = (base.cast_const().cast(), u32::from(segments));
    match (write, segments > 0, buffer == UNREGISTERED) {
        (false, false, false) => {
            opcode::ReadFixed::new(fd, base, len, buffer).offset(pos).rw_flags(rw_flags).build()
        }
        (true, false, false) => {
            opcode::WriteFixed::new(fd, base, len, buffer).offset(pos).rw_flags(rw_flags).build()
        }
        (false, false, true) => {
            opcode::Read::new(fd, base, len).offset(pos).rw_flags(rw_flags).build()
        }
        (true, false, true) => {
            opcode::Write::new(fd, base, len).offset(pos).rw_flags(rw_flags).build()
        }
        (false, true, _) => {
            opcode::Readv::new(fd, iov, count).offset(pos).rw_flags(rw_flags).build()
        }
        (true, true, _) => {
            opcode::Writev::new(fd, iov, count).offset(pos).rw_flags(rw_flags).build()
        }
    }
}
