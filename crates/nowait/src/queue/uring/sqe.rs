//! The submission queue entry of a transfer.
//!
//! Invariant: an entry names the memory, range, flags and priority of its transfer, and nothing else.
#![allow(unsafe_code)]

use io_uring::{opcode, squeue, types};

use crate::types::transfer::{Transfer, UNREGISTERED};

/// The entry for a transfer to or from `fd`.
#[inline]
pub(crate) fn of(fd: types::Fd, transfer: &Transfer) -> squeue::Entry {
    let Transfer { base, pos, len, rw_flags, segments, buffer, priority, write, .. } = *transfer;
    let (iov, count) = (base.cast_const().cast(), u32::from(segments));
    match (write, segments > 0, buffer == UNREGISTERED) {
        (false, false, false) => opcode::ReadFixed::new(fd, base, len, buffer)
            .offset(pos)
            .rw_flags(rw_flags)
            .ioprio(priority)
            .build(),
        (true, false, false) => opcode::WriteFixed::new(fd, base, len, buffer)
            .offset(pos)
            .rw_flags(rw_flags)
            .ioprio(priority)
            .build(),
        (false, false, true) => {
            opcode::Read::new(fd, base, len).offset(pos).rw_flags(rw_flags).ioprio(priority).build()
        }
        (true, false, true) => opcode::Write::new(fd, base, len)
            .offset(pos)
            .rw_flags(rw_flags)
            .ioprio(priority)
            .build(),
        (false, true, _) => opcode::Readv::new(fd, iov, count)
            .offset(pos)
            .rw_flags(rw_flags)
            .ioprio(priority)
            .build(),
        (true, true, _) => opcode::Writev::new(fd, iov, count)
            .offset(pos)
            .rw_flags(rw_flags)
            .ioprio(priority)
            .build(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::io_priority::{IoPriority, PriorityClass};

    /// The priority in an entry: 16 bits behind those of the operation and the flags.
    fn priority(entry: squeue::Entry) -> u16 {
        // SAFETY: an entry is a `struct io_uring_sqe` of 64 bytes, all of which are initialised.
        let bytes: [u8; 64] = unsafe { std::mem::transmute(entry) };
        u16::from_ne_bytes([bytes[2], bytes[3]])
    }

    #[test]
    fn c88_the_entry_of_every_kind_of_transfer_has_its_priority() {
        let high = IoPriority::new(PriorityClass::BestEffort, 1).unwrap();
        for (number, wanted) in
            [(0, 0), (high.number(), 0x4001), (IoPriority::IDLE.number(), 0x6000)]
        {
            for write in [true, false] {
                for (segments, buffer) in [(0, UNREGISTERED), (0, 3), (2, UNREGISTERED)] {
                    let transfer =
                        Transfer { priority: number, write, segments, buffer, ..Transfer::NONE };
                    assert_eq!(priority(of(types::Fd(5), &transfer)), wanted);
                }
            }
        }
    }
}
