//! The address of a server, and connecting to it.
//!
//! Invariant: no traffic leaves this machine: the addresses are paths and ports of the loopback
//! interface.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

/// A server that neither sends nor receives for so long is considered stuck.
pub(crate) const SILENCE_MAX: Duration = Duration::from_secs(10);

/// The address of a server.
#[derive(Clone, Debug)]
pub(crate) enum Address {
    /// A Unix socket.
    Unix(PathBuf),
    /// A port of the loopback interface.
    Loopback(u16),
}

impl Address {
    /// A port that no process listens on at this moment.
    pub(crate) fn free_port() -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        Ok(Address::Loopback(listener.local_addr()?.port()))
    }

    /// The URI of the export named `export` at this address.
    pub(crate) fn uri(&self, export: &str) -> String {
        match self {
            Address::Unix(path) => format!("nbd+unix:///{export}?socket={}", path.display()),
            Address::Loopback(port) => format!("nbd://127.0.0.1:{port}/{export}"),
        }
    }

    /// Connects; reads and writes fail after [`SILENCE_MAX`] without progress.
    pub(crate) fn connect(&self) -> io::Result<Stream> {
        match self {
            Address::Unix(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_read_timeout(Some(SILENCE_MAX))?;
                stream.set_write_timeout(Some(SILENCE_MAX))?;
                Ok(Stream::Unix(stream))
            }
            Address::Loopback(port) => {
                let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, *port))?;
                stream.set_read_timeout(Some(SILENCE_MAX))?;
                stream.set_write_timeout(Some(SILENCE_MAX))?;
                stream.set_nodelay(true)?;
                Ok(Stream::Tcp(stream))
            }
        }
    }
}

/// A connection.
pub(crate) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Unix(stream) => stream.as_fd(),
            Stream::Tcp(stream) => stream.as_fd(),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => stream.read(buffer),
            Stream::Tcp(stream) => stream.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => stream.write(bytes),
            Stream::Tcp(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
