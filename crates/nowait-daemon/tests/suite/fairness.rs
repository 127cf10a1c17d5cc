//! Fairness: a client with small requests is served between the large requests of another client,
//! not after them.
//!
//! Invariant: the test checks an order, counted in bytes that the server has sent; it does not
//! depend on time or on the clients' speed.

use std::io::{ErrorKind, Read};

use crate::common::{KIB, MIB, Scratch, Server};
use nowait_testkit::nbd::{Client, Command};

/// Requests of the greedy client, of 1 MiB each.
const LARGE: u64 = 64;
/// Small requests, one after the other while the greedy client receives its replies.
const SMALL: u64 = 5;
/// The bytes that the server may send to the greedy client, on average, between a small request and
/// its reply: the bytes in flight and a few quanta. The margin is for a small request that the page
/// cache cannot answer without waiting, so that a worker serves it.
const BEFORE_SMALL: u64 = 2 * MIB;

/// Sends a small read on `small`, then receives replies on `greedy` until the small answer arrives.
/// Returns the bytes received that the server has sent since the small request: a slow client's
/// socket may hold some 8 MiB from before.
fn sent_until_answered(small: &mut Client, greedy: &mut Client, buffer: &mut [u8]) -> u64 {
    let there = rustix::io::ioctl_fionread(greedy.stream()).expect("a socket");
    small.send(&Command::Read { offset: 0, len: 4096 }).expect("a socket");
    let mut taken: u64 = 0;
    loop {
        small.stream().set_nonblocking(true).expect("a socket");
        let answered = match rustix::net::recv(
            small.stream(),
            &mut [0u8; 1][..],
            rustix::net::RecvFlags::PEEK,
        ) {
            Ok(_) => true,
            Err(rustix::io::Errno::AGAIN) => false,
            Err(error) => panic!("the small client's socket: {error}"),
        };
        small.stream().set_nonblocking(false).expect("a socket");
        if answered {
            let (_, answer) = small.receive().expect("a reply");
            assert_eq!(answer.expect("bytes").len(), 4096);
            return taken.saturating_sub(there);
        }
        match greedy.stream().read(buffer) {
            Ok(0) => panic!("the greedy client was disconnected"),
            Ok(count) => taken += count as u64,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => panic!("the greedy client's socket: {error}"),
        }
    }
}

#[test]
fn small_reads_are_answered_between_large_reads_that_were_requested_before() {
    let scratch = Scratch::new();
    let image = scratch.random("disk.img", 16 * MIB, 5);
    let server = Server::start(&image, "threads = 1\nqueue = 'uring'\ndirect = 'off'");
    let (mut small, mut greedy) = (server.connect(), server.connect());
    small.read(0, 4096).expect("a first read");
    for n in 0..LARGE {
        let offset = n % 16 * MIB;
        greedy.send(&Command::Read { offset, len: MIB as u32 }).expect("a socket");
    }
    let mut buffer = vec![0; 256 * KIB as usize];
    let sent: u64 =
        (0..SMALL).map(|_| sent_until_answered(&mut small, &mut greedy, &mut buffer)).sum();
    assert!(sent < SMALL * BEFORE_SMALL, "{sent} bytes were sent before {SMALL} small reads");
    drop((small, greedy));
    server.stop();
}
