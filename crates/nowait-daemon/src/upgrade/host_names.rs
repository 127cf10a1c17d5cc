//! Addresses of hosts for a confined server, which has neither the resolver's files nor its sockets.
//!
//! A request is a packet with a name, and its reply one with the addresses.
//!
//! Invariant: each socket has one request at a time, and is closed after one that has failed: a late reply would be taken for
//! that to another request. However many requests a server sends, the launcher has [`SOCKETS`] threads for them.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};

/// Maximum number of requests at a time.
pub(crate) const SOCKETS: usize = 4;
/// Maximum bytes of a name (RFC 1035, 2.3.4).
const NAME_BYTES: usize = 255;
/// Maximum number of addresses of a reply, each of 16 bytes.
const ADDRESSES: usize = 64;
/// Maximum bytes of the reason for a failure.
const REASON_BYTES: usize = 255;
/// The first byte of a reply with addresses, and of one with a reason.
const FOUND: u8 = 1;
const FAILED: u8 = 0;

/// The server's side.
pub(crate) struct HostNameClient {
    sockets: Mutex<Sockets>,
    freed: Condvar,
}

struct Sockets {
    free: Vec<OwnedFd>,
    /// Number of sockets that have not failed, free or in use.
    usable: usize,
}

impl HostNameClient {
    /// The server's side, and the sockets of the launcher.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`.
    pub(crate) fn new() -> io::Result<(Self, Vec<OwnedFd>)> {
        let flags = SocketFlags::CLOEXEC;
        let pairs: Result<Vec<_>, Errno> = (0..SOCKETS)
            .map(|_| socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None))
            .collect();
        let (free, far) = pairs?.into_iter().unzip();
        let sockets = Mutex::new(Sockets { free, usable: SOCKETS });
        Ok((Self { sockets, freed: Condvar::new() }, far))
    }

    /// Asks for the addresses of `host`. Waits as the resolver does.
    ///
    /// # Errors
    /// The name has no address, or is longer than 255 bytes; the launcher has ended.
    pub(crate) fn ask(&self, host: &str) -> io::Result<Vec<IpAddr>> {
        if host.is_empty() || host.len() > NAME_BYTES {
            return Err(io::Error::other("this is not the name of a host"));
        }
        let socket = self.take()?;
        let mut answer = [0; 1 + ADDRESSES * 16];
        let exchanged = send(&socket, host.as_bytes(), SendFlags::NOSIGNAL)
            .and_then(|_| retry_on_intr(|| recv(&socket, &mut answer, RecvFlags::empty())));
        let len = exchanged.as_ref().map_or(0, |(len, _)| *len);
        self.give_back((len > 0).then_some(socket));
        exchanged?;
        match answer.get(..len).and_then(<[u8]>::split_first) {
            Some((&FOUND, addresses)) => Ok(addresses.chunks_exact(16).map(address).collect()),
            Some((_, why)) => Err(io::Error::other(String::from_utf8_lossy(why).into_owned())),
            None => Err(has_ended()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Sockets> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> io::Result<OwnedFd> {
        let mut sockets = self.lock();
        loop {
            match sockets.free.pop() {
                Some(socket) => return Ok(socket),
                None if sockets.usable == 0 => return Err(has_ended()),
                None => sockets = self.freed.wait(sockets).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// `socket` is free again; `None`: it has failed.
    fn give_back(&self, socket: Option<OwnedFd>) {
        let mut sockets = self.lock();
        sockets.usable -= usize::from(socket.is_none());
        sockets.free.extend(socket);
        self.freed.notify_all();
    }
}

fn has_ended() -> io::Error {
    io::Error::new(ErrorKind::BrokenPipe, "the process that looks up names has exited")
}

/// Replies to the requests of `socket` by `look_up`, until the server closes its side.
pub(crate) fn answer(socket: &OwnedFd, look_up: impl Fn(&str) -> io::Result<Vec<IpAddr>>) {
    let mut request = [0; NAME_BYTES + 1];
    while let Ok((len @ 1.., _)) = retry_on_intr(|| recv(socket, &mut request, RecvFlags::empty()))
    {
        let name = request.get(..len).filter(|name| name.len() <= NAME_BYTES);
        let found = match name.and_then(|name| str::from_utf8(name).ok()) {
            Some(name) => look_up(name),
            None => Err(io::Error::other("this is not the name of a host")),
        };
        let answer = match found {
            Ok(found) => found.iter().take(ADDRESSES).flat_map(octets).fold(vec![FOUND], with),
            Err(error) => error.to_string().bytes().take(REASON_BYTES).fold(vec![FAILED], with),
        };
        if send(socket, &answer, SendFlags::NOSIGNAL).is_err() {
            return;
        }
    }
}

fn with(mut bytes: Vec<u8>, byte: u8) -> Vec<u8> {
    bytes.push(byte);
    bytes
}

/// An address as one of IPv6, in the order of the network.
fn octets(address: &IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

fn address(octets: &[u8]) -> IpAddr {
    let mut all = [0; 16];
    all.copy_from_slice(octets);
    Ipv6Addr::from(all).to_canonical()
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn look_up(host: &str) -> io::Result<Vec<IpAddr>> {
        match host {
            "two" => Ok(vec!["127.0.0.1".parse().unwrap(), "2001:db8::1".parse().unwrap()]),
            "many" => Ok(vec!["::1".parse().unwrap(); 10 * ADDRESSES]),
            _ => Err(io::Error::other("no such name. ".repeat(100))),
        }
    }

    #[test]
    fn a_request_gets_its_reply_until_the_launcher_has_ended() {
        let (client, far) = HostNameClient::new().unwrap();
        let launcher: Vec<_> =
            far.into_iter().map(|socket| thread::spawn(move || answer(&socket, look_up))).collect();
        // More than there are sockets.
        thread::scope(|scope| {
            for _ in 0..4 * SOCKETS {
                scope.spawn(|| assert_eq!(client.ask("two").unwrap(), look_up("two").unwrap()));
            }
        });
        assert_eq!(client.ask("many").unwrap().len(), ADDRESSES);
        let error = client.ask("other").unwrap_err().to_string();
        assert!(error.starts_with("no such name") && error.len() == REASON_BYTES, "{error}");
        let longest = client.ask(&"x".repeat(NAME_BYTES)).unwrap_err().to_string();
        assert!(longest.starts_with("no such name"), "{longest}");
        for name in ["", &"x".repeat(NAME_BYTES + 1)] {
            assert!(client.ask(name).is_err());
        }
        drop(client);
        launcher.into_iter().for_each(|thread| thread.join().unwrap());
        let (client, far) = HostNameClient::new().unwrap();
        drop(far);
        for _ in 0..2 * SOCKETS {
            assert_eq!(client.ask("two").unwrap_err().kind(), ErrorKind::BrokenPipe);
        }
    }

    #[test]
    fn a_packet_that_is_no_name_is_answered_with_a_reason() {
        let (client, mut far) = HostNameClient::new().unwrap();
        let socket = far.pop().unwrap();
        let launcher = thread::spawn(move || answer(&socket, |_| panic!("looked up")));
        let own = client.take().unwrap();
        for packet in [&[b'x'; NAME_BYTES + 1][..], &[b'x'; 1 << 16], &[0xff]] {
            send(&own, packet, SendFlags::NOSIGNAL).unwrap();
            let mut answer = [0; 1 + REASON_BYTES];
            let (len, _) = recv(&own, &mut answer, RecvFlags::empty()).unwrap();
            assert!(len > 1 && answer[0] == FAILED);
        }
        drop(own);
        launcher.join().unwrap();
    }
}
