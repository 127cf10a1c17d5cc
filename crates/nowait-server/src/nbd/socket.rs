//! A client's socket: the three calls that a connection makes on it, or a simulated one's.
//!
//! Invariant: no call waits, and none raises a signal.
//! Knows: nothing here. Known by: listener, reply, tls, conn, receive, turn.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

#[cfg(feature = "sim")]
use nowait::sim::Near;
use rustix::io::Result;
use rustix::net::{SendAncillaryBuffer, SendFlags, Shutdown, sendmsg, shutdown};

/// A connected socket, which has been told not to wait.
pub(crate) enum Socket {
    Real(OwnedFd),
    #[cfg(feature = "sim")]
    Simulated(Near),
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
    /// readv(2). 0 bytes: the peer sends nothing more.
    ///
    /// # Errors
    /// What the system said; `EAGAIN` if nothing is there.
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
    /// What the system said; `EAGAIN` if there is no room.
    #[inline]
    pub(crate) fn send(&self, pieces: &[IoSlice<'_>]) -> Result<usize> {
        match self {
            Self::Real(fd) => {
                let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
                sendmsg(fd, pieces, &mut SendAncillaryBuffer::default(), flags)
            }
            #[cfg(feature = "sim")]
            Self::Simulated(near) => near.send(pieces),
        }
    }

    /// Ends both directions, whoever else has the socket open.
    pub(crate) fn shut_down(&self) {
        match self {
            // It may be gone already.
            Self::Real(fd) => drop(shutdown(fd, Shutdown::Both)),
            #[cfg(feature = "sim")]
            Self::Simulated(near) => near.shutdown(),
        }
    }
}
