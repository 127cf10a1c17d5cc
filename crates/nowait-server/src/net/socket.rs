//! A client's socket, real or simulated: the three calls that a connection makes on it.
//!
//! Invariant: no call blocks, and none raises a signal.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

#[cfg(feature = "sim")]
use nowait::sim::ServerEnd;
use rustix::io::{Errno, Result};
use rustix::net::{SendAncillaryBuffer, SendFlags, Shutdown, sendmsg, shutdown};

/// A connected, non-blocking socket.
pub(crate) enum Socket {
    Real(OwnedFd),
    #[cfg(feature = "sim")]
    Simulated(ServerEnd),
}

impl From<OwnedFd> for Socket {
    fn from(fd: OwnedFd) -> Self {
        Self::Real(fd)
    }
}

#[cfg(test)]
impl From<std::os::unix::net::UnixStream> for Socket {
    fn from(stream: std::os::unix::net::UnixStream) -> Self {
        Self::Real(stream.into())
    }
}

impl AsFd for Socket {
    #[inline]
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Real(fd) => fd.as_fd(),
            #[cfg(feature = "sim")]
            Self::Simulated(near) => near.as_fd(),
        }
    }
}

impl Socket {
    /// readv(2). Returns 0 at the end of file.
    ///
    /// # Errors
    /// The errors of readv(2); `EAGAIN` if no data are available.
    #[inline]
    pub(crate) fn receive(&self, pieces: &mut [IoSliceMut<'_>]) -> Result<usize> {
        match self {
            Self::Real(fd) => rustix::io::readv(fd, pieces),
            #[cfg(feature = "sim")]
            Self::Simulated(near) => near.receive(pieces),
        }
    }

    /// sendmsg(2). Returns the bytes taken.
    ///
    /// # Errors
    /// The errors of sendmsg(2); `EAGAIN` if the socket is full or the kernel is short of memory
    /// for it, which costs no client its connection.
    #[inline]
    pub(crate) fn send(&self, pieces: &[IoSlice<'_>]) -> Result<usize> {
        match self {
            Self::Real(fd) => {
                let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
                match sendmsg(fd, pieces, &mut SendAncillaryBuffer::default(), flags) {
                    Err(Errno::NOBUFS | Errno::NOMEM) => Err(Errno::AGAIN),
                    sent => sent,
                }
            }
            #[cfg(feature = "sim")]
            Self::Simulated(near) => near.send(pieces),
        }
    }

    /// shutdown(2) of both directions, even if the socket is open elsewhere.
    pub(crate) fn shut_down(&self) {
        match self {
            // The peer may have disconnected already.
            Self::Real(fd) => drop(shutdown(fd, Shutdown::Both)),
            #[cfg(feature = "sim")]
            Self::Simulated(near) => near.shutdown(),
        }
    }
}
