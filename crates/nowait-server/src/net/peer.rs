//! The client of a connection, as named in the log.
//!
//! Invariant: it is asked for once, when the connection is accepted.

use std::fmt;
use std::os::fd::AsFd;

use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrAny, getpeername};
/// A client: its TCP address, or the user and the process at the other end of a Unix socket.
pub(crate) struct Peer(Option<Box<str>>);

impl Peer {
    /// The client at `socket`, which was just accepted.
    pub(crate) fn of(socket: impl AsFd) -> Self {
        Self(describe(socket).map(String::into_boxed_str))
    }

    /// The client without the word for it; empty if the kernel does not tell.
    pub(crate) fn address(&self) -> String {
        self.0.as_deref().unwrap_or_default().to_owned()
    }
}

fn describe(socket: impl AsFd) -> Option<String> {
    let address: SocketAddrAny = getpeername(&socket).ok()??;
    if address.address_family() != AddressFamily::UNIX {
        return std::net::SocketAddr::try_from(address).ok().map(|address| address.to_string());
    }
    let user = socket_peercred(&socket).ok()?;
    Some(format!("uid {}, pid {}", user.uid.as_raw(), user.pid.as_raw_nonzero()))
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(words) => write!(f, "client ({words})"),
            None => f.write_str("a client"),
        }
    }
}
