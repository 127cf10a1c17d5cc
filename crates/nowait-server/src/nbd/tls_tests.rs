//! A session against a client of the same library, over a socket that fills.
//!
//! Invariant: what is compared with did not go through the session.
//! Knows: tls, credentials, reply, head, wire. Known by: the tests of turn.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};

use super::super::credentials::Clients;
use super::super::head::{Answer, ReplyHead};
use super::super::reply::Body;
use super::super::wire::Mode;
use super::*;

fn simple(cookie: u64) -> ReplyHead {
    Answer::to_cookie(Mode::Simple, cookie).simple(0)
}

/// Credentials for `localhost`, and the certificate to know them by.
fn credentials() -> (Credentials, CertificateDer<'static>) {
    let key = KeyPair::generate().unwrap();
    let cert = CertificateParams::new(["localhost".into()]).unwrap().self_signed(&key).unwrap();
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("server-cert.pem"), cert.pem()).unwrap();
    std::fs::write(directory.path().join("server-key.pem"), key.serialize_pem()).unwrap();
    let credentials = Credentials::load(directory.path(), Clients::Any).unwrap();
    (credentials, cert.der().clone())
}

/// Both sides of a connection after STARTTLS, at which `out` held what was not sent yet.
pub(crate) struct Pair {
    pub(crate) session: Session,
    pub(crate) near: Socket,
    pub(crate) client: ClientConnection,
    pub(crate) far: UnixStream,
}

impl Pair {
    fn new(out: &mut Out) -> Self {
        let (credentials, cert) = credentials();
        let mut roots = RootCertStore::empty();
        roots.add(cert).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from("localhost").unwrap();
        let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
        client.set_buffer_limit(None);
        let (near, far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        far.set_nonblocking(true).unwrap();
        let near = near.into();
        Self { session: Session::new(&credentials, out).unwrap(), near, client, far }
    }

    /// As `new`, with the TLS handshake done.
    pub(crate) fn established() -> Self {
        let mut pair = Self::new(&mut Out::default());
        while pair.client.is_handshaking() || pair.session.tls.is_handshaking() {
            pair.client_speaks(usize::MAX, &mut Vec::new());
            pair.send(&mut Out::default(), &mut 0);
            pair.client_listens();
        }
        pair
    }

    fn send(&mut self, out: &mut Out, budget: &mut u64) -> Sent {
        self.session.send(out, &self.near, &mut u64::MAX.clone(), budget)
    }

    /// What the client has to say comes to the session in pieces of at most `piece` bytes.
    fn client_speaks(&mut self, piece: usize, opened: &mut Vec<u8>) {
        let mut sealed = Vec::new();
        while self.client.wants_write() {
            self.client.write_tls(&mut sealed).unwrap();
        }
        for some in sealed.chunks(piece) {
            self.session.open(some, |bytes| opened.extend_from_slice(bytes)).unwrap();
        }
    }

    /// What was in the bytes that the client got.
    fn client_listens(&mut self) -> Vec<u8> {
        let mut opened = Vec::new();
        while self.client.read_tls(&mut self.far).is_ok_and(|count| count > 0) {
            let left = self.client.process_new_packets().unwrap().plaintext_bytes_to_read();
            let start = opened.len();
            opened.resize(start + left, 0);
            self.client.reader().read_exact(&mut opened[start..]).unwrap();
        }
        opened
    }
}

/// The first flight of a client.
fn client_hello() -> Vec<u8> {
    let mut bytes = Vec::new();
    Pair::new(&mut Out::default()).client.write_tls(&mut bytes).unwrap();
    bytes
}

#[test]
fn a_session_hears_what_its_client_says_however_it_is_cut() {
    for piece in [1, 7, 4096, usize::MAX] {
        let mut pair = Pair::new(&mut Out::default());
        let mut opened = Vec::new();
        let said: Vec<u8> = (0..40_000u32).map(|n| n as u8).collect();
        pair.client.writer().write_all(&said).unwrap();
        while opened.len() < said.len() {
            pair.client_speaks(piece, &mut opened);
            assert_eq!(pair.send(&mut Out::default(), &mut 0), Sent::All);
            pair.client_listens();
        }
        assert!(opened == said, "pieces of {piece}");
    }
}

#[test]
fn replies_arrive_whole_and_in_order_though_the_socket_fills() {
    let mut pair = Pair::established();
    let (mut out, mut expected, mut bytes_of) = (Out::default(), Vec::new(), Vec::new());
    for n in 0..600u64 {
        let head = simple(n);
        let bytes = vec![n as u8; (n as usize * 37) % 5000];
        expected.extend_from_slice(head.as_slice());
        expected.extend_from_slice(&bytes);
        bytes_of.push(expected.len());
        out.push(head, Body::Bytes(bytes), 1);
    }
    let (mut budget, mut got, mut fulls, mut enoughs) = (0, Vec::new(), 0, 0);
    loop {
        let mut most = 300_001;
        let sent = pair.session.send(&mut out, &pair.near, &mut most, &mut budget);
        got.extend(pair.client_listens());
        // What the client has not got is not given back, whether it is sealed or not.
        let whole = bytes_of.partition_point(|&end| end <= got.len()) as u64;
        assert!(budget <= whole, "{budget} replies given back, {whole} have arrived");
        match sent {
            Sent::All => break,
            Sent::Full => fulls += 1,
            Sent::Enough => enoughs += 1,
            Sent::Broken => panic!("the peer is there"),
        }
    }
    assert!(got == expected && out.is_empty());
    assert!(fulls + enoughs > 1, "{fulls} {enoughs}");
    assert_eq!(budget, 600);
}

#[test]
fn a_client_that_does_not_read_has_a_bounded_number_of_bytes_sealed_for_it() {
    let mut pair = Pair::established();
    let mut out = Out::default();
    for n in 0..64 {
        out.push(simple(n), Body::Bytes(vec![0; 1 << 20]), 1);
    }
    let mut budget = 0;
    for _ in 0..10 {
        assert_eq!(pair.send(&mut out, &mut budget), Sent::Full);
        let state = pair.session.tls.process_new_packets().unwrap();
        assert!(state.tls_bytes_to_write() < SEALED_BYTES + SEALED_BYTES / 8);
    }
    assert!(out.len() > 60 && budget < 4);
}

#[test]
fn what_was_not_sent_before_tls_is_sent_in_clear_and_first() {
    let mut out = Out::default();
    out.push_bytes(vec![1; 3]);
    out.push_bytes(vec![2; 5]);
    let (near, mut far) = UnixStream::pair().unwrap();
    let near = Socket::from(near);
    let (credentials, _) = credentials();
    let mut session = Session::new(&credentials, &mut out).unwrap();
    assert!(out.is_empty() && session.has_unsent());
    let mut said = client_hello();
    said.truncate(said.len() - 1);
    session.open(&said, |_| panic!("nothing can be inside")).unwrap();
    assert_eq!(session.send(&mut out, &near, &mut 100, &mut 0), Sent::All);
    let mut got = [0; 8];
    far.read_exact(&mut got).unwrap();
    assert_eq!(got, [1, 1, 1, 2, 2, 2, 2, 2]);
    assert!(!session.has_unsent());
}

#[test]
fn what_is_no_tls_gives_nothing_and_is_answered_by_an_alert() {
    for bytes in [&b"IHAVEOPT\0\0\0\x07\0\0\0\x06\0\0\0\0\0\0"[..], &[0; 64], &[0x16; 64]] {
        let mut pair = Pair::new(&mut Out::default());
        let opened = pair.session.open(bytes, |_| panic!("nothing can be inside"));
        assert!(opened.is_err());
        assert_eq!(pair.send(&mut Out::default(), &mut 0), Sent::All);
        let mut alert = [0; 7];
        pair.far.read_exact(&mut alert).unwrap();
        // A record of type 21 with a fatal (2) alert (RFC 8446, section 6).
        assert_eq!((alert[0], alert[5]), (21, 2));
        assert!(pair.session.open(&client_hello(), |_| {}).is_err(), "it recovers");
    }
}

#[test]
fn a_record_that_was_changed_on_its_way_gives_nothing() {
    let mut pair = Pair::established();
    pair.client.writer().write_all(&[7; 100]).unwrap();
    let mut sealed = Vec::new();
    pair.client.write_tls(&mut sealed).unwrap();
    sealed[50] ^= 1;
    assert!(pair.session.open(&sealed, |_| panic!("it was changed")).is_err());
}

#[test]
fn a_goodbye_ends_a_session_and_nothing_counts_after_it() {
    let mut pair = Pair::established();
    pair.client.writer().write_all(b"last").unwrap();
    pair.client.send_close_notify();
    let mut opened = Vec::new();
    pair.client_speaks(usize::MAX, &mut opened);
    assert_eq!(opened, b"last");
    assert!(pair.session.ended);
    pair.session.open(&[0x17; 100], |_| panic!("after the goodbye")).unwrap();
    // Replies may still follow, and the server's own goodbye comes last.
    let mut out = Out::default();
    out.push(simple(1), Body::None, 0);
    assert_eq!(pair.send(&mut out, &mut 0), Sent::All);
    pair.session.say_goodbye(&pair.near);
    assert_eq!(pair.client_listens(), simple(1).as_slice());
    assert!(pair.client.process_new_packets().unwrap().peer_has_closed());
}

#[test]
fn a_session_may_move_to_another_thread() {
    fn movable<T: Send>() {}
    movable::<Channel>();
}
