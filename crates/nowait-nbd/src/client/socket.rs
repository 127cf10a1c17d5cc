//! The socket of a connection, of a Unix or a TCP server.
//!
//! Invariant: a call that a signal interrupts is made again.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::io::retry_on_intr;

use crate::address::Address;

/// The outcome of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// The end of the stream.
    End,
    /// Less than there was room for.
    Some,
    /// As much as there was room for: more may have come.
    All,
}

/// A connected socket.
pub(super) struct Socket(OwnedFd);

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
                Ok(Self(stream.into()))
            }
            Address::Tcp { host, port } => {
                let mut refused = io::Error::other("the name has no address");
                for address in (host.as_str(), *port).to_socket_addrs()? {
                    match TcpStream::connect_timeout(&address, timeout) {
                        Ok(stream) => {
                            stream.set_nodelay(true)?;
                            stream.set_read_timeout(Some(timeout))?;
                            stream.set_write_timeout(Some(timeout))?;
                            return Ok(Self(stream.into()));
                        }
                        Err(error) => refused = error,
                    }
                }
                Err(refused)
            }
        }
    }

    /// Sends some of `slices`.
    ///
    /// # Errors
    /// Those of writev(2).
    pub(super) fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(retry_on_intr(|| rustix::io::writev(&self.0, slices))?)
    }

    /// Receives into `slices`, one after the other; 0 bytes at the end of the stream.
    ///
    /// # Errors
    /// Those of readv(2).
    pub(super) fn receive(&self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        Ok(retry_on_intr(|| rustix::io::readv(&self.0, &mut *slices))?)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
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
