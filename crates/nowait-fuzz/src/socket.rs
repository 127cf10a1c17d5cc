//! Whether the other side of a socket has read what was sent.
//!
//! Invariant: nothing is sent or read here.
//! Knows: nothing here. Known by: targets.
#![allow(unsafe_code)]

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// Whether nothing that was sent waits to be read (`SIOCOUTQ`, unix(7) and tcp(7)).
pub(crate) fn is_taken(stream: &UnixStream) -> bool {
    let mut waiting: libc::c_int = 0;
    // SAFETY: the request writes one int.
    let done = unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut waiting) };
    done == 0 && waiting == 0
}
