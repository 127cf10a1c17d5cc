//! The addresses of hosts, by the resolver of this process or by another process for it.
//!
//! Invariant: a literal address is not looked up.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::OnceLock;

/// Has another process look up the addresses of a host.
pub type LookUp = Box<dyn Fn(&str) -> io::Result<Vec<IpAddr>> + Send + Sync>;

static LOOK_UP: OnceLock<LookUp> = OnceLock::new();

/// From now on names of hosts are looked up by `look_up`, in a process that may not ask the resolver itself. Only the
/// first call counts.
pub fn look_up_names_by(look_up: LookUp) {
    let _ = LOOK_UP.set(look_up);
}

/// The addresses of `host`, as the resolver of this process knows them.
///
/// # Errors
/// The errors of getaddrinfo(3): it has none, or the resolver does not answer.
pub fn looked_up_here(host: &str) -> io::Result<Vec<IpAddr>> {
    Ok((host, 0).to_socket_addrs()?.map(|address| address.ip()).collect())
}

/// The addresses of `host`, with `port`.
///
/// # Errors
/// Like [`looked_up_here`]; the other process has exited.
pub(crate) fn addresses_of(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let found = match (host.parse(), LOOK_UP.get()) {
        (Ok(address), _) => vec![address],
        (Err(_), Some(look_up)) => look_up(host)?,
        (Err(_), None) => looked_up_here(host)?,
    };
    Ok(found.into_iter().map(|address| SocketAddr::new(address, port)).collect())
}
