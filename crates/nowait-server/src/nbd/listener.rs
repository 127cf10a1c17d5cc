//! Sockets that clients connect to.
//!
//! Invariant: a socket file that a living server listens on is never touched; the one that is
//! bound here is removed when the listener is dropped, one that was inherited stays.
//! Knows: nothing. Known by: turn, the command.

use std::io::{self, Read};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketType, sockopt};

/// Bytes that a socket may hold for a client; the system's bound may be lower.
const SEND_BUFFER_BYTES: usize = 4 << 20;

/// How long sockets of a killed process may still be there: the kernel takes a ring apart, and with
/// it the sockets that were watched, after the process is gone.
const AFTERLIFE: Duration = Duration::from_millis(500);

/// A bound address.
pub struct Listener(Kind);

enum Kind {
    Unix { socket: UnixListener, own: Option<OwnFile> },
    Tcp(TcpListener),
}

/// A socket file that was made here.
struct OwnFile {
    path: PathBuf,
    inode: u64,
}

impl Listener {
    /// Listens on a Unix socket at `path`. A socket file that nobody listens on is taken over.
    ///
    /// # Errors
    /// `EADDRINUSE`: somebody listens there, or the file is no socket; what bind(2) said.
    pub fn unix(path: &Path) -> io::Result<Self> {
        let socket = match UnixListener::bind(path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_stale(path) => {
                std::fs::remove_file(path)?;
                UnixListener::bind(path)?
            }
            bound => bound?,
        };
        socket.set_nonblocking(true)?;
        let inode = std::fs::symlink_metadata(path)?.ino();
        let own = OwnFile { path: path.to_owned(), inode };
        Ok(Self(Kind::Unix { socket, own: Some(own) }))
    }

    /// Listens on every address that `host` stands for at `port`; 0 is any free port.
    ///
    /// # Errors
    /// What getaddrinfo(3) or bind(2) said.
    pub fn tcp(host: &str, port: u16) -> io::Result<Self> {
        let begin = Instant::now();
        let socket = loop {
            match TcpListener::bind((host, port)) {
                Err(error)
                    if error.kind() == io::ErrorKind::AddrInUse && begin.elapsed() < AFTERLIFE =>
                {
                    std::thread::sleep(AFTERLIFE / 10);
                }
                bound => break bound?,
            }
        };
        socket.set_nonblocking(true)?;
        Ok(Self(Kind::Tcp(socket)))
    }

    /// Takes over a socket that somebody else has bound and made listen.
    ///
    /// # Errors
    /// `InvalidInput`: it is no socket, no Unix or TCP one, or does not listen; what fcntl(2) said.
    pub fn inherited(socket: OwnedFd) -> io::Result<Self> {
        let refuse = |why| io::Error::new(io::ErrorKind::InvalidInput, why);
        let listens = sockopt::socket_acceptconn(&socket).map_err(|_| refuse("it is no socket"))?;
        let stream = sockopt::socket_type(&socket)? == SocketType::STREAM;
        let kind = match sockopt::socket_domain(&socket)? {
            AddressFamily::UNIX if stream => Kind::Unix { socket: socket.into(), own: None },
            AddressFamily::INET | AddressFamily::INET6 if stream => Kind::Tcp(socket.into()),
            _ => return Err(refuse("it is neither a Unix nor a TCP socket")),
        };
        if !listens {
            return Err(refuse("nobody listens on it"));
        }
        match &kind {
            Kind::Unix { socket, .. } => socket.set_nonblocking(true)?,
            Kind::Tcp(socket) => socket.set_nonblocking(true)?,
        }
        Ok(Self(kind))
    }

    /// The path of a Unix socket, unless it has none.
    #[must_use]
    pub fn unix_path(&self) -> Option<PathBuf> {
        match &self.0 {
            Kind::Unix { socket, .. } => {
                socket.local_addr().ok()?.as_pathname().map(Path::to_owned)
            }
            Kind::Tcp(_) => None,
        }
    }

    /// The TCP address that was bound, or `None` for a Unix socket.
    #[must_use]
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        match &self.0 {
            Kind::Tcp(socket) => socket.local_addr().ok(),
            Kind::Unix { .. } => None,
        }
    }

    /// The next connection, ready to be polled.
    ///
    /// # Errors
    /// `EAGAIN` when there is none; what accept(2) said.
    pub(crate) fn accept(&self) -> io::Result<OwnedFd> {
        let socket: OwnedFd = match &self.0 {
            Kind::Unix { socket, .. } => {
                let (stream, _) = socket.accept()?;
                stream.set_nonblocking(true)?;
                stream.into()
            }
            Kind::Tcp(socket) => {
                let (stream, _) = socket.accept()?;
                stream.set_nonblocking(true)?;
                stream.set_nodelay(true)?;
                stream.into()
            }
        };
        // The smaller default works too, with more system calls.
        let _ = sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER_BYTES);
        Ok(socket)
    }
}

/// Whether `path` is a socket whose server has died. A server that lives sends its greeting; one
/// that was killed a moment ago takes connections for as long as the kernel is clearing up.
fn is_stale(path: &Path) -> bool {
    if !std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket()) {
        return false;
    }
    let begin = Instant::now();
    while begin.elapsed() < AFTERLIFE {
        let mut peer = match UnixStream::connect(path) {
            Ok(peer) => peer,
            Err(error) => return error.kind() == io::ErrorKind::ConnectionRefused,
        };
        let heard = peer.set_read_timeout(Some(AFTERLIFE)).and_then(|()| peer.read(&mut [0; 8]));
        match heard {
            Ok(0) => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
            // It speaks, or it is silent for longer than the kernel needs.
            _ => return false,
        }
    }
    false
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            Kind::Unix { socket, .. } => socket.as_fd(),
            Kind::Tcp(socket) => socket.as_fd(),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Kind::Unix { own: Some(OwnFile { path, inode }), .. } = &self.0
            && std::fs::symlink_metadata(path).is_ok_and(|meta| meta.ino() == *inode)
        {
            // It may be gone, or out of reach by now; there is nobody left to tell.
            let _ = std::fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_socket_is_taken_over_and_a_live_one_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        let listener = Listener::unix(&path).unwrap();
        let refused = Listener::unix(&path).map(|_| ()).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AddrInUse);
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("precious");
        std::fs::write(&path, "data").unwrap();
        assert!(Listener::unix(&path).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"data");
    }

    #[test]
    fn a_socket_that_somebody_else_has_made_since_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = Listener::unix(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let _other = Listener::unix(&path).unwrap();
        drop(listener);
        assert!(path.exists());
    }
}
