//! Addresses of hosts for a confined server, which has neither the resolver's files nor its sockets.
//!
//! A packet with a name goes to the launcher, and one with its addresses comes back.
//!
//! Invariant: each end is used for one question at a time, and never again after one that has failed: a later answer would be
//! taken for that to another question. However many questions a server asks, the launcher has [`ENDS`] threads for them.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};

/// The most questions at a time.
pub(crate) const ENDS: usize = 4;
/// The longest name in bytes (RFC 1035, 2.3.4).
const NAME_BYTES: usize = 255;
/// The most addresses of an answer, each of which has 16 bytes.
const ADDRESSES: usize = 64;
/// The most bytes of the reason why there is none.
const REASON_BYTES: usize = 255;
/// The first byte of an answer with addresses, and of one with a reason.
const FOUND: u8 = 1;
const FAILED: u8 = 0;

/// The server's ends.
pub(crate) struct Questions {
    ends: Mutex<Ends>,
    freed: Condvar,
}

struct Ends {
    free: Vec<OwnedFd>,
    /// Those that can be used, free or not.
    usable: usize,
}

impl Questions {
    /// The server's ends, and those of the launcher.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`.
    pub(crate) fn new() -> io::Result<(Self, Vec<OwnedFd>)> {
        let flags = SocketFlags::CLOEXEC;
        let pairs: Result<Vec<_>, Errno> = (0..ENDS)
            .map(|_| socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None))
            .collect();
        let (free, far) = pairs?.into_iter().unzip();
        let ends = Mutex::new(Ends { free, usable: ENDS });
        Ok((Self { ends, freed: Condvar::new() }, far))
    }

    /// Asks for the addresses of `host`. Waits as the resolver does.
    ///
    /// # Errors
    /// There are none; the launcher has ended; the name is too long.
    pub(crate) fn ask(&self, host: &str) -> io::Result<Vec<IpAddr>> {
        if host.is_empty() || host.len() > NAME_BYTES {
            return Err(io::Error::other("this is no name of a host"));
        }
        let end = self.take()?;
        let mut answer = [0; 1 + ADDRESSES * 16];
        let exchanged = send(&end, host.as_bytes(), SendFlags::NOSIGNAL)
            .and_then(|_| retry_on_intr(|| recv(&end, &mut answer, RecvFlags::empty())));
        let len = exchanged.as_ref().map_or(0, |(len, _)| *len);
        self.give_back((len > 0).then_some(end));
        exchanged?;
        match answer.get(..len).and_then(<[u8]>::split_first) {
            Some((&FOUND, addresses)) => Ok(addresses.chunks_exact(16).map(address).collect()),
            Some((_, why)) => Err(io::Error::other(String::from_utf8_lossy(why).into_owned())),
            None => Err(has_ended()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Ends> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> io::Result<OwnedFd> {
        let mut ends = self.lock();
        loop {
            match ends.free.pop() {
                Some(end) => return Ok(end),
                None if ends.usable == 0 => return Err(has_ended()),
                None => ends = self.freed.wait(ends).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// `end` is free again; `None`: it cannot be used any more.
    fn give_back(&self, end: Option<OwnedFd>) {
        let mut ends = self.lock();
        ends.usable -= usize::from(end.is_none());
        ends.free.extend(end);
        self.freed.notify_all();
    }
}

fn has_ended() -> io::Error {
    io::Error::new(ErrorKind::BrokenPipe, "the process that looks up names has ended")
}

/// Answers the questions that come to `end` by `look_up`, until its other end is closed.
pub(crate) fn answer(end: &OwnedFd, look_up: impl Fn(&str) -> io::Result<Vec<IpAddr>>) {
    let mut question = [0; NAME_BYTES + 1];
    while let Ok((len @ 1.., _)) = retry_on_intr(|| recv(end, &mut question, RecvFlags::empty())) {
        let name = question.get(..len).filter(|name| name.len() <= NAME_BYTES);
        let found = match name.and_then(|name| str::from_utf8(name).ok()) {
            Some(name) => look_up(name),
            None => Err(io::Error::other("this is no name of a host")),
        };
        let answer = match found {
            Ok(found) => found.iter().take(ADDRESSES).flat_map(octets).fold(vec![FOUND], with),
            Err(error) => error.to_string().bytes().take(REASON_BYTES).fold(vec![FAILED], with),
        };
        if send(end, &answer, SendFlags::NOSIGNAL).is_err() {
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
    fn a_question_gets_its_answer_until_the_launcher_has_ended() {
        let (questions, far) = Questions::new().unwrap();
        let launcher: Vec<_> =
            far.into_iter().map(|end| thread::spawn(move || answer(&end, look_up))).collect();
        // More than there are ends.
        thread::scope(|scope| {
            for _ in 0..4 * ENDS {
                scope.spawn(|| assert_eq!(questions.ask("two").unwrap(), look_up("two").unwrap()));
            }
        });
        assert_eq!(questions.ask("many").unwrap().len(), ADDRESSES);
        let error = questions.ask("other").unwrap_err().to_string();
        assert!(error.starts_with("no such name") && error.len() == REASON_BYTES, "{error}");
        for name in ["", &"x".repeat(256)] {
            assert!(questions.ask(name).is_err());
        }
        drop(questions);
        launcher.into_iter().for_each(|thread| thread.join().unwrap());
        let (questions, far) = Questions::new().unwrap();
        drop(far);
        for _ in 0..2 * ENDS {
            assert_eq!(questions.ask("two").unwrap_err().kind(), ErrorKind::BrokenPipe);
        }
    }

    #[test]
    fn a_packet_that_is_no_name_is_answered_with_a_reason() {
        let (questions, mut far) = Questions::new().unwrap();
        let end = far.pop().unwrap();
        let launcher = thread::spawn(move || answer(&end, |_| panic!("looked up")));
        let own = questions.take().unwrap();
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
