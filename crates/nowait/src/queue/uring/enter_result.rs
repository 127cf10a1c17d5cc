//! The result of io_uring_enter(2).
//!
//! Invariant: a failure that a drain or the next call remedies is not an error; the entries that the
//! kernel has not taken stay pushed.

use crate::types::error::{Error, Operation};

/// The errno of the call, except where the next call may succeed: after `EBUSY` and `EAGAIN`
/// completions have to be drained first; `EINTR` and `ETIME` are not errors of the ring.
#[inline]
pub(crate) fn checked(entered: std::io::Result<usize>) -> Result<(), Error> {
    match entered {
        Ok(_) => Ok(()),
        Err(error) if is_transient(&error) => Ok(()),
        Err(error) => Err(Error::from_io(&error, Operation::Wait)),
    }
}

fn is_transient(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN | libc::ETIME))
}
