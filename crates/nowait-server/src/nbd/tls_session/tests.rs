//! A TLS session against a client of the same library, over a socket that becomes full.
//!
//! Invariant: expected bytes have not passed through the session.

use std::io::Read;
use std::os::unix::net::UnixStream;

use nowait_testkit::Scratch;
use nowait_testkit::certificates::{client_of, self_signed};
use rustls::pki_types::CertificateDer;
use rustls::{ALL_VERSIONS, ClientConnection};

use crate::nbd::reply::send_queue::ReplyBody;
use crate::nbd::tls_config::ClientAuth;
use crate::nbd::tls_session::*;
use crate::nbd::wire::ReplyMode;
use crate::nbd::wire::{EncodedHeader, ReplyEncoder};

fn simple(cookie: u64) -> EncodedHeader {
    ReplyEncoder::to_cookie(ReplyMode::Simple, cookie).simple(0)
}

/// Credentials for `localhost`, and their certificate.
fn credentials() -> (Credentials, CertificateDer<'static>) {
    let directory = Scratch::new();
    let cert = self_signed(directory.path());
    (Credentials::load(directory.path(), ClientAuth::Any).unwrap(), cert)
}

/// Both sides of a connection after STARTTLS; `out` holds the unsent bytes from before.
pub(crate) struct Pair {
    pub(crate) session: TlsSession,
    pub(crate) near: Socket,
    pub(crate) client: ClientConnection,
    pub(crate) far: UnixStream,
}

impl Pair {
    fn new(out: &mut SendQueue) -> Self {
        let (credentials, cert) = credentials();
        let mut client = client_of(cert, ALL_VERSIONS);
        client.set_buffer_limit(None);
        let (near, far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        far.set_nonblocking(true).unwrap();
        let near = near.into();
        Self { session: TlsSession::new(&credentials, out).unwrap(), near, client, far }
    }

    /// Like `new`, with the TLS handshake done.
    pub(crate) fn established() -> Self {
        let mut pair = Self::new(&mut SendQueue::default());
        while pair.client.is_handshaking() || pair.session.tls.is_handshaking() {
            pair.client_sends(usize::MAX, &mut Vec::new());
            pair.send(&mut SendQueue::default(), &mut 0);
            pair.client_receives();
        }
        pair
    }

    fn send(&mut self, out: &mut SendQueue, budget: &mut u64) -> SendResult {
        self.session.send(out, &self.near, &mut u64::MAX.clone(), budget)
    }

    /// Passes the client's pending bytes to the session in pieces of at most `piece` bytes.
    fn client_sends(&mut self, piece: usize, plaintext: &mut Vec<u8>) {
        let mut ciphertext = Vec::new();
        while self.client.wants_write() {
            self.client.write_tls(&mut ciphertext).unwrap();
        }
        for some in ciphertext.chunks(piece) {
            self.session.decrypt(some, |bytes| plaintext.extend_from_slice(bytes)).unwrap();
        }
    }

    /// Decrypts the bytes that the client has received.
    fn client_receives(&mut self) -> Vec<u8> {
        let mut plaintext = Vec::new();
        while self.client.read_tls(&mut self.far).is_ok_and(|count| count > 0) {
            let left = self.client.process_new_packets().unwrap().plaintext_bytes_to_read();
            let start = plaintext.len();
            plaintext.resize(start + left, 0);
            self.client.reader().read_exact(&mut plaintext[start..]).unwrap();
        }
        plaintext
    }
}

/// The first flight of a client.
fn client_hello() -> Vec<u8> {
    let mut bytes = Vec::new();
    Pair::new(&mut SendQueue::default()).client.write_tls(&mut bytes).unwrap();
    bytes
}

#[test]
fn a_session_decrypts_all_bytes_of_its_client_however_they_are_cut() {
    for piece in [1, 7, 4096, usize::MAX] {
        let mut pair = Pair::new(&mut SendQueue::default());
        let mut plaintext = Vec::new();
        let sent_bytes: Vec<u8> = (0..40_000u32).map(|n| n as u8).collect();
        pair.client.writer().write_all(&sent_bytes).unwrap();
        while plaintext.len() < sent_bytes.len() {
            pair.client_sends(piece, &mut plaintext);
            assert_eq!(pair.send(&mut SendQueue::default(), &mut 0), SendResult::Drained);
            pair.client_receives();
        }
        assert!(plaintext == sent_bytes, "pieces of {piece}");
    }
}

#[test]
fn replies_arrive_whole_and_in_order_though_the_socket_fills() {
    let mut pair = Pair::established();
    let (mut out, mut expected, mut bytes_of) = (SendQueue::default(), Vec::new(), Vec::new());
    for n in 0..600u64 {
        let head = simple(n);
        let bytes = vec![n as u8; (n as usize * 37) % 5000];
        expected.extend_from_slice(head.as_slice());
        expected.extend_from_slice(&bytes);
        bytes_of.push(expected.len());
        out.push(head, ReplyBody::Bytes(bytes), 1);
    }
    let (mut budget, mut got, mut would_blocks, mut quota_hits) = (0, Vec::new(), 0, 0);
    loop {
        let mut quota = 300_001;
        let sent = pair.session.send(&mut out, &pair.near, &mut quota, &mut budget);
        got.extend(pair.client_receives());
        // No budget is released for bytes that the client has not received, encrypted or not.
        let whole = bytes_of.partition_point(|&end| end <= got.len()) as u64;
        assert!(budget <= whole, "{budget} replies released, {whole} have arrived");
        match sent {
            SendResult::Drained => break,
            SendResult::WouldBlock => would_blocks += 1,
            SendResult::QuotaUsed => quota_hits += 1,
            SendResult::Closed(_) => panic!("the peer is there"),
        }
    }
    assert!(got == expected && out.is_empty());
    assert!(would_blocks + quota_hits > 1, "{would_blocks} {quota_hits}");
    assert_eq!(budget, 600);
}

#[test]
fn a_client_that_does_not_read_has_a_bounded_number_of_bytes_encrypted_for_it() {
    let mut pair = Pair::established();
    let mut out = SendQueue::default();
    for n in 0..64 {
        out.push(simple(n), ReplyBody::Bytes(vec![0; 1 << 20]), 1);
    }
    let mut budget = 0;
    for _ in 0..10 {
        assert_eq!(pair.send(&mut out, &mut budget), SendResult::WouldBlock);
        let state = pair.session.tls.process_new_packets().unwrap();
        assert!(state.tls_bytes_to_write() < CIPHERTEXT_BUFFER_BYTES + CIPHERTEXT_BUFFER_BYTES / 8);
    }
    assert!(out.len() > 60 && budget < 4);
}

#[test]
fn bytes_unsent_before_tls_are_sent_unencrypted_and_first() {
    let mut out = SendQueue::default();
    out.push_bytes(vec![1; 3]);
    out.push_bytes(vec![2; 5]);
    let (near, mut far) = UnixStream::pair().unwrap();
    let near = Socket::from(near);
    let (credentials, _) = credentials();
    let mut session = TlsSession::new(&credentials, &mut out).unwrap();
    assert!(out.is_empty() && session.has_unsent());
    let mut sent_bytes = client_hello();
    sent_bytes.truncate(sent_bytes.len() - 1);
    session.decrypt(&sent_bytes, |_| panic!("nothing can be inside")).unwrap();
    assert_eq!(session.send(&mut out, &near, &mut 100, &mut 0), SendResult::Drained);
    let mut got = [0; 8];
    far.read_exact(&mut got).unwrap();
    assert_eq!(got, [1, 1, 1, 2, 2, 2, 2, 2]);
    assert!(!session.has_unsent());
}

#[test]
fn bytes_that_are_no_tls_decrypt_to_nothing_and_are_answered_by_an_alert() {
    for bytes in [&b"IHAVEOPT\0\0\0\x07\0\0\0\x06\0\0\0\0\0\0"[..], &[0; 64], &[0x16; 64]] {
        let mut pair = Pair::new(&mut SendQueue::default());
        let plaintext = pair.session.decrypt(bytes, |_| panic!("nothing can be inside"));
        assert!(plaintext.is_err());
        assert_eq!(pair.send(&mut SendQueue::default(), &mut 0), SendResult::Drained);
        let mut alert = [0; 7];
        pair.far.read_exact(&mut alert).unwrap();
        // A record of type 21 with a fatal (2) alert (RFC 8446, section 6).
        assert_eq!((alert[0], alert[5]), (21, 2));
        assert!(pair.session.decrypt(&client_hello(), |_| {}).is_err(), "it recovers");
    }
}

#[test]
fn a_modified_record_decrypts_to_nothing() {
    let mut pair = Pair::established();
    pair.client.writer().write_all(&[7; 100]).unwrap();
    let mut ciphertext = Vec::new();
    pair.client.write_tls(&mut ciphertext).unwrap();
    ciphertext[50] ^= 1;
    assert!(pair.session.decrypt(&ciphertext, |_| panic!("it was changed")).is_err());
}

#[test]
fn close_notify_ends_a_session_and_later_bytes_are_ignored() {
    let mut pair = Pair::established();
    pair.client.writer().write_all(b"last").unwrap();
    pair.client.send_close_notify();
    let mut plaintext = Vec::new();
    pair.client_sends(usize::MAX, &mut plaintext);
    assert_eq!(plaintext, b"last");
    assert!(pair.session.peer_closed);
    pair.session.decrypt(&[0x17; 100], |_| panic!("after close_notify")).unwrap();
    // Replies may still follow, and the server's own close_notify comes last.
    let mut out = SendQueue::default();
    out.push(simple(1), ReplyBody::None, 0);
    assert_eq!(pair.send(&mut out, &mut 0), SendResult::Drained);
    pair.session.send_close_notify(&pair.near);
    assert_eq!(pair.client_receives(), simple(1).as_slice());
    assert!(pair.client.process_new_packets().unwrap().peer_has_closed());
}

#[test]
fn a_session_may_move_to_another_thread() {
    fn movable<T: Send>() {}
    movable::<Transport>();
}
