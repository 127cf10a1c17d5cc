//! The addresses of servers under measurement.
//!
//! Invariant: no traffic leaves this machine: the addresses are paths and ports of the loopback
//! interface.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::time::Duration;

use nowait_nbd::Address;
use nowait_nbd::client::probe;

/// A server that neither sends nor receives for so long is considered stuck.
pub(crate) const SILENCE_MAX: Duration = Duration::from_secs(10);

/// A port of the loopback interface that no process listens on at this moment.
pub(crate) fn free_port() -> io::Result<Address> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(loopback(listener.local_addr()?.port()))
}

/// A port of the loopback interface.
pub(crate) fn loopback(port: u16) -> Address {
    Address::Tcp { host: Ipv4Addr::LOCALHOST.to_string(), port }
}

/// Fails unless a server listens at `address`.
pub(crate) fn check(address: &Address) -> io::Result<()> {
    probe(address, SILENCE_MAX)
}
