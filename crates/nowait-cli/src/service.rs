//! The service manager: the sockets it hands over, and what it is told.
//!
//! Invariant: a socket is taken once, and only if it was meant for this process; what the manager
//! is told is one line and short enough for it to be read.
//! Knows: error, listen. Known by: serve. Source: sd_listen_fds(3), sd_notify(3).
#![allow(unsafe_code)]

use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use nowait_server::Listener;
use sd_notify::NotifyState;
use tracing::warn;

use crate::error::{CliError, reason};
use crate::listen::Listen;

/// Bytes of a status; systemd reads no message that has more than 4096 in all.
const MAX_STATUS_BYTES: usize = 1024;

/// The sockets that the one who started this process has opened for it, in its order, each with
/// its address. To be called before this process opens anything itself.
///
/// # Errors
/// The environment is contradictory, or a socket is none that clients can connect to.
pub(crate) fn sockets() -> Result<Vec<(Listener, Listen)>, CliError> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Ok(Vec::new());
    }
    let given = sd_notify::listen_fds().map_err(|error| {
        let why = reason(&error);
        CliError::new(format!("LISTEN_FDS: the sockets handed over cannot be taken: {why}"))
    })?;
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    // More descriptors than names have none.
    let names = names.split(':').chain(std::iter::repeat(""));
    let taken = given.zip(names).map(|(number, name)| {
        // SAFETY: it is open, as its flags were set; it came with this process and was given to
        // nobody in it, as this is done once and first.
        let socket = unsafe { OwnedFd::from_raw_fd(number) };
        let refused = |why: &str| {
            CliError::new(format!("the socket handed over as descriptor {number} ({name}): {why}"))
        };
        let listener = Listener::inherited(socket).map_err(|error| refused(&reason(&error)))?;
        let listen = address(&listener)
            .ok_or_else(|| refused("it has no path that clients could be told"))?;
        Ok((listener, listen))
    });
    taken.collect()
}

fn address(listener: &Listener) -> Option<Listen> {
    if let Some(address) = listener.tcp_address() {
        return Some(Listen::Tcp { host: address.ip().to_string(), port: address.port() });
    }
    Listen::unix(listener.unix_path()?).ok()
}

/// Clients can connect, to `uris`.
pub(crate) fn tell_ready(uris: &[String]) {
    let others = match uris.len().saturating_sub(1) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let first = uris.first().map_or("", String::as_str);
    let status = format!("serving {first}{others}");
    tell(&[NotifyState::Ready, NotifyState::Status(bounded(&status))]);
}

/// No more requests are taken.
pub(crate) fn tell_stopping() {
    tell(&[NotifyState::Stopping, NotifyState::Status("finishing requests")]);
}

/// No request is in flight any more.
pub(crate) fn tell_flushing() {
    tell(&[NotifyState::Status("flushing")]);
}

/// As much of `status` as the manager reads. URIs are ASCII and have no line ends.
fn bounded(status: &str) -> &str {
    status.get(..MAX_STATUS_BYTES).unwrap_or(status)
}

/// Does nothing where there is no manager.
fn tell(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        warn!("NOTIFY_SOCKET: the service manager cannot be told: {}", reason(&error));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_cut_to_what_the_manager_reads() {
        assert_eq!(bounded("serving"), "serving");
        assert_eq!(bounded(&"x".repeat(5000)).len(), MAX_STATUS_BYTES);
    }
}
