//! Checks whether the peer of a socket has read all data that was sent.
//!
//! Invariant: nothing is sent or read here.
#![allow(unsafe_code)]

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// Whether the peer has read all data that was sent (`SIOCOUTQ`, unix(7) and tcp(7)).
pub(crate) fn is_taken(stream: &UnixStream) -> bool {
    let mut waiting: libc::c_int = 0;
    // SAFETY: the ioctl writes one int.
    let done = unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut waiting) };
    done == 0 && waiting == 0
}
