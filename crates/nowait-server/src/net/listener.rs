//! Listening sockets.
//!
//! Invariant: the socket file of a living server is never touched, however many servers start at
//! once. A socket file that was bound here is removed when the listener is dropped; that of an
//! inherited socket stays.

use std::fs::File;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with,
    sockopt,
};

use crate::net::deadline::call_until;

/// Send buffer of a client's socket in bytes; the system's limit may be lower.
/// Beyond it: the connection waits until its client reads.
const SEND_BUFFER_BYTES: usize = 4 << 20;

/// How long the sockets of a killed process may remain: the kernel takes a ring, and with it the
/// watched sockets, apart after the process is gone.
const BIND_RETRY: Duration = Duration::from_millis(500);
/// How long a server waits for another one that starts in the same directory: longer than it needs.
/// Beyond it: the start fails.
const LOCK_TIMEOUT: Duration = Duration::from_secs(3);
/// A bound socket listens a moment later; one that does not after this time is stale.
const BIND_TO_LISTEN: Duration = Duration::from_millis(20);
/// The interval in which a lock, or a listener, is tried again.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// TCP keep-alive: a silent client gets a first probe after this time, then one per interval; after
/// this many unanswered probes the connection is dropped.
const KEEP_ALIVE_AFTER: Duration = Duration::from_secs(120);
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(30);
const KEEP_ALIVE_TRIES: u32 = 4;

/// Removes a socket file where unlink(2) is not to be used.
static REMOVE_FILE: OnceLock<fn(&Path) -> io::Result<()>> = OnceLock::new();

/// A bound address.
pub struct Listener(Kind);

enum Kind {
    Unix { socket: UnixListener, own: Option<OwnedSocketFile> },
    Tcp(TcpListener),
}

/// A socket file that this process has bound.
struct OwnedSocketFile {
    path: PathBuf,
    inode: u64,
}

impl Listener {
    /// Listens on a Unix socket at `path`. Takes over a stale socket file.
    ///
    /// # Errors
    /// `EADDRINUSE`: another server listens there, or the file is not a socket; the errors of bind(2).
    pub fn unix(path: &Path) -> io::Result<Self> {
        // Holds the lock until the socket listens and its inode is known: until then another server
        // could take it for stale.
        let starting = DirectoryLock::at(path);
        let socket = match UnixListener::bind(path) {
            Err(error)
                if error.kind() == io::ErrorKind::AddrInUse
                    && !matches!(starting, DirectoryLock::TimedOut)
                    && is_stale(path) =>
            {
                std::fs::remove_file(path)?;
                UnixListener::bind(path)?
            }
            bound => bound?,
        };
        socket.set_nonblocking(true)?;
        let inode = std::fs::symlink_metadata(path)?.ino();
        let own = OwnedSocketFile { path: path.to_owned(), inode };
        Ok(Self(Kind::Unix { socket, own: Some(own) }))
    }

    /// Listens at `port` on every address of `host`; port 0 is any free port, the same for all
    /// addresses. An address that this machine does not have is left out, unless it is the only
    /// one.
    ///
    /// # Errors
    /// The errors of getaddrinfo(3) and bind(2).
    pub fn tcp(host: &str, mut port: u16) -> io::Result<Vec<Self>> {
        let mut listeners: Vec<Self> = Vec::new();
        let mut refused = None;
        for mut address in (host, port).to_socket_addrs()? {
            address.set_port(port);
            if listeners.iter().any(|listener| listener.tcp_address() == Some(address)) {
                continue;
            }
            match Self::tcp_at(address) {
                Ok(listener) => {
                    port = listener.tcp_address().map_or(port, |bound| bound.port());
                    listeners.push(listener);
                }
                Err(error) if is_no_address_here(&error) => refused = Some(error),
                Err(error) => return Err(error),
            }
        }
        match refused {
            Some(error) if listeners.is_empty() => Err(error),
            _ => Ok(listeners),
        }
    }

    fn tcp_at(address: SocketAddr) -> io::Result<Self> {
        let begin = Instant::now();
        let socket = loop {
            match TcpListener::bind(address) {
                Err(error)
                    if error.kind() == io::ErrorKind::AddrInUse && begin.elapsed() < BIND_RETRY =>
                {
                    std::thread::sleep(BIND_RETRY / 10);
                }
                bound => break bound?,
            }
        };
        socket.set_nonblocking(true)?;
        Ok(Self(Kind::Tcp(socket)))
    }

    /// Takes over a listening socket that another process has bound.
    ///
    /// # Errors
    /// `InvalidInput`: it is not a socket, no Unix or TCP one, or does not listen; the errors of
    /// fcntl(2).
    pub fn inherited(socket: OwnedFd) -> io::Result<Self> {
        let refuse = |why| io::Error::new(io::ErrorKind::InvalidInput, why);
        let listens =
            sockopt::socket_acceptconn(&socket).map_err(|_| refuse("it is not a socket"))?;
        let stream = sockopt::socket_type(&socket)? == SocketType::STREAM;
        let kind = match sockopt::socket_domain(&socket)? {
            AddressFamily::UNIX if stream => Kind::Unix { socket: socket.into(), own: None },
            AddressFamily::INET | AddressFamily::INET6 if stream => Kind::Tcp(socket.into()),
            _ => return Err(refuse("it is neither a Unix nor a TCP socket")),
        };
        if !listens {
            return Err(refuse("it does not listen for connections"));
        }
        match &kind {
            Kind::Unix { socket, .. } => socket.set_nonblocking(true)?,
            Kind::Tcp(socket) => socket.set_nonblocking(true)?,
        }
        Ok(Self(kind))
    }

    /// Takes over a listening socket from another server, which touches it no more. If `is_own`, a
    /// socket file is removed when this is dropped, as if it was bound here.
    ///
    /// # Errors
    /// Like [`Listener::inherited`]; those of lstat(2) on the socket file.
    pub fn handed_over(socket: OwnedFd, is_own: bool) -> io::Result<Self> {
        let mut listener = Self::inherited(socket)?;
        if let (Some(path), Kind::Unix { own, .. }) = (listener.unix_path(), &mut listener.0)
            && is_own
        {
            let inode = std::fs::symlink_metadata(&path)?.ino();
            *own = Some(OwnedSocketFile { path, inode });
        }
        Ok(listener)
    }

    /// Closes the socket here; a socket file stays, for the process that it was handed over to.
    pub fn abandon(mut self) {
        if let Kind::Unix { own, .. } = &mut self.0 {
            *own = None;
        }
    }

    /// Another descriptor of the same socket, with which no socket file is removed.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self(match &self.0 {
            Kind::Unix { socket, .. } => Kind::Unix { socket: socket.try_clone()?, own: None },
            Kind::Tcp(socket) => Kind::Tcp(socket.try_clone()?),
        }))
    }

    /// Whether a socket file is removed when this is dropped.
    #[must_use]
    pub fn is_own(&self) -> bool {
        matches!(self.0, Kind::Unix { own: Some(_), .. })
    }

    /// Whether `path` is a socket that refuses connections, because the process that bound it has ended. One that is
    /// not accepted from is not refused: its queue may be full.
    #[must_use]
    pub fn is_refused(path: &Path) -> bool {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let connected = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .and_then(|socket| connect(&socket, &SocketAddrUnix::new(path)?));
        connected == Err(Errno::CONNREFUSED)
    }

    /// Closes the connections that wait at `listeners` and those that come within `time`, when
    /// nothing can be served. Left waiting, a client would see a server that hangs, and a service
    /// manager would start the next server immediately. Returns immediately if there is no listener.
    pub fn reject<'a>(listeners: impl IntoIterator<Item = &'a Self>, time: Duration) {
        let listeners: Vec<&Self> = listeners.into_iter().collect();
        let begin = Instant::now();
        while !listeners.is_empty() && begin.elapsed() < time {
            for listener in &listeners {
                while begin.elapsed() < time && listener.accept().is_ok() {}
            }
            std::thread::sleep(POLL_INTERVAL);
        }
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

    /// Accepts the next connection, as a non-blocking socket.
    ///
    /// # Errors
    /// `EAGAIN` if there is none; the errors of accept(2).
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
                keep_alive(&stream);
                stream.into()
            }
        };
        // The smaller default works too, with more system calls.
        let _ = sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER_BYTES);
        Ok(socket)
    }
}

/// Enables keep-alive, so that the system notices a client whose machine or network is gone. If
/// that fails, the system's own times apply, or the next send fails.
fn keep_alive(stream: impl AsFd) {
    let _ = sockopt::set_socket_keepalive(&stream, true)
        .and_then(|()| sockopt::set_tcp_keepidle(&stream, KEEP_ALIVE_AFTER))
        .and_then(|()| sockopt::set_tcp_keepintvl(&stream, KEEP_ALIVE_INTERVAL))
        .and_then(|()| sockopt::set_tcp_keepcnt(&stream, KEEP_ALIVE_TRIES));
}

/// Whether this machine has no such address, such as an IPv6 address where IPv6 is turned off.
fn is_no_address_here(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EADDRNOTAVAIL | libc::EAFNOSUPPORT))
}

/// The lock that keeps apart servers that start in the same directory.
enum DirectoryLock {
    /// The lock is held as long as this value lives.
    Held { _directory: File },
    /// The directory cannot be locked: servers that start at the same moment are not kept apart.
    Unlocked,
    /// Timed out: another server takes too long, or another program holds the lock.
    TimedOut,
}

impl DirectoryLock {
    /// Locks the directory of `path`.
    fn at(path: &Path) -> Self {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let Ok(directory) = File::open(parent.unwrap_or(Path::new("."))) else {
            return Self::Unlocked;
        };
        let begin = Instant::now();
        loop {
            match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Self::Held { _directory: directory },
                Err(rustix::io::Errno::WOULDBLOCK) if begin.elapsed() < LOCK_TIMEOUT => {
                    std::thread::sleep(POLL_INTERVAL);
                }
                Err(rustix::io::Errno::WOULDBLOCK) => return Self::TimedOut,
                Err(_) => return Self::Unlocked,
            }
        }
    }
}

/// Whether `path` is a socket whose server has died. A living server sends its greeting; the socket
/// of a killed server accepts connections until the kernel has cleaned up.
fn is_stale(path: &Path) -> bool {
    if !std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket()) {
        return false;
    }
    let begin = Instant::now();
    let mut refusals = 0;
    while begin.elapsed() < BIND_RETRY {
        let peer = match UnixStream::connect(path) {
            Ok(peer) => peer,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused && refusals == 0 => {
                // Another program may have bound it and be about to listen.
                refusals += 1;
                std::thread::sleep(BIND_TO_LISTEN);
                continue;
            }
            Err(error) => return error.kind() == io::ErrorKind::ConnectionRefused,
        };
        let deadline = Some(Instant::now() + BIND_RETRY);
        let greeting = call_until(deadline, &peer, PollFlags::IN, |peer| {
            rustix::net::recv(peer, &mut [0; 8], RecvFlags::DONTWAIT).map(|(bytes, _)| bytes)
        });
        match greeting {
            Ok(0) => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
            // Data, or silence for longer than the kernel needs: the server lives.
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
        if let Kind::Unix { own: Some(OwnedSocketFile { path, inode }), .. } = &self.0
            && std::fs::symlink_metadata(path).is_ok_and(|meta| meta.ino() == *inode)
        {
            // The file may be gone or unreachable by now; nothing is left to do then.
            let _ =
                REMOVE_FILE.get().map_or_else(|| std::fs::remove_file(path), |remove| remove(path));
        }
    }
}

/// From now on socket files are removed by `remove`, in a process that may not unlink them itself. Only the first call
/// counts.
pub fn remove_sockets_by(remove: fn(&Path) -> io::Result<()>) {
    let _ = REMOVE_FILE.set(remove);
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
    fn a_socket_is_refused_only_when_nothing_listens_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        assert!(!Listener::is_refused(&path), "there is none");
        let socket = UnixListener::bind(&path).unwrap();
        // More connections than its queue has room for.
        assert!((0..200).all(|_| !Listener::is_refused(&path)));
        drop(socket);
        assert!(Listener::is_refused(&path));
    }

    #[test]
    fn of_servers_that_take_over_a_stale_socket_at_once_one_gets_it_and_keeps_it() {
        const SERVERS: usize = 4;
        for _ in 0..4 {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("s");
            drop(UnixListener::bind(&path).unwrap());
            let starts = std::sync::Barrier::new(SERVERS);
            let bound: Vec<_> = std::thread::scope(|scope| {
                let start = || {
                    starts.wait();
                    Listener::unix(&path)
                };
                let servers: Vec<_> = (0..SERVERS).map(|_| scope.spawn(start)).collect();
                servers.into_iter().map(|server| server.join().unwrap()).collect()
            });
            let living: Vec<_> = bound.iter().flatten().collect();
            assert_eq!(living.len(), 1);
            assert!(bound.iter().flatten().all(|one| one.unix_path() == Some(path.clone())));
            UnixStream::connect(&path).unwrap();
            assert!(living[0].accept().is_ok(), "its socket is not at its path");
        }
    }

    #[test]
    fn a_tcp_client_that_vanishes_is_detected_by_keep_alive() {
        let listeners = Listener::tcp("127.0.0.1", 0).unwrap();
        let address = listeners[0].tcp_address().unwrap();
        let _client = std::net::TcpStream::connect(address).unwrap();
        let accepted = loop {
            match listeners[0].accept() {
                Ok(accepted) => break accepted,
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
        };
        assert!(sockopt::socket_keepalive(&accepted).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&accepted).unwrap(), KEEP_ALIVE_AFTER);
    }

    #[test]
    fn a_name_is_listened_on_at_all_of_its_addresses_and_one_port() {
        let listeners = Listener::tcp("localhost", 0).unwrap();
        let bound: Vec<_> = listeners.iter().filter_map(Listener::tcp_address).collect();
        let port = bound[0].port();
        for address in ("localhost", port).to_socket_addrs().unwrap() {
            // Where the system has no IPv6, its address is left out.
            if TcpListener::bind((address.ip(), 0)).is_ok() {
                assert!(bound.contains(&address), "{address} is not in {bound:?}");
                std::net::TcpStream::connect(address).unwrap();
            }
        }
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
    fn a_socket_file_that_another_listener_has_bound_since_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = Listener::unix(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let _other = Listener::unix(&path).unwrap();
        drop(listener);
        assert!(path.exists());
    }
}
