//! The socket of a connection, of a Unix or a TCP server.
//!
//! Invariant: a call that a signal interrupts is made again.

use std::cell::Cell;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::io::retry_on_intr;

use crate::address::Address;

/// The outcome of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// The end of the stream.
    End,
    /// Less than there was room for.
    Some,
    /// All of the room is filled: more may have come.
    All,
}

/// A connected socket.
pub(super) struct Socket {
    fd: OwnedFd,
    /// Until then the handshake has to end, however often the server sends a byte.
    deadline: Cell<Option<Instant>>,
}

impl From<OwnedFd> for Socket {
    fn from(fd: OwnedFd) -> Self {
        Self { fd, deadline: Cell::new(None) }
    }
}

impl Socket {
    /// Connects to `address`. The connection, each read and each write fail after `timeout` without
    /// progress.
    ///
    /// # Errors
    /// Those of connect(2) and of the name's resolution.
    pub(super) fn connect(address: &Address, timeout: Duration) -> io::Result<Self> {
        match address {
            Address::Unix(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_read_timeout(Some(timeout))?;
                stream.set_write_timeout(Some(timeout))?;
                Ok(OwnedFd::from(stream).into())
            }
            Address::Tcp { host, port } => {
                let mut refused = io::Error::other("the name has no address");
                for address in (host.as_str(), *port).to_socket_addrs()? {
                    match TcpStream::connect_timeout(&address, timeout) {
                        Ok(stream) => {
                            stream.set_nodelay(true)?;
                            stream.set_read_timeout(Some(timeout))?;
                            stream.set_write_timeout(Some(timeout))?;
                            return Ok(OwnedFd::from(stream).into());
                        }
                        Err(error) => refused = error,
                    }
                }
                Err(refused)
            }
        }
    }

    /// Sends and receives nothing after `deadline`; `None` takes that back. A call that waits then ends
    /// by its timeout.
    pub(super) fn set_deadline(&self, deadline: Option<Instant>) {
        self.deadline.set(deadline);
    }

    fn check_deadline(&self) -> io::Result<()> {
        match self.deadline.get().is_some_and(|deadline| Instant::now() >= deadline) {
            true => Err(io::ErrorKind::TimedOut.into()),
            false => Ok(()),
        }
    }

    /// Sends some of `slices`.
    ///
    /// # Errors
    /// The errnos of writev(2); `TimedOut` after the deadline.
    pub(super) fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.check_deadline()?;
        Ok(retry_on_intr(|| rustix::io::writev(&self.fd, slices))?)
    }

    /// Receives into `slices`, one after the other; 0 bytes at the end of the stream.
    ///
    /// # Errors
    /// The errnos of readv(2); `TimedOut` after the deadline.
    pub(super) fn receive(&self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.check_deadline()?;
        Ok(retry_on_intr(|| rustix::io::readv(&self.fd, &mut *slices))?)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Read for &Socket {
    fn read(&mut self, memory: &mut [u8]) -> io::Result<usize> {
        self.receive(&mut [IoSliceMut::new(memory)])
    }
}

impl Write for &Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.send(&[IoSlice::new(bytes)])
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
