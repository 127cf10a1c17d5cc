//! Calls on sockets that are bounded in time as a whole.
//!
//! Invariant: a signal, or a peer that does a little at a time, makes no wait longer.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Calls `act`, which must not block, until it has neither found `socket` not ready (`EAGAIN`) nor been
/// interrupted (`EINTR`). Between two calls it waits until the socket is `ready`, at most until
/// `deadline`; for ever without one.
///
/// # Errors
/// `EAGAIN` once the deadline has passed; the other errors of `act`; those of poll(2).
pub fn call_until<T>(
    deadline: Option<Instant>,
    socket: impl AsFd,
    ready: PollFlags,
    mut act: impl FnMut(BorrowedFd<'_>) -> Result<T, Errno>,
) -> io::Result<T> {
    loop {
        match act(socket.as_fd()) {
            Err(Errno::AGAIN) => {}
            Err(Errno::INTR) => continue,
            result => return Ok(result?),
        }
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Err(Errno::AGAIN.into());
        }
        // A time that is too long for the kernel is not a bound.
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut [PollFd::new(&socket, ready)], left.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_call_is_made_again_after_a_signal_and_ends_with_its_deadline() {
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut answers = vec![Ok(7), Err(Errno::INTR), Err(Errno::INTR)];
        let late = Some(Instant::now() + Duration::from_secs(3600));
        let result = call_until(late, &near, PollFlags::IN, |_| answers.pop().unwrap());
        assert_eq!(result.unwrap(), 7);
        let passed = Some(Instant::now());
        let silent = call_until(passed, &near, PollFlags::IN, |_| Err::<(), _>(Errno::AGAIN));
        assert_eq!(silent.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        rustix::io::write(&far, b"x").unwrap();
        let mut tries = 0;
        let read = call_until(None, &near, PollFlags::IN, |socket| {
            tries += 1;
            if tries == 1 { Err(Errno::AGAIN) } else { rustix::io::read(socket, &mut [0; 8]) }
        });
        assert_eq!(read.unwrap(), 1);
    }
}
