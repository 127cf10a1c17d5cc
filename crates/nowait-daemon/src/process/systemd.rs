//! The interface to the service manager: inherited sockets and notifications.
//!
//! Invariant: a socket is taken once, and only if it was meant for this process; a notification is
//! one line and short enough for the manager to read.
#![allow(unsafe_code)]

use std::ffi::OsStr;
use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixStream};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nowait_nbd::Address;
use nowait_server::Listener;
use rustix::io::FdFlags;
use sd_notify::NotifyState;
use tracing::warn;

use crate::config::listen_address;
use crate::error::{CliError, os_message};

/// How long the clients of sockets that were handed over are disconnected when they cannot be served. It is also the
/// shortest interval at which a service manager starts the server for them.
pub(crate) const REJECTED: Duration = Duration::from_secs(1);
/// The longest status for systemd, in bytes, which ignores messages of more than 4096 bytes in all.
/// Beyond it: the status is cut.
const MAX_STATUS_BYTES: usize = 1024;

/// The connection to the service manager.
static MANAGER: OnceLock<Option<UnixDatagram>> = OnceLock::new();

/// The sockets that the parent process has opened for this process, in its order, each with its
/// address. To be called before this process opens any descriptor.
///
/// # Errors
/// The environment is contradictory, or a socket is not one that clients can connect to.
pub(crate) fn sockets() -> Result<Vec<(Listener, Address)>, CliError> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Ok(Vec::new());
    }
    let given = sd_notify::listen_fds().map_err(|error| {
        let why = os_message(&error);
        CliError::new(format!("LISTEN_FDS: the sockets handed over cannot be taken: {why}"))
    })?;
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    // Descriptors beyond the list of names have empty names.
    let names = names.split(':').chain(std::iter::repeat(""));
    let taken = given.zip(names).map(|(number, name)| {
        // SAFETY: the descriptor is open, as its flags were set; this process inherited it and no
        // other code owns it, as this runs once and first.
        let socket = unsafe { OwnedFd::from_raw_fd(number) };
        let refused = |why: &str| {
            CliError::new(format!("the socket handed over as descriptor {number} ({name}): {why}"))
        };
        let listener = Listener::inherited(socket).map_err(|error| refused(&os_message(&error)))?;
        let listen = address(&listener)
            .ok_or_else(|| refused("it has no path that clients could connect to"))?;
        Ok((listener, listen))
    });
    taken.collect()
}

/// Disconnects the clients of the sockets that were handed over, in a process that ends without serving them.
pub fn reject_clients() {
    let inherited = sockets().unwrap_or_default();
    Listener::reject(inherited.iter().map(|(listener, _)| listener), REJECTED);
}

/// The socket that the parent process has connected and handed over as descriptor `number`, above 2.
/// To be called before this process opens any descriptor, and once for each number.
///
/// # Errors
/// The descriptor is not open, or is not a connected Unix socket.
pub(crate) fn connection(number: i32) -> Result<UnixStream, CliError> {
    let refused = |why: &str| CliError::new(format!("--vhost-user fd:{number}: {why}"));
    // SAFETY: the call only asks whether the number is that of an open descriptor.
    let inherited = unsafe { BorrowedFd::borrow_raw(number) };
    rustix::io::fcntl_setfd(inherited, FdFlags::CLOEXEC)
        .map_err(|_| refused("this process was not given such a descriptor"))?;
    // SAFETY: the descriptor is open, as its flags were set; this process inherited it and no other
    // code owns it, as this runs first.
    let socket = UnixStream::from(unsafe { OwnedFd::from_raw_fd(number) });
    socket.peer_addr().map_err(|_| refused("it is not a connected Unix socket"))?;
    socket.set_nonblocking(false).map_err(|error| refused(&os_message(&error)))?;
    Ok(socket)
}

fn address(listener: &Listener) -> Option<Address> {
    if let Some(address) = listener.tcp_address() {
        return Some(Address::Tcp { host: address.ip().to_string(), port: address.port() });
    }
    listen_address::unix(listener.unix_path()?).ok()
}

/// Notifies that clients can connect, to `uris`.
pub(crate) fn notify_ready(uris: &[String]) {
    let others = match uris.len().saturating_sub(1) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let first = uris.first().map_or("", String::as_str);
    let status = format!("serving {first}{others}");
    notify(&[NotifyState::Ready, NotifyState::Status(bounded(&status))]);
}

/// Notifies that files are being read again.
pub(crate) fn notify_reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => notify(&[NotifyState::Reloading, now]),
        Err(error) => {
            warn!("NOTIFY_SOCKET: cannot tell the time of the reload: {}", os_message(&error))
        }
    }
}

/// Notifies that a reload has ended.
pub(crate) fn notify_reloaded() {
    notify(&[NotifyState::Ready]);
}

/// Notifies that this process works.
pub(crate) fn notify_watchdog() {
    notify(&[NotifyState::Watchdog]);
}

/// Notifies that a flush has failed, and that all later ones fail too.
pub(crate) fn notify_failed_flush() {
    let status = "a flush has failed: what was written since the last one may be lost, and every flush \
                  fails until a restart";
    notify(&[NotifyState::Status(status)]);
}

/// Notifies that process `number` serves instead of this one.
pub(crate) fn notify_successor(number: u32) {
    notify(&[NotifyState::MainPid(number)]);
}

/// Notifies that no more requests are accepted.
pub(crate) fn notify_stopping() {
    notify(&[NotifyState::Stopping, NotifyState::Status("finishing requests")]);
}

/// Notifies that no request is in flight any more.
pub(crate) fn notify_flushing() {
    notify(&[NotifyState::Status("flushing")]);
}

/// `status`, cut to the length that the manager reads. URIs are ASCII and have no line breaks.
fn bounded(status: &str) -> &str {
    status.get(..MAX_STATUS_BYTES).unwrap_or(status)
}

/// Connects to the service manager, if there is one, for a process that does nothing but serve: a confined one cannot any
/// more. Without it there is nothing to notify.
pub(crate) fn connect() {
    MANAGER.get_or_init(|| {
        let path = std::env::var_os("NOTIFY_SOCKET").filter(|path| !path.is_empty())?;
        let connected = connected(&path);
        let told = connected.inspect_err(|error| {
            warn!("NOTIFY_SOCKET: cannot notify the service manager: {}", os_message(error));
        });
        told.ok()
    });
}

/// A socket that sends to `path`, or to an abstract address if that begins with '@' (sd_notify(3)).
fn connected(path: &OsStr) -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    match path.as_bytes().strip_prefix(b"@") {
        Some(name) => socket.connect_addr(&SocketAddr::from_abstract_name(name)?)?,
        None => socket.connect(path)?,
    }
    Ok(socket)
}

/// The service manager, if this process is connected to one.
pub(crate) fn manager() -> Option<&'static UnixDatagram> {
    MANAGER.get().and_then(Option::as_ref)
}

/// Sends a notification; no effect without a service manager.
fn notify(state: &[NotifyState<'_>]) {
    let Some(manager) = manager() else { return };
    let lines: String = state.iter().map(|line| format!("{line}\n")).collect();
    if let Err(error) = manager.send(lines.as_bytes()) {
        warn!("NOTIFY_SOCKET: cannot notify the service manager: {}", os_message(&error));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manager_is_found_at_a_path_and_at_an_abstract_address() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let name = format!("@nowait-notify-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name[1..]).unwrap();
        let managers = [UnixDatagram::bind(&path), UnixDatagram::bind_addr(&address)];
        for (manager, path) in managers.into_iter().zip([path.as_os_str(), OsStr::new(&name)]) {
            connected(path).unwrap().send(b"READY=1\n").unwrap();
            let mut received = [0; 16];
            assert_eq!(manager.unwrap().recv(&mut received).unwrap(), 8);
        }
        assert!(connected(OsStr::new("@nowait-no-manager")).is_err());
    }

    #[test]
    fn a_status_is_cut_to_the_length_that_the_manager_reads() {
        assert_eq!(bounded("serving"), "serving");
        assert_eq!(bounded(&"x".repeat(5000)).len(), MAX_STATUS_BYTES);
    }
}
